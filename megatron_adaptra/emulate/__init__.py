"""Slow links and slow workers for tests and demos; never in production."""

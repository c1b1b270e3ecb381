"""The process that starts ranks, and what it reports of those that end."""

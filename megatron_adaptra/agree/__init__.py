"""Votes of all ranks on what they run: messages, bundles, ballots."""

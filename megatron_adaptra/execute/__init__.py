"""The execution of an iteration on one rank: ops, messages, collectives, and their watchdog."""

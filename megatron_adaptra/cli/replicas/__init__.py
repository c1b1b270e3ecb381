"""Output of commands for several replicas in one plan."""

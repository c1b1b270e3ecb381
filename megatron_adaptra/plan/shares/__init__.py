"""How many microbatches each replica runs."""

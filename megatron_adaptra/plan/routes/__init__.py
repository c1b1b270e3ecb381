"""Plans in which replicas run each other's microbatches."""

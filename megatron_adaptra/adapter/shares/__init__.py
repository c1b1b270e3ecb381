"""Shares of an iteration between replicas, in Megatron: counts, weights, data and limits."""

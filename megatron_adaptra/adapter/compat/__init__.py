"""Differences between releases of Megatron, and every patch of it."""

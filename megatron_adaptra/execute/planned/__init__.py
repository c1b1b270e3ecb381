"""Reductions of gradients by plan, and their measurement."""

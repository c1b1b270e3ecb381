"""Shares of microbatches: their measurement at one rank."""

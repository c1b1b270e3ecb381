"""Collectives of a few bytes across stages, in one delay of the slowest link."""

"""Small collectives between stages, in one delay of the slowest link."""

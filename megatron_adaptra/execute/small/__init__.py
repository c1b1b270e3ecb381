"""Small collectives at the end of an iteration, one delay each."""

"""Layer 6: the command line."""

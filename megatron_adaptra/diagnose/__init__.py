"""Layer 4: who is slow, whatever is done about it."""

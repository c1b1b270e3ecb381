"""The end of an iteration: what the optimizer step waits for."""

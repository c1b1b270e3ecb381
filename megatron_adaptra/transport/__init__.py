"""Layer 3: tagged point-to-point engines."""

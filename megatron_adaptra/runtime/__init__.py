"""Layer 4: executing a plan, and replacing it while training."""

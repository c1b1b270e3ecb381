"""Layer 1: the discrete-event clock."""

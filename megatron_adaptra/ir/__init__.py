"""Layer 0: the values everything else passes around. Standard library only."""

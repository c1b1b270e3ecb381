"""Layer 5: the only package that imports Megatron."""

"""The schedule of one training iteration, run inside Megatron."""

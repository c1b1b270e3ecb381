"""Stock Megatron to compare with: measured, emulated, on CPUs, with a small GPT."""

"""The plugin in Megatron: its flags, switching it on, checkpoints and log lines."""

"""What a machine lacks for a training with the plugin, and the command that mends it."""

"""The doctor: checks of a machine for trainings with the plugin, and the remedy of each fault."""

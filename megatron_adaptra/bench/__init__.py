"""How fast messages are, and what a slow one costs: `adaptra bench`."""

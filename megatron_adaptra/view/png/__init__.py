"""The same pictures as PNG, by matplotlib."""

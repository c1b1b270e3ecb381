"""The remedy of a data-parallel group: who adds what, when."""

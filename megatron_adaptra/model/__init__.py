"""Layer 1: closed forms and lower bounds."""

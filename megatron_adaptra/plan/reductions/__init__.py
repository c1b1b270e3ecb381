"""Builders of collective plans: the all-reduces that there are, as data (ir/collective.py)."""

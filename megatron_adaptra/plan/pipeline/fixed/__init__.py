"""Policies that do not adapt: 1F1B, GPipe, interleaved 1F1B, ZB-H1, ZB-H2."""

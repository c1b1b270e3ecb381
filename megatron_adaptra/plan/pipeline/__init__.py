"""Schedules of one pipeline."""

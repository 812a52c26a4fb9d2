"""Callbacks of a training recipe: each schedules a pure function that has the mathematics."""

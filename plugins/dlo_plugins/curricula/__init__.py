"""Schedules of what a run trains: blocks, tokens, parameters and lengths, as functions of the run's progress."""

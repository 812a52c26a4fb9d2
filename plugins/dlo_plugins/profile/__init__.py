"""Profiles of a run's steps: time by kind and module, memory, roofline, waits, stragglers and energy."""

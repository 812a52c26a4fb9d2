"""Checks that a run computes what it says: steps that are run twice, and compared bit by bit."""

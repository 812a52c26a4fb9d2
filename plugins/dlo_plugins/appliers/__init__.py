"""Appliers: one class per technique that rewrites a model in place."""

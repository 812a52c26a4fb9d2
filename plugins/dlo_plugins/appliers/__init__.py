"""Appliers: one class a technique that rewrites a model in place, in the order of its phase."""

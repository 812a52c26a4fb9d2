"""Strategies: who holds what of a model, and what passes between the ranks."""

"""Strategies' common ground: processes, collectives, precision, and one checkpoint for all of them."""

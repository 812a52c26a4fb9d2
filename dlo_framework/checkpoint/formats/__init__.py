"""Checkpoint formats of other programs: what reads them, and what writes them."""

"""The weights that a run starts from."""

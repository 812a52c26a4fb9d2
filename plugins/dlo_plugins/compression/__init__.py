"""Gradient compression for data parallelism: hooks, sign compression, and optimizers that use it."""

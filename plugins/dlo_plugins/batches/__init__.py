"""Batch sizes: grown with the gradient noise, and the largest micro-batch that fits."""

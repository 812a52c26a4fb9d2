"""Parallelism: the strategies, their parts, and what they share."""

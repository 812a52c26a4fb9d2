"""Monitoring of a run: progress bar, TensorBoard scalars, and the summary at the end."""

"""Watching a run: the progress bar, the monitor behind TensorBoard, and the summary at the end."""

"""A run: its settings, folder, resuming, stopping, and the callbacks that it has by default."""

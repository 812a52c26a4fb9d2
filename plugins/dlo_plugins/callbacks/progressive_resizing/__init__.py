"""Progressive resizing: the callback, and its mathematics."""

from dlo_plugins.callbacks.progressive_resizing.progressive_resizing_callback import ProgressiveResizing

__all__ = ["ProgressiveResizing"]

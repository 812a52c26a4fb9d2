"""Learning-rate finder: the callback, and the mathematics of a sweep and its suggestions."""

from dlo_plugins.callbacks.lr_finder.lr_finder_callback import LRFinder

__all__ = ["LRFinder"]

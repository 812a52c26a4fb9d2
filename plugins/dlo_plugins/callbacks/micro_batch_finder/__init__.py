"""Search for the largest micro-batch: the callback, and the search itself."""

from dlo_plugins.callbacks.micro_batch_finder.micro_batch_finder_callback import MicroBatchFinder

__all__ = ["MicroBatchFinder"]

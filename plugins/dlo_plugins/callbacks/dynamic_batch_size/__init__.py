"""Growing batch size: the callback, its mathematics, the measured gradient noise and scaled rates."""

from dlo_plugins.callbacks.dynamic_batch_size.dynamic_batch_size_callback import DynamicBatchSize

__all__ = ["DynamicBatchSize"]

"""MixUp and CutMix of training batches: the callback, and its mathematics."""

from dlo_plugins.callbacks.batch_mix.batch_mix_callback import BatchMix

__all__ = ["BatchMix"]

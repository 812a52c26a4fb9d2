"""The callback Prune: sparse weights during training."""

from dlo_plugins.callbacks.prune.prune_callback import Prune

__all__ = ["Prune"]

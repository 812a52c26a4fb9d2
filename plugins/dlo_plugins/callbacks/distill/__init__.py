"""Distillation: a student learns from a frozen teacher."""

from dlo_plugins.callbacks.distill.distill_callback import Distill
from dlo_plugins.callbacks.distill.layer_options import AttentionTransfer, HiddenStates
from dlo_plugins.callbacks.distill.on_policy import OnPolicy

__all__ = ["AttentionTransfer", "Distill", "HiddenStates", "OnPolicy"]

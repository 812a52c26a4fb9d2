"""Facts about modules of transformers (5.24), told without importing the library."""

from __future__ import annotations

from typing import Any

from torch import nn


def attention_implementation(module: nn.Module) -> str | None:
    """Returns the name of the attention that a module of transformers uses; None for modules without a config."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def is_bidirectional(attention: nn.Module, **arguments: Any) -> bool:
    """Returns whether tokens see later ones by themselves, as an attention module or its kernel's arguments say."""
    return arguments.get("is_causal") is False or getattr(attention, "is_causal", True) is False


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is transformers' Conv1D (GPT-2): a linear layer whose weight is [in, out]."""
    return hasattr(module, "nf") and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)

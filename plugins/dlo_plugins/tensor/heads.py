"""Heads of an attention module: their number and width, and the module's attributes for this rank's heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dlo_framework.errors import DloError

#: Attributes for the width of a head.
_WIDTHS = ("head_dim", "dim_head", "head_size", "attention_head_size")
#: Attributes for the numbers of query heads, of key/value heads, and of the query heads' features.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_FEATURES = ("attn_dim", "split_size", "all_head_size")
#: Attributes for the number of query heads that share a key/value head.
_GROUPS = ("num_key_value_groups",)


def head_width(name: str, modules: list[nn.Module], features: int) -> int:
    """Returns the number of features of one head.

    Args:
        name: Name of the projection, for the message.
        modules: Modules of the attention, in the order in which their attributes are read.
        features: Number of features of all query heads, used if a module has only the number of heads.

    Raises:
        DloError: If no module has such an attribute.
    """
    for module in modules:
        width = next((value for key in _WIDTHS if (value := _integer(module, key))), None)
        if width:
            return width
        heads = next((value for key in _HEADS if (value := _integer(module, key))), None)
        if heads and features % heads == 0:
            return features // heads
    raise DloError(
        f"{type(modules[0]).__name__} must have an attribute with the width of its heads for tensor parallelism of"
        f" '{name}', got none; add {_WIDTHS[0]}, or {_HEADS[0]}"
    )


def kv_heads(name: str, modules: list[nn.Module], heads: int = 0, total: int = 0) -> int:
    """Returns the number of key/value heads of a module with a fused projection.

    Args:
        name: Name of the projection, for the message.
        modules: Modules of the attention, in the order in which their attributes are read.
        heads: Number of query heads, used if no module has such an attribute; 0 if it is not known.
        total: Number of heads of queries, keys and values.

    Raises:
        DloError: If no module has such an attribute, and the numbers of heads do not tell.
    """
    for module in modules:
        found = next((value for key in _KV_HEADS if (value := _integer(module, key))), None)
        if found:
            return found
    if 0 < heads < total and (total - heads) % 2 == 0:
        return (total - heads) // 2
    raise DloError(
        f"{type(modules[0]).__name__} must have an attribute with its number of key/value heads for tensor parallelism"
        f" of '{name}', got none; add {_KV_HEADS[0]}"
    )


def set_local_heads(attention: nn.Module, heads: int, kv: int | None, width: int, tp: int) -> None:
    """Sets the counts in an attention's modules to this rank's.

    Args:
        attention: Attention module; all modules inside it are changed too.
        heads: Number of query heads over all ranks.
        kv: Number of key/value heads over all ranks, if known.
        width: Number of features of a head.
        tp: Number of ranks.
    """
    counts = dict.fromkeys(_HEADS, heads) | dict.fromkeys(_FEATURES, heads * width)
    # Each rank keeps the one key/value head of multi-query attention; fewer query heads share it.
    counts |= dict.fromkeys(_GROUPS, heads) if kv == 1 else dict.fromkeys(_KV_HEADS, kv or 0)
    for module in attention.modules():
        for key, count in counts.items():
            if count and _integer(module, key) == count:
                setattr(module, key, count // tp)
        shape = getattr(module, "bias_shape", None)  # timm's relative positions: heads last, in one class first
        if isinstance(shape, tuple) and len(shape) == 3:
            at = 0 if hasattr(module, "height_lookup") else 2
            assert shape[at] == heads
            local = tuple(size // tp if dim == at else size for dim, size in enumerate(shape))
            module.__dict__["bias_shape"] = local


class LocalConfig:
    """Model's config with other counts of heads, for a module that reads them from its config.

    Args:
        config: Config of the model.
        counts: Counts of this rank, by attribute.
    """

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        self.__dict__["_config"], self.__dict__["_counts"] = config, dict(counts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        counts = self.__dict__["_counts"]
        return counts[name] if name in counts else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


def set_local_config(attention: nn.Module, tp: int) -> None:
    """Sets a config with this rank's heads in a module that reads them from the model's config (Phi-3)."""
    config = getattr(attention, "config", None)
    if config is not None:
        values = {key: _integer(config, key) for key in (*_HEADS, *_KV_HEADS)}
        counts = {key: value // tp for key, value in values.items() if value > 1}
        attention.config = LocalConfig(config, counts)  # type: ignore[assignment]


def _integer(owner: Any, key: str) -> int:
    value = getattr(owner, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0

"""The heads of an attention module: how many there are, and telling the module how many are left to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dlo_framework.errors import DloError

#: Attributes by which modules say how wide a head is.
_WIDTHS = ("head_dim", "dim_head", "head_size", "attention_head_size")
#: Attributes by which modules count their query heads, their key/value heads, and the query heads' features.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_FEATURES = ("attn_dim", "split_size", "all_head_size")
#: Attributes by which they say how many query heads share a key/value head.
_GROUPS = ("num_key_value_groups",)


def head_width(name: str, modules: list[nn.Module], features: int) -> int:
    """Returns the features of one head.

    Args:
        name: of the projection, for the message.
        modules: of the attention, in the order in which they are asked.
        features: of all query heads, used where a module says only how many heads there are.

    Raises:
        DloError: if none of them says.
    """
    for module in modules:
        width = next((value for key in _WIDTHS if (value := _integer(module, key))), None)
        if width:
            return width
        heads = next((value for key in _HEADS if (value := _integer(module, key))), None)
        if heads and features % heads == 0:
            return features // heads
    raise DloError(
        f"tensor parallelism cuts '{name}' between heads, and {type(modules[0]).__name__} does not say how wide they"
        f" are; give it an attribute {_WIDTHS[0]}, or {_HEADS[0]}"
    )


def kv_heads(name: str, modules: list[nn.Module]) -> int:
    """Returns how many key/value heads a module with a fused projection has.

    Raises:
        DloError: if none of the modules says.
    """
    for module in modules:
        heads = next((value for key in _KV_HEADS if (value := _integer(module, key))), None)
        if heads:
            return heads
    raise DloError(
        f"tensor parallelism cuts '{name}' between heads, and {type(modules[0]).__name__} does not say how many heads"
        f" keys and values have; give it an attribute {_KV_HEADS[0]}"
    )


def tell(attention: nn.Module, heads: int, kv: int | None, width: int, tp: int) -> None:
    """Sets the counts that an attention's modules keep to this rank's.

    Args:
        attention: with all below it.
        heads: query heads of all ranks.
        kv: key/value heads of all ranks, where they are known.
        width: features of a head.
        tp: ranks.
    """
    wholes = dict.fromkeys(_HEADS, heads) | dict.fromkeys(_FEATURES, heads * width)
    # The one key/value head of multi-query attention stays, with fewer query heads to share it.
    wholes |= dict.fromkeys(_GROUPS, heads) if kv == 1 else dict.fromkeys(_KV_HEADS, kv or 0)
    for module in attention.modules():
        for key, whole in wholes.items():
            if whole and _integer(module, key) == whole:
                setattr(module, key, whole // tp)
        shape = getattr(module, "bias_shape", None)  # timm's relative positions: heads come last, in one kind first
        if isinstance(shape, tuple) and len(shape) == 3:
            at = 0 if hasattr(module, "height_lookup") else 2
            assert shape[at] == heads
            local = tuple(size // tp if dim == at else size for dim, size in enumerate(shape))
            module.__dict__["bias_shape"] = local


class LocalConfig:
    """A config as a module sees it that counts heads by it: the model's own, but for this rank's counts.

    Args:
        config: of the model.
        counts: that differ.
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


def tell_config(attention: nn.Module, tp: int) -> None:
    """Gives a module that reads its number of heads from the model's config (Phi-3) a config with this rank's."""
    config = getattr(attention, "config", None)
    if config is not None:
        counts = {key: value // tp for key in (*_HEADS, *_KV_HEADS) if (value := _integer(config, key))}
        attention.config = LocalConfig(config, counts)  # type: ignore[assignment]


def _integer(owner: Any, key: str) -> int:
    value = getattr(owner, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0

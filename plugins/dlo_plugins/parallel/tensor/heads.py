"""Heads of an attention module: their number and width, this rank's counts, and its entries of operands.

Operands of an attention that are made outside of it may have an entry for each head, such as ALiBi's biases. Each rank
passes the attention the entries of its own heads. The gradient of an operand is summed over the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import copy_in
from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from dlo_plugins.parallel.tensor.regions import Region


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
        width, heads = _first(module, _WIDTHS), _first(module, _HEADS)
        if width:
            return width
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
        if count := _first(module, _KV_HEADS):
            return count
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


def _first(owner: Any, keys: Sequence[str]) -> int:
    """Returns the first number of an owner's attributes; 0 for none."""
    return next((value for key in keys if (value := _integer(owner, key))), 0)


def _integer(owner: Any, key: str) -> int:
    value = getattr(owner, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def operand_dim(shape: tuple[int, ...], heads: int, rows: int, tokens: int) -> int | None:
    """Returns the dim of an operand that has an entry for each head, or for each sample's heads; None if none has.

    Args:
        shape: Shape of the operand.
        heads: Number of heads.
        rows: Number of samples.
        tokens: Number of tokens of a sample.
    """
    if heads < 2 or not shape:
        return None
    usual = 1 if len(shape) == 4 else 0  # [samples, heads, tokens, tokens], [heads, ...]
    if len(shape) > 1 and shape[0] == rows * heads:
        return 0
    if shape[usual] == heads:
        return usual
    others = (dim for dim, size in enumerate(shape) if size == heads and size not in (rows, tokens))
    return next(others, None)


def slice_heads(operand: Tensor, dim: int, heads: int, communicator: Communicator, name: str = "") -> Tensor:
    """Returns the entries of this rank's heads.

    Args:
        operand: Operand for all heads; one entry for all of them stays.
        dim: Dim of `heads`, or of `samples * heads`.
        heads: Number of heads over all ranks.
        communicator: Communicator of the ranks that share the heads.
        name: Name of the operand, for the message.

    Raises:
        DloError: The dim has another size.
    """
    if operand.shape[dim] == 1:
        return operand
    if operand.shape[dim] % heads:
        raise DloError(
            f"head_operands '{name}' must have {heads} heads in dim {dim}, got shape {tuple(operand.shape)}; correct"
            " the dim in ParallelPlan(head_operands=...)"
        )
    count = heads // communicator.size
    entered = copy_in(operand, communicator) if operand.requires_grad else operand
    by_sample = entered.unflatten(dim, (-1, heads))
    return by_sample.narrow(dim + 1, communicator.rank * count, count).flatten(dim, dim + 1)


def parameter_names(module: nn.Module) -> list[str]:
    """Returns the names of the positional arguments of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(module.forward).parameters.items() if parameter.kind in kinds]


def install_operands(module: nn.Module, operands: Mapping[str, int], heads: int, region: Region) -> None:
    """Makes an attention get its own heads' entries of operands.

    Args:
        module: Attention module.
        operands: Names of arguments of its forward, and their dim of heads.
        heads: Number of heads over all ranks.
        region: Region of the module, on the ranks that share the heads.

    Raises:
        DloError: Its forward has no argument of that name.
    """
    names = parameter_names(module)
    unknown = next((name for name in operands if name not in names), None)
    if unknown is not None:
        raise DloError(
            f"head_operands must name arguments of the forward of {type(module).__name__}, got"
            f" '{unknown}'{did_you_mean(unknown, names)}; it has {', '.join(names)}"
        )

    def slice_operands(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = list(args), dict(kwargs)
        for name, dim in operands.items():
            holder: Any = named if name in named else given
            key: Any = name if name in named else names.index(name)
            if (holder is named or key < len(given)) and isinstance(holder[key], Tensor):
                holder[key] = slice_heads(holder[key], dim, heads, region.communicator, name)
        return tuple(given), named

    module.register_forward_pre_hook(slice_operands, with_kwargs=True)

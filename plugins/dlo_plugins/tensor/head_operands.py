"""Operands of an attention that are made outside of it and have an entry for each head, such as ALiBi's biases.

Each rank passes the attention the entries of its own heads. The gradient of an operand is summed over the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.tensor.collectives import copy_in

if TYPE_CHECKING:
    from dlo_plugins.tensor.regions import Region


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
    return [name for name, found in inspect.signature(module.forward).parameters.items() if found.kind in kinds]


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
    places = {name: (names.index(name), dim) for name, dim in operands.items()}
    hook = functools.partial(_slice_operands, places, heads, region)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _slice_operands(
    places: Mapping[str, tuple[int, int]],
    heads: int,
    region: Region,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given, named, communicator = list(args), dict(kwargs), region.communicator
    for name, (at, dim) in places.items():
        if isinstance(named.get(name), Tensor):
            named[name] = slice_heads(named[name], dim, heads, communicator, name)
        elif at < len(given) and isinstance(given[at], Tensor):
            given[at] = slice_heads(given[at], dim, heads, communicator, name)
    return tuple(given), named

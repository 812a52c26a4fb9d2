"""Reshapes to full sizes inside a region: each becomes a reshape to this rank's share of heads or features.

Much code of models writes the full sizes into its reshapes: `x.reshape(B, N, C)` with `C` from the input's shape, or
`qkv.reshape(B, N, 3, heads, C // heads)`. With a slice of the features such a reshape fails. Inside a region with the
rule `local_shapes`, a function mode divides the dim of the requested shape that has the heads or features. Modules keep
their full sizes in their attributes.

It also enters the region where code multiplies by a column projection's weight without calling the projection, as
BEiT does to add a bias to queries and values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlo_plugins.parallel.tensor.projections import REGION, mix_in

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)
_EXPANDS = (Tensor.expand,)
_SPLITS = (Tensor.split, torch.split, torch.functional.split)


@dataclass(frozen=True)
class LocalSizes:
    """Full sizes of an attention, of which each rank has a share.

    Attributes:
        ranks: Number of ranks.
        heads: Number of query heads over all ranks.
        kv: Number of key/value heads over all ranks.
        width: Number of features of a head.
    """

    ranks: int
    heads: int
    kv: int
    width: int

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of heads."""
        return self.heads, self.kv

    @property
    def features(self) -> tuple[int, int]:
        """Numbers of features of all query heads, and of all key/value heads."""
        return self.heads * self.width, self.kv * self.width


def local_shape(given: Sequence[int], shape: Sequence[int], sizes: LocalSizes) -> list[int]:
    """Returns the shape to which a tensor is reshaped, with this rank's share of the heads or features.

    Args:
        given: Shape of the tensor, which has a share of them.
        shape: Requested shape, in full sizes; one dim may be -1.
        sizes: Full sizes.
    """
    wanted, numel = list(shape), math.prod(given)
    if -1 in wanted:
        at = wanted.index(-1)
        known = -math.prod(wanted)
        if known == 0 or numel * sizes.ranks % known:
            return wanted
        full = numel * sizes.ranks // known
        of_heads = full == sizes.width and any(size in sizes.counts for size in wanted)
        # A leading -1 that would be a fraction of the same dim before.
        of_same = at < len(given) and full == given[at] and numel // known != given[at]
        of_same = of_same and wanted[at + 1 :] != [sizes.width]  # There it is the rank's heads.
        if not of_heads and not of_same:
            return wanted
        wanted[at] = full
    if sizes.ranks * numel != math.prod(wanted):
        return wanted
    divided = _divided(list(given), wanted, sizes)
    if divided is not None:
        wanted[divided] //= sizes.ranks
    return wanted


def _divided(given: list[int], wanted: list[int], sizes: LocalSizes) -> int | None:
    """Returns the dim of a shape that has the heads or features: among those that differ, heads before features."""
    first, last = 0, len(wanted)
    while first < min(len(given), last) and given[first] == wanted[first]:
        first += 1
    tail = len(given)
    # A size that is the number of heads is not taken for the same dim: it may come from samples times heads.
    while last > first and tail > first and given[tail - 1] == wanted[last - 1] not in sizes.counts:
        last, tail = last - 1, tail - 1
    among = [dim for dim in range(first, last) if wanted[dim] % sizes.ranks == 0]
    from_features = last == len(wanted)
    heads = [dim for dim in among if wanted[dim] in sizes.counts]
    if len(heads) > 1:  # The width of a head, or the batch, has the same size as the heads.
        heads = heads[:1] if from_features else heads[-1:]
    features = [dim for dim in among if any(size and wanted[dim] % size == 0 for size in sizes.features)]
    found = heads or features[-1:] or (among if len(among) == 1 else [])
    return found[0] if found else None


def local_expansion(given: Sequence[int], shape: Sequence[int], sizes: LocalSizes) -> list[int]:
    """Returns the shape to which the one key or value of multi-query attention is repeated: for this rank's heads.

    Args:
        given: Shape of the tensor.
        shape: Requested shape, in full sizes.
        sizes: Full sizes.
    """
    wanted = list(shape)
    if sizes.kv != 1 or len(given) != len(wanted) or not given or given[-1] != sizes.width:
        return wanted
    of_heads = [dim for dim, size in enumerate(wanted[:-1]) if size == sizes.heads and given[dim] == 1]
    if of_heads:
        wanted[of_heads[-1]] //= sizes.ranks
    return wanted


class LocalShapes(TorchFunctionMode):
    """Function mode that divides requested shapes; see this module.

    Args:
        sizes: Full sizes.
        region: Region of the module.
    """

    def __init__(self, sizes: LocalSizes, region: Any) -> None:
        super().__init__()
        self._sizes, self._region = sizes, region

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShapes:
        return self  # A process group cannot be copied.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        change = local_shape if func in _RESHAPES else local_expansion if func in _EXPANDS else None
        if change is not None and not kwargs and len(args) > 1:
            shape = args[1] if isinstance(args[1], Sequence) else args[1:]
            if all(isinstance(size, int) for size in shape):  # Not a dtype, as `view` takes.
                return func(args[0], change(args[0].shape, shape, self._sizes))
        elif func in _SPLITS and len(args) > 1:
            return func(args[0], self._split_sizes(args, kwargs), *args[2:], **kwargs)
        elif func is F.linear and self._region.needs_entry(args[0], kwargs.get("weight", args[1:] and args[1])):
            return func(self._region.enter(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _split_sizes(self, args: Any, kwargs: Any) -> Any:
        wanted, dim = args[1], kwargs.get("dim", args[2] if len(args) > 2 else 0)
        own, ranks = args[0].shape[dim], self._sizes.ranks
        if isinstance(wanted, int):
            features = self._sizes.features[: 1 if self._sizes.kv == 1 else 2]
            is_full = wanted in features and own * ranks % wanted == 0
            return wanted // ranks if is_full else wanted
        is_full = sum(wanted) == own * ranks and all(size % ranks == 0 for size in wanted)
        if is_full:
            return [size // ranks for size in wanted]
        of_queries = self._sizes.features[0]  # Beside the one key and value of multi-query attention.
        divided = [size // ranks if size == of_queries else size for size in wanted]
        return divided if sum(divided) == own else wanted


class LocallyShaped:
    """Mixin for the class of a region's module: its forward runs with divided shapes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with self.__dict__[REGION]:
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def install_local_shapes(module: nn.Module, sizes: LocalSizes, region: Any) -> None:
    """Makes a region's module run with divided shapes.

    Args:
        module: Module of the region; its class is replaced by a derived one.
        sizes: Full sizes.
        region: State of the region.
    """
    mix_in(LocallyShaped, module, LocalShapes(sizes, region))

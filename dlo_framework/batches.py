"""Batches as nested structures: their samples, and the rows that belong to them.

A batch is a tensor ``[B, ...]``, or dicts, lists and tuples with tensors and plain values in them. torch's pytree takes
subclasses of these for leaves, so that it finds no tensor in a dict of a user's own class; the functions here do. Its
own functions, which torch (2.11 to 2.15) has under a private name alone, are imported from here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

#: Entry of a batch, `[B, L]`: positions of the full sequence, where a strategy has sharded the batch along it.
FULL_POSITIONS = "full_position_ids"
#: Key of a batch whose sequence is sharded: place in the full row of each token of this rank, where a mask needs it.
ROW_PLACES = "row_places"
_CHOSEN: ContextVar[Tensor | None] = ContextVar("dlo_chosen_tokens", default=None)


@contextlib.contextmanager
def chosen_tokens(index: Tensor) -> Iterator[None]:
    """Context in which blocks see some of the tokens of each row alone.

    Args:
        index: Positions of the tokens, int64 `[K]`, ascending; padding behind them repeats one.
    """
    token = _CHOSEN.set(index)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def get_chosen_tokens() -> Tensor | None:
    """Returns the positions of the tokens that blocks see; None for all."""
    return _CHOSEN.get()


def leaves(nest: Any) -> Iterator[Any]:
    """Yields the values in nested dicts, lists and tuples, in order."""
    if isinstance(nest, dict | list | tuple):
        for item in nest.values() if isinstance(nest, dict) else nest:
            yield from leaves(item)
    else:
        yield nest


def map_leaves(function: Callable[..., Any], *nests: Any) -> Any:
    """Returns the structure of the first nest, with the results of a function of the nests' corresponding leaves.

    A list or tuple of plain values is a leaf here: they are values of the samples, such as their names.

    Args:
        function: Function with one argument per nest.
        *nests: Nested structures; the others have all keys and items of the first.
    """
    first = nests[0]
    if isinstance(first, dict):
        return rebuild(first, [map_leaves(function, *(nest[key] for nest in nests)) for key in first])
    if isinstance(first, list | tuple) and any(isinstance(item, Tensor | dict | list | tuple) for item in first):
        return rebuild(first, [map_leaves(function, *items) for items in zip(*nests, strict=True)])
    return function(*nests)


def rebuild(nest: Any, items: list[Any]) -> Any:
    """Returns a dict, list or tuple of the same class with other items, in the same order."""
    if isinstance(nest, dict):
        made = copy.copy(nest)
        made.update(zip(nest, items, strict=True))
        return made
    return type(nest)(*items) if is_named(nest) else type(nest)(items)


def is_named(nest: Any) -> bool:
    """Returns whether a list or tuple, or a class of such, is a NamedTuple, whose class takes its items one by one."""
    return hasattr(nest, "_fields")


def find_batch_size(batch: Any) -> int | None:
    """Returns the number of samples of a batch: the first dim of the first tensor that has one; None without one."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)


def batch_size(batch: Any) -> int:
    """Returns the number of samples of a batch, 1 if no tensor shows it."""
    return find_batch_size(batch) or 1


def sample_shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Returns the shape of one sample in each tensor of a batch."""
    return tuple(leaf.shape[1:] for leaf in leaves(batch) if isinstance(leaf, Tensor))


def map_rows(function: Callable[[Any], Any], batch: Any, size: int) -> Any:
    """Returns a batch with the results of a function of each tensor, list and tuple that has an entry per sample.

    Other values are unchanged: scalars, and tensors and lists of another length.

    Args:
        function: Function of a tensor ``[B, ...]``, or of a list or tuple of B plain values.
        batch: Batch of B samples.
        size: Number of samples, B.
    """

    def apply(leaf: Any) -> Any:
        has_rows = leaf.ndim > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list | tuple)
        return function(leaf) if has_rows and len(leaf) == size else leaf

    return map_leaves(apply, batch)


def slice_batch(batch: Any, first: int, size: int) -> Any:
    """Returns ``size`` samples of a batch, from the one with index ``first``; tensors are views."""
    return map_rows(lambda rows: rows[first : first + size], batch, batch_size(batch))


def replace_entries(batch: Any, entries: dict[int | str, Any]) -> Any:
    """Returns a copy of a dict, a list or a tuple, named or not, with other entries.

    Args:
        batch: Batch.
        entries: New entries by key or position.
    """
    if isinstance(batch, dict):
        return type(batch)({**batch, **entries})
    values = list(batch)
    for key, value in entries.items():
        assert isinstance(key, int)
        values[key] = value
    return rebuild(batch, values)

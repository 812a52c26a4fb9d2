"""Kinds of kernels that memory bounds: how near to a copy's bandwidth a kernel comes depends on what it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

#: Kind of kernel.
Kind = Literal[
    "copy",  # copies and fills in one order of memory
    "pointwise",  # arithmetic on each element, and everything that has no other kind
    "activation",  # transcendental functions of each element, and random numbers
    "strided",  # transposed reads or writes, and joined tensors
    "cast",  # copies to another dtype
    "norm",  # normalisation, forward
    "norm_backward",
    "softmax",  # forward and backward
    "reduction",  # sums and the like over some dims
    "gather",  # reads or writes at indices
    "optimizer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: The kind of a kernel of several operations is the first of these that one of them has. Transposed reads beside
#: arithmetic cost it nothing: a compiler lays its tiles over both.
_FIRST: tuple[Kind, ...] = (
    "gather", "norm_backward", "norm", "softmax", "reduction", "activation", "pointwise", "strided", "cast", "copy",
)  # fmt: skip


def kind_of_fused(kinds: Iterable[Kind]) -> Kind:
    """Returns the kind of a kernel that runs operations of several kinds."""
    found = set(kinds)
    return next(kind for kind in _FIRST if kind in found)

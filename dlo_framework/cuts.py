"""Which part of a tensor a rank holds under tensor parallelism, and what that leaves to be done with its gradient.

Tensor parallelism cuts a parameter once, along one dim, and for good: the module then holds a smaller parameter. A
:class:`Cut` remembers which part of the whole it is, so that checkpoints and reports speak of the whole. A fused
projection of queries, keys and values is cut in three places, so a part is a few runs of indices, not one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Cut:
    """A part of a tensor, cut along one dim.

    Attributes:
        dim: that is cut.
        size: of the whole tensor along it.
        runs: of indices along it: `(first, how many)`, in the order in which the part holds them.
    """

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """The part's size along the dim."""
        return sum(count for _, count in self.runs)

    def take(self, whole: Tensor) -> Tensor:
        """Returns the part of a whole tensor, in memory of its own."""
        assert whole.shape[self.dim] == self.size
        return torch.cat([whole.narrow(self.dim, first, count) for first, count in self.runs], dim=self.dim)

    def part_shape(self, whole: torch.Size) -> torch.Size:
        """Returns the part's shape."""
        assert whole[self.dim] == self.size
        return torch.Size([self.length if dim == self.dim else size for dim, size in enumerate(whole)])

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """Returns the whole tensor's shape."""
        assert part[self.dim] == self.length
        return torch.Size([self.size if dim == self.dim else size for dim, size in enumerate(part)])

    def overlaps(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields where indices of the part lie in the whole, run by run: `(index in the part, in the whole, count)`.

        Args:
            first: index in the part.
            count: how many follow.
        """
        at = 0
        for start, length in self.runs:
            low, high = max(first, at), min(first + count, at + length)
            if low < high:
                yield low, start + low - at, high - low
            at += length


def equal_cut(dim: int, size: int, ranks: int, rank: int, pieces: int = 1) -> Cut:
    """Returns a rank's share of a dim that is split into equal pieces, of each of which it has an equal part.

    Args:
        dim: that is cut.
        size: along it.
        ranks: among which it is shared.
        rank: whose share it is.
        pieces: that follow one another along the dim: 3 for queries, keys and values.

    Raises:
        DloError: if the ranks do not divide the size.
    """
    if size % (pieces * ranks):
        raise DloError(f"a size of {size} cannot be shared equally by {ranks} ranks")
    piece = size // pieces
    share = piece // ranks
    return Cut(dim, size, tuple((number * piece + rank * share, share) for number in range(pieces)))


@dataclass
class Layout:
    """What tensor and pipeline parallelism have made of a model. Names are relative to the model.

    Attributes:
        cuts: the parameters and buffers of which the ranks of the axis hold a part each.
        partial: parameters that each rank holds whole and whose gradients are parts of a sum over the axis.
        elsewhere: parameters and buffers that ranks of other pipeline stages hold; here they are on the meta device,
            so that optimizers' groups and checkpoints know all names.
        repeated: parameters of which an earlier pipeline stage holds a copy: an embedding that the head is tied to.
            The gradients of the copies are parts of a sum.
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)

    def under(self, prefix: str) -> Layout:
        """Returns the layout by the names of a module that holds the model under a name."""
        return Layout(
            {f"{prefix}.{name}": cut for name, cut in self.cuts.items()},
            {f"{prefix}.{name}" for name in self.partial},
            {f"{prefix}.{name}" for name in self.elsewhere},
            {f"{prefix}.{name}" for name in self.repeated},
        )


#: Under this name a model that has been cut keeps how.
_LAYOUT = "_dlo_layout"


def layout_of(module: nn.Module) -> Layout:
    """Returns a model's layout, to be read and added to; an empty one for a model that has not been cut."""
    found: Layout = module.__dict__.setdefault(_LAYOUT, Layout())
    return found

"""Slices of tensors under tensor and expert parallelism, and the reductions that their gradients need.

Tensor parallelism slices a parameter once, along one dim, and for good: the module then holds a smaller parameter. A
:class:`TensorSlice` records which slice of the full tensor it is, for checkpoints and reports, which use the full
tensor. A fused projection of queries, keys and values is sliced in three places, so a slice is several ranges of
indices, not one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor along one dim.

    Attributes:
        dim: Dimension that is sliced.
        size: Size of the full tensor along the dim.
        runs: Ranges of indices along the dim, as `(first, count)`, in the slice's order.
        inner: Slice of this slice along another dim, which then is the rank's; None for this slice itself.
    """

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]
    inner: TensorSlice | None = None

    @property
    def length(self) -> int:
        """The slice's size along the dim."""
        return sum(count for _, count in self.runs)

    def slice_tensor(self, whole: Tensor) -> Tensor:
        """Returns the slice of a full tensor, copied."""
        assert whole.shape[self.dim] == self.size
        found = torch.cat([whole.narrow(self.dim, first, count) for first, count in self.runs], dim=self.dim)
        return found if self.inner is None else self.inner.slice_tensor(found)

    def write_slice(self, whole: Tensor, part: Tensor) -> None:
        """Writes the slice into a full tensor."""
        at = 0
        for first, count in self.runs:
            target, piece = whole.narrow(self.dim, first, count), part.narrow(self.dim, at, count)
            if self.inner is None:
                target.copy_(piece)
            else:
                self.inner.write_slice(target, piece)
            at += count

    def slice_shape(self, whole: torch.Size) -> torch.Size:
        """Returns the slice's shape."""
        assert whole[self.dim] == self.size
        found = torch.Size([self.length if dim == self.dim else size for dim, size in enumerate(whole)])
        return found if self.inner is None else self.inner.slice_shape(found)

    def full_shape(self, part: torch.Size) -> torch.Size:
        """Returns the full tensor's shape."""
        part = part if self.inner is None else self.inner.full_shape(part)
        assert part[self.dim] == self.length
        return torch.Size([self.size if dim == self.dim else size for dim, size in enumerate(part)])

    def overlaps(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields the full tensor's ranges for indices of the slice: `(index in slice, index in tensor, count)`.

        Args:
            first: First index in the slice.
            count: Number of indices.
        """
        at = 0
        for start, length in self.runs:
            low, high = max(first, at), min(first + count, at + length)
            if low < high:
                yield low, start + low - at, high - low
            at += length


def make_equal_slice(dim: int, size: int, ranks: int, rank: int, pieces: int = 1) -> TensorSlice:
    """Returns a rank's slice of a dim of equal pieces, of each of which it holds an equal part.

    Args:
        dim: Dimension to slice.
        size: Size of the dim.
        ranks: Number of ranks that share it.
        rank: Rank whose slice is returned.
        pieces: Number of pieces that are concatenated along the dim: 3 for queries, keys and values.

    Raises:
        DloError: if the ranks do not divide the size.
    """
    if size % (pieces * ranks):
        raise DloError(f"size must be divisible by {pieces * ranks} ({ranks} ranks), got {size}; use fewer ranks")
    piece = size // pieces
    share = piece // ranks
    return TensorSlice(dim, size, tuple((number * piece + rank * share, share) for number in range(pieces)))


@dataclass
class Layout:
    """Result of tensor and pipeline parallelism on a model. Names are relative to the model.

    Attributes:
        slices: Slices of the parameters and buffers that the ranks of the tp axis share, and of those in `experts`.
            Where `tp` and `ep` both slice a parameter, the slice of `ep` is in that of `tp`.
        partial: Parameters that each rank holds in full and whose gradients must be summed over the tp axis.
        other_stages: Parameters and buffers of other pipeline stages; here they are on the meta device, so that
            optimizer groups and checkpoints know all names.
        tied_copies: Parameters of which an earlier pipeline stage holds a copy: an embedding that the head is tied to.
            The gradients of the copies must be summed.
        experts: Parameters that are sliced over `ep`, between full experts. The ranks of dp_shard x cp with the same
            slice shard it, and average its gradients.
        expert_modules: Modules that hold these parameters, each called by the router's module.
    """

    slices: dict[str, TensorSlice] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    other_stages: set[str] = field(default_factory=set)
    tied_copies: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    expert_modules: list[str] = field(default_factory=list)

    def with_prefix(self, prefix: str) -> Layout:
        """Returns the layout with the names of a module that holds the model under a name."""
        return Layout(
            {f"{prefix}.{name}": cut for name, cut in self.slices.items()},
            {f"{prefix}.{name}" for name in self.partial},
            {f"{prefix}.{name}" for name in self.other_stages},
            {f"{prefix}.{name}" for name in self.tied_copies},
            {f"{prefix}.{name}" for name in self.experts},
            [f"{prefix}.{name}" for name in self.expert_modules],
        )


#: Attribute of a split model that holds its layout.
_LAYOUT = "_dlo_layout"


def get_layout(module: nn.Module) -> Layout:
    """Returns a model's layout, to be read and extended; an empty one if the model has not been split."""
    found: Layout = module.__dict__.setdefault(_LAYOUT, Layout())
    return found

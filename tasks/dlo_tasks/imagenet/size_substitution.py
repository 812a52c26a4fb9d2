"""Tensors and settings of a module for the size of its images, in place of its own during a forward pass.

A module keeps its parameters, buffers and settings. At another size its forward runs with others, which are computed
from the parameters, so that gradients flow back to them: embeddings and tables are interpolated, indices of relative
positions are made for the map. A class derived from the module's own does so; see :func:`derive`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.model_sizes import Size

_GRIDS = "_dlo_grids"


class GridRecord:
    """Sizes of the maps in a model's forward: modules that get a sequence of cells look up its height and width."""

    def __init__(self) -> None:
        self._grids: dict[int, Size] = {}
        self.latest: Size | None = None

    def note(self, grid: Size) -> None:
        """Notes a map of the forward that begins."""
        self._grids[grid[0] * grid[1]] = self.latest = grid

    def grid_of(self, cells: int, own: Size) -> Size:
        """Returns the last map with a number of cells.

        Args:
            cells: Number of cells.
            own: Map that the module was built for, which counts if no model has noted one.
        """
        return self._grids.get(cells, own)


@contextmanager
def substituted(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Gives a module other attributes in the block; parameters and buffers stay registered, and are shadowed."""
    own = vars(module)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


class SizedModel:
    """Mixin for the class of a model: its forward runs with the tensors of the images' size."""

    def substitutions(self, height: int, width: int) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Returns modules and their attributes at a size of images, none at the size the model was built for."""
        raise NotImplementedError

    @contextmanager
    def _at_size_of(self, x: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for module, values in self.substitutions(*x.shape[-2:]):
                stack.enter_context(substituted(module, values))
            yield

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the features of images, [B, C, H, W]."""
        with self._at_size_of(x):
            return super().forward_features(x, *args, **kwargs)  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns features and intermediate maps of images, [B, C, H, W]."""
        with self._at_size_of(x):
            return super().forward_intermediates(x, *args, **kwargs)  # type: ignore[misc]


class SizedModule:
    """Mixin for the class of a module whose input tells the size of its map."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        """Returns the attributes for an input, none if it has the size that the module was built for."""
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with substituted(self, self.values_for(x)):  # type: ignore[arg-type]
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]


def derive(module: nn.Module, mixin: type, grids: GridRecord | None = None) -> None:
    """Puts a mixin before a module's class. The object stays, and with it its parameters, hooks and references.

    Args:
        module: Module, whose class a strategy may have derived before.
        mixin: Mixin.
        grids: Record of the model that the module is in, if it needs one.
    """
    if not isinstance(module, mixin):
        module.__class__ = _derived(mixin, type(module))  # type: ignore[arg-type]
    if grids is not None:
        vars(module).setdefault(_GRIDS, grids)


@functools.cache
def _derived(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def grids_of(module: Any) -> GridRecord:
    """Returns the record that a module was given by :func:`derive`; a model's own begins empty."""
    return vars(module).setdefault(_GRIDS, GridRecord())


# --- interpolation -----------------------------------------------------------------------------------------


def resize_tokens(embedding: Tensor, old: Size, new: Size, prefix: int = 0) -> Tensor:
    """Returns position embeddings of tokens, [1, prefix + H * W, C], for another map, as :func:`resize_map`."""
    found: Tensor = resample_abs_pos_embed(embedding, new_size=list(new), old_size=list(old), num_prefix_tokens=prefix)
    return found


def resize_map(embedding: Tensor, size: Size) -> Tensor:
    """Returns position embeddings of a map, [1, C, H, W], at another size (bicubic, antialiased)."""
    return F.interpolate(embedding, size, mode="bicubic", antialias=True, align_corners=False)


def resize_table(table: Tensor, old: Size, new: Size) -> Tensor:
    """Returns a table of relative positions for another map, by timm's (1.0.31) `resize_rel_pos_bias_table`.

    It is BEiT's: linear between offsets whose distances grow geometrically, so that those of near cells stay as they
    are. Entries after those of the map, a class token's, are kept.

    Args:
        table: Table, [(2H - 1) * (2W - 1) + extra, heads].
        old: Height and width of the map of the table.
        new: Height and width of the map of the result.
    """
    rows, columns = (2 * side - 1 for side in old)
    inner, extra = table[: rows * columns], table[rows * columns :]
    down, across = (
        _stretched(2 * was - 1, 2 * side - 1).to(table.device, table.dtype) for was, side in zip(old, new, strict=True)
    )
    found = torch.einsum("yr,rch,xc->yxh", down, inner.view(rows, columns, -1), across)
    return torch.cat([found.flatten(0, 1), extra])


@functools.cache
def _stretch(old: int, new: int) -> tuple[tuple[float, ...], ...]:
    """Returns the weights of `old` offsets in each of `new` offsets."""
    low, high = 1.01, 1.5
    ratio = low
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (1 - ratio ** (old // 2)) / (1 - ratio) > new // 2:
            high = ratio
        else:
            low = ratio
    reached = [0.0]
    for step in range(old // 2):
        reached.append(reached[-1] + ratio**step)
    points = [-place for place in reversed(reached[1:])] + reached
    weights = []
    for place in range(-(new // 2), new // 2 + 1):
        right = min(next((at for at, point in enumerate(points) if point >= place), old - 1), old - 1)
        left = max(right - 1, 0)
        after, before = max(points[right] - place, 0.0), max(place - points[left], 0.0)
        if after == before == 0:
            after = before = 1.0
        row = [0.0] * old
        row[left] += after / (after + before)
        row[right] += before / (after + before)
        weights.append(tuple(row))
    return tuple(weights)


def _stretched(old: int, new: int) -> Tensor:
    return torch.tensor(_stretch(old, new), dtype=torch.float64)

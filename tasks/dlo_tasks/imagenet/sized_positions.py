"""timm's (1.0.31) transformers with embeddings or biases of positions, at other sizes.

A module keeps its parameters, buffers and settings. At another size its forward runs with others, which are computed
from the parameters, so that gradients flow back to them: embeddings and tables are interpolated, indices of relative
positions are made for the map. A class derived from the module's own does so; see :func:`derive`.

* CaiT, ConViT, EVA, Hiera, PiT and VOLO have one embedding a patch. They are interpolated bicubically and antialiased,
  as by timm's ``set_input_size`` where a model has it.
* BEiT (Bao et al. 2021, arXiv 2106.08254) and ViTs with relative positions resize their tables as ``set_input_size``
  does: those of near patches stay, and the distances between the others grow.
* MViTv2 (Li et al. 2022, arXiv 2112.01526) interpolates its tables of offsets linearly.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp, gen_relative_log_coords, gen_relative_position_index
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit, RelativePositionBias
from timm.models.beit import gen_relative_position_index as beit_index
from timm.models.cait import Cait
from timm.models.convit import GPSA, ConVit
from timm.models.eva import Eva
from timm.models.gemma4_vit import Gemma4VitEncoder
from timm.models.hiera import Hiera
from timm.models.mvitv2 import MultiScaleAttention, MultiScaleAttentionPoolFirst, MultiScaleVit
from timm.models.pit import PoolingVisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from timm.models.volo import VOLO
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.models.model_sizes import Size

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
    resized: Tensor = resample_abs_pos_embed(
        embedding, new_size=list(new), old_size=list(old), num_prefix_tokens=prefix
    )
    return resized


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
        torch.tensor(_stretch(2 * was - 1, 2 * side - 1), dtype=torch.float64).to(table.device, table.dtype)
        for was, side in zip(old, new, strict=True)
    )
    resized = torch.einsum("yr,rch,xc->yxh", down, inner.view(rows, columns, -1), across)
    return torch.cat([resized.flatten(0, 1), extra])


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


# --- models and modules -------------------------------------------------------------------------------------

_Substitutions = list[tuple[nn.Module, dict[str, Any]]]
_WINDOW = "_dlo_window"


def free_positions(model: nn.Module) -> bool:
    """Makes a model of these families accept any size; returns whether it is one."""
    family = next((family for family in _MODELS if isinstance(model, family)), None)
    if family is None:
        return False
    grids, mixin = grids_of(model), _MODELS[family]
    for part in model.modules():
        if isinstance(part, PatchEmbed):
            part.strict_img_size = False
        kind = next((mixin for family, mixin in _PARTS.items() if isinstance(part, family)), None)
        if kind is not None:
            derive(part, kind, grids)
    if mixin is not None:
        derive(model, mixin)
    return True


def position_multiples(part: nn.Module) -> list[int]:
    """Returns the divisors of a model's heights and widths, beside those of its patches."""
    model: Any = part
    if isinstance(part, VOLO):
        return [_volo_stride(model)]
    if isinstance(part, Hiera):
        return [stride * unit for stride, unit in zip(model.patch_stride, model.mask_unit_size, strict=True)]
    if isinstance(part, Gemma4VitEncoder):
        return [int(side) * int(model.pooling_kernel_size) for side in model.patch_size]
    return []


# --- one embedding a patch ---------------------------------------------------------------------------------


class _SizedTokens(SizedModel):
    """CaiT and ConViT: embeddings of patches, without a class token's; and BEiT, with it."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own, grid = tuple(model.patch_embed.grid_size), model.patch_embed.dynamic_feat_size((height, width))
        grids_of(model).note(grid)
        embedding = getattr(model, "pos_embed", None)
        if grid == own or embedding is None:
            return []
        prefix = model.num_prefix_tokens if isinstance(model, Beit) else 0
        return [(model, {"pos_embed": resize_tokens(embedding, own, grid, prefix)})]


class _SizedGPSA(SizedModule):
    """ConViT's attention, whose relative positions timm makes for square maps."""

    def values_for(self, x: Tensor) -> dict[str, Any]:
        side = math.isqrt(x.shape[1])
        height, width = grids_of(self).grid_of(x.shape[1], (side, side))
        if height == width:  # It makes them itself.
            return {}
        weight = self.qk.weight  # type: ignore[attr-defined]
        rows = torch.arange(height, dtype=torch.float32).repeat_interleave(width)
        columns = torch.arange(width, dtype=torch.float32).repeat(height)
        down, across = rows[None] - rows[:, None], columns[None] - columns[:, None]
        offsets = torch.stack([across, down, across**2 + down**2], dim=-1)[None]  # [1, N, N, 3]
        return {"rel_indices": offsets.to(weight.device, weight.dtype)}


class _SizedEva(SizedModel):
    """EVA, EVA-02, DINOv3 and other models of timm's `Eva`: embeddings of patches, and rotations by position."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own, grid = tuple(model.patch_embed.grid_size), model.patch_embed.dynamic_feat_size((height, width))
        if model.dynamic_img_size or grid == own:
            return []
        values: dict[str, Any] = {}
        if model.pos_embed is not None:
            prefix = 0 if model.no_embed_class else model.num_prefix_tokens
            values["pos_embed"] = resize_tokens(model.pos_embed, own, grid, prefix)
        if hasattr(model.rope, "update_feat_shape"):
            values["rope"] = _rotations(model.rope, grid)
        return [(model, values), (model.patch_embed, {"grid_size": grid})]


def _rotations(rope: nn.Module, grid: Size) -> nn.Module:
    """Returns a module with the same parameters for another grid."""
    rope = rope._modules.get("module") or rope  # The placeholder of a pipeline's stage has the module's attributes.
    resized: Any = copy.copy(rope)
    vars(resized)["_buffers"] = dict(rope._buffers)
    vars(resized)["_non_persistent_buffers_set"] = set(rope._non_persistent_buffers_set)
    resized.update_feat_shape(grid)
    return resized


class _SizedPit(SizedModel):
    """PiT: an embedding of the map after overlapping patches."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        patches, embedding = model.patch_embed.conv, model.pos_embed
        sides = zip((height, width), patches.padding, patches.kernel_size, patches.stride, strict=True)
        rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side, padding, kernel, stride in sides)
        grid = rows, columns
        same = grid == tuple(embedding.shape[-2:])
        return [] if same else [(model, {"pos_embed": resize_map(embedding, grid)})]


def _volo_stride(model: Any) -> int:
    patches = model.patch_embed
    stem = patches.conv[0].stride[0] if patches.conv is not None else 1
    return int(stem * patches.proj.stride[0] * model.pooling_scale)


class _SizedVolo(SizedModel):
    """VOLO: an embedding of the map after its outlookers, channels last."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        stride, embedding = _volo_stride(model), model.pos_embed
        grid = height // stride, width // stride
        if embedding is None or grid == tuple(embedding.shape[1:3]):
            return []
        return [(model, {"pos_embed": resize_map(embedding.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)})]


class _SizedHiera(SizedModel):
    """Hiera: an embedding of the map, and the order of tokens in mask units."""

    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        own = list(model.tokens_spatial_shape)
        grid = [side // stride for side, stride in zip((height, width), model.patch_stride, strict=True)]
        if grid == own or len(own) != 2:
            return []
        values: dict[str, Any] = {
            "tokens_spatial_shape": grid,
            "mask_spatial_shape": [side // unit for side, unit in zip(grid, model.mask_unit_size, strict=True)],
        }
        if model.pos_embed is not None and model.pos_embed_win is None:
            values["pos_embed"] = resize_tokens(model.pos_embed, (own[0], own[1]), (grid[0], grid[1]))
        scaled = {
            index: (strides, [side * new // old for side, new, old in zip(size, grid, own, strict=True)])
            for index, (strides, size) in model.reroll.schedule.items()
        }
        rolled = {"size": grid, "schedule": scaled}
        return [(model, values), (model.unroll, {"size": grid}), (model.reroll, rolled)]


# --- BEiT, and ViTs with relative positions ----------------------------------------------------------------


def _beit_values(module: Any, grid: Size) -> dict[str, Any]:
    table = module.relative_position_bias_table
    return {
        "window_size": grid,
        "window_area": grid[0] * grid[1],
        "relative_position_bias_table": resize_table(table, tuple(module.window_size), grid),
        "relative_position_index": beit_index(grid, device=table.device),
    }


class _SizedBeitAttention(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        if module.window_size is None:
            return {}
        own = tuple(module.window_size)
        grid = grids_of(module).grid_of(x.shape[1] - 1, own)
        return {} if grid == own else _beit_values(module, grid)


class _SizedBeitBias:
    """BEiT's table of all blocks."""

    def forward(self) -> Tensor:
        module: Any = self
        own = tuple(module.window_size)
        grid = grids_of(module).latest or own
        with substituted(module, {} if grid == own else _beit_values(module, grid)):
            bias: Tensor = super().forward()  # type: ignore[misc]
        return bias


class _SizedRelPos:
    """timm's `RelPosBias` and `RelPosMlp` for the map that their attention has named."""

    def get_bias(self) -> Tensor:
        module: Any = self
        own = tuple(module.window_size)
        grid = vars(module).get(_WINDOW, own)
        with substituted(module, {} if grid == own else _bias_values(module, grid)):
            bias: Tensor = super().get_bias()  # type: ignore[misc]
        return bias


def _bias_values(module: Any, grid: Size) -> dict[str, Any]:
    cells = grid[0] * grid[1]
    if isinstance(module, RelPosBias):
        table = module.relative_position_bias_table
        index = gen_relative_position_index(grid, class_token=module.prefix_tokens > 0, device=table.device)
        return {
            "bias_shape": (cells + module.prefix_tokens,) * 2 + (table.shape[1],),
            "relative_position_bias_table": resize_table(table, (module.window_size[0], module.window_size[1]), grid),
            "relative_position_index": index.view(-1),
        }
    weight = module.mlp.fc1.weight
    coordinates = gen_relative_log_coords(
        grid, module.pretrained_window_size, mode=module.mode, device=weight.device, dtype=weight.dtype
    )
    return {
        "bias_shape": (cells, cells, module.bias_shape[2]),
        "relative_position_index": gen_relative_position_index(grid, device=weight.device).view(-1),
        "rel_coords_log": coordinates,
    }


class _SizedRelPosAttention(SizedModule):
    def values_for(self, x: Tensor) -> dict[str, Any]:
        module: Any = self
        bias = module.rel_pos
        if bias is not None:
            own = tuple(bias.window_size)
            vars(bias)[_WINDOW] = grids_of(module).grid_of(x.shape[1] - bias.prefix_tokens, own)
        return {}


class _SizedRelPosViT(SizedModel):
    def substitutions(self, height: int, width: int) -> _Substitutions:
        model: Any = self
        grid = model.patch_embed.dynamic_feat_size((height, width))
        grids_of(model).note(grid)
        if model.shared_rel_pos is not None:
            vars(model.shared_rel_pos)[_WINDOW] = grid
        return []


# --- tables of offsets, in each direction ------------------------------------------------------------------


class _SizedMultiScaleAttention:
    """MViTv2's attention: tables are interpolated linearly, as in its own code.

    timm reads them at other sizes without, from a wrong middle on small maps and beyond the end on large ones.
    """

    def forward(self, x: Tensor, feat_size: Any) -> Any:
        """Returns attention over ``x``, [B, N, C], and the size of its map."""
        part: Any = self
        values: dict[str, Any] = {}
        if part.rel_pos_type == "spatial":
            strides = [(1, 1) if pool is None else _pair(pool.stride) for pool in (part.pool_q, part.pool_k)]
            for axis, name in enumerate(("rel_pos_h", "rel_pos_w")):
                offsets = 2 * max((feat_size[axis] - 1) // stride[axis] + 1 for stride in strides) - 1
                table = getattr(part, name)
                if offsets != table.shape[0]:
                    values[name] = F.interpolate(table.T[None], offsets, mode="linear", align_corners=False)[0].T
        with substituted(part, values):
            return super().forward(x, feat_size)  # type: ignore[misc]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


#: Mixins of models; None where that of their parts suffices.
_MODELS: dict[type[nn.Module], type | None] = {
    Beit: _SizedTokens,
    Cait: _SizedTokens,
    ConVit: _SizedTokens,
    Eva: _SizedEva,
    Hiera: _SizedHiera,
    MultiScaleVit: None,
    PoolingVisionTransformer: _SizedPit,
    VisionTransformerRelPos: _SizedRelPosViT,
    VOLO: _SizedVolo,
}
_PARTS: dict[type[nn.Module], type] = {
    BeitAttention: _SizedBeitAttention,
    GPSA: _SizedGPSA,
    MultiScaleAttention: _SizedMultiScaleAttention,
    MultiScaleAttentionPoolFirst: _SizedMultiScaleAttention,
    RelativePositionBias: _SizedBeitBias,
    RelPosAttention: _SizedRelPosAttention,
    RelPosBias: _SizedRelPos,
    RelPosMlp: _SizedRelPos,
}

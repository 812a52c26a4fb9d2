"""Support for images of other sizes than the one a model was built for.

A ViT has one position embedding for each patch of the size it was built for, a CoAtNet one bias for each relative
position in its feature maps. :func:`accept_any_size` does not change these parameters, so that optimizers, averages and
checkpoints are unaffected; the forward pass interpolates them to the size of its images, and gradients flow back
through the interpolation. At the size the model was built for, outputs are those of the plain model, bit for bit.
Convolutional networks do not need this.

* Vision Transformers do it themselves, by timm's ``dynamic_img_size`` (bicubic, antialiased).
* CoAtNet (Dai, Liu, Le, Tan 2021, arXiv 2106.04803) interpolates its biases bilinearly, as the paper does for
  fine-tuning at a larger size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from timm.layers.format import Format
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp, gen_relative_log_coords
from timm.models.maxxvit import Attention2d, MaxxVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dlo_framework.errors import DloError

Size: TypeAlias = tuple[int, int]
"""Height and width of an image in pixels, or of a feature map in cells."""


def accept_any_size(module: nn.Module) -> None:
    """Makes every timm ViT and CoAtNet in ``module`` accept images of any size that its stride divides.

    Parameters, buffers, the keys of the state dict and the outputs at the size it was built for do not change. It may
    be called again, and on modules without such models.
    """
    for part in module.modules():
        if isinstance(part, VisionTransformer):
            _free_vit(part)
        elif type(part) is Attention2d and isinstance(part.rel_pos, RelPosBias | RelPosMlp):
            # The object stays the same, and with it its parameters, hooks and the strategy's references.
            part.__class__ = AnySizeAttention2d


def _free_vit(vit: VisionTransformer) -> None:
    """Sets what ``dynamic_img_size=True`` sets at construction.

    timm 1.0.31 has no setter for it: ``VisionTransformer.__init__`` passes ``strict_img_size=False`` and
    ``output_fmt="NHWC"`` to its patch embedding, which turns ``flatten`` off, and notes ``dynamic_img_size``.
    """
    patches = vit.patch_embed
    if vit.dynamic_img_size or not isinstance(patches, PatchEmbed | HybridEmbed):
        return
    patches.strict_img_size = False
    patches.flatten = False
    patches.output_fmt = Format.NHWC
    vit.dynamic_img_size = True  # type: ignore[misc]  # Final for TorchScript


class AnySizeAttention2d(Attention2d):
    """timm's ``Attention2d`` (1.0.31) with a bias that fits the feature map at any size."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns attention over ``x``, [B, C, H, W]; timm's own if H and W are those it was built for."""
        rel_pos: Any = self.rel_pos
        height, width = x.shape[-2:]
        if (height, width) == tuple(rel_pos.window_size):
            return super().forward(x, shared_rel_pos)
        batch = x.shape[0]
        if self.head_first:
            parts = self.qkv(x).view(batch, self.num_heads, self.dim_head * 3, -1).chunk(3, dim=2)
        else:
            parts = self.qkv(x).reshape(batch, 3, self.num_heads, self.dim_head, -1).unbind(1)
        query, key, value = (part.transpose(-1, -2).contiguous() for part in parts)  # [B, heads, HW, dim_head]
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias_at(rel_pos, height, width),
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(mixed.transpose(-1, -2).reshape(batch, -1, height, width)))


def bias_at(rel_pos: RelPosBias | RelPosMlp, height: int, width: int) -> Tensor:
    """Returns the attention bias of a feature map, [1, heads, HW, HW].

    A table is interpolated bilinearly. A small network that makes the table (CoAtNet-rmlp) makes it for this map, as in
    timm's ``set_window_size``.
    """
    size = 2 * height - 1, 2 * width - 1
    if isinstance(rel_pos, RelPosMlp):
        weight = rel_pos.mlp.fc1.weight
        coordinates = gen_relative_log_coords(
            (height, width), rel_pos.pretrained_window_size, rel_pos.mode, device=weight.device, dtype=weight.dtype
        )
        bias = expand_relative_bias(rel_pos.mlp(coordinates))
        bias = rel_pos.bias_act(bias)
        return bias if rel_pos.bias_gain is None else bias * rel_pos.bias_gain
    rows, columns = (2 * side - 1 for side in rel_pos.window_size)
    table = rel_pos.relative_position_bias_table.view(1, rows, columns, -1).permute(0, 3, 1, 2)
    # Not antialiased: so it has a deterministic gradient on CUDA, and at up to half the size every entry is used.
    table = F.interpolate(table, size, mode="bilinear", align_corners=False)
    return expand_relative_bias(table[0].permute(1, 2, 0))


def expand_relative_bias(table: Tensor) -> Tensor:
    """Returns the bias of each pair of cells, [1, heads, HW, HW], from that of each relative position.

    Args:
        table: Bias of each relative position, [2H - 1, 2W - 1, heads]; the middle is that of a cell and itself.
    """
    height, width = (table.shape[0] + 1) // 2, (table.shape[1] + 1) // 2
    shifted = table.unfold(0, height, 1).unfold(1, width, 1)  # [H, W, heads, H, W]: [y, x, :, a, b] is at y+a, x+b
    return shifted.flip(3, 4).permute(2, 0, 1, 3, 4).reshape(1, -1, height * width, height * width)


# --- checks ------------------------------------------------------------------------------------------------


def size_multiple(module: nn.Module) -> int | None:
    """Returns the divisor of valid heights and widths: the patch of a ViT, the stride of a CoAtNet; else None."""
    found = []
    for part in module.modules():
        if isinstance(part, VisionTransformer):
            found += [int(side) for side in part.patch_embed.feat_ratio(as_scalar=False)]  # the patch
        elif isinstance(part, MaxxVit):
            found.append(int(part.feature_info[-1]["reduction"]))
    return math.lcm(*found) if found else None


def check_sizes(module: nn.Module, sizes: Iterable[Size], base: Size) -> None:
    """Checks that a model accepts images of these sizes, without computing anything.

    The forward pass runs on meta tensors. If it cannot run so at ``base`` either, which need not mean anything for real
    images, and if parameters are sharded, only the rules of the model's family are checked.

    Args:
        module: Model of images, or a LightningModule: its ``model``, or itself if it has a ``forward``.
        sizes: Sizes of images to check, as (height, width) in pixels.
        base: Size that the model was built for, (height, width).

    Raises:
        DloError: if a size is not accepted; it names the model and the size, and the nearest sizes or another fix.
    """
    sizes = list(dict.fromkeys(sizes))
    model = _image_model(module)
    multiple = size_multiple(module)
    for side in dict.fromkeys(chain.from_iterable(sizes)):
        if multiple is not None and side % multiple:
            down = side // multiple * multiple
            near = " or ".join(str(fit) for fit in (down, down + multiple) if fit)
            raise DloError(
                f"{_name(model or module)}: height and width of images must be multiples of {multiple} pixels,"
                f" got {side}; use {near}"
            )
    if model is None or _sharded(model):
        return
    channels = next((number for number in _channels(model) if _objection(model, base, number) is None), None)
    if channels is None:
        return
    for size in sizes:
        why = _objection(model, size, channels)
        if why is not None:
            fix = "use a ViT, a CoAtNet or a convolutional network"
            if getattr(model, "dynamic_img_size", True) is False:
                fix = "build it with dynamic_img_size: true (of a task: in model_args)"
            raise DloError(
                f"{_name(model)}: images must have the size that it was built for, {base[0]} x {base[1]} pixels, got"
                f" {size[0]} x {size[1]} ({why}); {fix}, or set the size to {base[0]}"
            )


def _name(model: nn.Module) -> str:
    config = getattr(model, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or type(model).__name__)


def _image_model(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, LightningModule):
        return module
    inner = getattr(module, "model", None)
    if isinstance(inner, nn.Module):
        return inner
    return module if type(module).forward is not LightningModule.forward else None


def _sharded(model: nn.Module) -> bool:
    """Whether a strategy has sharded the parameters, so that the forward pass needs the other ranks."""
    return any(type(parameter) is not nn.Parameter for parameter in model.parameters())


def find_objection(model: nn.Module, size: Size) -> str | None:
    """Returns the reason why a model cannot take two images of ``size``, None if it can; nothing is computed."""
    found = [_objection(model, size, channels) for channels in _channels(model)]
    return None if None in found else found[0]


def _channels(model: nn.Module) -> list[int]:
    """Returns the possible numbers of channels of a model's images: that of its first convolution, and three.

    The first convolution of a model that transforms images before (CSATv2: to frequencies) has another number.
    """
    first = next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), 3)
    return list(dict.fromkeys((first, 3)))


def _objection(model: nn.Module, size: Size, channels: int) -> str | None:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    images = torch.empty(2, channels, *size, dtype=None if first is None else first.dtype, device="meta")
    empty = _on_meta(model)
    with _as_in_evaluation(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            functional_call(model, empty, (images,), tie_weights=False)
        except Exception as error:  # whatever it is, the model would raise it in training
            return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's tensors on the meta device, each under one name in the module that holds it.

    ``functional_call`` (torch 2.11 to 2.15) swaps a tensor under each of its names and back in the same order: in a
    module that has two names (CoaT shares its position encodings) the model would keep the meta tensor.
    """
    made: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for prefix, part in model.named_modules():  # each once
        own = chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, value in own:
            empty = made.setdefault(id(value), torch.empty_like(value, device="meta"))
            found[f"{prefix}.{name}" if prefix else name] = empty
    return found


@contextmanager
def _as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Turns off random layers in the block, and restores each module's own mode."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training

"""timm models by name, with checks before training starts, mixtures in place of their MLPs, and their parallel plans.

Mixtures are those of V-MoE: Scaling Vision with Sparse Mixture of Experts. Riquelme et al., 2021, arXiv 2106.05974.
Departures: capacities are per image, no noise is added to the routers' logits, and weights are divided by their sum
unless `normalize` is false, so that experts that start as copies of the MLP compute what it did.

There are plans of Vision Transformers, CoAtNet and its family, ResNets, Twins, and inferred ones. A plan is made for a
module: it names only what that variant has (class token, register tokens, layer scale, the place of its norm).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import timm
import torch
from timm.layers import Attention, RelPosBiasTf, SEModule
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.models import parse_model_name
from timm.models.maxxvit import MaxxVit, MbConvBlock
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.twins import Twins
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from dlo_framework.errors import DloError, did_you_mean, unknown_hint
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.layer import DenseMLP, MixtureLayer, upcycle
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.models.model_sizes import accept_any_size, check_sizes, find_objection
from dlo_framework.plan import ParallelPlan, Rule, tied_groups
from dlo_framework.task_abilities import ChannelGroup


def add_mixtures(model: nn.Module, plan: ParallelPlan, options: MixtureOptions) -> None:
    """Replaces MLPs of a model's blocks by mixtures, in place.

    Args:
        model: Model of timm.
        plan: Plan of the model, which names its blocks.
        options: Options with `count`.

    Raises:
        DloError: If no block has an MLP of linear layers.
    """
    names = [name for block in plan.block_names(model) for name in _mlps(model, block)]
    upcycle(model, names, read_mlp, options)


def _mlps(model: nn.Module, block: str) -> list[str]:
    modules = model.get_submodule(block).named_modules()
    return [f"{block}.{name}" for name, module in modules if name.endswith("mlp") and read_mlp(module) is not None]


def read_mlp(mlp: nn.Module) -> DenseMLP | None:
    """Returns the linear layers of an MLP of timm (1.0); None for others, such as those with a norm or convolutions."""
    up: nn.Module
    gate: nn.Linear | None
    if isinstance(mlp, SwiGLU):
        up, gate = mlp.fc1_x, mlp.fc1_g
    elif isinstance(mlp, Mlp):
        up, gate = mlp.fc1, None
    else:
        return None
    down = mlp.fc2
    if not (isinstance(mlp.norm, nn.Identity) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if (up.bias is None) != (down.bias is None):
        return None
    return DenseMLP(up, down, mlp.act, gate, dropout=(mlp.drop1.p, mlp.drop2.p))


def dense_mlps(model: nn.Module) -> list[nn.Module]:
    """Returns the MLPs of a model outside its mixtures."""
    inside = {id(part) for module in model.modules() if isinstance(module, MixtureLayer) for part in module.modules()}
    mlps = (module for name, module in model.named_modules() if name.endswith(".mlp"))
    return [module for module in mlps if id(module) not in inside]


#: Argument for the width of a head, beside `num_heads`; timm (1.0) takes it through `attn_layer` only.
_HEAD_DIM = "attn_head_dim"
#: Packages whose errors say that weights cannot be downloaded, beside OSError.
_DOWNLOADERS = ("huggingface_hub", "httpx", "requests")
_HUBS = ("hf-hub", "hf_hub", "local-dir")


def check_name(name: str, *, pretrained: bool) -> None:
    """Checks that timm knows a model.

    Raises:
        DloError: If timm does not know the model (the message has the nearest name), or if it is on a hub, so that its
            architecture would have to be downloaded, and `pretrained` is false.
    """
    source, identifier = parse_model_name(name)
    if source in _HUBS:
        if not pretrained:
            raise DloError(f"pretrained must be true for a model on a hub, got false for '{name}'")
        return
    architecture, _, tag = str(identifier).partition(".")
    if not timm.is_model(architecture):
        names = timm.list_models()
        raise DloError(
            f"unknown timm model '{name}'{did_you_mean(architecture, names)}"
            f" (python -c 'import timm; print(timm.list_models())' lists all {len(names)})"
        )
    weights = [full.partition(".") for full in timm.list_pretrained(architecture + "*")]
    tags = [weights_tag for known, _, weights_tag in weights if known == architecture]
    if tag and tag not in tags:
        raise DloError(f"timm has no weights '{tag}' of {architecture}{unknown_hint(tag, tags)}")


@lru_cache
def takes_image_size(name: str) -> bool:
    """Returns whether the model is built for one image size (`img_size`), as ViT is and ResNet is not."""
    with torch.device("meta"):
        model = timm.create_model(name)
    return "img_size" in inspect.signature(type(model).__init__).parameters


def check_image_size(name: str, args: dict[str, Any], image_size: int) -> None:
    """Checks that the model divides an image of this size evenly.

    timm itself accepts any size, and drops the pixels beyond the last full patch.

    Raises:
        DloError: If it does not; the message has the nearest sizes that fit.
    """
    with torch.device("meta"):
        model = _create(name, {key: value for key, value in args.items() if key != "img_size"})
    if "img_size" not in inspect.signature(type(model).__init__).parameters:
        return
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    what, unit = "patch", size[0] if isinstance(size, tuple | list) else size
    known = unit is not None
    if unit is None:
        what, unit = "the model's stride", _stride(model)
    if image_size % unit:
        down = image_size // unit * unit
        sizes = " or ".join(str(size) for size in (down, down + unit) if size and (known or _fits(name, args, size)))
        fix = f"; use {sizes}" if sizes else ""
        raise DloError(f"image_size must be divisible by {what} {unit}, got {image_size}{fix}")
    if unit == 1 and not _fits(name, args, image_size):
        own = int((getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))[-1])
        raise DloError(f"image_size must be {own} for {name}, built for that size only, got {image_size}; use {own}")


def _stride(model: nn.Module) -> int:
    """Returns a model's stride; 1 if its stages do not form a pyramid (CrossViT: two branches side by side)."""
    reductions = [int(info["reduction"]) for info in getattr(model, "feature_info", None) or []]
    pyramid = all(after % before == 0 for before, after in pairwise(reductions))
    return reductions[-1] if reductions and pyramid else 1


def _fits(name: str, args: dict[str, Any], image_size: int) -> bool:
    """Returns whether a model that is built for an image size accepts images of that size."""
    try:
        with torch.device("meta"):
            model = build(name, args, num_classes=2, image_size=image_size, pretrained=False)
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError):
        return False
    return find_objection(model, (image_size, image_size)) is None


def check_eval_size(name: str, args: dict[str, Any], image_size: int, eval_image_size: int) -> None:
    """Checks that a model can be evaluated at another size than its training size.

    Raises:
        DloError: If it is built for one size and cannot be adapted to others, or not to this one.
    """
    if eval_image_size == image_size:
        return
    with torch.device("meta"):
        model = build(name, args, num_classes=2, image_size=image_size, pretrained=False)
    try:
        check_sizes(model, [(eval_image_size, eval_image_size)], (image_size, image_size))
    except DloError as error:
        raise DloError(f"data.init_args.eval_image_size={eval_image_size}: {error}") from error


def build(name: str, args: dict[str, Any], *, num_classes: int, image_size: int | None, pretrained: bool) -> nn.Module:
    """Builds a timm model; downloads nothing unless `pretrained` is true.

    A ViT and a CoAtNet accept images of other sizes too, see :mod:`dlo_tasks.imagenet.timm_sizes`; their parameters
    have the shapes for `image_size`.

    Args:
        name: Name of the model in timm, with or without a tag of weights.
        args: Arguments of the model's constructor.
        num_classes: Number of outputs of the classifier.
        image_size: Height and width of the images in pixels; passed to models built for one size.
        pretrained: Whether to download and load timm's weights.

    Raises:
        DloError: If the model does not have an argument.
    """
    sized = image_size is not None and "img_size" not in args and takes_image_size(name)
    more = {"img_size": image_size} if sized else {}
    model = _create(name, {**args, **more}, num_classes=num_classes, pretrained=pretrained)
    accept_any_size(model)
    return model


@lru_cache
def _attention_of_width(width: int) -> type[Attention]:
    """Returns timm's attention with heads of a width of their own; its blocks (1.0) take a class and no width."""

    class AttentionOfWidth(Attention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["attn_head_dim"] = width
            super().__init__(*args, **kwargs)

    return AttentionOfWidth


def resized_args(model: nn.Module, args: dict[str, Any], sizes: Mapping[str, float]) -> dict[str, Any]:
    """Returns the arguments that build a Vision Transformer in other sizes, or a ResNet or CoAtNet of fewer channels.

    Args:
        model: Model in its present sizes; it may be on the meta device.
        args: Arguments that have built it.
        sizes: New sizes that change: `heads` and `head_width`, `hidden`, `blocks`; `channels`, a fraction to keep.

    Raises:
        DloError: If the model is of another family.
    """
    if "channels" in sizes:
        args = narrowed_args(model, args, sizes["channels"])
        sizes = {key: value for key, value in sizes.items() if key != "channels"}
        if not sizes:
            return args
    if not isinstance(model, VisionTransformer):
        raise DloError(
            f"prune: the model must be a timm VisionTransformer to be built in other sizes, got {type(model).__name__};"
            " use a ViT or DeiT, or the callback Prune, which keeps the sizes"
        )
    args = dict(args)
    if "blocks" in sizes:
        args["depth"] = sizes["blocks"]
    if "hidden" in sizes:
        # timm (1.0) computes int(embed_dim * mlp_ratio).
        ratio = sizes["hidden"] / model.embed_dim
        args["mlp_ratio"] = (
            ratio if int(model.embed_dim * ratio) == sizes["hidden"] else (sizes["hidden"] + 0.5) / model.embed_dim
        )
    if "heads" in sizes:
        args["num_heads"], args[_HEAD_DIM] = sizes["heads"], sizes["head_width"]
    return args


def set_sincos_positions(model: nn.Module) -> None:
    """Replaces a ViT's learned position embedding by fixed 2-D sines and cosines.

    Source: MoCo v3 (Chen et al. 2021, arXiv 2104.02057) and big_vision's plain ViT baseline.

    Raises:
        DloError: If the model has no position embedding that covers exactly a grid of patches.
    """
    positions, patches = getattr(model, "pos_embed", None), getattr(model, "patch_embed", None)
    grid = getattr(patches, "grid_size", None)
    if not isinstance(positions, nn.Parameter) or grid is None or positions.shape[1] != grid[0] * grid[1]:
        raise DloError(
            "position_embedding: sincos2d must have a ViT whose position embedding covers exactly its patches, got"
            f" {type(model).__name__}; for a timm ViT set model_args: {{class_token: false, global_pool: avg}}"
        )
    if not positions.is_meta:
        with torch.no_grad():
            positions.copy_(sincos_2d(grid[0], grid[1], positions.shape[2]))
    positions.requires_grad_(False)


def sincos_2d(height: int, width: int, dim: int) -> Tensor:
    """Returns a `[1, height * width, dim]` embedding: sin x, cos x, sin y, cos y, each with `dim / 4` channels."""
    if dim % 4:
        raise DloError(f"the width of a sincos2d embedding must be divisible by 4, got {dim}; use {dim // 4 * 4 + 4}")
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    omega = 10_000.0 ** -(torch.arange(dim // 4).double() / max(1, dim // 4 - 1))
    angles_x, angles_y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega  # [HW, dim / 4]
    return torch.cat([angles_x.sin(), angles_x.cos(), angles_y.sin(), angles_y.cos()], 1)[None].float()


class _UnclampedOnMeta(TorchFunctionMode):
    """Leaves out ``clamp_`` of meta tensors, which takes 4/5 of the time to build a ViT there (torch 2.14)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clamp_ and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _create(name: str, args: dict[str, Any], **more: Any) -> nn.Module:
    if _HEAD_DIM in args:
        args = dict(args)
        args["attn_layer"] = _attention_of_width(args.pop(_HEAD_DIM))
    try:
        with _UnclampedOnMeta() if torch.get_default_device().type == "meta" else nullcontext():
            model: nn.Module = timm.create_model(name, **args, **more)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        with torch.device("meta"):
            known = inspect.signature(type(timm.create_model(name)).__init__).parameters
        raise DloError(
            f"model_args must be arguments of {name}, got '{unknown[1]}'{did_you_mean(unknown[1], known)}"
        ) from error
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if not more.get("pretrained") or not (isinstance(error, OSError) or package in _DOWNLOADERS):
            raise
        raise DloError(
            f"pretrained weights of {name} must be in the cache or downloadable, got {type(error).__name__}:"
            f" {str(error).splitlines()[0]}; connect to the hub once, or set model.init_args.pretrained to false"
        ) from error
    return model


#: Layers of CaiT, XCiT and VOLO that process a class token after all blocks of patches.
_CLASS_ATTENTION = ("blocks_token_only", "cls_attn_blocks", "post_network")


def plan_for(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a timm model, with its mixtures of experts.

    Raises:
        DloError: If the model's family is unknown and its repeated blocks cannot be found.
    """
    patterns = dict.fromkeys(_any_index(mixture.name) for mixture in find_mixtures(model))
    return replace(_family_plan(model), experts=tuple(patterns))


def _family_plan(model: nn.Module) -> ParallelPlan:
    if isinstance(model, VisionTransformer):
        return vit_plan(model)
    if isinstance(model, MaxxVit):
        return maxxvit_plan(model)
    if isinstance(model, ResNet):
        return resnet_plan(model)
    if isinstance(model, Twins):
        return twins_plan(model)
    plan = ParallelPlan.infer(model)
    if "cls_token" in plan.stem and any(getattr(model, name, None) is not None for name in _CLASS_ATTENTION):
        stem = tuple(name for name in plan.stem if name != "cls_token")
        return replace(plan, stem=stem, head=(*plan.head, "cls_token"))
    return plan


def vit_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `VisionTransformer`: ViT, DeiT and DeiT III, with or without registers.

    Each block follows Megatron: `qkv` by heads and `fc1` by columns, `proj` and `fc2` by rows, so that one all-reduce
    serves two linear layers. The fused `qkv` is `[3, heads, head_dim]`.
    """
    stem = ("cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed", "norm_pre")
    head = ("norm", "attn_pool", "fc_norm", "head", "head_dist")
    rules = {
        **_attention_rules(model),
        **_mlp_rules(model),
        **{f"blocks.*.{name}": Rule.SEQUENCE for name in ("norm1", "norm2", "ls1", "ls2")},
    }
    return ParallelPlan(
        blocks=("blocks.*",),
        stem=_present(model, stem),
        head=_present(model, head),
        tensor={pattern: rule for pattern, rule in rules.items() if _matches(model, pattern)},
        attention=("blocks.*.attn",) if _matches(model, "blocks.*.attn") else (),
        tied=tied_groups(model),
    )


def _attention_rules(model: nn.Module) -> dict[str, Rule]:
    """Returns the rules of the blocks' attentions; empty if a norm over all heads follows."""
    attentions = [module for name, module in model.named_modules() if name.endswith(".attn")]
    if not all(isinstance(getattr(attention, "norm", None), nn.Identity | None) for attention in attentions):
        return {}
    rules = {"qkv": Rule.QKV, "gate": Rule.HEADS, "proj": Rule.ROW}
    return {f"blocks.*.attn.{name}": rule for name, rule in rules.items()}


def _mlp_rules(model: nn.Module) -> dict[str, Rule]:
    """Returns the rules of the blocks' MLPs, mixtures apart; empty if a norm follows `fc1`."""
    mlps = dense_mlps(model)
    if not all(isinstance(mlp, Mlp | SwiGLU | GluMlp) and isinstance(mlp.norm, nn.Identity) for mlp in mlps):
        return {}
    first = Rule.GATE_UP if any(isinstance(mlp, GluMlp) for mlp in mlps) else Rule.COLUMN
    rules = {"fc1": first, "fc1_g": Rule.COLUMN, "fc1_x": Rule.COLUMN, "fc2": Rule.ROW}
    return {f"blocks.*.mlp.{name}": rule for name, rule in rules.items()}


def maxxvit_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `MaxxVit`: CoAtNet, MaxViT and their relatives.

    It has the blocks of all stages in order, convolutional ones too, and tensor rules for the attention of transformer
    blocks and their MLPs. In this family the fused `qkv` is `[heads, 3, head_dim]` if the attention has `head_first`,
    and the table of relative positions has one column per head.
    """
    tensor: dict[str, Rule] = {}
    attention: dict[str, None] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "qkv"):
            continue
        pattern = _any_index(name)
        block = pattern.rpartition(".")[0]
        attention[pattern] = None
        tensor[f"{pattern}.qkv"] = Rule.QKV_BY_HEAD if module.head_first else Rule.QKV
        tensor[f"{pattern}.proj"] = Rule.ROW
        if hasattr(module.rel_pos, "relative_position_bias_table"):
            first = isinstance(module.rel_pos, RelPosBiasTf)  # [heads, height, width]
            tensor[f"{pattern}.rel_pos.relative_position_bias_table"] = Rule.HEADS if first else Rule.LAST_DIM_HEADS
        else:
            # Its output is a head's bias, and its input is not an activation: cut its tensors, not a projection.
            tensor |= {f"{pattern}.rel_pos.mlp.fc2.{name}": Rule.HEADS for name in ("weight", "bias")}
        tensor |= {f"{block}.mlp.fc1": Rule.COLUMN, f"{block}.mlp.fc2": Rule.ROW}
    return ParallelPlan(
        blocks=("stages.*.blocks.*",),
        stem=_present(model, ("stem",)),
        head=_present(model, ("norm", "head")),
        tensor={pattern: rule for pattern, rule in tensor.items() if _matches(model, pattern)},
        attention=tuple(attention),
        tied=tied_groups(model),
    )


def resnet_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `ResNet`: its residual blocks in order, without tensor rules."""
    return ParallelPlan(
        blocks=("layer?.*",),
        stem=_present(model, ("conv1", "bn1", "maxpool")),
        head=_present(model, ("fc",)),
    )


def twins_plan(model: Twins) -> ParallelPlan:
    """Returns the plan of a `Twins`, without tensor rules.

    The modules between its blocks count as blocks too: the patch embedding at the start of each group but the first,
    and the position encoding after a group's first block.
    """
    blocks: list[str] = []
    for group, layers in enumerate(model.blocks):
        names = [f"blocks.{group}.{number}" for number, _ in layers.named_children()]
        embedding = [f"patch_embeds.{group}"] if group else []
        blocks += [*embedding, names[0], f"pos_block.{group}", *names[1:]]
    return ParallelPlan(blocks=tuple(blocks), stem=("patch_embeds.0",), head=_present(model, ("norm", "head")))


def _present(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the names that have a parameter or buffer in `model`."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    present = {name.split(".")[0] for name, _ in tensors}
    return tuple(name for name in names if name in present)


def _matches(model: nn.Module, pattern: str) -> bool:
    finder = ParallelPlan(tensor={pattern: Rule.COLUMN})
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    return any(finder.rule_for(name) is Rule.COLUMN for name in names)


def _any_index(name: str) -> str:
    """Returns `name` with each number between dots replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# --- inner channels of convolutional blocks -----------------------------------------------------------------------

#: Largest difference of the fraction that is left from the one that is asked for.
_NEAR = 0.03


def channel_groups(model: Any) -> list[ChannelGroup]:
    """Returns the inner channels of ResNet's blocks, and of MBConv blocks and their squeeze-and-excitation.

    Channels between blocks, which residual additions couple, are not among them.

    Raises:
        DloError: The model has no such blocks, or a layer of a block mixes its channels.
    """
    groups = []
    for name, block in model.named_modules():
        if isinstance(block, Bottleneck):
            _check(block, name, depthwise=(), dense=("conv1", "conv2", "conv3"), norms=("bn1", "bn2"))
            groups.append(_group(block, name, ("conv1",), ("bn1",), ("conv2",)))
            groups.append(_group(block, name, ("conv2",), ("bn2",), ("conv3",)))
        elif isinstance(block, BasicBlock):
            _check(block, name, depthwise=(), dense=("conv1", "conv2"), norms=("bn1",))
            groups.append(_group(block, name, ("conv1",), ("bn1",), ("conv2",)))
        elif isinstance(block, MbConvBlock):
            _check(block, name, ("conv2_kxk",), ("conv1_1x1", "conv3_1x1"), ("norm1", "norm2"))
            attention = next((key for key in ("se", "se_early") if getattr(block, key, None) is not None), None)
            writers, readers = ["conv1_1x1"], ["conv3_1x1"]
            if attention is not None:
                squeeze = block.get_submodule(attention)
                if not isinstance(squeeze, SEModule) or not isinstance(squeeze.bn, nn.Identity) or squeeze.add_maxpool:
                    raise _mixes(f"{name}.{attention}", squeeze)
                groups.append(_group(block, name, (f"{attention}.fc1",), (), (f"{attention}.fc2",)))
                writers.append(f"{attention}.fc2")
                readers.append(f"{attention}.fc1")
            groups.append(_group(block, name, tuple(writers), ("norm1", "conv2_kxk", "norm2"), tuple(readers)))
    if not groups:
        raise DloError(
            "prune: the model must have blocks of timm's ResNets or MBConv blocks (CoAtNet, MaxViT) for --channels, got"
            f" {type(model).__name__} without; prune hidden units or blocks, or use the callback Prune"
        )
    return groups


def _group(
    block: Any, name: str, writers: tuple[str, ...], channelwise: tuple[str, ...], readers: tuple[str, ...]
) -> ChannelGroup:
    parts = [tuple(f"{name}.{key}" for key in keys) for keys in (writers, channelwise, readers)]
    return ChannelGroup(name, block.get_submodule(writers[0]).out_channels, *parts)


def _check(block: Any, name: str, depthwise: Any, dense: Any, norms: Any) -> None:
    """Checks that a block's convolutions and norms work on channels as their kind says.

    Raises:
        DloError: One does not; the message has its name.
    """
    for key in depthwise:
        conv = block.get_submodule(key)
        if conv.groups != conv.in_channels:
            raise _mixes(f"{name}.{key}", conv)
    for key in dense:
        conv = block.get_submodule(key)
        if conv.groups != 1:
            raise _mixes(f"{name}.{key}", conv)
    for key in norms:
        norm = block.get_submodule(key)
        if not isinstance(norm, _BatchNorm):
            raise _mixes(f"{name}.{key}", norm)


def _mixes(name: str, layer: Any) -> DloError:
    return DloError(
        "prune: layers of a block must be dense or depthwise convolutions, batch norms and squeeze-and-excitation for"
        f" --channels, got {name}, {type(layer).__name__}"
        f"{f' with groups={layer.groups}' if isinstance(layer, nn.Conv2d) else ''}; use the callback Prune"
    )


def narrowed_args(model: Any, args: dict[str, Any], kept: float) -> dict[str, Any]:
    """Returns the arguments that build a model with a fraction of its blocks' inner channels.

    timm rounds the numbers of MBConv blocks to multiples of 8.

    Args:
        model: Model in its present sizes; it may be on the meta device.
        args: Arguments that have built it.
        kept: Fraction to keep.

    Raises:
        DloError: The model is of another family.
    """
    first = next(group for group in channel_groups(model) if group.channelwise)
    if isinstance(model.get_submodule(first.block), BasicBlock):
        return _divided_args(args, kept)
    if isinstance(model, ResNet):
        # timm (1.0) computes floor(planes * base_width / 64); a block has 4 * planes output channels.
        last: Any = model.get_submodule(f"{first.block}.conv3")
        width = 64 * max(1, round(kept * last.in_channels)) / (last.out_channels // Bottleneck.expansion)
        return {**args, "base_width": int(width) if width == int(width) else width + 1e-6}
    if isinstance(model, MaxxVit):
        block: Any = model.get_submodule(first.block)
        outer = block.conv3_1x1.out_channels if _expands_output(model) else block.conv1_1x1.in_channels
        return {**args, "conv_expand_ratio": first.count / outer * kept}
    raise DloError(
        f"prune: the model must be a timm ResNet or MaxxVit for --channels, got {type(model).__name__}; use the"
        " callback Prune, which keeps the sizes"
    )


def _divided_args(args: dict[str, Any], kept: float) -> dict[str, Any]:
    """Returns the arguments of a model of basic blocks, whose inner channels timm (1.0) divides by a whole number.

    Raises:
        DloError: No whole number leaves this fraction.
    """
    before = int(args.get("block_reduce_first", 1))
    divisor = max(before + 1, round(before / kept))
    left = before / divisor
    if abs(left - kept) > _NEAR:
        raise DloError(
            "prune: --channels must leave a half, a third, a quarter, ... of the inner channels of basic blocks"
            f" (ResNet-18 and -34), which timm divides by a whole number, got {1 - kept:.0%}; set {1 - left:.0%}"
        )
    return {**args, "block_reduce_first": divisor}


def _expands_output(model: Any) -> bool:
    """Whether MBConv blocks have a multiple of their output's channels, not of their input's."""
    blocks = [block for block in model.modules() if isinstance(block, MbConvBlock)]
    outputs = [block.conv1_1x1.out_channels / block.conv3_1x1.out_channels for block in blocks]
    inputs = [block.conv1_1x1.out_channels / block.conv1_1x1.in_channels for block in blocks]
    return max(outputs) / min(outputs) <= max(inputs) / min(inputs)  # Equal but for timm's rounding, or doubled.

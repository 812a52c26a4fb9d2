"""Inner channels of timm's convolutional blocks, and the arguments that build a model with fewer of them."""

from __future__ import annotations

from typing import Any

from timm.layers import SEModule
from timm.models.maxxvit import MaxxVit, MbConvBlock
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlo_framework.errors import DloError
from dlo_framework.task import ChannelGroup

#: Largest difference of the fraction that is left from the one that is asked for.
_NEAR = 0.03


def channel_groups(model: Any) -> list[ChannelGroup]:
    """Returns the inner channels of ResNet's blocks, and of MBConv blocks and their squeeze-and-excitation.

    Channels between blocks, which residual additions couple, are not among them.

    Raises:
        DloError: The model has no such blocks, or a layer of a block mixes its channels.
    """
    found = []
    for name, block in model.named_modules():
        if isinstance(block, Bottleneck):
            _check(block, name, depthwise=(), dense=("conv1", "conv2", "conv3"), norms=("bn1", "bn2"))
            found.append(_group(block, name, ("conv1",), ("bn1",), ("conv2",)))
            found.append(_group(block, name, ("conv2",), ("bn2",), ("conv3",)))
        elif isinstance(block, BasicBlock):
            _check(block, name, depthwise=(), dense=("conv1", "conv2"), norms=("bn1",))
            found.append(_group(block, name, ("conv1",), ("bn1",), ("conv2",)))
        elif isinstance(block, MbConvBlock):
            _check(block, name, ("conv2_kxk",), ("conv1_1x1", "conv3_1x1"), ("norm1", "norm2"))
            attention = next((key for key in ("se", "se_early") if getattr(block, key, None) is not None), None)
            writers, readers = ["conv1_1x1"], ["conv3_1x1"]
            if attention is not None:
                squeeze = block.get_submodule(attention)
                if not isinstance(squeeze, SEModule) or not isinstance(squeeze.bn, nn.Identity) or squeeze.add_maxpool:
                    raise _mixes(f"{name}.{attention}", squeeze)
                found.append(_group(block, name, (f"{attention}.fc1",), (), (f"{attention}.fc2",)))
                writers.append(f"{attention}.fc2")
                readers.append(f"{attention}.fc1")
            found.append(_group(block, name, tuple(writers), ("norm1", "conv2_kxk", "norm2"), tuple(readers)))
    if not found:
        raise DloError(
            "prune: the model must have blocks of timm's ResNets or MBConv blocks (CoAtNet, MaxViT) for --channels, got"
            f" {type(model).__name__} without; prune hidden units or blocks, or use the callback Prune"
        )
    return found


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
        f"{f' with groups={layer.groups}' if hasattr(layer, 'groups') else ''}; use the callback Prune"
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

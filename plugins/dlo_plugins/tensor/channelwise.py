"""Modules that compute with each channel of a feature map alone: batch norms, and convolutions with a group a channel.

Between a convolution whose output channels are divided and one whose input channels are, each rank computes them for
its own channels. The mean and variance of a batch norm are those of a channel, so that no rank needs another's, and
running statistics are slices too.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


def is_channelwise(module: nn.Module) -> bool:
    """Returns whether a module computes with each channel alone."""
    if isinstance(module, _BatchNorm):
        return True
    return isinstance(module, _ConvNd) and not module.transposed and module.groups == module.in_channels > 1


def channel_count(module: nn.Module) -> int:
    """Returns the number of channels that can be divided."""
    count = module.groups if isinstance(module, _ConvNd) else module.num_features
    assert isinstance(count, int)
    return count


def set_channel_counts(module: nn.Module, ranks: int) -> None:
    """Sets a module's numbers of channels to one rank's.

    Args:
        module: Module with a rank's parameters and buffers.
        ranks: Number of ranks.
    """
    for key in ("groups", "in_channels", "out_channels") if isinstance(module, _ConvNd) else ("num_features",):
        setattr(module, key, getattr(module, key) // ranks)

"""Structured pruning of convolutions: inner channels of blocks, with all that computes, scales and reads them.

Learning Efficient Convolutional Networks through Network Slimming. Liu et al., 2017, arXiv 1708.06519: a channel's
scale is that of its batch norm, because the norm undoes the scale of the filter. The score is this scale times the norm
of the weights that read the channel. Departures: no L1 penalty in training, and every block loses the same fraction, so
that a config can describe the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.task import ChannelGroup
from dlo_plugins.pruning.structured import kept_units


def channel_scores(group: ChannelGroup, weights: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Returns the score of each channel: the product of its norms' scales, times the norm of the weights that read it.

    Without norms, the norm of the weights that compute it takes the place of their scales.

    Args:
        group: Channels.
        weights: Full weights by name.
        prefix: Prefix of the model's names in ``weights``.

    Returns:
        float32 scores, ``[count]``.
    """
    score, scaled = torch.ones(group.count), False
    for name in group.channelwise:
        weight = weights.get(f"{prefix}{name}.weight")
        if weight is not None:
            score = score * weight.float().flatten(1).norm(dim=1) if weight.ndim > 1 else score * weight.float().abs()
            scaled = scaled or weight.ndim == 1
    if not scaled:
        score = score * weights[f"{prefix}{group.writers[0]}.weight"].float().flatten(1).norm(dim=1)
    read = [weights[f"{prefix}{name}.weight"].float().transpose(0, 1).flatten(1) for name in group.readers]
    return score * torch.cat(read, 1).norm(dim=1)


def remove_channels(weights: dict[str, Tensor], group: ChannelGroup, keep: Tensor, prefix: str = "") -> None:
    """Removes all other channels of a group from the weights and buffers, in place.

    Args:
        weights: Full weights by name.
        group: Channels.
        keep: Indices of the channels to keep, ascending.
        prefix: Prefix of the model's names in ``weights``.
    """
    for name in (*group.writers, *group.channelwise):
        for key in ("weight", "bias", "running_mean", "running_var"):
            if f"{prefix}{name}.{key}" in weights:
                weights[f"{prefix}{name}.{key}"] = weights[f"{prefix}{name}.{key}"].index_select(0, keep)
    for name in group.readers:
        weights[f"{prefix}{name}.weight"] = weights[f"{prefix}{name}.weight"].index_select(1, keep)


def prune_channels(
    weights: dict[str, Tensor], groups: Sequence[ChannelGroup], counts: Sequence[int], prefix: str = ""
) -> str:
    """Removes the channels with the smallest scores from the weights, in place; returns a description.

    Args:
        weights: Full weights by name.
        groups: Groups of channels of the model.
        counts: Number of channels to keep of each group.
        prefix: Prefix of the model's names in ``weights``.

    Raises:
        DloError: If no channel is removed.
    """
    before, after = sum(group.count for group in groups), sum(counts)
    if after >= before or any(not 0 < count <= group.count for group, count in zip(groups, counts, strict=True)):
        raise DloError(
            f"prune: --channels must remove at least one of {before} channels, got {after} in the smaller model, which"
            " rounds its numbers; set a larger part"
        )
    scores = [channel_scores(group, weights, prefix) for group in groups]  # Of the weights before any is removed.
    for group, score, count in zip(groups, scores, counts, strict=True):
        remove_channels(weights, group, kept_units(score, count), prefix)
    return f"channels: {before} -> {after} in {len(groups)} groups of {len({g.block for g in groups})} blocks"

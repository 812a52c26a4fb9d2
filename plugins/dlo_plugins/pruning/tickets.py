"""Sparsity over a run and over rounds; lottery tickets: the masks of the next round, from a round's trained weights.

Gradual pruning: Zhu & Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
2017, arXiv 1710.01878, equation 1.

Lottery tickets: Frankle & Carbin, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", 2019,
arXiv 1803.03635; rewinding to an early step: Frankle, Dziugaite, Roy & Carbin, "Linear Mode Connectivity and the
Lottery Ticket Hypothesis", 2020, arXiv 1912.05671.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dlo_framework.checkpoint import load, save
from dlo_framework.checkpoint.loading import LazyStateDict, as_lazy_state_dict
from dlo_framework.errors import DloError, check_number, did_you_mean
from dlo_framework.shards import FlatShard
from dlo_plugins.pruning.selection import Keys, find_cut, order_keys


def cubic_sparsity(progress: float, final: float, initial: float = 0.0) -> float:
    """Returns the sparsity at a point of the schedule: ``s_f + (s_i - s_f) (1 - progress)^3``.

    It rises fast at first, while many weights are redundant, and slowly at the end.

    Args:
        progress: Fraction of the way from the schedule's begin to its end; values outside [0, 1] are clamped.
        final: Sparsity at the end.
        initial: Sparsity at the begin.
    """
    left = 1.0 - min(1.0, max(0.0, progress))
    return final + (initial - final) * left**3


def ticket_sparsity(round_number: int, amount: float) -> float:
    """Returns the sparsity after rounds that each prune a fraction of the remaining weights: ``1 - (1 - amount)^n``.

    Args:
        round_number: Number of rounds so far; 0 gives a dense model.
        amount: Fraction of the remaining weights that each round prunes.
    """
    return 1.0 - (1.0 - amount) ** round_number


def check_fraction(value: float, what: str, usual: str) -> None:
    """Checks that a fraction of the weights is in (0, 1).

    Raises:
        DloError: If it is not.
    """
    check_number(what, value, "above 0 and below 1, a fraction of the weights", usual)


#: Keys of masks in a checkpoint.
PRUNING, MASKS = "pruning", "masks"
#: Key of the trained weights in a checkpoint whose ``state_dict`` is their average.
TRAINED = "current_model_state"


def magnitude_masks(
    weights: Mapping[str, Tensor], before: Mapping[str, Tensor], sparsity: float, scope: str
) -> dict[str, Tensor]:
    """Returns masks that prune a fraction of the weights, those with the smallest magnitudes.

    Args:
        weights: Full weights by name.
        before: Masks of the round, by name; true for kept weights. What they prune stays pruned.
        sparsity: Fraction to prune of all weights; at least that of ``before``.
        scope: ``global`` to compare all weights, ``layer`` to compare each layer's own.

    Returns:
        bool masks by name; true for kept weights.
    """
    names = sorted(weights)
    sizes = [weights[name].numel() for name in names]
    offsets = [sum(sizes[:number]) for number in range(len(names))]
    per_layer = scope == "layer"

    def keys(name: str) -> Tensor:
        pruned = ~before[name] if name in before else None
        return order_keys(weights[name].abs(), pruned).flatten()

    def indices(number: int) -> Tensor:
        return torch.arange(offsets[number], offsets[number] + sizes[number])

    counts = torch.tensor([round(sparsity * size) for size in (sizes if per_layer else [sum(sizes)])])
    parts = [Keys(partial(keys, name), number if per_layer else 0) for number, name in enumerate(names)]
    where = [partial(indices, number) for number in range(len(names))]
    cut = find_cut(parts, where, counts, lambda values: values)
    return {
        name: ~cut.is_pruned(keys(name), where[number], parts[number].group).view(weights[name].shape)
        for number, name in enumerate(names)
    }


def next_masks(checkpoint: str | Path, names: Sequence[str], sparsity: float, scope: str) -> dict[str, Tensor]:
    """Returns the masks of the next round, from the trained weights of a round's checkpoint.

    Args:
        checkpoint: Checkpoint of the round, saved under any strategy.
        names: Names of the weights to prune.
        sparsity: Fraction of them to prune, that of earlier rounds included.
        scope: ``global`` or ``layer``.

    Raises:
        DloError: If the checkpoint lacks a weight.
    """
    content = load(checkpoint, level="size")
    state = as_lazy_state_dict(content.get(TRAINED) or content["state_dict"])
    absent = next((name for name in names if name not in state), None)
    if absent is not None:
        raise DloError(
            f"checkpoint must hold the pruned weights, got {checkpoint} without {absent}{did_you_mean(absent, state)}"
        )
    saved = content.get(PRUNING, {}).get(MASKS, {})
    before = as_lazy_state_dict(saved)
    weights = {name: state[name].float() for name in names}
    return magnitude_masks(weights, {name: before[name].bool() for name in names if name in before}, sparsity, scope)


def save_masks(masks: Mapping[str, Tensor], path: Path) -> None:
    """Writes masks as a checkpoint that `Prune` starts with."""
    shards = {name: FlatShard(mask.flatten(), mask.shape, 0) for name, mask in masks.items()}
    save({"state_dict": {}, PRUNING: {MASKS: shards}}, path, about={"kind": "masks"})


def read_masks(path: str | Path) -> LazyStateDict:
    """Returns the masks of a checkpoint, which are read lazily.

    Raises:
        DloError: If it holds none.
    """
    found = load(path, level="size").get(PRUNING) or {}
    if MASKS not in found:
        raise DloError(
            f"Prune: masks must name a checkpoint of a pruned run, got {path} without masks; train one first"
        )
    return as_lazy_state_dict(found[MASKS])


def kept_fraction(masks: Mapping[str, Tensor]) -> float:
    """Returns the fraction of weights that masks keep."""
    return sum(int(masks[name].sum()) for name in masks) / sum(masks[name].numel() for name in masks)

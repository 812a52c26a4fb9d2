"""Options of the distances between layers: hidden states with a projection, and attention transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dlo_framework.errors import DloError
from dlo_framework.task import Task


@dataclass
class HiddenStates:
    """Distance between hidden states of pairs of layers, with a trained projection to the teacher's width.

    Args:
        layers: Layers of the student, each with the teacher's; names are relative to the models. By default the last
            block of each parallel plan.
        loss: `mse`, the mean squared difference (FitNets); `cosine`, one minus the cosine (DistilBERT).
        weight: Factor of the distance's mean.
        project: Whether to project the student's states also where both models have the same width.

    Raises:
        DloError: A value is out of range.
    """

    layers: dict[str, str] = field(default_factory=dict)
    loss: Literal["mse", "cosine"] = "mse"
    weight: float = 1.0
    project: bool = False

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "cosine"):
            raise DloError(f"Distill: hidden.loss must be mse or cosine, got {self.loss}")
        _check_weight("hidden", self.weight)


@dataclass
class AttentionTransfer:
    """Distance between the attention maps of pairs of layers: squared activations, summed over features.

    Args:
        layers: Layers of the student, each with the teacher's; names are relative to the models. By default the last
            block of each parallel plan. Their outputs must have positions: `[B, D, H, W]` or `[B, N, D]`.
        weight: Factor of the distance's mean; the paper's is 1000 over the number of samples and positions.

    Raises:
        DloError: A value is out of range.
    """

    layers: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_weight("attention", self.weight)


def _check_weight(option: str, weight: float) -> None:
    if not weight > 0:
        raise DloError(f"Distill: {option}.weight must be above 0, got {weight}; leave {option} out to switch it off")


def layer_pairs(layers: dict[str, str], student: Task, teacher: Task) -> dict[str, str]:
    """Returns the pairs of layers: those named, or by default the last blocks of both plans."""
    if layers:
        return dict(layers)
    last = [task.parallel_plan().block_names(task.model)[-1] for task in (student, teacher)]
    return {last[0]: last[1]}

"""Options of distillation: the student's own samples (GKD), and the distances between layers.

On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes. Agarwal et al., 2024, arXiv
2306.13649. In a share of the steps the student completes the batch's prompts, and the loss is the distance from the
teacher on these completions alone. No gradient goes through the sampling. Departure: the share is of optimizer steps,
so that all micro-batches of a step are of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dlo_framework.errors import check_choice, check_number
from dlo_framework.task import Task


@dataclass
class OnPolicy:
    """Distillation on the student's own completions, in a share of the steps.

    Args:
        fraction: Share of optimizer steps that train on the student's samples, lambda; 0.5 mixes both, 1 uses no
            answers of the data.
        prompt_tokens: Number of tokens of each row's prompt, for packed text; None for the tokens before the first
            target, for prompts and answers.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Divisor of the student's logits in sampling; the paper uses 1.
        seed: Seed of the choice of steps and of the sampling.
        multiple: Multiple to which rows are padded. A larger one makes fewer shapes, each of which a pipeline and
            compiled code prepare once.

    Raises:
        DloError: A value is out of range.
    """

    fraction: float = 0.5
    prompt_tokens: int | None = None
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    multiple: int = 8

    def __post_init__(self) -> None:
        check_number("Distill: on_policy.fraction", self.fraction, "above 0 and at most 1", "leave on_policy out")
        for name, value in (
            ("prompt_tokens", self.prompt_tokens),
            ("max_new_tokens", self.max_new_tokens),
            ("multiple", self.multiple),
        ):
            check_number(f"Distill: on_policy.{name}", value, "at least 1")
        check_number("Distill: on_policy.temperature", self.temperature, "above 0", "1 is usual")

    def samples_at(self, step: int) -> bool:
        """Returns whether an optimizer step trains on samples; the same on all ranks."""
        return float(np.random.default_rng([self.seed, step]).random()) < self.fraction

    def seed_of(self, step: int) -> int:
        """Returns the seed of the samples of an optimizer step, the same on all ranks."""
        return int(np.random.default_rng([self.seed, 1, step]).integers(2**31))


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
        check_choice("Distill: hidden.loss", self.loss, ("mse", "cosine"))
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
    check_number(f"Distill: {option}.weight", weight, "above 0", f"leave {option} out to switch it off")


def layer_pairs(layers: dict[str, str], student: Task, teacher: Task) -> dict[str, str]:
    """Returns the pairs of layers: those named, or by default the last blocks of both plans."""
    if layers:
        return dict(layers)
    last = [task.parallel_plan().block_names(task.model)[-1] for task in (student, teacher)]
    return {last[0]: last[1]}

"""Trainer settings that DeepSpeed's JSON has too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerSettings:
    """Trainer settings that DeepSpeed's JSON has too.

    Attributes:
        precision: Lightning's name of the precision, such as `bf16-mixed`.
        accumulation: Number of micro-batches per optimizer step.
        clip_val: Gradient norm to clip to; None if the Trainer does not set it, 0 for off.
        clip_algorithm: Clipping by `norm`, the meaning of None, or by `value`.
        micro_batch_size: Number of samples per rank and micro-step; None if it is unknown or varies.
        world_size: Number of ranks that see different data.
    """

    precision: str
    accumulation: int
    clip_val: float | None
    clip_algorithm: str | None
    micro_batch_size: int | None
    world_size: int

"""What the Trainer says of those settings that DeepSpeed's JSON has too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerFacts:
    """The Trainer's side of the settings that DeepSpeed has too.

    Attributes:
        precision: Lightning's name of it, such as `bf16-mixed`.
        accumulation: micro-batches that one optimizer step sums.
        clip_val: the gradient norm that is clipped to; None where the Trainer leaves it open, 0 where it is off.
        clip_algorithm: `norm`, which None means, or `value`.
        micro_batch_size: samples that one rank loads at once; None where that is not known, or changes.
        world_size: ranks that see different data.
    """

    precision: str
    accumulation: int
    clip_val: float | None
    clip_algorithm: str | None
    micro_batch_size: int | None
    world_size: int

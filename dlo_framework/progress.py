"""How far a run has come, as the fraction of its samples that it has seen.

Schedules index this fraction rather than a count of steps, so that gradient accumulation, a batch size that
changes and a resume do not shift them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def fraction_seen(trainer: Trainer) -> float:
    """Returns the fraction of training, 0 to 1, that lies before the batch that is being trained on.

    Call it in ``on_train_batch_start`` or later in the same batch. It is the larger of the fraction of
    ``max_epochs`` and the fraction of ``max_steps``, whichever of them are set.

    Raises:
        DloError: if neither is set.
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    fractions = []
    if epochs is not None and epochs > 0:
        batches = trainer.num_training_batches
        within = (
            trainer.fit_loop.epoch_loop.batch_idx / batches if math.isfinite(batches) and batches else 0.0
        )
        fractions.append((trainer.current_epoch + within) / epochs)
    if steps > 0:
        fractions.append(trainer.global_step / steps)
    if not fractions:
        raise DloError(
            "a schedule needs to know where training ends: set trainer.max_epochs or trainer.max_steps"
            " (both are unlimited here)"
        )
    return min(1.0, max(fractions))


def optimizer_steps(trainer: Trainer) -> float:
    """Returns the number of optimizer steps of the whole run; infinite where the loader has no length."""
    per_epoch = (
        math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        if math.isfinite(trainer.num_training_batches)
        else math.inf
    )
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
    return min(per_epoch * epochs, trainer.max_steps if trainer.max_steps > 0 else math.inf)

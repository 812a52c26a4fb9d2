"""How far a run has come, as the fraction of its samples that it has seen.

Schedules index this fraction rather than a count of steps, so that gradient accumulation, a batch size that
changes and a resume do not shift them. It is read off the trainer's counters, in batches, so that the loaders need
not be built to know how many steps there will be (Lightning issue #20550).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def fraction_seen(trainer: Trainer, *, with_this_batch: bool = False) -> float:
    """Returns the fraction of training, 0 to 1, that lies before the batch that is being trained on.

    It is the larger of the fraction of ``max_epochs`` and the fraction of ``max_steps``, whichever of them are set.

    Args:
        trainer: in ``on_train_batch_start`` or later in the same batch.
        with_this_batch: count that batch too: what a torch scheduler needs, which steps after it.

    Raises:
        DloError: if neither is set.
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    fractions = []
    if epochs is not None and epochs > 0:
        batches = trainer.num_training_batches
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        done = ready if with_this_batch else max(0, ready - 1)
        within = done / batches if batches and math.isfinite(batches) else 0.0
        fractions.append((trainer.current_epoch + within) / epochs)
    if steps > 0:
        fractions.append(trainer.global_step / steps)
    if not fractions:
        raise DloError(
            "a schedule ends with training, and trainer.max_epochs and trainer.max_steps are both unlimited;"
            " set one of them, or leave the schedule out (ImageClassifier: schedule: constant)"
        )
    return min(1.0, max(fractions))


def steps_per_epoch(trainer: Trainer) -> float:
    """Returns the optimizer steps of an epoch; infinite where the loader has no length."""
    batches = trainer.num_training_batches
    return math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else math.inf


def optimizer_steps(trainer: Trainer) -> float:
    """Returns the optimizer steps of the whole run; infinite where neither loader nor trainer limits them."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
    return min(steps_per_epoch(trainer) * epochs, trainer.max_steps if trainer.max_steps > 0 else math.inf)

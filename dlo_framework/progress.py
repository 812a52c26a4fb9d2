"""How far a run has come, as the fraction of its samples that it has seen.

Schedules index this fraction rather than a count of steps, so that gradient accumulation, a batch size that
changes and a resume do not shift them. It is read off the trainer's counters, in batches, so that the loaders need
not be built to know how many steps there will be (Lightning issue #20550); and, where the batch size changes within
an epoch, off the plan of its batches.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from dlo_framework.data.sampler import Span


def fraction_seen(trainer: Trainer, *, with_this_batch: bool = False) -> float:
    """Returns the fraction of training, 0 to 1, that lies before the batch that is being trained on.

    It is the larger of the fraction of ``max_epochs`` and the fraction of ``max_steps``, whichever of them are set.

    Args:
        trainer: in ``on_train_batch_start`` or later in the same batch.
        with_this_batch: count that batch too: what a torch scheduler needs, which steps after it.

    Raises:
        DloError: if neither is set; if ``max_epochs`` alone is, and the loader does not say how long an epoch is.
    """
    loaded = getattr(trainer, "train_dataloader", None) is not None
    check_end(trainer)
    if loaded and trainer.max_steps < 0 and math.isinf(trainer.num_training_batches):
        raise DloError(
            "a schedule follows the fraction of training that has been seen, and the training loader has no length;"
            " set trainer.max_steps, or trainer.limit_train_batches to the batches of an epoch"
        )
    return fraction_at(trainer, epochs_seen(trainer, with_this_batch=with_this_batch), trainer.global_step)


def fraction_at(trainer: Trainer, epochs: float, steps: float) -> float:
    """Returns the fraction of training, 0 to 1, that lies before a place in it.

    Args:
        trainer: of the run.
        epochs: that lie before it.
        steps: optimizer steps that lie before it.

    Raises:
        DloError: if neither ``max_epochs`` nor ``max_steps`` is set.
    """
    check_end(trainer)
    ends = ((epochs, epochs_of_run(trainer)), (steps, trainer.max_steps if trainer.max_steps >= 0 else math.inf))
    return min(1.0, max(seen / end if end else 1.0 for seen, end in ends))


def check_end(trainer: Trainer) -> None:
    """Checks that training ends.

    Raises:
        DloError: if neither ``max_epochs`` nor ``max_steps`` says when.
    """
    if math.isinf(epochs_of_run(trainer)) and trainer.max_steps < 0:
        raise DloError(
            "a schedule ends with training, and trainer.max_epochs and trainer.max_steps are both unlimited;"
            " set one of them, or leave the schedule out (ImageClassifier: schedule: constant)"
        )


def epochs_of_run(trainer: Trainer) -> float:
    """Returns ``max_epochs``, infinite where it is -1 or None; ``max_steps`` may end the run before."""
    return math.inf if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs


def epochs_seen(trainer: Trainer, *, with_this_batch: bool = False) -> float:
    """Returns the epochs that lie before the batch that is being trained on, the fraction of this one included.

    Args:
        trainer: as for :func:`fraction_seen`.
        with_this_batch: count that batch too.
    """
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return trainer.current_epoch + _within_epoch(trainer, ready if with_this_batch else max(0, ready - 1))


def _within_epoch(trainer: Trainer, done: int) -> float:
    """Returns the fraction of the epoch that its first ``done`` batches are."""
    spans = planned_batches(trainer)
    if spans:
        return (spans[done].start if done < len(spans) else spans[-1].stop) / spans[-1].stop
    batches = trainer.num_training_batches
    return done / batches if batches and math.isfinite(batches) else 0.0


def planned_batches(trainer: Trainer) -> list[Span] | None:
    """Returns the batches of the current epoch where the loader plans batches of changing size, else None."""
    sampler: Any = getattr(getattr(trainer, "train_dataloader", None), "batch_sampler", None)
    return sampler.planned() if getattr(sampler, "window_at", None) is not None else None


class AccumulationWindow(int):
    """How many batches make up this optimizer step, counted from the batch at which it began.

    Lightning ends a step where ``batches_of_this_epoch % trainer.accumulate_grad_batches`` is 0. Set as that
    attribute, this number answers for windows that differ in length and begin anywhere in the epoch.

    Attributes:
        start: how many batches of the epoch lie before the window.
        usual: how many make up a step of this epoch: of windows that are cut short at its end the number that the
            others have, of such as differ by plan the mean.
    """

    start: int
    usual: Fraction

    def __new__(cls, batches: int, start: int, usual: Fraction | int | None = None) -> AccumulationWindow:
        """Returns ``batches``, with the place where the window begins; ``usual`` is None where it is as usual."""
        window = super().__new__(cls, batches)
        window.start, window.usual = start, Fraction(batches if usual is None else usual)
        return window

    def __rmod__(self, ready: int) -> int:
        return (ready - self.start) % int(self)

    def __getnewargs__(self) -> tuple[int, int, Fraction]:  # type: ignore[override]
        return int(self), self.start, self.usual


def refresh_epoch_length(trainer: Trainer) -> None:
    """Tells Lightning how many batches the epoch that begins has; the loader's length is asked anew.

    For ``on_train_start`` and ``on_train_epoch_start``. Lightning (2.6) reads the length once, when it sets the
    loader up, and has no public way to tell it another but to build the loader, and its workers, again:
    ``FitLoop.setup_data`` does what is done here to its private ``_combined_loader`` and ``_data_fetcher``.
    """
    loop: Any = trainer.fit_loop
    loader, fetcher = loop._combined_loader, loop._data_fetcher
    lengths = [len(part) for part in loader.flattened]
    loader.limits[:] = lengths  # In place: the iterator that already exists holds the same list.
    loop.max_batches = fetcher.length = max(lengths)
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def steps_per_epoch(trainer: Trainer) -> float:
    """Returns the optimizer steps of the present epoch; infinite where the loader has no length."""
    batches, window = trainer.num_training_batches, trainer.accumulate_grad_batches
    usual = window.usual if isinstance(window, AccumulationWindow) else window
    return math.ceil(int(batches) / Fraction(usual)) if math.isfinite(batches) else math.inf


def optimizer_steps(trainer: Trainer) -> float:
    """Returns the optimizer steps of the whole run; infinite where neither loader nor trainer limits them."""
    steps, epochs = trainer.max_steps if trainer.max_steps >= 0 else math.inf, epochs_of_run(trainer)
    return min(steps_per_epoch(trainer) * epochs if epochs else 0, steps)

"""Progress of a run that is the same for all micro-batches of an optimizer step, also after a resume inside one."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from dlo_framework.progress import fraction_seen


class StepFraction:
    """Fraction of training before an optimizer step, read once a step.

    Attributes:
        step: Number of optimizer steps before it; -1 before the first.
        fraction: Fraction of training, 0 to 1.
    """

    def __init__(self) -> None:
        self.step, self.fraction = -1, 0.0

    def update(self, trainer: Trainer) -> bool:
        """Reads the progress at a step's first micro-batch; returns whether this batch is one.

        Args:
            trainer: Trainer, in ``on_train_batch_start``.
        """
        if trainer.global_step == self.step:
            return False
        self.step, self.fraction = trainer.global_step, fraction_seen(trainer)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the last step and its fraction."""
        return {"step": self.step, "fraction": self.fraction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the last step and its fraction."""
        self.step, self.fraction = state["step"], state["fraction"]

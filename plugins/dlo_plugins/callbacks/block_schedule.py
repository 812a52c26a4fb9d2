"""Base class of callbacks that handle the calls of a model's blocks, by the progress of the run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.progress import check_end
from dlo_plugins.callbacks.compile import Compile
from dlo_plugins.callbacks.rotor_callback import Rotor
from dlo_plugins.curricula.block_handlers import BlockHandle
from dlo_plugins.curricula.step_fraction import StepFraction


class BlockSchedule(Callback):
    """Callback with handlers around the blocks' calls, which are removed when training ends.

    A subclass adds the handlers in ``on_train_start``, and reads the progress in ``on_train_batch_start``.
    """

    #: Place of the handlers among those of other callbacks: those with lower numbers are called around the others.
    order: int

    def __init__(self) -> None:
        self._clock = StepFraction()
        self._handles: list[BlockHandle] = []

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks that training has an end, and the other callbacks; a subclass may check more.

        Raises:
            DloError: If training has no end, or another callback needs the blocks' own calls.
        """
        name = type(self).__name__
        check_end(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Rotor):
                raise DloError(
                    f"{name}: Rotor must be left out, as it plans for blocks that always do the same, got both; use"
                    " ActivationCheckpoint, or recompute: true of the task"
                )
            if isinstance(callback, Compile) and callback.scope == "model":
                raise DloError(
                    f"{name}: Compile must have scope: blocks, got scope: model, whose graph holds all blocks; set"
                    " scope: blocks"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run, and checks this one."""
        self._clock = StepFraction()
        if stage == "fit":
            try:
                self.check_trainer(trainer)
            except DloError as error:
                raise mark_agreed(error) from None

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the blocks run as before."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Makes the blocks run as before."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress at the last step."""
        return self._clock.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the progress at the last step."""
        self._clock.load_state_dict(state_dict)

"""Exponential moving average (EMA) of a model's weights, used in place of the weights in evaluation.

The averaging is that of :mod:`dlo_framework.weight_average`. Lightning's own `EMAWeightAveraging` (2.6.6) is
not used because it keeps the average on the CPU when a GPU trains (it is built before the model moves), builds the
model outside the strategy's context, tests the un-averaged weights with `trainer.test` after a fit, and loses the
trained weights in a checkpoint that is saved after training ends or during validation: such a run does not resume bit
for bit. The layout of a checkpoint is Lightning's: `state_dict` holds the average, for evaluation and export, and
`current_model_state` the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from dlo_framework.errors import check_number
from dlo_framework.strategy_contract import contract_of
from dlo_framework.weight_average import WeightAverage

_CURRENT = "current_model_state"
_STATE = "averaging_state"
#: Digits of the average beyond those of half-precision weights, in parts that such weights can hold.
_REST = "averaging_rest"


class WeightEMA(Callback):
    """Averages the weights after each optimizer step, and evaluates and saves the average.

    Validation uses the average; training continues with the trained weights. When training ends, the module holds the
    average. It works under any strategy that keeps parameters as tensors of the module: each rank averages its shards.
    The average of half-precision weights (``bf16-true``) is kept in fp32, because the change of a step would be lost to
    rounding.

    Args:
        decay: Weight of the old average in each step, in [0, 1). The average spans about `1 / (1 - decay)` steps:
            0.9999 suits runs of 100,000 steps or more; in shorter ones it would still contain the start.

    Raises:
        DloError: if `decay` is outside [0, 1).
    """

    #: Shows ExactResume that this callback loads the trained weights of a checkpoint that has both.
    loads_trained_weights = True

    def __init__(self, decay: float = 0.9999) -> None:
        check_number("the EMA decay", decay, "at least 0 and below 1", "0.9999 is usual, 0.999 for short runs")
        self.decay = decay
        self._held = WeightAverage(decay)
        self._trained: list[Tensor] = []  # walking the modules in each step would cost more than the average
        self._last_step = 0

    @property
    def _average(self) -> list[Tensor] | None:
        return self._held.tensors

    @property
    def restrictions(self) -> list[Callable[[Any], None]]:
        """Functions of the strategy that change the average when it is put into the module; dropped by a new run."""
        return self._held.restrictions

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops an earlier run's average: its module holds it."""
        self._held = WeightAverage(self.decay)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the average from the module, which has just loaded it, and loads the trained weights."""
        if _CURRENT not in checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return
        rest, updates = checkpoint.get(_REST, {}), int(checkpoint[_STATE]["n_averaged"])
        self._held.load(trainer.strategy, checkpoint, rest, updates)
        trained = {**checkpoint, "state_dict": checkpoint[_CURRENT]}
        trainer.strategy.load_model_state_dict(trained, strict=pl_module.strict_loading)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Initialises the average to the weights, now on their device, unless it was loaded."""
        tensors = self._trained = contract_of(trainer.strategy).local_tensors()
        self._last_step = trainer.global_step
        self._held.begin(tensors)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average if the batch ended an optimizer step."""
        if trainer.global_step == self._last_step or self._average is None:
            return
        self._last_step = trainer.global_step
        contract_of(trainer.strategy).finish_step()
        self._held.update(self._trained)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average into the module."""
        self._held.swap(trainer.strategy, average=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the trained weights back into the module."""
        self._held.swap(trainer.strategy, average=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the average in the module; a checkpoint saved from here on still holds both."""
        self._trained = []
        self._held.swap(trainer.strategy, average=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts the trained weights back if a validation was interrupted."""
        self._held.swap(trainer.strategy, average=False)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the average as `state_dict` and the trained weights beside it."""
        if self._average is None:
            return
        checkpoint[_CURRENT], checkpoint["state_dict"] = self._both_states(trainer, checkpoint)
        checkpoint[_STATE] = {"n_averaged": self._held.updates}
        rest = self._held.residual(trainer.strategy)
        if rest:
            checkpoint[_REST] = rest

    def average_only(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a weights-only checkpoint, for which Lightning calls no callback."""
        if self._average is not None and _CURRENT not in checkpoint:
            _, checkpoint["state_dict"] = self._both_states(trainer, checkpoint)

    def _both_states(self, trainer: Trainer, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the trained and the averaged state; the module keeps the one that it holds."""
        held, other = checkpoint["state_dict"], self._held.other_state(trainer.strategy)
        return (other, held) if self._held.swapped else (held, other)

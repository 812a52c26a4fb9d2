"""Callback `ScheduleFree`: evaluates and saves the average of a schedule-free optimizer.

The Road Less Scheduled. Defazio et al., 2024, arXiv 2405.15682. The layout of a checkpoint is that of WeightEMA:
`state_dict` holds the average, for evaluation and export, and `current_model_state` the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn

from dlo_framework.callback import PluginCallback
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import SeparateSteps
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.optimizers.schedule_free_optimizers import ScheduleFreeOptimizer

_CURRENT = "current_model_state"


class ScheduleFree(PluginCallback):
    """Puts the average of a schedule-free optimizer into the module for validation and into checkpoints.

    Tasks whose `optimizer` is `adamw_schedulefree`, `radam_schedulefree` or `sgd_schedulefree` add it by themselves; a
    module of yours that builds such an optimizer needs it under `callbacks`. Training continues with the trained
    weights, bit for bit. When training ends, the module holds the average.

    Raises:
        DloError: If the run has no schedule-free optimizer, averages weights in another way too, or trains under
            DeepSpeed, whose engine owns the tensors that the optimizer steps.
    """

    #: Shows ExactResume that this callback loads the trained weights of a checkpoint that has both.
    loads_trained_weights = True

    def __init__(self) -> None:
        #: Functions of the strategy that change the average in the module when it is put there, such as pruning's mask.
        self.restrictions: list[Callable[[Any], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks strategy and callbacks."""
        if stage != "fit":
            return
        contract_of(trainer.strategy).ability(SeparateSteps, "ScheduleFree")
        if any(isinstance(other, WeightEMA) for other in trainer.callbacks):  # type: ignore[attr-defined]
            raise DloError(
                "ScheduleFree: the run must have one average of the weights, got WeightEMA too; remove ema_decay or"
                " WeightEMA"
            )

    def _optimizers(self, trainer: Trainer) -> list[ScheduleFreeOptimizer]:
        plain = (one.optimizer if isinstance(one, LightningOptimizer) else one for one in trainer.optimizers)
        return [optimizer for optimizer in plain if isinstance(optimizer, ScheduleFreeOptimizer)]

    def _swap(self, trainer: Trainer, *, average: bool) -> None:
        contract = contract_of(trainer.strategy)
        for optimizer in self._optimizers(trainer):
            contract.finish_step()
            optimizer.swap(average=average)
        contract.finish_step()
        for restrict in self.restrictions if average else ():
            restrict(trainer.strategy)
            contract.refresh()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the trained weights, where the module has just loaded the average."""
        if _CURRENT in checkpoint and trainer.state.fn == TrainerFn.FITTING:
            trained = {**checkpoint, "state_dict": checkpoint[_CURRENT]}
            trainer.strategy.load_model_state_dict(trained, strict=pl_module.strict_loading)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes charge of the optimizers before the first validation."""
        self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes charge of the optimizers."""
        found = self._optimizers(trainer)
        if not found:
            names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            raise DloError(
                f"ScheduleFree: the run must have a schedule-free optimizer, got {', '.join(names) or 'none'}; set"
                " model.init_args.optimizer to adamw_schedulefree, or remove the callback"
            )
        for optimizer in found:
            optimizer.attended = True

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average into the module."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap(trainer, average=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the trained weights back into the module."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap(trainer, average=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the average in the module; a checkpoint saved from here on still holds both."""
        self._swap(trainer, average=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the average as `state_dict` and the trained weights beside it."""
        optimizers = self._optimizers(trainer)
        if not optimizers:
            return
        held, average = checkpoint["state_dict"], optimizers[0].holds_average
        self._swap(trainer, average=not average)
        state = trainer.strategy.lightning_module_state_dict()
        other = {name: value.detach().clone() for name, value in state.items()}
        self._swap(trainer, average=average)
        checkpoint[_CURRENT], checkpoint["state_dict"] = (other, held) if average else (held, other)

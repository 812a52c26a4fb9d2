"""Schedule-free AdamW, RAdam and SGD, of the package schedulefree (1.4), and the callback that evaluates their average.

The Road Less Scheduled. Defazio et al., 2024, arXiv 2405.15682.

Gradients are computed at ``y``, which the module holds in training; ``z`` is in the optimizer's state; evaluation uses
their average ``x``, which follows from both: ``x = y + (1 - 1/beta) (z - y)``. The callback :class:`ScheduleFree` puts
it into the module, and tasks add that callback by themselves. Here ``y`` is kept aside meanwhile and put back bit by
bit, instead of being computed from ``x`` as the package does: so the run does not depend on how often it is evaluated
or saved. The layout of a checkpoint is that of WeightEMA: `state_dict` holds the average, for evaluation and export,
and `current_model_state` the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.optimizers import stepped_tensors
from dlo_framework.strategy_abilities import SeparateSteps
from dlo_framework.strategy_contract import contract_of

try:
    import schedulefree
except ImportError as missing:
    raise DloError(
        f"schedule-free optimizers must have the package schedulefree, got {missing};"
        " pip install 'dlo_framework[optimizers]'"
    ) from missing


class ScheduleFreeOptimizer(Optimizer):
    """Base in front of one of schedulefree's classes.

    Attributes:
        attended: Whether the callback ScheduleFree has taken charge of evaluation and checkpoints.
    """

    #: Shows tasks that the learning rate must have no schedule.
    schedule_free = True
    #: Callback that evaluates and saves the average, which tasks add.
    callback = "dlo_plugins.schedules.schedule_free.ScheduleFree"

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.attended = False
        self._trained: list[Tensor] | None = None
        for group in self.param_groups:
            group["train_mode"] = True
        self.register_step_pre_hook(_check_attended)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group."""
        super().add_param_group(param_group)
        self.param_groups[-1]["train_mode"] = True

    @property
    def holds_average(self) -> bool:
        """Whether the parameters hold the average ``x``, and not ``y``."""
        return self._trained is not None

    def swap(self, *, average: bool) -> None:
        """Puts the average, or the trained weights, into the parameters; does nothing if they hold them.

        It is called like a step: a strategy's step hooks load the parameters before it, and publish them after it.
        """
        if self.holds_average != average:
            hooked: Any = Optimizer.profile_hook_step(_put_average if average else _put_trained)
            hooked(self)


@torch.no_grad()
def _put_average(optimizer: ScheduleFreeOptimizer) -> None:
    optimizer._trained = []
    for group in optimizer.param_groups:
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        for parameter in group["params"]:
            optimizer._trained.append(parameter.detach().clone())
            z = optimizer.state.get(parameter, {}).get("z")
            if z is not None:
                parameter.lerp_(end=z.to(parameter.device), weight=1 - 1 / beta)


@torch.no_grad()
def _put_trained(optimizer: ScheduleFreeOptimizer) -> None:
    assert optimizer._trained is not None
    for parameter, trained in zip(stepped_tensors(optimizer), optimizer._trained, strict=True):
        parameter.copy_(trained)
    optimizer._trained = None


def _check_attended(optimizer: Any, *_: Any) -> None:
    if not optimizer.attended:
        raise DloError(
            f"trainer.callbacks must have ScheduleFree with {type(optimizer).__name__}, whose average is evaluated and"
            " saved, got none; add {class_path: ScheduleFree}"
        )


class AdamWScheduleFree(ScheduleFreeOptimizer, schedulefree.AdamWScheduleFree):
    """Schedule-free AdamW; its warm-up is the argument ``warmup_steps``."""


class RAdamScheduleFree(ScheduleFreeOptimizer, schedulefree.RAdamScheduleFree):
    """Schedule-free RAdam, which needs no warm-up."""


class SGDScheduleFree(ScheduleFreeOptimizer, schedulefree.SGDScheduleFree):
    """Schedule-free SGD."""


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
        optimizers = self._optimizers(trainer)
        if not optimizers:
            names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            raise DloError(
                f"ScheduleFree: the run must have a schedule-free optimizer, got {', '.join(names) or 'none'}; set"
                " model.init_args.optimizer to adamw_schedulefree, or remove the callback"
            )
        for optimizer in optimizers:
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

"""Callback that trains a part of the model at a time: freezing from below (FreezeOut), gradual unfreezing (ULMFiT).

- FreezeOut: Accelerate Training by Progressively Freezing Layers. Brock, Lim, Ritchie & Weston, 2017, arXiv 1706.04983.
- Universal Language Model Fine-tuning for Text Classification (gradual unfreezing, discriminative rates). Howard &
  Ruder, 2018, arXiv 1801.06146.

Units are numbered from below: the stem is 0, then the blocks, then the head. In both schedules the frozen units are
those below a number.

All parameters are in the optimizer and in the strategy's shards from the start. Frozen blocks compute no graph; their
parameters get gradients of zero, which the strategy reduces as it always does; and their tensors have no gradient when
the optimizer steps, so that it leaves weights and state alone. Strategies that shard give the optimizer tensors of
their own, and checkpoints name its parameter groups. So the groups stay, and are divided only while the optimizer
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlo_framework.batches import tree_leaves
from dlo_framework.callback import callbacks_of
from dlo_framework.distributed.step_primitives import prepend_post_hook
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.models.recompute import has_backward
from dlo_framework.progress import parse_position, run_fraction
from dlo_framework.strategy_abilities import CanonicalCheckpoints, SeparateSteps
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.curriculum.block_schedule import (
    BlockSchedule,
    ModelBlocks,
    call_with_forward,
    pass_gradient,
)
from dlo_plugins.memory.block_calls import Handler, split_hidden, with_hidden


class Freeze(BlockSchedule):
    """Trains a part of the model at a time, and saves the backward of the frozen part below it.

    Units are the stem, each block of the parallel plan, and the head, from below. `freeze_out` anneals the learning
    rate of each unit to 0 along half a cosine, the lowest units' first, and freezes it there. `unfreeze` trains the
    head first, and one more unit from above after each interval.

    A frozen parameter does not change: no update, no weight decay, no momentum. It works under every strategy that
    leaves the optimizer one tensor for each parameter, sharded or not; weights and optimizer state are those of one
    process. A parameter that is tied to one of a higher unit, such as an embedding to the output projection, is in that
    unit. The factors of `freeze_out` and `lr_decay` multiply the parameter groups' learning rates: use a constant
    schedule with `freeze_out`, which anneals by itself.

    Logged every ``trainer.log_every_n_steps``: ``freeze/frozen_units``.

    Args:
        method: Schedule: `freeze_out` from below, or `unfreeze` from above.
        t0: Fraction of training after which `freeze_out` freezes the stem, before the cube; by default 0.5.
        cubic: Whether `freeze_out` cubes the units' fractions; by default true.
        scale_lr: Whether `freeze_out` divides a unit's initial rate by its fraction; by default true.
        every: Interval of `unfreeze`, such as `1 epochs` or `10%`; by default such that all units train from half of
            training on.
        lr_decay: Ratio of the learning rates of a unit and the one below it, for `unfreeze`; 2.6 in the paper, 1 by
            default.

    Attributes:
        frozen: Number of units, from below, that are frozen in the current step.

    Raises:
        DloError: If a value is out of range or belongs to the other method, the strategy steps several parameters as
            one tensor, or another callback needs all blocks to train.
    """

    example = "{method: freeze_out}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    #: Place of the handler among those of other callbacks: around all others.
    order = 10

    def __init__(
        self,
        method: Literal["freeze_out", "unfreeze"] = "freeze_out",
        t0: float | None = None,
        cubic: bool | None = None,
        scale_lr: bool | None = None,
        every: str | float | None = None,
        lr_decay: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("Freeze: method", method, ("freeze_out", "unfreeze"))
        others = {"every": every, "lr_decay": lr_decay}
        if method == "unfreeze":
            others = {"t0": t0, "cubic": cubic, "scale_lr": scale_lr}
        for key, value in others.items():
            if value is not None:
                raise DloError(f"Freeze: {key} must be left out with method {method}, got {value}; remove it")
        self.method = method
        self.t0 = 0.5 if t0 is None else t0
        self.cubic, self.scale_lr = cubic is not False, scale_lr is not False
        self.every = None
        if every is not None:
            self.every = parse_position(every, "Freeze: every", in_samples=False, at_zero=False)
        self.lr_decay = 1.0 if lr_decay is None else lr_decay
        check_number("Freeze: t0", self.t0, "above 0 and below 1", "the paper has 0.5 to 0.8")
        check_number("Freeze: lr_decay", self.lr_decay, "at least 1", "the paper has 2.6")
        self.needs_max_epochs = self.every is not None and self.every.unit == "epochs"
        self._factors: dict[int, GroupFactors] = {}
        self._schedule: FreezeOutSchedule | UnfreezeSchedule | None = None
        self._blocks: ModelBlocks | None = None
        self.frozen = 0

    # --- before training -----------------------------------------------------------------------------------

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks the strategy and the other callbacks.

        Raises:
            DloError: If they do not go with parameters that are frozen for a part of the run.
        """
        super().check_trainer(trainer)
        contract_of(trainer.strategy).ability(SeparateSteps, "Freeze")
        contract_of(trainer.strategy).ability(CanonicalCheckpoints, "Freeze")
        for callback in callbacks_of(trainer):
            if isinstance(callback, GradientCompression) and callback.method == "one_bit":
                raise DloError(
                    "Freeze: GradientCompression must not have method one_bit, whose optimizer sends the momenta of all"
                    " parameters, got both; set method: powersgd, or leave one of them out"
                )
        if self.every is not None:
            run_fraction(trainer, self.every, "Freeze", "every")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to handle the blocks' calls and the optimizers' steps."""
        self._blocks = self.handle_blocks(pl_module)
        units = self._blocks.unit_count
        if self.method == "freeze_out":
            self._schedule = FreezeOutSchedule(units, self.t0, self.cubic, self.scale_lr)
        else:
            interval = 0.5 / (units - 1) if self.every is None else run_fraction(trainer, self.every, "Freeze", "every")
            self._schedule = UnfreezeSchedule(units, interval, self.lr_decay)
        self.frozen = self._schedule.frozen(self._clock.fraction)
        self._factors = {id(optimizer): GroupFactors(optimizer) for optimizer in trainer.optimizers}

    def _remove(self) -> None:
        super()._remove()
        for factors in self._factors.values():
            factors.remove()
        self._factors = {}

    # --- steps ---------------------------------------------------------------------------------------------

    def begin_step(self) -> dict[str, float]:
        """Sets the frozen units of a new step, and returns their number."""
        assert self._schedule is not None
        self.frozen = self._schedule.frozen(self._clock.fraction)
        return {"freeze/frozen_units": float(self.frozen)}

    def handler(self, number: int, name: str, block: nn.Module) -> Handler:
        """Returns a handler that computes a frozen block without a backward."""
        unit = number + 1  # The stem is unit 0.

        def call(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (has_backward() and block.training) or not self.frozen:
                return inner(*args, **kwargs)
            if unit < self.frozen:
                return call_with_forward(block, _frozen_forward(block, name), *args, **kwargs)
            if unit == 1:  # The stem alone is frozen: its backward has nothing to compute.
                hidden = split_hidden(args, kwargs)[0]
                if isinstance(hidden, Tensor) and hidden.requires_grad:
                    cut = pass_gradient(hidden.detach(), hidden)
                    args, kwargs = with_hidden(args, kwargs, cut)
            return inner(*args, **kwargs)

        return call

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Drops the gradients of frozen tensors, and sets the units' learning rates for the step."""
        assert self._schedule is not None
        assert self._blocks is not None
        stepped: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        tensors = contract_of(trainer.strategy).optimizer_tensors(stepped)
        units = self._blocks.unit_of(tensors)
        for name, tensor in tensors.items():
            if units[name] < self.frozen:
                tensor.grad = None
        factors = self._schedule.factors(self._clock.fraction)
        if any(factor != 1 for factor in factors):
            of_tensor = {id(tensor): factors[units[name]] for name, tensor in tensors.items()}
            self._factors[id(stepped)].divide(lambda tensor: of_tensor.get(id(tensor), 1.0))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Restores the parameter groups after a step that the loss scaler skipped."""
        for factors in self._factors.values():
            factors.restore()


def _frozen_forward(block: nn.Module, name: str) -> Callable[..., Tensor]:
    """Returns a block's forward without a graph; its inputs and parameters get gradients of zero."""
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            output = own(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise DloError(
                f"Freeze: a block must return a tensor, got {type(output).__name__} from '{name}'; return the hidden"
                " state alone"
            )
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return pass_gradient(output, *inputs, *block.parameters())

    return forward


class GroupFactors:
    """Divides an optimizer's parameter groups by learning rate for a step, and restores them after it.

    Args:
        optimizer: Optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._own: list[dict[str, Any]] | None = None
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._handle: RemovableHandle = prepend_post_hook(optimizer, lambda *_: self.restore())

    def divide(self, factor_of: Callable[[Tensor], float]) -> None:
        """Divides the groups for the next step.

        Args:
            factor_of: Function that returns the factor of a tensor's learning rate.
        """
        self.restore()
        divided: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            by_factor: dict[float, list[Tensor]] = {}
            for tensor in group["params"]:
                by_factor.setdefault(factor_of(tensor), []).append(tensor)
            for factor, tensors in by_factor.items():
                part = {**group, "params": tensors, "lr": group["lr"] * factor}
                self._parts.append((group, part))
                divided.append(part)
        self._own = list(self.optimizer.param_groups)
        self.optimizer.param_groups[:] = divided

    def restore(self) -> None:
        """Restores the groups, with the values that the step has changed in them, such as a counter."""
        if self._own is None:
            return
        for group, part in self._parts:
            group.update({key: value for key, value in part.items() if key not in ("params", "lr")})
        self.optimizer.param_groups[:] = self._own
        self._own, self._parts = None, []

    def remove(self) -> None:
        """Restores the groups, and stops following the optimizer."""
        self.restore()
        self._handle.remove()


#: Fractions that are computed in two ways must not differ in which side of a point they are on.
_ROUNDING = 1e-9


class FreezeOutSchedule:
    """Anneals the rate of each unit to 0 along half a cosine, the lower units' sooner; at 0 the unit is frozen.

    Args:
        units: Number of units.
        t0: Fraction of training after which the lowest unit is frozen, before the cube; the highest trains to the end.
        cubic: Whether the fractions are cubed, which freezes the lower units sooner.
        scale_lr: Whether a unit's initial rate is divided by its fraction, so that all units move about as far.
    """

    def __init__(self, units: int, t0: float, cubic: bool, scale_lr: bool) -> None:
        ends = [t0 + (1 - t0) * number / (units - 1) for number in range(units)]
        self.ends = [end**3 if cubic else end for end in ends]
        self.scale_lr = scale_lr

    def frozen(self, fraction: float) -> int:
        """Returns the number of units that are frozen; never the highest."""
        return sum(fraction >= end - _ROUNDING for end in self.ends[:-1])

    def factors(self, fraction: float) -> list[float]:
        """Returns the factor of each unit's learning rate."""
        return [
            0.5 * (1 + math.cos(math.pi * min(1.0, fraction / end))) / (end if self.scale_lr else 1)
            for end in self.ends
        ]


class UnfreezeSchedule:
    """Trains the highest unit from the start, and one more from above after each interval.

    Args:
        units: Number of units.
        interval: Interval, as a fraction of training.
        lr_decay: Ratio of the learning rates of a unit and the one below it.
    """

    def __init__(self, units: int, interval: float, lr_decay: float) -> None:
        self.units, self.interval = units, interval
        self._factors = [lr_decay ** (number + 1 - units) for number in range(units)]

    def frozen(self, fraction: float) -> int:
        """Returns the number of units that do not train yet."""
        return max(0, self.units - 1 - int(fraction / self.interval + _ROUNDING))

    def factors(self, fraction: float) -> list[float]:
        """Returns the factor of each unit's learning rate, which does not change."""
        return self._factors

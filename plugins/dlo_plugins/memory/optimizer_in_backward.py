"""Callback `OptimizerInBackward`: each parameter is stepped in backward, as soon as its gradient is there.

Optimizer Fusion: Efficient Training with Better Locality and Parallelism. Jiang et al., 2021, arXiv 2104.00237: its
"backward-fusion". Departures from the paper: the step is the optimizer's own, on the tensors whose gradients are
complete, instead of a fused kernel; and under several ranks it follows the reduction of their bucket or unit. The
paper's "forward-fusion", which steps before the next use, is left out: it keeps all gradients, so it saves no memory.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback, callbacks_of, needs_gradients, traits_of
from dlo_framework.distributed.optimizer_steps import overriding_update
from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import StepsInBackward
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.parallel.optimizer_probe import changed_settings, probe_optimizer

_SELF = "OptimizerInBackward"


@torch.no_grad()
def step_only(optimizer: Optimizer, tensors: list[Tensor], homes: dict[int, int]) -> None:
    """Takes an optimizer's step on some of its tensors, without step hooks, and drops their gradients.

    The parameter groups have only these tensors meanwhile. The hooks of strategies publish all values after a full
    step, and those of schedulers count steps.

    Args:
        optimizer: Optimizer whose update of a tensor needs no other.
        tensors: Tensors with gradients.
        homes: Number of the parameter group of each tensor of the optimizer, by the tensor's id.
    """
    held = [group["params"] for group in optimizer.param_groups]
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        for tensor in tensors:
            optimizer.param_groups[homes[id(tensor)]]["params"].append(tensor)
        update = overriding_update(optimizer)
        if update is not None:
            update()
        else:
            step: Any = type(optimizer).step  # The instance's counts its calls for a scheduler.
            step(optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before
    for tensor in tensors:
        tensor.grad = None


class _GroupCounts:
    """Settings of parameter groups that count steps: a step in parts is counted once.

    Each part begins with the counts from before the step. After the step they are those of one of the parts.

    Args:
        optimizer: Optimizer that is stepped in parts.
        names: Names of the settings.
    """

    def __init__(self, optimizer: Optimizer, names: list[str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._before: list[dict[str, Any]] | None = None
        self._after: dict[int, dict[str, Any]] = {}
        self._handle = optimizer.register_step_post_hook(lambda *_: self._end())

    def rewind(self) -> None:
        """Restores the counts from before the step, before one of its parts."""
        if self._before is None:
            self._before, self._after = [self._copy(group) for group in self._optimizer.param_groups], {}
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in self._names:
                group.pop(name, None)
            group.update(copy.deepcopy(before))

    def record(self, groups: Iterable[int]) -> None:
        """Records the counts after a part of the step with tensors of some parameter groups, by their numbers."""
        for number in groups:
            self._after[number] = self._copy(self._optimizer.param_groups[number])

    def _end(self) -> None:
        """Sets the counts of the full step, after the optimizer's own, which had no gradients left."""
        for number, after in self._after.items():
            self._optimizer.param_groups[number].update(after)
        self._before, self._after = None, {}

    def _copy(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(group[name]) for name in self._names if name in group}

    def remove(self) -> None:
        """Ends the counting."""
        self._handle.remove()


class OptimizerInBackward(PluginCallback):
    """Steps each parameter in backward as soon as its gradient is complete, and frees the gradient (arXiv 2104.00237).

    So the gradients of the whole model never exist at once: the peak is those of a parameter in one process and under
    tensor parallelism, of a bucket or of a unit elsewhere. The weights are those of the ordinary step, bit for bit. It
    works in one process and under ddp, ZeRO, FSDP and MeshStrategy without a pipeline, with offload too.

    A step is taken before all gradients are known. So clipping by norm, gradient accumulation, loss scaling
    (`16-mixed`), callbacks that read gradients and optimizers that need all tensors are refused; clipping by value
    works. The gradients' norm is not logged, and a loss that becomes infinite has already stepped when it is noticed.

    Where ranks shard parameters, an optimizer that needs full tensors, such as Muon, steps those of a bucket or a unit
    on the ranks that own them, which exchange gradients and values within backward.

    Raises:
        DloError: If the Trainer, a callback, the optimizer or the strategy does not allow it.
    """

    needs_gradients = False
    drops_gradients = True

    def __init__(self) -> None:
        self.steps = 0  # number of partial steps in this fit
        self._optimizer: Optimizer | None = None
        self._homes: dict[int, int] = {}
        self._counts: _GroupCounts | None = None
        self._clip: float | None = None

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the Trainer's settings, the strategy and the other callbacks, before processes start.

        Raises:
            DloError: One of them needs all gradients at once.
        """
        contract_of(trainer.strategy).ability(StepsInBackward, _SELF)
        if not module.automatic_optimization:
            raise DloError(f"{_SELF}: the module must use automatic optimization, got manual; leave the callback out")
        if trainer.accumulate_grad_batches != 1:
            raise DloError(
                f"{_SELF}: trainer.accumulate_grad_batches must be 1, got {trainer.accumulate_grad_batches}, since each"
                " backward steps; raise the batch size with recomputation instead, or leave the callback out"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
            raise DloError(
                f"{_SELF}: trainer.gradient_clip_algorithm must be value, got norm, since the norm of all gradients is"
                " known only when the first have stepped; set it, or leave gradient_clip_val out"
            )
        if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
            raise DloError(
                f"{_SELF}: trainer.precision must need no loss scaling, got 16-mixed, which skips a step by all"
                " gradients; use bf16-mixed"
            )
        if module.__class__.on_before_optimizer_step is not LightningModule.on_before_optimizer_step:
            _refuse_reader(type(module).__name__)
        for other in callbacks_of(trainer):
            if traits_of(other).needs_full_step:
                raise DloError(f"{_SELF}: {traits_of(other).needs_full_step}")
            if needs_gradients(other):
                _refuse_reader(type(other).__name__)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run, which may have been started from Python."""
        if stage == "fit":
            self.check_run(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the optimizer, and asks the strategy for gradients as they become complete."""
        if len(trainer.optimizers) != 1:
            raise DloError(f"{_SELF}: the run must have one optimizer, got {len(trainer.optimizers)}")
        optimizer: Any = trainer.optimizers[0]
        self._optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self._optimizer is not None
        name = type(self._optimizer).__name__
        if probe_optimizer(self._optimizer) == "all":
            raise DloError(
                f"{_SELF}: the optimizer must update each tensor without the others, got {name}, which needs all"
                " gradients (LAMB's max_grad_norm: set optimizer_args: {max_grad_norm: null}); use adamw"
            )
        counted, by_values = changed_settings(self._optimizer)
        if by_values:
            raise DloError(
                f"{_SELF}: the optimizer must update each tensor without the others, got {name}, whose step changes"
                f" {', '.join(by_values)} of its parameter groups by the gradients; use adamw"
            )
        groups = self._optimizer.param_groups
        self._counts = _GroupCounts(self._optimizer, counted)
        self._homes = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        # The Trainer's own clipping (Lightning 2.6) raises where no gradient is left at the end of backward.
        self._clip, self.steps = trainer.gradient_clip_val or None, 0
        trainer.gradient_clip_val = None
        contract_of(trainer.strategy).ability(StepsInBackward).watch_gradients(self._step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clips the gradients that are left for the ordinary step, such as those of scalars under FSDP."""
        if self._counts is not None:
            self._counts.rewind()
        self._clip_values([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

    def _end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Ends the steps in backward."""
        if self._optimizer is not None:
            contract_of(trainer.strategy).ability(StepsInBackward).watch_gradients(None)
            if self._counts is not None:
                self._counts.remove()
                self._counts = None
            trainer.gradient_clip_val, self._optimizer = self._clip, None

    on_train_end = on_exception = _end

    def _clip_values(self, tensors: list[Tensor]) -> None:
        if self._clip is not None and tensors:
            torch.nn.utils.clip_grad_value_(tensors, self._clip)

    def _step(self, tensors: list[Tensor]) -> None:
        assert self._optimizer is not None
        assert self._counts is not None
        known = [tensor for tensor in tensors if id(tensor) in self._homes and tensor.grad is not None]
        if known:
            self._clip_values(known)
            self._counts.rewind()
            step_only(self._optimizer, known, self._homes)
            self._counts.record({self._homes[id(tensor)] for tensor in known})
            self.steps += 1


def _refuse_reader(name: str) -> None:
    raise DloError(
        f"{_SELF}: callbacks and module must not read gradients or hook the optimizer's step, got {name}, which would"
        " find no gradients; leave one of the two out"
    )

"""The strategies that every run starts from: one process, data parallelism, and the base of those that shard."""

from __future__ import annotations

import contextlib
import sys
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from dlo_framework.distributed.canonical import CanonicalStrategy
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.launcher import WatchedRanks
from dlo_framework.distributed.norms import total_norm
from dlo_framework.distributed.precision import sharded
from dlo_framework.distributed.stacks import hook_frame, hook_of, own_line
from dlo_framework.distributed.unused import unused_message, unused_numbers
from dlo_framework.errors import DloError

#: How long a collective may take; a rank that hangs ends the run after this.
TIMEOUT = timedelta(minutes=10)


class SingleProcessStrategy(CanonicalStrategy, SingleDeviceStrategy):
    """One process on one device; what ``auto`` is on such a machine."""

    holds_full_state = True

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm of an optimizer's gradients."""
        return total_norm(optimizer)


class DataParallelStrategy(CanonicalStrategy, WatchedRanks):
    """Plain data parallelism: every rank holds the whole model; gradients are averaged. Aliases: `ddp`.

    Lightning's DDPStrategy with canonical checkpoints, which all ranks write.

    Args:
        find_unused_parameters: whether parameters may go without a gradient, which costs a walk over the graph.
        timeout_minutes: how long a collective may take before a rank gives the others up; 10 by default, or
            Lightning's `timeout`.
        kwargs: further arguments of Lightning's DDPStrategy and torch's DistributedDataParallel.
    """

    holds_full_state = True

    def __init__(
        self,
        find_unused_parameters: bool = False,
        timeout_minutes: float | None = None,
        **kwargs: Any,
    ) -> None:
        if timeout_minutes is not None:
            kwargs["timeout"] = timedelta(minutes=timeout_minutes)
        kwargs.setdefault("timeout", TIMEOUT)
        super().__init__(find_unused_parameters=find_unused_parameters, **kwargs)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm of an optimizer's gradients, which are the same on all ranks."""
        return total_norm(optimizer)

    def configure_ddp(self) -> None:
        """Wraps the module; torch numbers the parameters that are set to train here, whatever is toggled later."""
        module = self.lightning_module
        assert module is not None
        self._trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        super().configure_ddp()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step through torch's wrapper."""
        with self._naming_unused():
            return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the wrapper for a backward by hand."""
        with self._naming_unused():
            super().pre_backward(closure_loss)

    @contextlib.contextmanager
    def _naming_unused(self) -> Iterator[None]:
        """Turns what torch says, a step late and by number, of parameters without a gradient into their names."""
        try:
            yield
        except RuntimeError as error:
            missed = unused_numbers(str(error))
            if not missed:
                raise
            allow = "take --trainer.strategy ddp_find_unused_parameters_true"
            raise DloError(unused_message([self._trained[number] for number in missed], allow)) from error


class ShardedStrategy(CanonicalStrategy, WatchedRanks):
    """Base of the strategies that divide a model's state among the ranks.

    Processes, rendezvous (Lightning's launcher, torchrun, SLURM), devices, broadcast, reduce and barriers are those
    of Lightning's DDPStrategy, without its wrapper: gradients are the subclass's own business. A subclass implements
    :meth:`shard`, which is called once the optimizers are there.

    Args:
        timeout_minutes: how long a collective may take before a rank gives the others up.
    """

    #: Parameters may have to be gathered for it.
    forward_needs_all_ranks = True
    #: Whether `configure_model` builds models without memory, which they get as they are sharded.
    meta_init = False
    #: Whether other models are built where they are trained; else in CPU memory, from which each unit is moved.
    builds_on_device = True

    def __init__(self, timeout_minutes: float = TIMEOUT.total_seconds() / 60, **kwargs: Any) -> None:
        super().__init__(timeout=timedelta(minutes=timeout_minutes), **kwargs)
        self._guards: list[RemovableHandle] = []

    def counted(self, batch: Any) -> Any:
        """Returns a batch that is on the CPU still, and takes with it to the device what the strategy has to know.

        The strategy counts here what it would otherwise wait for the device for.
        """
        return batch

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Lightning builds the model in it."""
        # Not in Lightning's own: of two devices the inner one counts, and Lightning's is the one to train on.
        device = self.root_device if self.builds_on_device else None
        if self.meta_init if empty_init is None else empty_init:
            device = torch.device("meta")
        with device or contextlib.nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @abstractmethod
    def shard(self, trainer: Trainer) -> None:
        """Divides the module's state and, while fitting, its optimizers' among the ranks."""

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's choice of precision, with clipping and loss scale that hold over all ranks."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else sharded(precision_plugin, self.gradient_norm)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read into shards: yes, so they have to be there first."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Prepares the module on its device, builds the optimizers, and shards both.

        Raises:
            DloError: if a callback is to unfreeze parameters in mid-run, or averages parameters that are divided.
        """
        assert self.accelerator is not None
        assert self.model is not None
        _refuse_finetuning(trainer)
        if self.zero_stage == 3 and self.needs_all_ranks(self._module()):
            _refuse_averages(trainer)
        self.accelerator.setup(trainer)
        if self._layer_sync and trainer.state.fn == TrainerFn.FITTING:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.shard(trainer)
        self.bring_the_rest()
        self.setup_precision_plugin()
        self.guard_forwards(trainer)
        self.barrier("sharded")

    def needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of a part of the LightningModule, or of all of it, takes all ranks."""
        return self.forward_needs_all_ranks and next(module.parameters(), None) is not None

    def guard_forwards(self, trainer: Trainer) -> None:
        """Makes the module and its parts ask the other ranks first where a hook calls them, outside of steps.

        Collectives are matched by their order alone. A forward on one rank would pair its own with those of the others'
        next steps: they end in a hang, or in weights that are none.
        """
        for handle in self._guards:
            handle.remove()
        module = self._module()
        guarded = [module, *module.children()] if self.world_size > 1 else []
        guard = _forward_guard(weakref.ref(trainer), weakref.ref(module))
        self._guards = [
            part.register_forward_pre_hook(guard, prepend=True) for part in guarded if self.needs_all_ranks(part)
        ]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers.

        Raises:
            DloError: if there is none, whose steps the parameters' shards would be for; if a step takes several
                evaluations of the model; if one steps what the module does not have.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise DloError(
                f"configure_optimizers must return an optimizer that evaluates the model once a step under"
                f" {type(self).__name__}, got LBFGS; take another, or strategy auto or ddp"
            )
        if any(not optimizer.param_groups for optimizer in self.optimizers):
            raise DloError(
                f"configure_optimizers must return an optimizer under {type(self).__name__}, got None; return one, or"
                " take strategy auto or ddp"
            )
        for optimizer in self.optimizers:
            self._check_parameters(optimizer)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        known = {id(parameter) for parameter in self._module().parameters()}
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        foreign = next((parameter for parameter in stepped if id(parameter) not in known), None)
        if foreign is not None:
            name = type(self._module()).__name__
            raise DloError(
                f"{type(optimizer).__name__} must step parameters of {name} alone, got one of shape"
                f" {list(foreign.shape)} that is none of {name}'s; register it in the module, or let"
                " configure_optimizers make a new optimizer for each run"
            )

    def bring_the_rest(self) -> None:
        """Brings what is no tensor of the module's to the device: its metrics, and what it says of its own device.

        ``Module.to`` would, of which a model is no part whose tensors are moved one by one.
        """
        module = self._module()
        _update_properties(module, device=self.root_device)
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)

    def share_buffers(self) -> None:
        """Gives all ranks the first one's buffers, such as the statistics of batch norm.

        DistributedDataParallel does that before each forward. What the others' steps made of theirs is lost there as
        here, so that doing it where buffers are used or saved comes to the same; but not for a model whose training
        step reads buffers that it writes: here each rank reads its own.
        """
        for buffer in self._module().buffers() if self._world() > 1 else ():
            if not isinstance(buffer, DTensor):
                broadcast_values(buffer)

    def on_validation_start(self) -> None:
        """Evaluates with the first rank's buffers."""
        self.share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns what this rank holds of the module's state, by name; called on all ranks."""
        self.share_buffers()
        return super().lightning_module_state_dict()

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        local = total_norm(optimizer).to(self.root_device)
        squared = local.square()
        dist.all_reduce(squared)
        return squared.sqrt()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps the micro-batches of an accumulation in it, all but the last."""
        yield

    def teardown(self) -> None:
        """Ends the run; the module stays as it is sharded, and can be validated or trained again."""
        self.finish_checkpoints()
        for handle in self._guards:
            handle.remove()
        self._guards = []
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.handled()


def _refuse_finetuning(trainer: Trainer) -> None:
    """Refuses Lightning's callbacks that unfreeze in mid-run: they look for whole parameters in the optimizer."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            raise DloError(
                f"{type(callback).__name__} adds parameters to the optimizer in mid-run, but"
                f" {type(trainer.strategy).__name__} divides them when the run starts; use strategy ddp with it, or let"
                " all train from the start, some with a lower lr"
            )


def _refuse_averages(trainer: Trainer) -> None:
    """Refuses Lightning's averages of the weights, which read and write full parameters."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise DloError(
                f"an average of the weights under {type(trainer.strategy).__name__} must be taken of each rank's"
                f" shards, got {type(callback).__name__}, which takes full parameters; take WeightEMA, or strategy ddp"
            )


def _forward_guard(trainer_ref: weakref.ref[Trainer], module_ref: weakref.ref[LightningModule]) -> Any:
    """Returns a forward pre-hook that lets a forward outside of steps begin once all ranks have come to it."""
    checked: list[tuple[Any, ...]] = [()]

    def guard(part: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # What is compiled is called in steps.
        trainer, module = trainer_ref(), module_ref()
        hook = module._current_fx_name if module is not None else None
        if trainer is None or hook is None or not hook.startswith("on_"):
            return
        frame = hook_frame(sys._getframe())
        call = (id(frame), hook_of(frame), trainer.global_step)
        if frame is None or call == checked[0]:  # Once a call of the hook.
            return
        checked[0] = call
        strategy = trainer.strategy
        missing = strategy.meet(call[1]) if isinstance(strategy, WatchedRanks) else ""
        if missing:
            raise DloError(
                f"rank {trainer.global_rank} called the model outside of a step that all ranks take part in ({call[1]},"
                f" {own_line(sys._getframe())}), while {missing}; a forward under {type(strategy).__name__} must be"
                " called on all ranks: take it out of a condition on the rank, or move it into validation_step"
            )

    return guard


def register_data_parallel() -> None:
    """Lets Lightning's names for plain data parallelism mean dlo's strategy: ``ddp``, and what ``auto`` becomes."""
    for name, find_unused in (
        ("ddp", False),
        ("ddp_find_unused_parameters_false", False),
        ("ddp_find_unused_parameters_true", True),
    ):
        StrategyRegistry.register(
            name,
            DataParallelStrategy,
            description="plain data parallelism with canonical checkpoints",
            override=True,
            find_unused_parameters=find_unused,
        )


def use_canonical_checkpoints(trainer: Trainer) -> None:
    """Makes the strategy that Lightning has chosen for a single device dlo's, which writes canonical checkpoints.

    Lightning (2.6) builds it itself where ``auto`` meets one device, and asks no registry; the two classes differ in
    methods alone.
    """
    if type(trainer.strategy) is SingleDeviceStrategy:
        trainer.strategy.__class__ = SingleProcessStrategy

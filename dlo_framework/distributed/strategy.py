"""Base strategies: a single process, plain data parallelism, and `ShardedStrategy`, from which others derive."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from dlo_framework.ability import Ability
from dlo_framework.distributed.checkpointing import BUCKETS, CanonicalStrategy
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.gradient_check import USED_AT_THE_END, check_gradients, unused_message, unused_numbers
from dlo_framework.distributed.launcher import WatchedRanks
from dlo_framework.distributed.optimizer_steps import sparse_embeddings
from dlo_framework.distributed.precision import keep_dtypes, with_sharded_clipping
from dlo_framework.distributed.stacks import hook_frame, hook_of, own_line
from dlo_framework.errors import DloError, shown_names
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.shards import Shard
from dlo_framework.strategy_abilities import CommunicationHooks, Replicas, StepsInBackward
from dlo_framework.strategy_contract import with_strides_of

#: Time limit of a collective; a rank that hangs ends the run after it.
TIMEOUT = timedelta(minutes=10)
#: Fix under plain data parallelism that allows parameters without a gradient.
_ALLOW_UNUSED = "use --trainer.strategy ddp_find_unused_parameters_true"


class SingleProcessStrategy(CanonicalStrategy, SingleDeviceStrategy, Replicas, StepsInBackward):
    """Strategy of one process on one device; ``auto`` chooses it on a machine with one device."""

    holds_full_state = True
    _handles: tuple[RemovableHandle, ...] = ()

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with each parameter whose gradient is complete."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        if ready is not None:
            assert self.lightning_module is not None
            trained = [p for p in self.lightning_module.parameters() if p.requires_grad]
            self._handles = tuple(p.register_post_accumulate_grad_hook(lambda p: ready([p])) for p in trained)


class DataParallelStrategy(CanonicalStrategy, WatchedRanks, Replicas, StepsInBackward, CommunicationHooks):
    """Plain data parallelism: every rank holds the full model, and gradients are averaged. Aliases: `ddp`.

    It is Lightning's DDPStrategy with canonical checkpoints, which all ranks write.

    Args:
        find_unused_parameters: Whether to allow parameters without a gradient, which costs a walk over the graph. By
            default only in manual optimization, where a backward for one of several optimizers, as in a GAN, leaves
            the others' parameters without.
        timeout_minutes: Minutes that a collective may take before the run ends; by default 10, or Lightning's
            `timeout`.
        kwargs: Further arguments of Lightning's DDPStrategy and torch's DistributedDataParallel.
    """

    holds_full_state = True
    _buckets: BackwardBuckets | None = None
    _copying: Sequence[RemovableHandle] = ()

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        timeout_minutes: float | None = None,
        **kwargs: Any,
    ) -> None:
        if timeout_minutes is not None:
            kwargs["timeout"] = timedelta(minutes=timeout_minutes)
        kwargs.setdefault("timeout", TIMEOUT)
        super().__init__(find_unused_parameters=bool(find_unused_parameters), **kwargs)
        self._decides_unused = find_unused_parameters is None

    def check_model(
        self, module: Any, datamodule: Any = None, *, trains: bool = True, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Checks that each trainable parameter gets a gradient, before any process starts.

        Args:
            module: LightningModule of the run.
            datamodule: Datamodule of the run; None without one.
            trains: Whether the run trains; evaluation needs no gradients.
            callbacks: Callbacks of the run.

        Raises:
            DloError: Parameters get none, which torch's wrapper is not told to look for.
        """
        looks = self._ddp_kwargs.get("find_unused_parameters", False) or self._ddp_kwargs.get("static_graph", False)
        if trains and not looks and self.num_processes * self.num_nodes > 1:
            check_gradients(module, datamodule, callbacks, allow=_ALLOW_UNUSED)

    def configure_ddp(self) -> None:
        """Wraps the module, and notes the names of its trainable parameters, which torch numbers at this moment.

        The values of an embedding's sparse gradient are the gradient of its output, which a sum such as that of tokens
        and positions passes on to its other terms too. torch's wrapper (2.11 to 2.15) divides them in place, so that
        parameters behind the other terms would get gradients divided twice: it gets copies.
        """
        module = self.lightning_module
        assert module is not None
        named = dict(module.named_parameters())
        self._trained = [name for name, parameter in named.items() if parameter.requires_grad]
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        if self._decides_unused and not module.automatic_optimization:
            self._ddp_kwargs["find_unused_parameters"] = True  # Lightning (2.6) passes these to torch's wrapper.
            rank_zero_warn(
                f"{type(module).__name__} optimizes by hand, so a backward may leave parameters without a gradient:"
                " ddp walks over the graph in each backward to find them; use --trainer.strategy"
                " ddp_find_unused_parameters_false if every backward reaches all parameters"
            )
        if self.several_buckets:
            trained = sum(p.numel() * p.element_size() for p in named.values() if p.requires_grad)
            self._ddp_kwargs.setdefault("bucket_cap_mb", min(25.0, trained / BUCKETS / 2**20))
        for handle in self._copying:
            handle.remove()
        tables = [part.weight for part in sparse_embeddings(module) if part.weight.requires_grad]
        self._copying = [table.register_hook(torch.clone) for table in tables]
        super().configure_ddp()
        if self.separates and isinstance(self.model, DistributedDataParallel):
            # torch checks a hook's annotations, and accepts a hook without any.
            self.model.register_comm_hook(None, lambda state, bucket: _unreduced(bucket.buffer()))

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities, by the options."""
        waits = {StepsInBackward: USED_AT_THE_END} if self._ddp_kwargs.get("find_unused_parameters") else {}
        return super().abilities() | waits

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step through torch's wrapper.

        Raises:
            DloError: if parameters have been unfrozen under a communication hook.
        """
        if self._buckets is not None:
            self._buckets.begin()
        elif any(parameter.requires_grad for parameter in self._frozen.values()):
            self._wrap_again()
        with self._naming_unused():
            return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares torch's wrapper for a backward in manual optimization."""
        with self._naming_unused():
            super().pre_backward(closure_loss)

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with each bucket whose gradients are averaged, in place of torch's wrapper.

        Raises:
            DloError: A communication hook compresses gradients.
        """
        module = self.lightning_module
        assert module is not None
        if self._buckets is not None:
            self._buckets.remove()
        self._buckets = None
        if ready is None:
            return
        wrapper = self.model
        if isinstance(wrapper, DistributedDataParallel):
            if wrapper._comm_hooks:
                raise DloError(
                    "a step in backward does not support a communication hook: it gets buckets of all gradients; leave"
                    " out what compresses gradients"
                )
            self.model = wrapper.module  # The wrapper's buckets would hold all gradients.
            del wrapper
        self._buckets = BackwardBuckets(module, ready, self._world())

    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends a backward that has averaged gradients in buckets of its own."""
        super().post_backward(closure_loss)
        if self._buckets is not None:
            self._buckets.finish()

    def _wrap_again(self) -> None:
        """Wraps the module again, since torch's wrapper averages only what was trainable when it was made."""
        wrapper = self.model
        assert isinstance(wrapper, DistributedDataParallel)
        if wrapper._comm_hooks:  # torch (2.11 to 2.15) has no public name for them.
            unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
            raise DloError(
                "parameters must train from the start of the run where a communication hook compresses gradients,"
                f" got {shown_names(unfrozen)} unfrozen since; leave out the compression, or train them from the start"
                " in a parameter group with lr 0"
            )
        self.model = wrapper.module
        self.configure_ddp()

    @contextlib.contextmanager
    def _naming_unused(self) -> Iterator[None]:
        """Names the parameters without a gradient, which torch reports by number and one step late."""
        try:
            yield
        except RuntimeError as error:
            missed = unused_numbers(str(error))
            if not missed:
                raise
            names = [self._trained[number] for number in missed]
            raise DloError(unused_message(names, _ALLOW_UNUSED, self.lightning_module)) from error


def _unreduced(buffer: Tensor) -> Any:
    """Returns the result of a communication hook that leaves a rank's gradients alone."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


class BackwardBuckets:
    """Averages gradients over the ranks in buckets, in the order of backward, which is the same on all ranks.

    They are handed over as soon as they are. DistributedDataParallel keeps buckets for all gradients during the run;
    here a bucket exists from its last gradient to its step.

    Args:
        module: Module whose trainable parameters are equal on all ranks; its buffers are broadcast by :meth:`begin`.
        ready: Function of the parameters of a bucket, called when their gradients are averaged. It must drop them.
        size: Number of ranks.
        bucket_bytes: Maximum bytes of a bucket, unless one parameter has more; by default DistributedDataParallel's.
    """

    def __init__(
        self,
        module: nn.Module,
        ready: Callable[[list[Tensor]], None],
        size: int,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self._module, self._ready, self._size = module, ready, size
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in named}
        #: Parameters in buckets of one dtype, in order.
        self.buckets: list[list[Tensor]] = []
        for _, parameter in reversed(named):
            last = self.buckets[-1] if self.buckets else []
            fits = sum(one.nbytes for one in last) + parameter.nbytes <= bucket_bytes
            if last and last[0].dtype == parameter.dtype and fits:
                last.append(parameter)
            else:
                self.buckets.append([parameter])
        self._missing = [len(bucket) for bucket in self.buckets]
        self._next = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._count(number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
        ]

    def begin(self) -> None:
        """Prepares a backward: rank 0's buffers go to all ranks, as DistributedDataParallel does before a forward."""
        self._missing, self._next = [len(bucket) for bucket in self.buckets], 0
        for buffer in self._module.buffers() if self._size > 1 else ():
            broadcast_values(buffer)

    def finish(self) -> None:
        """Ends a backward.

        Raises:
            DloError: Parameters have no gradient.
        """
        absent = [self._names[id(p)] for bucket in self.buckets[self._next :] for p in bucket if p.grad is None]
        if self._next < len(self.buckets):
            raise DloError(unused_message(sorted(absent), "step at the end of backward"))

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _count(self, number: int) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            self._missing[number] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] <= 0:
                self._average(self.buckets[self._next])
                self._next += 1

        return count

    @torch.no_grad()
    def _average(self, bucket: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        if self._size > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for parameter in bucket:
                parameter.grad = None
            dist.all_reduce(flat.div_(self._size))
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = with_strides_of(parameter, part.view_as(parameter))
        self._ready(bucket)


class ShardedState(Protocol):
    """State of optimizers of which each rank has a part, by parameter name."""

    def tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank."""

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too."""

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard | None:
        """Returns an uninitialised shard of a state tensor; None for a parameter that is stepped as a DTensor."""


class ShardedStrategy(CanonicalStrategy, WatchedRanks):
    """Base class of strategies that shard a model's state over the ranks.

    Processes, rendezvous (Lightning's launcher, torchrun, SLURM), devices, broadcast, reduce and barriers are those
    of Lightning's DDPStrategy, without its wrapper: the subclass reduces gradients itself. A subclass implements
    :meth:`shard`, which builds the optimizers too.

    Args:
        timeout_minutes: Minutes that a collective may take before the run ends.
    """

    #: Whether a forward of the model needs all ranks, as it does where parameters are gathered for it.
    forward_needs_all_ranks = True
    #: Whether `configure_model` builds models on the meta device; they get memory as they are sharded.
    meta_init = False
    #: Stochastic rounding of the optimizers' steps, which must not round the state that they load; None without.
    _rounding: Any = None

    def __init__(self, timeout_minutes: float = TIMEOUT.total_seconds() / 60, **kwargs: Any) -> None:
        super().__init__(timeout=timedelta(minutes=timeout_minutes), **kwargs)
        self._guards: list[RemovableHandle] = []

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Sets the device and dtype in which Lightning builds the model: in CPU memory, or on the meta device."""
        # Not Lightning's context: it is entered inside, so that its device, the training device, would win.
        empty = self.meta_init if empty_init is None else empty_init
        with torch.device("meta" if empty else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @abstractmethod
    def shard(self, trainer: Trainer) -> None:
        """Moves the module to its device, builds its optimizers while fitting, and shards both over the ranks."""

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision plugin, with gradient clipping and loss scaling over all ranks."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None
            if precision_plugin is None
            else with_sharded_clipping(precision_plugin, self.gradient_norm, self.guard_hooks)
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded after setup: true, because they are read into shards."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Prepares the module, and has :meth:`shard` build the optimizers and shard both.

        Raises:
            DloError: if a callback unfreezes parameters during the run, or averages parameters that are sharded.
        """
        assert self.accelerator is not None
        assert self.model is not None
        self._check_callbacks(trainer)
        self.accelerator.setup(trainer)
        if self._layer_sync and trainer.state.fn == TrainerFn.FITTING:
            self.model = self._layer_sync.apply(self.model)
        with keep_dtypes(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
        self.shard(trainer)
        self.move_metrics()
        self.setup_precision_plugin()
        self._guard_forwards(trainer)
        self._begin_training_streams()
        self.barrier("sharded")

    def _check_callbacks(self, trainer: Trainer) -> None:
        """Checks that no callback needs full parameters that a rank does not have, and that loggers take checkpoints.

        Raises:
            DloError: if a callback unfreezes parameters during the run, or averages or prunes those that are sharded;
                if a logger is to upload checkpoints that are folders.
        """
        self.check_loggers(trainer.loggers)
        name = type(self).__name__
        # Lightning's (2.6) compares each tensor of the optimizer with the module's parameters, and stores it by the
        # name that the same object has in the module: both need an optimizer of the module's full parameters.
        rule = f"the optimizer's parameters must stay the same during a run under {name}, which shards them first"
        fix = (
            " of Lightning, which looks for the module's full parameters in the optimizer; use dlo's own freezing"
            " callback (dlo plugins), which unfreezes blocks in turn, strategy ddp, or train all parameters from the"
            " start, some with a lower lr"
        )
        refused: list[tuple[Any, str, str]] = [(BaseFinetuning, rule, fix)]
        if not self._keeps_plain_parameters(self._module()):
            rule = f"an average of the weights under {name} must be taken of each rank's shards"
            fix = ", which takes full parameters; use WeightEMA, or strategy ddp"
            refused.append((StochasticWeightAveraging | WeightAveraging, rule, fix))
        if self.zero_stage == 3:  # On one rank too: pruning renames and assigns parameters that are watched.
            rule = f"parameters under {name} must not be pruned between steps"
            fix = "; use dlo's own pruning callback (dlo plugins), or ddp, zero1 or zero2"
            refused.append((ModelPruning, rule, fix))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kinds, rule, fix in refused:
                if isinstance(callback, kinds):
                    raise DloError(f"{rule}, got {type(callback).__name__}{fix}")

    def _keeps_plain_parameters(self, module: LightningModule) -> bool:
        """Returns whether a module's parameters are plain, full tensors on each rank after setup."""
        return self.zero_stage < 3 or not self._needs_all_ranks(module)

    def _needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of the LightningModule, or of a submodule, needs all ranks."""
        return self.forward_needs_all_ranks and next(module.parameters(), None) is not None

    def _guard_forwards(self, trainer: Trainer) -> None:
        """Makes a forward that a hook calls outside of steps wait until all ranks have called it too.

        Collectives are matched by their order alone. The collectives of a forward on one rank would pair with those of
        the other ranks' next steps, and end in a hang or in garbage weights.
        """
        for handle in self._guards:
            handle.remove()
        module = self._module()
        guarded = [module, *module.children()] if self.world_size > 1 else []
        guard = _forward_guard(weakref.ref(trainer), weakref.ref(module))
        self._guards = [
            part.register_forward_pre_hook(guard, prepend=True) for part in guarded if self._needs_all_ranks(part)
        ]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers.

        Raises:
            DloError: without an optimizer; if an optimizer evaluates the model several times a step; if it steps a
                tensor that is not a parameter of the module.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise DloError(
                f"configure_optimizers must return an optimizer that evaluates the model once a step under"
                f" {type(self).__name__}, got LBFGS; use another optimizer, or strategy auto or ddp"
            )
        if any(not optimizer.param_groups for optimizer in self.optimizers):
            raise DloError(
                f"configure_optimizers must return an optimizer under {type(self).__name__}, got None; return one, or"
                " use strategy auto or ddp"
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
                f"{type(optimizer).__name__} must step parameters of {name} only, got a tensor of shape"
                f" {list(foreign.shape)} that is not a parameter of {name}; register it in the module, or build a new"
                " optimizer in each call of configure_optimizers"
            )

    def move_metrics(self) -> None:
        """Moves the module's metrics to the device, and sets its ``device`` property.

        ``Module.to`` would do so, but is not called on a model whose tensors are moved one by one.
        """
        module = self._module()
        _update_properties(module, device=self.root_device)
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)

    def _share_buffers(self) -> None:
        """Broadcasts rank 0's buffers, such as the statistics of batch norm, to all ranks.

        DistributedDataParallel broadcasts before each forward, and discards the other ranks' updates too. So a
        broadcast where buffers are evaluated or saved gives the same result, except for a model whose training step
        reads buffers that it writes: here each rank reads its own.
        """
        for buffer in self._module().buffers() if self._world() > 1 else ():
            if not isinstance(buffer, DTensor):
                broadcast_values(buffer)

    def on_validation_start(self) -> None:
        """Broadcasts rank 0's buffers before an evaluation."""
        self._share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Frees the parameters that the evaluation gathered, since the next may have other weights."""
        self._free_gathered()

    on_test_end = on_predict_end = on_train_end = on_validation_end

    def _free_gathered(self) -> None:
        """Frees the parameters that are gathered."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device, with its counts; a batch that a callback has moved is left alone."""
        return super().batch_to_device(self.attach_counts(batch), device, dataloader_idx)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's tensors and shards of the module's state, by name; called on all ranks."""
        self._share_buffers()
        return super().lightning_module_state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' state."""
        with self._rounding.loading() if self._rounding is not None else contextlib.nullcontext():
            super().load_optimizer_state_dict(checkpoint)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns a decision that all ranks agree on; this process's own before the ranks are connected."""
        if not dist.is_initialized():
            return decision
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote)
        return bool(vote == self.world_size) if all else bool(vote)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- optimizer state -----------------------------------------------------------------------------------

    @property
    def _state(self) -> ShardedState | None:
        """Optimizer state of the run; None for a strategy that overrides the questions about it."""
        return None

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank, by parameter name."""
        return super().optimizer_tensors(optimizer) if self._state is None else self._state.tensors(optimizer)

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too."""
        return super().group_names(optimizer) if self._state is None else self._state.group_names(optimizer)

    def as_shard(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""
        return super().as_shard(name, tensor, value) if self._state is None else self._state.as_shard(name, value)

    def empty_shard(self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard of a state tensor for this rank."""
        shard = None if self._state is None else self._state.empty_shard(name, shape, dtype)
        return super().empty_shard(name, tensor, shape, dtype) if shard is None else shard

    def guard_hooks(self, optimizer: Optimizer | None = None) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for hooks in which the user's code may read and change gradients.

        Args:
            optimizer: Optimizer that steps next; None for the hooks after a backward.
        """
        return contextlib.nullcontext()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        return total_norm(collect_gradients(optimizer), self.root_device, dist.group.WORLD)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Does nothing; Lightning enters it for each micro-batch of an accumulation but the last."""
        yield

    def teardown(self) -> None:
        """Ends the run; the module stays sharded, and can be validated or trained again."""
        self.finish_checkpoints()
        for handle in self._guards:
            handle.remove()
        self._guards = []
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self._end_training_streams()
        self.handled()


def _forward_guard(trainer_ref: weakref.ref[Trainer], module_ref: weakref.ref[LightningModule]) -> Any:
    """Returns a forward pre-hook that waits for all ranks before a forward outside of steps."""
    checked: list[tuple[Any, ...]] = [()]

    def guard(part: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Compiled modules are called in steps.
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
                f"a forward under {type(strategy).__name__} must be called on all ranks, got one on rank"
                f" {trainer.global_rank} in {call[1]} ({own_line(sys._getframe())}), while {missing}; take it out of a"
                " condition on the rank, or move it into validation_step"
            )

    return guard


def register_data_parallel() -> None:
    """Registers dlo's strategy under Lightning's names of plain data parallelism, which ``auto`` chooses too."""
    starts = (("popen", ""), ("fork", "_fork"), ("fork", "_notebook"), ("spawn", "_spawn"))
    unused = {None: "", False: "_find_unused_parameters_false", True: "_find_unused_parameters_true"}
    for (start, suffix), (find_unused, ending) in itertools.product(starts, unused.items()):
        StrategyRegistry.register(
            f"ddp{suffix}{ending}",
            DataParallelStrategy,
            description="plain data parallelism with canonical checkpoints",
            override=True,
            find_unused_parameters=find_unused,
            start_method=start,
        )


def use_canonical_checkpoints(trainer: Trainer) -> None:
    """Replaces Lightning's strategy for a single device with dlo's, which writes canonical checkpoints.

    Lightning (2.6) builds it without the registry where ``auto`` finds one device; the two classes differ in methods
    alone, so that the object's class is changed.
    """
    if type(trainer.strategy) is SingleDeviceStrategy:
        trainer.strategy.__class__ = SingleProcessStrategy

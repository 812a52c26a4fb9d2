"""Implements ZeRO as a Lightning strategy.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054. ZeRO-Offload: Democratizing Billion-Scale Model Training. Ren et al., 2021, arXiv 2101.06840.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from dlo_framework.ability import Ability
from dlo_framework.callback import callbacks_of, traits_of
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.distributed.checkpointing import BUCKETS
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.gradient_check import USED_AT_THE_END, check_gradients
from dlo_framework.distributed.meta_init import Initialiser, check_initialisable, on_meta
from dlo_framework.distributed.model_units import find_units
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.local_memory import optimizer_bytes
from dlo_framework.placed_model import PlacedModel
from dlo_framework.strategy_abilities import ExplainsNaN, HalfPrecisionGradients, Replicas, StepsInBackward
from dlo_framework.strategy_contract import loads_checkpoint, plain_name
from dlo_plugins.parallel.gathered_dtype import (
    Bf16Weights,
    check_precision,
    check_sent_dtype,
    default_param_dtype,
    parse_dtype,
    prepare_weights,
)
from dlo_plugins.parallel.stepped_gradients import WatchedSteps
from dlo_plugins.parallel.user_code import meet_all, users_hooks
from dlo_plugins.parallel.zero.zero_engine import FrozenZero, ZeroEngine, ZeroOptions

MIB = 2**20
#: Size of a gradient bucket in MiB, as torch's DistributedDataParallel has it.
_BUCKET_MB = 25.0
#: Autocast's dtype by the Trainer's precision.
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ZeroStrategy(WatchedSteps, ShardedStrategy, StepsInBackward, HalfPrecisionGradients, ExplainsNaN):
    """Shards optimizer state, gradients and parameters over the ranks: ZeRO, stages 1 to 3.

    With psi parameters in single precision under Adam, plain data parallelism takes 16 psi bytes per rank. With N
    ranks, stage 1 takes 8 psi + 8 psi / N (optimizer state sharded), stage 2 takes 4 psi + 12 psi / N (gradients too),
    stage 3 takes 16 psi / N (parameters too). Stages 1 and 2 communicate 2 psi elements per step, as plain data
    parallelism does; stage 3 communicates 3 psi. With `param_dtype: bfloat16`, stages 1 and 2 take 2 psi + 16 psi / N,
    and stage 3 takes 16 psi / N.

    Aliases: `zero1 zero2 zero3 zero2_offload zero3_offload`.

    Args:
        stage: Stage of ZeRO: 1, 2 or 3.
        offload: State in CPU memory: `optimizer` (its state and step, the gradient shards and, in stage 3, a copy of
            the shards that it steps), `parameters` (their shards, those of frozen parameters too; stage 3), or `both`.
            With `parameters` alone, the shards are copied to the device for a step.
        bucket_mb: Size of a gradient bucket in MiB (stages 1 and 2; stage 3 reduces unit by unit).
        find_unused: Whether parameters may have no gradient in a step. Otherwise that is an error that names them. In
            stage 3 all units are then gathered for the full step.
        units: Names of the modules whose parameters are gathered together in stage 3, and that wait for the last
            step's parameters in stages 1 and 2; by default the model's blocks.
        param_dtype: Dtype in which parameters in single precision are gathered and computed, with sharded master
            weights in single precision: `bfloat16` under `bf16-mixed`, where it is the default on accelerators;
            `float16` under `16-mixed`; `float32` for their own. Batch norms keep single precision.
        reduce_dtype: Dtype in which gradients are summed; by default single precision, in which they are always kept.
        meta_init: Whether `configure_model` builds the model on the meta device, and each unit is allocated when it
            is sharded: for models larger than a device's memory, in stage 3. Each module's `reset_parameters` then
            initialises it, alike on all ranks; or a checkpoint does, or each rank's shard of trained weights.
        bf16_weights: Kind of bf16 weights: `masters` has sharded master weights in single precision, `stochastic` has
            none, and rounds each optimizer's step stochastically. By default weights have the precision's dtype.
        timeout_minutes: Timeout of a collective in minutes, after which a rank aborts the run.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload: Literal["optimizer", "parameters", "both"] | None = None,
        bucket_mb: float = _BUCKET_MB,
        find_unused: bool = False,
        units: list[str] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        meta_init: bool = False,
        bf16_weights: Bf16Weights | None = None,
        timeout_minutes: float = 10.0,
    ) -> None:
        check_choice("bf16_weights", bf16_weights, get_args(Bf16Weights))
        if stage not in (1, 2, 3):
            raise DloError(f"stage must be 1, 2 or 3, got {stage}; use 2 to shard optimizer state and gradients")
        check_choice("offload", offload, ("optimizer", "parameters", "both"))
        if offload in ("parameters", "both") and stage < 3:
            raise DloError(
                f"offload: {offload} must come with stage 3, got stage {stage}, where every rank has full parameters;"
                " set stage: 3, or offload: optimizer"
            )
        check_number("bucket_mb", bucket_mb, "above 0", "use 25")
        super().__init__(timeout_minutes=timeout_minutes)
        self.stage, self.offload, self.bucket_mb = stage, offload, bucket_mb
        self.find_unused, self.units = find_unused, units
        self.dtypes, self.meta_init, self.bf16_weights = (param_dtype, reduce_dtype), meta_init, bf16_weights
        self._rounding = None
        self._sent_dtype: torch.dtype | None = None
        self._met: set[str] = set()  # Hooks that all ranks have used weights in.
        self.engine: ZeroEngine | None = None

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
            DloError: Parameters get none, and `find_unused` is off.
        """
        if trains and not self.find_unused:
            check_gradients(module, datamodule, callbacks, allow="set find_unused: true in the strategy")

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the short names: ``--trainer.strategy zero2``."""
        for name, arguments in (
            ("zero1", {"stage": 1}),
            ("zero2", {"stage": 2}),
            ("zero3", {"stage": 3}),
            ("zero2_offload", {"stage": 2, "offload": "optimizer"}),
            ("zero3_offload", {"stage": 3, "offload": "both"}),
        ):
            strategy_registry.register(name, cls, description=f"ZeRO: {arguments}", **arguments)

    # --- setting up ----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Checks the options against the Trainer's, before processes start."""
        self._gathered_dtypes()
        super()._configure_launcher()

    def _gathered_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Returns the dtypes in which parameters are gathered and gradients summed; None for the parameters' own.

        Raises:
            DloError: The dtypes do not fit the Trainer's precision.
        """
        precision, (gathered, reduced) = str(self.precision_plugin.precision), self.dtypes
        check_precision(self.bf16_weights, precision, gathered)
        if self.bf16_weights == "stochastic":
            return None, parse_dtype("reduce_dtype", reduced)
        if self.bf16_weights == "masters":
            gathered = "bfloat16"
        if gathered is None:
            gathered = default_param_dtype(precision, self.root_device)
        param, reduce = parse_dtype("param_dtype", gathered), parse_dtype("reduce_dtype", reduced)
        if param not in (None, torch.float32, _AUTOCAST.get(precision)):
            wanted = next((key for key, value in _AUTOCAST.items() if value == param), "32-true")
            raise DloError(
                f"param_dtype must be float32 or the dtype that precision {precision} casts to, got {gathered};"
                f" set the trainer's precision to {wanted}, or leave param_dtype out"
            )
        if param in (None, torch.float32):
            if reduce not in (None, torch.float32):
                raise DloError(
                    f"reduce_dtype must come with a param_dtype in half precision, got {reduced} alone; set param_dtype"
                    " too, or leave reduce_dtype out"
                )
            return None, None
        return param, reduce

    def shard(self, trainer: Trainer) -> None:
        """Builds the optimizers, and moves the parameters into flat groups."""
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        self._rounding = prepare_weights(self.bf16_weights, module)
        communicator, initialise = Communicator(), self._initialiser(module, loads_checkpoint(trainer))
        if self.stage < 3:
            if initialise is not None:
                initialise(module, "")
            module.to(self.root_device)
        if fitting:
            if self.engine is not None:  # An earlier run has made a partition.
                self.engine.dissolve()
                self.engine = None
            self.has_stepped = False
            self.setup_optimizers(trainer)
        if fitting or (self.stage == 3 and self.engine is None):
            self.engine = self._build(communicator, initialise)
            if self.engine.gather_overlap is not None:
                self.engine.gather_overlap.enabled = not _may_read_weights(trainer, module)
        if self.stage == 3:
            for submodule in module.modules():
                for name, buffer in submodule.named_buffers(recurse=False):
                    submodule._buffers[name] = buffer.to(self.root_device)
        else:
            for parameter in module.parameters():
                if not (fitting and parameter.requires_grad):
                    communicator.broadcast(parameter.data)
        self._share_buffers()

    def _needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of a submodule gathers weights, as in stage 3."""
        return self.stage == 3 and super()._needs_all_ranks(module)

    def _initialiser(self, module: nn.Module, loads_weights: bool) -> Initialiser | None:
        """Returns the initialiser of a module on the meta device; None for a module with values.

        Raises:
            DloError: A tensor would stay uninitialised.
        """
        if not on_meta(module):
            return None
        check_initialisable(module, loads_weights=loads_weights)
        return Initialiser(self.root_device, self.broadcast(torch.initial_seed()))

    def _build(self, communicator: Communicator, initialise: Initialiser | None) -> ZeroEngine:
        module = self._module()
        units = self.units if self.units is not None else find_units(module)
        gathered, reduced = self._gathered_dtypes()
        element = max((p.element_size() for p in module.parameters()), default=4)
        bucket = int(self.bucket_mb * MIB / element)
        if self.several_buckets and self.bucket_mb == _BUCKET_MB:
            bucket = min(bucket, sum(p.numel() for p in module.parameters() if p.requires_grad) // BUCKETS)
        options = ZeroOptions(
            stage=self.stage,
            bucket_elements=bucket,
            offload_optimizer=self.offload in ("optimizer", "both"),
            offload_parameters=self.offload in ("parameters", "both"),
            find_unused=self.find_unused,
            gathered_dtype=gathered,
            reduced_dtype=reduced,
            sent_dtype=self._sent_dtype,
            rounding=self._rounding,
        )
        engine = ZeroEngine(module, self.optimizers, units, communicator, self.root_device, options, initialise)
        self.own(module, communicator.size if engine.holds_shards else 1, engine.dissolve)
        return engine

    def place_frozen(
        self, task: Any, *, dtype: torch.dtype | None = None, offload: bool = False, loads_weights: bool = False
    ) -> PlacedModel:
        """Partitions a frozen task in stage 3; each rank has the full one in others.

        Its shards are in CPU memory where those of the run's model are.
        """
        initialise = self._initialiser(task, loads_weights)
        if self.stage < 3:
            if initialise is not None:
                initialise(task, "")
            return super().place_frozen(task, dtype=dtype, offload=offload)
        options = ZeroOptions(
            stage=3,
            bucket_elements=1,
            offload_parameters=offload or self.offload in ("parameters", "both"),
            gathered_dtype=self._gathered_dtypes()[0] if dtype is None else None,
        )
        engine = ZeroEngine(task, [], find_units(task), Communicator(), self.root_device, options, initialise)
        context = self.precision_plugin.forward_context if dtype is None else contextlib.nullcontext
        return FrozenZero(task, self.root_device, engine, context=context)

    def place_own(self) -> PlacedModel:
        """Returns the run's own model for forwards outside of steps."""
        if self.stage < 3:
            return super().place_own()
        context = self.precision_plugin.forward_context
        return FrozenZero(self._module(), self.root_device, self._running, context=context)

    def forget_module(self) -> None:
        """Drops the engine, when another strategy takes the module over."""
        self.engine = None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Rebuilds the optimizers, because those of an earlier run hold freed shards."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @property
    def _state(self) -> ZeroEngine:
        return self._running

    @property
    def _running(self) -> ZeroEngine:
        assert self.engine is not None, "setup comes first"
        return self.engine

    # --- a step --------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step, with its parameters gathered.

        Raises:
            DloError: The user's code has written to parameters without values, or reads gradients in the first step.
        """
        if self.engine is not None:
            self.engine.check_params()
        with self._step("training"):
            return super().training_step(*args, **kwargs)

    def watched_names(self) -> dict[int, str]:
        """Returns the names of the parameters whose gradients are in the engine's shards, by id."""
        return self.engine.trained_names if self.engine is not None else {}

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's validation step, with its parameters gathered."""
        with self._step("validation"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's test step, with its parameters gathered."""
        with self._step("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's predict step, with its parameters gathered."""
        with self._step("predict"):
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        """Gathers the parameters that a step needs from its beginning."""
        gathering = self.engine.gathering if self.engine is not None else None
        if self.engine is not None and self.engine.gather_overlap is not None:
            with self.engine.gather_overlap.step(kind):
                yield
            return
        if gathering is None:
            yield
            return
        gathering.begin_step()
        with gathering.watch_step(kind):
            yield
        if kind == "training" and not self._module().automatic_optimization:
            gathering.release_all()

    @property
    def watches_hooks(self) -> bool:
        """Whether hooks are watched: in stage 3, and where shards are not memory of the parameters."""
        return self.engine is not None and not all(group.shares_memory for group in self.engine.groups)

    @contextlib.contextmanager
    def around_hook(self, hook: str) -> Iterator[None]:
        """Gathers the weights that a hook of the user's reads or writes, and stores what it has written."""

        def meet() -> None:
            if hook not in self._met:
                meet_all(self, f"{hook}, which uses weights", "weights under ZeRO stage 3", f"a use in {hook}")
            self._met.add(hook)

        gathering, gather_overlap = self._running.gathering, self._running.gather_overlap
        with gathering.gather_used(meet) if gathering is not None else gather_overlap.watch_data():  # type: ignore[union-attr]
            yield

    def _free_gathered(self) -> None:
        self.finish_step()
        if self.engine is not None and self.engine.gathering is not None:
            self.engine.gathering.release_all()

    def finish_step(self) -> None:
        """Waits for the parameters and shards of the last step."""
        if self.engine is not None:
            self.engine.finish_step()

    def teardown(self) -> None:
        """Ends the run; a single rank, which has all parameters, leaves them readable."""
        if self.engine is not None and self.engine.communicator.size == 1:
            for group in self.engine.groups:
                group.finish_gather()
        super().teardown()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the engine for a backward."""
        self._running.before_backward(self._module().automatic_optimization)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finishes the engine's reduction."""
        self._running.after_backward(self._module().automatic_optimization)

    def send_gradients_in(self, dtype: torch.dtype) -> None:
        """Sends gradients in a half precision."""
        check_sent_dtype(self.dtypes[1], dtype)
        self._sent_dtype = dtype

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities, by the options."""
        waits = {StepsInBackward: USED_AT_THE_END} if self.find_unused else {}
        return super().abilities() | {Replicas: Replicas.one_copy} | waits

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with this rank's shards whose gradients are reduced."""
        if self.engine is not None:
            self.engine.watch_gradients(ready)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        self._running.sync = False
        try:
            yield
        finally:
            self._running.sync = True

    # --- state ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state by name; in stage 3, or with master weights, this rank's shards."""
        self.finish_step()
        if self.engine is None or not self.engine.holds_shards:
            return super().lightning_module_state_dict()
        first_names = {id(p): plain_name(name) for name, p in self._module().named_parameters()}
        with self._names():
            state = super().lightning_module_state_dict()
            whole = self._module().state_dict(keep_vars=True)
        for name, value in whole.items():
            piece = self.engine.shard(first_names[id(value)]) if id(value) in first_names else None
            if piece is not None:
                state[plain_name(name)] = piece
        return state

    def state_names(self) -> set[str]:
        """Returns the names of all of the module's state."""
        with self._names():
            return super().state_names()

    def _names(self) -> AbstractContextManager[None]:
        """Returns a context in which ``state_dict`` is allowed, for its names and buffers."""
        gathering = self.engine.gathering if self.engine is not None else None
        return gathering.allow_names() if gathering is not None else contextlib.nullcontext()

    def local_tensors(self) -> list[Tensor]:
        """Returns the tensors of this rank's parameters, or of its shards, and of the buffers."""
        self.finish_step()
        if self.engine is None or not self.engine.holds_shards:
            return super().local_tensors()
        grouped = {id(parameter) for group in self.engine.groups for parameter in group.parameters}
        held: list[Tensor] = []
        for group in self.engine.groups:
            held += [group.shard] if group.has_master_weights or not group.keep_full else group.parameters
        held += [parameter for parameter in self._module().parameters() if id(parameter) not in grouped]
        return [*held, *self._module().buffers()]

    @property
    def zero_stage(self) -> int:  # type: ignore[override]
        """Stage of ZeRO."""
        return self.stage

    @property
    def has_master_weights(self) -> bool:  # type: ignore[override]
        """Whether parameters are gathered in half precision."""
        return self.engine is not None and self.engine.options.gathered_dtype is not None

    @property
    def nan_hint(self) -> str:
        """Possible cause of a NaN loss where weights are gathered during forward; empty where they are not."""
        gather_overlap = self.engine.gather_overlap if self.engine is not None else None
        if gather_overlap is None or not gather_overlap.enabled or self.world_size == 1:
            return ""
        return (
            f"under zero{self.stage}, weights read as NaN outside their block's forward if the first step did not read"
            " them there: read them in the first step too, or use strategy ddp"
        )

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        held = self._running.count_state_bytes()
        if self.stage < 3:
            held["parameters"] += sum(p.nbytes for p in self._module().parameters() if not p.requires_grad)
        held["optimizer"] = held.pop("masters") + optimizer_bytes(self.optimizers)
        return {**held}

    def refresh(self) -> None:
        """Synchronises parameters and shards after a write from outside."""
        if self.engine is not None:
            self.engine.refresh()

    def accumulated_gradients(self) -> Mapping[str, Any]:
        """Returns the gradients of an unfinished accumulation: full ones in stage 1, this rank's shards in others."""
        running = self._running
        return running.gradient_shards() if running.options.reduces_each else super().accumulated_gradients()

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation."""
        if not self._running.options.reduces_each:
            super().restore_gradients(saved)
        else:
            gradients = as_lazy_state_dict(saved)
            for name, shard in self._running.open_window(gradients).items():
                gradients.read_into(name, shard)

    def about(self) -> dict[str, Any]:
        """Returns the run's description for a checkpoint's manifest."""
        return {**super().about(), "stage": self.stage}


#: Hooks of a module that run between a step and the next forward.
_BETWEEN = (
    *("on_before_zero_grad", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_model_eval", "on_save_checkpoint"),
    *("on_validation_epoch_end", "on_validation_end", "on_train_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def _may_read_weights(trainer: Trainer, module: LightningModule) -> bool:
    """Returns whether a callback or the module may read weights between a step and the next forward.

    They read the module's own parameters, which cannot be intercepted; so all gathers end with the step.
    """
    callbacks = callbacks_of(trainer)
    reads = any(traits_of(callback).reads_weights for callback in callbacks) or any(users_hooks(callbacks))
    return reads or not module.automatic_optimization or any(users_hooks([module], _BETWEEN))

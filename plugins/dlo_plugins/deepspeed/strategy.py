"""Implements DeepSpeed as a Lightning strategy, with dlo's processes and checkpoints.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054. ZeRO-Offload: Ren et al., 2021, arXiv 2101.06840. ZeRO-Infinity: Rajbhandari et al., 2021,
arXiv 2104.07857. ZeRO++ (hpZ): Wang et al., 2023, arXiv 2306.10209.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.ability import Ability
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.costs import is_compiled
from dlo_framework.data.description import ModuleDescription, run_datamodule
from dlo_framework.distributed.checkpointing import BUCKETS
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.optimizer_steps import prefer_fused
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_framework.errors import DloError
from dlo_framework.local_memory import state_bytes
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.placed_model import PlacedModel
from dlo_framework.shards import FlatShard, Shard
from dlo_framework.strategy_abilities import (
    BlocksInPlace,
    HalfPrecisionGradients,
    Replicas,
    SeparateSteps,
    StepsInBackward,
)
from dlo_framework.strategy_contract import plain_name
from dlo_framework.task import Task
from dlo_plugins.deepspeed import environment
from dlo_plugins.deepspeed.config import check_available, check_device, merge_options, warn_unused_checkpointing
from dlo_plugins.deepspeed.deepspeed_engine import (
    DeepSpeedEngine,
    EnginePrecision,
    ForwardInAutocast,
    FrozenDeepSpeed,
    frozen_config,
)
from dlo_plugins.deepspeed.json_file import DeepSpeedJson, get, get_source
from dlo_plugins.deepspeed.optimizer_and_schedule import build_scheduler, compute_lengths, make_optimizer_args
from dlo_plugins.deepspeed.partitions import explain_step, full_shape, local_partition, refuse_empty, segments
from dlo_plugins.deepspeed.trainer_settings import SECTIONS, fill_from_trainer, get_open_settings, read_settings
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.optimizer_probe import requires_closure
from dlo_plugins.parallel.stepped_gradients import WatchedSteps

Offload = Literal["cpu", "nvme"]


class DeepSpeedBridge(WatchedSteps, ShardedStrategy, environment.AnyDeviceDeepSpeed, HalfPrecisionGradients):
    """Trains with DeepSpeed: ZeRO stages 0 to 3 and offload to CPU or NVMe, on CUDA and on CPU.

    The optimizer, its schedule, accumulation and checkpoints are those of every other strategy: `zero3`, `fsdp` or a
    single process, on any number of ranks, can resume from DeepSpeed's checkpoints. Clipping and the loss scale of fp16
    are DeepSpeed's, with the Trainer's settings.

    Aliases: `deepspeed` (stage 2), `deepspeed_0 deepspeed_1 deepspeed_2 deepspeed_3`, `deepspeed_2_offload`
    (optimizer on the CPU), `deepspeed_3_offload` (optimizer and parameters).

    Args:
        stage: Stage of ZeRO: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too; 2 by default.
        offload_optimizer: Storage of optimizer state and of the partitions in single precision, which the CPU then
            steps: `cpu` or `nvme`; by default both are on the device, which steps.
        offload_parameters: Memory of the partitions of the parameters in stage 3: `cpu` or `nvme`.
        nvme_path: Folder on a local disk for NVMe offload.
        overlap_comm: Whether gradients are reduced during backward; costs a second bucket.
        contiguous_gradients: Whether gradients are copied into one buffer, which avoids fragmentation.
        reduce_bucket_size: Number of elements of gradients that are reduced at once.
        allgather_bucket_size: Number of elements of parameters that are gathered at once, in stages 1 and 2.
        round_robin_gradients: Whether consecutive parameters belong to different ranks (stages 1 and 2), so that
            copies to the CPU run in parallel.
        hpz: Number of ranks, such as those of a node, that keep a second copy of the partitions, so that backward
            gathers among them alone (ZeRO++, stage 3).
        communication_dtype: Dtype in which gradients are summed: `fp32`, `fp16` or `bf16`; by default the model's.
        partition_activations: Whether activations are partitioned over model-parallel ranks. The bridge has one such
            rank: the option has an effect only in a model that calls `deepspeed.checkpointing.checkpoint` itself, with
            more.
        cpu_checkpointing: Whether the blocks of a task keep only their inputs for backward, in CPU memory, and
            recompute the rest, as the applier ActivationCheckpoint with `offload` does. A plain LightningModule calls
            `deepspeed.checkpointing.checkpoint` itself.
        activation_checkpointing: Further keys of that section of DeepSpeed's JSON.
        flops_profiler: Whether to print a profile of FLOPs; a number is the step that is profiled.
        comms_logger: Whether to log communication.
        config: Path or content of a DeepSpeed JSON file, for these and all other keys. A key that an option or the
            Trainer sets too must be equal; its optimizer and scheduler replace the task's.
        timeout_minutes: Timeout of a collective in minutes, after which a rank aborts the run.

    Raises:
        DloError: A key is unknown, a value is invalid, or options contradict each other.
    """

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: Offload | None = None,
        offload_parameters: Offload | None = None,
        nvme_path: str | None = None,
        overlap_comm: bool | None = None,
        contiguous_gradients: bool | None = None,
        reduce_bucket_size: int | None = None,
        allgather_bucket_size: int | None = None,
        round_robin_gradients: bool | None = None,
        hpz: int | None = None,
        communication_dtype: str | None = None,
        partition_activations: bool | None = None,
        cpu_checkpointing: bool | None = None,
        activation_checkpointing: dict[str, Any] | None = None,
        flops_profiler: bool | int | None = None,
        comms_logger: bool | None = None,
        config: str | Path | dict[str, Any] | None = None,
        timeout_minutes: float = 10.0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        environment.check_installed()
        environment.adopt_launcher()
        #: Configuration from options and JSON, before the Trainer's settings are added.
        self.asked = merge_options(given, config)
        super().__init__(timeout_minutes=timeout_minutes, config=self.asked)
        self.engine: DeepSpeedEngine | None = None
        self._forward_redirection = ForwardInAutocast(self._autocast)
        self._loading: dict[int, dict[str, Any]] = {}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the short names, ``--trainer.strategy deepspeed_3``, some of which override Lightning's."""
        presets: dict[str, dict[str, Any]] = {"deepspeed": {"stage": 2}}
        presets |= {f"deepspeed_{stage}": {"stage": stage} for stage in range(4)}
        presets["deepspeed_2_offload"] = {"stage": 2, "offload_optimizer": "cpu"}
        presets["deepspeed_3_offload"] = {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}
        for name, arguments in presets.items():
            strategy_registry.register(name, cls, description=f"DeepSpeed: {arguments}", override=True, **arguments)

    def trainer_arguments(self, given: Mapping[str, Any], datamodule: Any = None) -> dict[str, Any]:
        """Returns the Trainer's arguments that the JSON sets and the config leaves at the default; called by `dlo fit`.

        Args:
            given: Arguments of the Trainer by name.
            datamodule: Datamodule of the run.

        Raises:
            DloError: If both set different values.
        """
        return get_open_settings(self.asked, given, datamodule)

    def check_model(
        self, module: Any, datamodule: Any = None, *, trains: bool = True, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Checks that one part of the run sets the learning rate, before any process starts.

        Raises:
            DloError: The JSON has a scheduler and so has a callback; or it has an optimizer alone, and the task's
                scheduler is for the task's own.
        """
        from dlo_plugins.schedules.lr_curves import LearningRateSchedule

        super().check_model(module, datamodule, trains=trains, callbacks=callbacks)
        if not trains:
            return
        source, section = get_source(self.asked), self.asked.get("scheduler")
        schedules = [type(callback).__name__ for callback in callbacks if isinstance(callback, LearningRateSchedule)]
        if section is not None and schedules:
            raise DloError(
                f"{source}: scheduler must be unset where the callback {schedules[0]} sets the learning rate, got"
                f" {section.get('type')}; remove the section from {source}, or the callback from trainer.callbacks"
            )
        if section is None and self.asked.get("optimizer") is not None and _has_schedule(module):
            raise DloError(_alone(source))

    @property
    def stage(self) -> int:
        """Stage of ZeRO."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    @property
    def forward_needs_all_ranks(self) -> bool:  # type: ignore[override]
        """Whether a forward pass gathers parameters."""
        return self.stage == 3

    # --- setting up ----------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's precision for DeepSpeed, driven by dlo's accumulation."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if isinstance(precision_plugin, DeepSpeedPrecision) and not isinstance(precision_plugin, EnginePrecision):
            precision_plugin = EnginePrecision(precision_plugin.precision, self)
        self._precision_plugin = precision_plugin

    def _configure_launcher(self) -> None:
        """Checks the options against the Trainer's, before processes start."""
        check_device(self.asked, self.root_device.type, SECTIONS.get(str(self.precision_plugin.precision)))
        super()._configure_launcher()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        precision = self.precision_plugin
        assert isinstance(precision, EnginePrecision)
        return precision.autocast()

    def setup(self, trainer: Trainer) -> None:
        """Adds the Trainer's settings to the configuration, builds the optimizer, and starts DeepSpeed's engine.

        Raises:
            DloError: Configuration and Trainer differ, or this machine lacks a requirement.
        """
        given: dict[str, Any] = {"precision": self.precision_plugin.precision}
        given["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        given |= {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
        data: Any = run_datamodule(trainer)
        self.config = fill_from_trainer(self.asked, read_settings(given, self.world_size, data))
        check_available(self.config, self.root_device.type, self.world_size)
        super().setup(trainer)

    def shard(self, trainer: Trainer) -> None:
        """Starts the engine, or moves the module to its device where nothing trains."""
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        kept = self._master_weights() if fitting else {}
        if fitting and self.engine is not None:
            engine, self.engine = self.engine, None
            engine.destroy()
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)
            broadcast_values(buffer.data)
        for parameter in module.parameters():
            if self.stage < 3:
                parameter.data = parameter.data.to(self.root_device)
                broadcast_values(parameter.data)
        if not fitting:
            if self.engine is None and self.stage == 3:
                self.engine = DeepSpeedEngine(module, None, self.config, self.root_device)
                self._own_module()
            if self.engine is not None and self.stage == 3:
                self.model = self.engine.deepspeed
            return
        self._start(trainer)
        now = self._master_weights(copied=False)
        for name in kept.keys() & now.keys():
            if (now[name].start, now[name].data.shape) == (kept[name].start, kept[name].data.shape):
                now[name].data.copy_(kept[name].data)

    def _master_weights(self, *, copied: bool = True) -> dict[str, FlatShard]:
        """Returns the master weights of an earlier fit, if the module's weights are in half precision."""
        masters = self.engine.master_weights if self.engine is not None else None
        if masters is None or not self.precision_plugin.precision.startswith(("16", "bf16")):
            return {}
        return {name: shard.clone() if copied else shard for name, shard in masters.shards().items()}

    def _start(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        self.has_stepped = False
        optimizer = self._optimizer(trainer)
        self._checkpoint_activations(self._module())
        config = {key: value for key, value in self.config.items() if key not in ("optimizer", "scheduler")}
        module = self._module()
        buckets = BUCKETS if self.several_buckets else 1
        self.engine = DeepSpeedEngine(module, optimizer, config, self.root_device, buckets)
        if self.steps_on_host:
            prefer_fused(optimizer, on_cpu=True)
        self._own_module()
        environment.limit_groups(self.engine.deepspeed, self._timeout)
        self._set_deepspeed_activation_checkpointing()
        self.optimizers = [self.engine.optimizer]
        _optimizers_to_device(self.optimizers, self.root_device)
        self.model = self.engine.deepspeed

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps parameters in the host's memory, beside an accelerator."""
        storage = get(self.config, "zero_optimization.offload_optimizer.device")
        return storage in ("cpu", "nvme") and self.root_device.type != "cpu"

    def _prefer_fused_step(self, optimizer: Optimizer) -> None:
        """Switches to the fused step; to that of host memory once the engine has moved the parameters there."""
        if not self.steps_on_host:
            super()._prefer_fused_step(optimizer)

    def _checkpoint_activations(self, module: LightningModule) -> None:
        """Makes a task's blocks recompute, with their inputs on the CPU, if `cpu_checkpointing` is set."""
        if not isinstance(module, Task):
            return
        warn_unused_checkpointing(self.config)
        if get(self.config, "activation_checkpointing.cpu_checkpointing") is True:
            if ModuleDescription(module).recompute:
                raise DloError(
                    "activation_checkpointing.cpu_checkpointing must be the only recomputation, got recompute: true"
                    f" of {type(module).__name__} too; leave recompute out"
                )
            ActivationCheckpoint(offload=True).apply(module.model, None, module.parallel_plan())

    def _optimizer(self, trainer: Trainer) -> Optimizer:
        """Returns the configuration's optimizer, or the task's where there is none."""
        if len(self.optimizers) != 1:
            raise DloError(
                f"configure_optimizers must return one optimizer under DeepSpeed, got {len(self.optimizers)}; return"
                " one with several parameter groups, or use strategy zero2"
            )
        own = self.optimizers[0]
        if requires_closure(own):
            raise DloError(
                f"an optimizer under DeepSpeed must step without a closure, got {type(own).__name__};"
                " give its step closure=None, or use strategy zero2"
            )
        made = make_optimizer_args(self.config, own)
        if made is not None:
            if self.lr_scheduler_configs and "scheduler" not in self.config:
                raise DloError(_alone(get_source(self.config)))
            kind, arguments = made
            own = kind([p for p in self._module().parameters() if p.requires_grad], **arguments)
            self._prefer_fused_step(own)
        schedule = build_scheduler(self.config, own, **compute_lengths(self.config, self._module(), trainer))
        if schedule is not None:
            self.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="step")]
        return own

    def _own_module(self) -> None:
        self.own(self._module(), self.world_size if self.stage == 3 else 1, self._running.destroy)

    def place_frozen(
        self, task: Any, *, dtype: torch.dtype | None = None, offload: bool = False, loads_weights: bool = False
    ) -> PlacedModel:
        """Partitions a frozen task in stage 3, by an engine of its own; each rank has the full one in other stages."""
        context = self._autocast if dtype is None else contextlib.nullcontext
        if self.stage < 3:
            return PlacedModel(task, self.root_device, context=context, offload=offload)
        for buffer in task.buffers():
            buffer.data = buffer.data.to(self.root_device)
        engine = DeepSpeedEngine(task, None, frozen_config(self.config, dtype, offload), self.root_device)
        return FrozenDeepSpeed(task, engine, context=context)

    def place_own(self) -> PlacedModel:
        """Returns the run's own model for forwards outside of steps."""
        if self.stage < 3:
            return PlacedModel(self._module(), self.root_device, context=self._autocast, moved=True)
        return FrozenDeepSpeed(self._module(), self._running, context=self._autocast, owns=False)

    def forget_module(self) -> None:
        """Drops the engine, when another strategy takes the module over."""
        self.engine = None

    @property
    def _running(self) -> DeepSpeedEngine:
        assert self.engine is not None, "DeepSpeed's engine runs"
        return self.engine

    # --- a step --------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step.

        Raises:
            DloError: It uses weights in a way that stage 3 does not support.
        """
        module = self._module()
        with contextlib.ExitStack() as step:
            if self.stage == 3:
                step.enter_context(explain_step())
                if not (self.has_stepped or is_compiled(module)):
                    step.enter_context(refuse_empty(module, "training_step", allows_data=True))
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward."""
        with explain_step() if self.stage == 3 else contextlib.nullcontext():
            return super().backward(*args, **kwargs)

    @property
    def watches_hooks(self) -> bool:
        """Whether hooks are watched: in stage 3, and where parameters are in half precision."""
        return self.stage == 3 or (self.engine is not None and self.engine.halves)

    def around_hook(self, hook: str) -> contextlib.AbstractContextManager[Any]:
        """Refuses weights that a hook of the user's uses in stage 3, or writes through ``data``."""
        return refuse_empty(self._module(), hook) if self.stage == 3 else self.guard_hooks()

    def watched_names(self) -> dict[int, str]:
        """Returns the names of the parameters whose gradients are in DeepSpeed's partitions, by id."""
        return self.engine.names if self.engine is not None and self.stage > 0 else {}

    def check_written(self, names: list[str]) -> None:
        """Checks whether the step may write parameters through their ``data``."""
        self._running.check_written(names)

    def send_gradients_in(self, dtype: torch.dtype) -> None:
        """Sends gradients in a half precision, by DeepSpeed's own option."""
        name, given = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], self.asked.get("communication_data_type")
        if given not in (None, name):
            raise DloError(
                f"communication_dtype must be {name} or unset beside a callback that sends gradients in it, got"
                f" {given}; leave one of the two out"
            )
        self.asked = DeepSpeedJson({**self.asked, "communication_data_type": name}, self.asked.source)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the engine for a backward."""
        self._running.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finishes the engine's reduction."""
        self._running.after_backward()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        engine = self._running
        engine.sync = False
        try:
            yield
        finally:
            engine.sync = True

    def on_validation_end(self) -> None:
        """Frees the parameters that the evaluation gathered, except persistent ones."""
        if self.engine is not None and self.stage == 3:
            self.engine.gather_persistent()

    on_test_end = on_predict_end = on_validation_end

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm of the gradient over all ranks, before clipping."""
        engine = self._running
        masters = engine.master_weights
        gradients = collect_gradients(engine.optimizer) if masters is None else masters.gradients()
        group = dist.group.WORLD if masters is not None and masters.sharded else None
        return total_norm(gradients, engine.device, group) / engine.loss_scale()

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities: in stage 0 DeepSpeed averages the gradients of all copies itself."""
        waits = "the engine steps copies of its own after backward; use zero1 to zero3"
        abilities = super().abilities() | {StepsInBackward: waits, SeparateSteps: SeparateSteps.missing}
        if self.stage:
            abilities[Replicas] = Replicas.one_copy
        if self.stage == 3:
            abilities[BlocksInPlace] = f"{BlocksInPlace.missing}, or DeepSpeed's stage 2"
        return abilities

    def gradient_scale(self) -> float | None:
        """Returns the loss scale, by which DeepSpeed divides in its step; None with the optimizer on NVMe."""
        if get(self.asked, "zero_optimization.offload_optimizer.device") == "nvme":
            return None
        return 1.0 if self.engine is None else self.engine.loss_scale()

    # --- state ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state by name, with this rank's shards of trained weights in single precision."""
        self.finish_step()
        state = super().lightning_module_state_dict()
        masters = self.engine.master_weights if self.engine is not None else None
        shards = masters.shards() if masters is not None else {}
        cut = segments(self._module())
        first_names = {id(p): plain_name(name) for name, p in self._module().named_parameters()}
        for name, value in self._module().state_dict(keep_vars=True).items():
            first = first_names.get(id(value), "")
            if first in shards or first in cut:
                state[plain_name(name)] = shards[first] if first in shards else cut[first]
        return state

    def local_tensors(self) -> list[Tensor]:
        """Returns the tensors of this rank's partitions, of unpartitioned parameters, and of buffers."""
        self.finish_step()
        masters = self.engine.master_weights if self.engine is not None else None
        if masters is None:
            return super().local_tensors()
        module = self._module()
        frozen = [local_partition(p) for name, p in module.named_parameters() if plain_name(name) not in masters.homes]
        return [*(flat.tensor for flat in masters.partitions), *frozen, *module.buffers()]

    def finish_step(self) -> None:
        """Stores what the user's code has written to parameters since the last step in the partitions."""
        if self.engine is not None:
            self.engine.store_writes()

    @property
    def zero_stage(self) -> int:  # type: ignore[override]
        """Stage of ZeRO."""
        return self.stage

    def full_size(self, name: str, parameter: Tensor) -> int:
        """Returns the number of elements of a full parameter, of which this rank may have a shard."""
        return full_shape(parameter).numel()

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        masters = self.engine.master_weights if self.engine is not None else None
        if masters is None:
            return super().state_bytes()
        parameters = list(self._module().parameters())
        held = [*(local_partition(p) for p in parameters), *parameters, *(flat.tensor for flat in masters.partitions)]
        return state_bytes(held, self.optimizers, masters.buffers())

    def refresh(self) -> None:
        """Updates the parameters of all ranks from the partitions, after these were written from outside."""
        if self.engine is not None:
            self.engine.load_params()

    def accumulated_gradients(self) -> Mapping[str, Any]:
        """Returns the gradients of an unfinished accumulation: full ones in stages 0 and 1, shards in 2 and 3."""
        masters = self._running.master_weights
        if masters is None or self.stage < 2:
            return super().accumulated_gradients()
        return dict(masters.grad_shards())

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation."""
        masters = self._running.master_weights
        if masters is None or self.stage < 2:
            super().restore_gradients(saved)
            return
        gradients = as_lazy_state_dict(saved)
        for name, shard in masters.zero_grad_shards(list(gradients)).items():
            gradients.read_into(name, shard)

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the partition of each parameter of which this rank has elements, by name."""
        masters = self._running.master_weights
        return super().optimizer_tensors(optimizer) if masters is None else masters.tensors()

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks too."""
        masters = self._running.master_weights
        return super().group_names(optimizer) if masters is None else masters.group_names()

    def as_shard(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""
        masters = self._running.master_weights
        flat = masters.homes.get(name) if masters is not None else None
        return value if flat is None or value.shape != flat.tensor.shape else flat.shard(name, value)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        self._loading = {}
        super()._load_optimizer(optimizer, saved)
        self._loading = {}

    def _read_state(self, name: str, tensor: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter's partition, with this parameter's slice filled in."""
        masters = self._running.master_weights
        flat = masters.homes.get(name) if masters is not None else None
        if flat is None:
            return super()._read_state(name, tensor, saved)
        state, entries = self._loading.setdefault(id(tensor), {}), as_lazy_state_dict(saved)
        shape = flat.shapes[name]
        for key in entries:
            if not entries.is_tensor(key):
                state[key] = entries[key]
            elif entries.shape(key) == shape and key != "step":
                value = state.setdefault(key, tensor.new_zeros(tensor.shape, dtype=entries.dtype(key)))
                entries.read_into(key, flat.shard(name, value))
            else:
                state[key] = entries[key].clone()
        return state

    def about(self) -> dict[str, Any]:
        """Returns the run's description for a checkpoint's manifest."""
        return {**super().about(), "stage": self.stage}


def _alone(source: str) -> str:
    """Returns the error for a JSON with an optimizer and no scheduler, for a task with a scheduler."""
    return (
        f"{source}: optimizer and scheduler must be set together where the task has a learning-rate scheduler, got an"
        f" optimizer alone; add a scheduler to {source}, remove its optimizer, or take the task's scheduler out (dlo's"
        " tasks: schedule: constant)"
    )


def _has_schedule(module: Any) -> bool:
    """Returns whether a module configures a learning-rate scheduler, as far as that is known without a run."""
    from dlo_plugins.schedules.lr_curves import configured_schedulers

    try:
        twin = module.on_meta() if isinstance(module, Task) else module
        configured = twin.configure_optimizers()
    except Exception:  # A user's code may need the trainer; dlo's tasks do for the length of their schedule.
        return ModuleDescription(module).schedule not in ("constant", None)
    return bool(configured_schedulers(configured))

"""Wrapper of DeepSpeed's engine: starts it on a module and its optimizer, steps it, and ends it; and frozen models."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.distributed.gradient_check import check_backward_seen
from dlo_framework.distributed.optimizer_steps import sparse_embeddings
from dlo_framework.distributed.precision import GuardedHooks
from dlo_framework.errors import DloError, shown_names
from dlo_framework.local_memory import memory_of
from dlo_framework.placed_model import Context, PlacedModel, block_names
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.deepspeed.partitions import (
    MasterWeights,
    Stage0Weights,
    Stage3Weights,
    Stage12Weights,
    gather_params,
    gather_persistent,
    is_partitioned,
    local_partition,
    partition_params,
    segments,
)
from dlo_plugins.parallel.optimizer_probe import probe_optimizer
from dlo_plugins.parallel.stepped_gradients import check_groups

#: Options that let DeepSpeed step torch's optimizers: :func:`_check_elementwise` has tried them, also with offload,
#: for which DeepSpeed's own would first be compiled.
_OWN_OPTIMIZER = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
#: DeepSpeed's default of `reduce_bucket_size`.
_BUCKET = 500_000_000


class DeepSpeedEngine:
    """DeepSpeed's engine under the strategy.

    Args:
        module: Module to train.
        optimizer: Optimizer as configured on the module's parameters; None to evaluate only (under stage 3, whose
            parameters have to be gathered for that too).
        config: Complete DeepSpeed configuration.
        device: Device of this rank.
        buckets: Number of buckets of the gradients, unless the configuration sets their size.

    Attributes:
        deepspeed: DeepSpeed's engine.
        optimizer: Torch optimizer that steps, with this rank's partitions in its groups.
        master_weights: Master weights; None if the optimizer steps the parameters themselves (stage 0 in single
            precision).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        config: dict[str, Any],
        device: torch.device,
        buckets: int = 1,
    ) -> None:
        import deepspeed

        self.module, self.stage, self.device = module, int(config["zero_optimization"]["stage"]), device
        if optimizer is not None and (self.stage > 0 or _halves(config)):
            _check_wraps_none(optimizer)
        if optimizer is not None and self.stage > 0:
            _check_elementwise(optimizer)
        self.names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        _check_tensors(module, self.stage)
        config = _with_small_bucket({**config, **_OWN_OPTIMIZER}, module, buckets)
        before = _in_single_precision(module, device) if _halves(config) else {}
        self._attributes = {id(p): dict(vars(p)) for p in module.parameters()}
        if self.stage == 3:
            partition_params(module, config)
        logger = logging.getLogger("DeepSpeed")
        level = logger.level
        logger.setLevel(logging.ERROR)  # It warns about optimizers that are not DeepSpeed's.
        self.deepspeed, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=device.index or 0),
            config=config,
            model=module,
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            dist_init_required=False,
        )
        logger.setLevel(level)
        _watch_outer_forward(self.deepspeed, module)
        self.optimizer: Optimizer = self.deepspeed.basic_optimizer
        self.trains = optimizer is not None
        self.master_weights = self._masters() if self.trains else None
        self._frozen = {plain_name(n): p for n, p in module.named_parameters() if not p.requires_grad}
        self._sync = self._complete = False
        self.sync = True
        self.halves, self._versions = _halves(config), self._find_versions()
        self._places = self._find_places()
        if isinstance(self.master_weights, Stage0Weights):
            self.master_weights.undo_first_step()
        if self.master_weights is not None and before:
            self._restore(before)
        if self.stage == 3:
            self.load_params()  # DeepSpeed gathers the persistent parameters only from the first step on.

    def _masters(self) -> MasterWeights | None:
        kind = type(self.deepspeed.optimizer).__name__
        if self.deepspeed.optimizer is self.deepspeed.basic_optimizer:
            return None
        if kind == "FP16_UnfusedOptimizer":
            return Stage0Weights(self.deepspeed.optimizer, self.optimizer, self.names)
        if kind.startswith("DeepSpeedZeroOptimizer"):
            self.optimizer = self.deepspeed.optimizer.optimizer  # Adagrad is replaced by a new instance.
            sort = Stage3Weights if self.stage == 3 else Stage12Weights
            return sort(self.deepspeed.optimizer, self.optimizer, self.names)
        raise DloError(
            f"DeepSpeed's optimizer must be one whose partitions dlo can read, got {kind}; leave out"
            " data_types.grad_accum_dtype, zenflow and super_offload, or use stage 2"
        )

    @torch.no_grad()
    def _restore(self, weights: dict[str, Tensor]) -> None:
        """Copies the weights before DeepSpeed rounded them to half precision into the partitions."""
        assert self.master_weights is not None
        for flat in self.master_weights.partitions:
            for name, shard in flat.shards(flat.tensor).items():
                whole = weights[name].view(-1)
                shard.data.copy_(whole[shard.start : shard.start + shard.data.numel()])

    # --- steps ---------------------------------------------------------------------------------------------

    @property
    def sync(self) -> bool:
        """Whether the next backward is the last of its accumulation window, so that a step follows."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = value
        self.deepspeed.set_gradient_accumulation_boundary(value)

    def _find_versions(self) -> dict[str, int]:
        """Returns the version counters of the parameters that the step overwrites, by name."""
        return {self.names[id(p)]: p._version for p in self.module.parameters() if self.stage == 3 or p.requires_grad}

    def check_written(self, names: list[str]) -> None:
        """Checks that parameters which the user's code has written are not overwritten by the next step.

        Raises:
            DloError: They are, as the partitions are in higher precision or elsewhere.
        """
        if names and (self.stage == 3 or self.halves):
            where = "stage 3" if self.stage == 3 else "half precision"
            raise DloError(
                f"parameters under DeepSpeed in {where} must be written by its optimizer alone, got"
                f" {shown_names(names)} written by the model or a callback; use strategy zero1 to zero3, or DeepSpeed's"
                " stage 1 or 2 in single precision"
            )

    def store_writes(self) -> None:
        """Stores what the user's code has written to parameters in the partitions that DeepSpeed steps."""
        before, self._versions = self._versions, self._find_versions()
        written = [name for name, version in self._versions.items() if before.get(name, version) != version]
        self.check_written(written)
        if isinstance(self.master_weights, Stage12Weights):
            self._check_places()
        if self.trains and self.stage > 0:
            check_groups(self.optimizer, self.names)
        if isinstance(self.master_weights, Stage12Weights) and not self.halves:
            self.master_weights.store_writes(always=bool(written))

    def _find_places(self) -> dict[str, int]:
        """Returns the addresses of the trained parameters, by name."""
        return {self.names[id(p)]: p.data_ptr() for p in self.module.parameters() if p.requires_grad}

    def _check_places(self) -> None:
        """Checks that parameters are in the flat memory from which DeepSpeed's stages 1 and 2 step them."""
        moved = [name for name, place in self._find_places().items() if self._places.get(name, place) != place]
        if moved:
            raise DloError(
                "parameters under DeepSpeed must keep their memory, which its optimizer steps, got"
                f" {shown_names(moved)} assigned by `data`; write in place, as `p.data.copy_(value)`, or use strategy"
                " zero1 to zero3"
            )

    def before_backward(self) -> None:
        """Prepares the gradient buffers; called before each backward.

        Raises:
            DloError: If a parameter that was frozen at the start requires a gradient: DeepSpeed would not step it.
        """
        thawed = sorted(name for name, parameter in self._frozen.items() if parameter.requires_grad)
        if thawed:
            raise DloError(
                f"requires_grad of {shown_names(thawed)} must stay false after the start of a run under DeepSpeed, got"
                " true: it partitions the trained parameters once; train it from the start in a parameter group with lr"
                " 0, or start a second run from this one's checkpoint"
            )
        if self.master_weights is not None:
            self.master_weights.start_window()

    def after_backward(self) -> None:
        """Exposes the reduced gradients to callbacks before a step; called after each backward.

        Raises:
            DloError: If manual optimization runs a second backward before a step.
        """
        if not self._sync:
            return
        if self._complete:
            raise DloError(
                "manual optimization must run one synchronised backward pass per optimizer step under DeepSpeed, got"
                " two; run all but the last under optimizer.toggle_model(sync_grad=False), or add up their losses"
            )
        self._complete = True
        if self.master_weights is not None:
            self.master_weights.expose_grads()

    def step(self) -> None:
        """Steps, unless a callback has dropped the exposed gradients.

        Raises:
            DloError: If no announced backward ran before.
        """
        check_backward_seen(self._complete)
        self._complete = False
        self.store_writes()
        if self.master_weights is None:
            self.deepspeed.step()
            return
        if self.master_weights.dropped:
            self.master_weights.drop_grads()
            self.deepspeed.global_steps += 1
            return
        self.master_weights.store_grads()
        self.master_weights.hide_partitions()
        try:
            self.deepspeed.step()
        finally:
            self.master_weights.expose_partitions()
        if not self.master_weights.offloaded:
            for flat in self.master_weights.partitions:
                flat.tensor.grad = None  # A step that was skipped for an overflow keeps it.

    def loss_scale(self) -> float:
        """Returns the factor by which the gradients are scaled."""
        return float(getattr(self.deepspeed.optimizer, "loss_scale", 1.0) or 1.0)

    def load_params(self) -> None:
        """Copies changed partitions into the parameters of all ranks."""
        self._versions = self._find_versions()
        if self.master_weights is not None:
            self.master_weights.load_params()
        elif self.stage == 3:
            self.gather_persistent()

    def gather_persistent(self) -> None:
        """Brings stage 3's parameters into their state between steps: small ones gathered, all others partitioned."""
        zero = self.deepspeed.optimizer
        gather_persistent(getattr(zero, "parameter_offload", zero))

    # --- the end -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def destroy(self) -> None:
        """Ends the engine; the module's parameters are full tensors again and keep their values."""
        engine = self.deepspeed
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            hook = getattr(engine, name, None)
            if hook is not None:
                hook.remove()
        engine.destroy()
        if self.stage == 3:
            gather_params(self.module, self._attributes)
        else:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()


def _with_small_bucket(config: dict[str, Any], module: nn.Module, buckets: int) -> dict[str, Any]:
    """Returns a config with a bucket of gradients of at most a share of their elements, unless it sets the size.

    DeepSpeed (0.19) allocates a bucket in full, by default 500 million elements: 2 GB beside a model of any size.
    """
    zero, numel = config["zero_optimization"], sum(p.numel() for p in module.parameters() if p.requires_grad)
    if "reduce_bucket_size" in zero or not 0 < numel < _BUCKET:
        return config
    return {**config, "zero_optimization": {**zero, "reduce_bucket_size": -(-numel // buckets)}}


def _watch_outer_forward(engine: Any, module: nn.Module) -> None:
    """Makes the engine see a step's forward once, also where ``training_step`` calls the module itself.

    DeepSpeed (0.17 to 0.19) hooks the module's forward: the inner call of ``self(batch)`` would start its timers a
    second time, which is an error, and end stage 3's tracking of parameters that are used outside their module.
    """
    if not hasattr(engine, "module_forward_pre_hook"):
        return  # Earlier versions do it in the engine's own forward.
    depth = 0

    def before(_: nn.Module, inputs: Any, named: Any) -> Any:
        nonlocal depth
        depth += 1
        return engine._forward_prologue(inputs, named) if depth == 1 else None

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            engine._forward_epilogue()

    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.module_forward_pre_hook = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    engine.module_forward_post_hook = module.register_forward_hook(after, always_call=True)


def _halves(config: dict[str, Any]) -> bool:
    return any(config.get(section, {}).get("enabled") is True for section in ("fp16", "bf16"))


def _in_single_precision(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Returns CPU copies of the first rank's full trained weights, in fp32, before DeepSpeed rounds them."""
    copies = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32 and not is_partitioned(parameter):
            value = parameter.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            dist.broadcast(value, 0)
            copies[plain_name(name)] = value.cpu()
    return copies


def _check_wraps_none(optimizer: Optimizer) -> None:
    """Raises a DloError for an optimizer that wraps another (Lookahead), because DeepSpeed sees only the outer one.

    DeepSpeed (0.17 to 0.19) puts partitions into its parameter groups, and steps it once on zero gradients to create
    its state.
    """
    wrapped = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if wrapped is not None:
        raise DloError(
            f"optimizer must not wrap another under DeepSpeed, got {type(optimizer).__name__} around"
            f" {type(wrapped).__name__}: DeepSpeed partitions only the outer one; use strategy zero1, zero2 or zero3,"
            f" or {type(wrapped).__name__} alone"
        )


def _check_tensors(module: nn.Module, stage: int) -> None:
    """Raises a DloError for parameters and sparse gradients on which DeepSpeed (0.19) fails, or trains wrong.

    It broadcasts parameters as bytes, as which torch views only tensors with a dim whose last stride is 1. Its stage 3
    does not gather tensors without elements.
    """
    named = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    for rule, fails, fix in (
        ("have a dim", lambda p: p.ndim == 0, "make it of shape [1]"),
        ("be contiguous in the last dim", lambda p: p.ndim and p.stride(-1) != 1, "make it contiguous()"),
        ("have elements", lambda p: stage == 3 and p.numel() == 0, "remove it"),
    ):
        wrong = [name for name, parameter in named.items() if fails(parameter)]
        if wrong:
            raise DloError(
                f"parameters under DeepSpeed must {rule}, got {shown_names(wrong)}; {fix}, or use strategy"
                " zero1 to zero3"
            )
    sparse = sparse_embeddings(module)
    tables = [plain_name(name) for name, part in module.named_modules() if part in sparse]
    if tables and stage > 0:
        raise DloError(
            f"gradients under DeepSpeed's ZeRO must be dense, got sparse=True of {shown_names(tables)}; set"
            " sparse=False, or use strategy zero1 to zero3"
        )


def _check_elementwise(optimizer: Optimizer) -> None:
    """Raises a DloError for an optimizer that needs full tensors, which DeepSpeed's partitions do not have."""
    if probe_optimizer(optimizer) != "elementwise":
        raise DloError(
            f"optimizer must be elementwise under DeepSpeed's ZeRO, whose flat partitions cut through parameters, got"
            f" {type(optimizer).__name__}, which needs full tensors; use strategy zero1, zero2 or zero3, which"
            " distribute full tensors, or stage 0"
        )


class ForwardInAutocast(_ForwardRedirection):
    """Redirection of Lightning's steps through the engine's forward, with autocast inside.

    DeepSpeed (0.17 on) switches off an autocast that is entered outside its engine.

    Args:
        context: Function that returns the context in which a step's code runs.
    """

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._context = context

    def __call__(
        self, wrapper_module: Any, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a method of the module as the engine's forward."""
        forward = original_module.forward

        def redirected(*inner: Any, **named: Any) -> Any:
            original_module.forward = forward  # type: ignore[method-assign]
            with self._context():
                return getattr(original_module, method_name)(*inner, **named)

        original_module.forward = redirected  # type: ignore[method-assign]
        return wrapper_module(*args, **kwargs)


# --- frozen models -----------------------------------------------------------------------------------------

#: Section of DeepSpeed's configuration of a half-precision model, by its dtype.
_SECTIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def frozen_config(config: dict[str, Any], dtype: torch.dtype | None, offload: bool) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of a frozen model, from that of the run.

    Args:
        config: Complete configuration of the run.
        dtype: Dtype of the frozen model's parameters; None for the run's precision.
        offload: Whether partitions are in CPU memory; they are too where those of the run's model are.
    """
    frozen = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    zero = {key: value for key, value in frozen["zero_optimization"].items() if key != "offload_optimizer"}
    if offload:
        zero.setdefault("offload_param", {"device": "cpu"})
    if dtype is not None:
        frozen = {key: value for key, value in frozen.items() if key not in ("fp16", "bf16")}
        if dtype in _SECTIONS:
            frozen[_SECTIONS[dtype]] = {"enabled": True}
    return {**frozen, "zero_optimization": zero}


class FrozenDeepSpeed(PlacedModel):
    """Frozen task whose parameters DeepSpeed gathers module by module.

    Args:
        task: Task that the engine has partitioned.
        engine: Engine of stage 3, without an optimizer.
        context: Context of a forward; DeepSpeed switches off an autocast outside of its own forward.
        owns: Whether :meth:`close` ends the engine.
    """

    def __init__(
        self, task: Any, engine: DeepSpeedEngine, *, context: Context = contextlib.nullcontext, owns: bool = True
    ) -> None:
        self.engine, self._call_in_autocast, self._owns = engine, ForwardInAutocast(context), owns
        super().__init__(task, engine.device, moved=True)
        blocks = tuple(f"{name}." for name in block_names(task))
        self._root = [
            parameter
            for name, parameter in task.named_parameters()
            if is_partitioned(parameter) and not name.startswith(blocks or ("",))
        ]

    def outputs(self, batch: Any) -> Any:
        """Returns the task's outputs for a batch, without a graph."""
        with torch.no_grad():
            outputs = self._call_in_autocast(self.engine.deepspeed, self.task, "_outputs", batch)
        self.engine.gather_persistent()
        return outputs

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters outside of blocks inside the block."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._root):
            yield

    def shards(self) -> dict[str, Any]:
        """Returns this rank's segments of the parameters, and the buffers, by name."""
        cut, first_names = segments(self.task), {id(p): plain_name(name) for name, p in self.task.named_parameters()}
        state = super().shards()
        for name, value in self.task.state_dict(keep_vars=True).items():
            if first_names.get(id(value)) in cut:
                state[plain_name(name)] = cut[first_names[id(value)]]
        return state

    def refresh(self) -> None:
        """Gathers the small parameters that stage 3 keeps in full, after the segments have been written to."""
        self.engine.load_params()

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's segments, of the parameters that are gathered now, and of the buffers."""
        parameters = list(self.task.parameters())
        return memory_of([*parameters, *(local_partition(p) for p in parameters), *self.task.buffers()])

    def close(self) -> None:
        """Ends the engine, and frees the model."""
        if self._owns:
            self.engine.deepspeed.destroy()
        super().close()


# --- the precision plug-in --------------------------------------------------------------------------------

#: Counters of the engine that its schedules (curriculum, layer drop, profiler) use.
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
#: State of a dynamic loss scale.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(GuardedHooks, DeepSpeedPrecision):
    """Lightning's precision for DeepSpeed, with Lightning's gradient accumulation.

    DeepSpeed keeps parameters in half precision and steps master weights in single precision. Under a mixed precision
    the forward pass also runs in autocast, as in other strategies: operations that need single precision get it, and
    modules without support for half precision run.

    Lightning divides each loss by the window's micro-batches and marks the last of them, so that a window may be
    shorter at an epoch's end, or change; DeepSpeed is told not to divide again.

    Args:
        precision: Lightning's name of the precision.
        bridge: DeepSpeedBridge, the strategy.
    """

    def __init__(self, precision: Any, bridge: Any) -> None:
        super().__init__(precision)
        self._bridge, self.guard_hooks = bridge, bridge.guard_hooks

    def _engine(self) -> DeepSpeedEngine:
        engine = self._bridge.engine
        assert engine is not None, "DeepSpeed's engine runs"
        return engine

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the parameters, which must be real: a conversion would drop imaginary parts (Lightning 2.6)."""
        names = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
        if names:
            raise DloError(
                f"parameters under DeepSpeed must be real, got {shown_names(names)}; store it as"
                " torch.view_as_real(), or use strategy zero1 to zero3"
            )
        return super().convert_module(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of a forward pass: autocast under a mixed precision."""
        if not self.precision.endswith("mixed"):
            return nullcontext()
        return torch.autocast(self._bridge.root_device.type, dtype=self._desired_dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns the context of a step outside the engine; inside it, ``ForwardInAutocast`` has one."""
        return self.autocast() if self._bridge.model is self._bridge.lightning_module else nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Casts a batch if the model is in half precision; autocast casts it where needed."""
        return data if self.precision.endswith("mixed") else super().convert_input(data)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        """Computes gradients, and reduces them as the stage requires."""
        self._engine().deepspeed.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward, then DeepSpeed's step, unless a callback has dropped the gradients."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise DloError(
                "training_step must return a loss under DeepSpeed, where all ranks take part in each backward pass, got"
                " None; return a loss times 0, or use strategy ddp"
            )
        self._engine().step()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Leaves clipping to DeepSpeed's step.

        Raises:
            DloError: If a module's own ``configure_gradient_clipping`` asks for another clipping.
        """
        ours = self._engine().deepspeed.gradient_clipping()
        if clip_val and (gradient_clip_algorithm != GradClipAlgorithmType.NORM or float(clip_val) != float(ours)):
            raise DloError(
                f"configure_gradient_clipping must clip by norm to {ours}, as DeepSpeed does in its step, got"
                f" {gradient_clip_algorithm} to {clip_val}; set trainer.gradient_clip_val, or use strategy zero2"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the engine's counters and its loss scale; empty without a training engine."""
        engine: DeepSpeedEngine | None = self._bridge.engine
        if engine is None or not engine.trains:
            return {}
        state = {name: int(getattr(engine.deepspeed, name)) for name in COUNTERS}
        scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
        return {**state, "loss_scale": {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the engine's counters and its loss scale."""
        engine: DeepSpeedEngine | None = self._bridge.engine
        if engine is None or not engine.trains or not state_dict:
            return
        for name in COUNTERS:
            setattr(engine.deepspeed, name, state_dict[name])
        scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
        for name, value in state_dict["loss_scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)

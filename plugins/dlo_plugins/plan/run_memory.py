"""Tensors, profile and memory of a run, from its config.

The state of the run's optimizer is measured: it takes a step on tensors like the parameters, fake tensors of their
shapes, or where it does not run on those, such as one whose state is quantised, real tensors of smaller shapes. So it
is right for a user's own optimizer.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.batches import tree_leaves
from dlo_framework.data.description import ModuleDescription
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_tensors
from dlo_framework.local_memory import inner_tensors
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task, find_example
from dlo_plugins.memory.planning import MeasuredRank
from dlo_plugins.parallel.gathered_dtype import find_batch_norms
from dlo_plugins.parallel.optimizer_probe import Kind, probe_optimizer, shrink_shape, step_trial
from dlo_plugins.parallel.tensor.inferred_rules import has_rules
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.plan.layout import SIZES, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_config import (
    find_part,
    layout_or_one_rank,
    read_device,
    read_dtypes,
    read_layout,
    read_precision,
    strategy_options,
)
from dlo_plugins.plan.rank_memory import MemoryModel, in_flight
from dlo_plugins.plan.rotor_model import RotorModel
from dlo_plugins.plan.step_time import TimeModel


def predict_rank_memory(
    config: dict[str, Any], model: Any, datamodule: Any, ranks: int, device: str
) -> dict[str, float]:
    """Returns the bytes of the rank that needs most, by part; parts of no bytes are left out.

    Args:
        config: Config as the user means it, without Lightning's defaults.
        model: Task or LightningModule of the config.
        datamodule: Datamodule of the config, or None.
        ranks: Number of ranks.
        device: Type of device.

    Raises:
        DloError: The strategy, the precision or the model is not predicted.
    """
    layout = read_layout(config, ranks)
    if isinstance(model, Task) and ModuleDescription(model).recompute and not model.has_model:
        model = copy.copy(model)
        model.recompute = False  # The layout has it.
    state, _ = run_state(config, model, *read_dtypes(config, device))
    machine = load_machine("h100" if device == "cuda" else "cpu")
    profile = profile_run(model, datamodule, state, machine.device)
    memory = MemoryModel(TimeModel(profile, machine, state)).largest(layout)
    return {name: size for name, size in vars(memory).items() if size > 0}


def predict_chains(
    config: dict[str, Any], model: Any, datamodule: Any, ranks: int, rows: int | None
) -> list[MeasuredRank]:
    """Returns the predicted chains of one rank of each place in the pipeline of a run.

    Args:
        config: Config of the user.
        model: Task of the config.
        datamodule: Datamodule of the config, or None.
        ranks: Number of ranks.
        rows: Rows of a micro-batch on a rank; None for the config's.

    Raises:
        DloError: The model is not a task with blocks, or its step cannot run without values.
    """
    if not isinstance(model, Task):
        raise DloError(
            f"remat: the model must be a dlo_framework.Task, whose inputs are known, got {type(model).__name__}; start"
            " a run with the callback Rotor, which measures any model"
        )
    device = read_device(config)
    state, _ = run_state(config, model, *read_dtypes(config, device))
    profile = profile_run(model, datamodule, state, device)
    task = model.on_meta()
    names = task.parallel_plan().block_names(task.model)
    if not names:
        raise DloError(
            f"remat: the parallel plan must name blocks, got none of {type(model).__name__}; name them in"
            " Task.parallel_plan: ParallelPlan(blocks=(...))"
        )
    layout = replace(layout_or_one_rank(config, ranks), recompute="none", every=1)
    layout = layout if rows is None else replace(layout, micro_batch=rows)
    times = TimeModel(profile, load_machine("h100"), state)
    memory, at, chains = MemoryModel(times), 0, []
    for own in RotorModel(times, memory).chains(layout):
        chain = own.measured.chain
        named = (replace(stage, name=name) for stage, name in zip(chain.stages, names[at:], strict=False))
        at += len(chain) - 1
        stages = (*itertools.islice(named, len(chain) - 1), chain.stages[-1])
        chains.append(replace(own.measured, chain=replace(chain, stages=stages)))
    return [
        MeasuredRank(tuple(replace(chains[s], in_flight=n) for s, n in zip(one.stages, one.most, strict=True)), 0)
        for one in in_flight(layout)
    ]


#: Moments of Adam, each of the parameter's size.
_MOMENTS = 2.0


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer.

    Attributes:
        name: Class name of the optimizer.
        moments: Bytes of the state for each byte of trained parameters; 2 for Adam.
        kind: Kind of the optimizer, as the probe of a strategy finds it.
        error: Why the optimizer could not be built, so that Adam is assumed; empty where it could.
    """

    name: str = "Adam"
    moments: float = _MOMENTS
    kind: Kind = "elementwise"
    error: str = ""


def measure_optimizer(module: Any, dtype: torch.dtype) -> OptimizerState:
    """Returns the state of a module's optimizer.

    Args:
        module: Task or LightningModule with its model on the meta device.
        dtype: Dtype of the stored parameters.

    Raises:
        DloError: The optimizer cannot take a step on tensors like the parameters.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizers = list(_find_optimizers(module.configure_optimizers()))
    except DloError:
        raise
    except Exception as error:
        return OptimizerState(error=f"{type(error).__name__}: {error}")
    if not optimizers:
        return OptimizerState(error=f"configure_optimizers of {type(module).__name__} returned none")
    stored = kept = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            shapes = Counter(tuple(p.shape) for p in group["params"] if p.requires_grad and p.numel())
            for shape, count in shapes.items():
                size = math.prod(shape) * dtype.itemsize
                stored += count * size
                kept += count * size * _moments(optimizer, group, shape, dtype)
    kinds = {probe_optimizer(optimizer) for optimizer in optimizers}
    kind: Kind = next((kind for kind in ("all", "tensor") if kind in kinds), "elementwise")
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return OptimizerState(" and ".join(names), kept / stored if stored else 0.0, kind)


def _find_optimizers(configured: Any) -> Iterator[Optimizer]:
    """Yields the optimizers in what `configure_optimizers` returns."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _find_optimizers(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for entry in configured:
            yield from _find_optimizers(entry)


def _moments(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Returns the bytes of the state for each byte of a parameter."""
    try:
        with fake_tensors():
            return _step(optimizer, group, shape, dtype)
    except Exception:
        try:
            return _step(optimizer, group, shrink_shape(shape), dtype)
        except Exception as error:
            raise DloError(
                f"optimizer must take a step on a tensor of shape {list(shape)} to be planned, got"
                f" {type(error).__name__} from {type(optimizer).__name__}: {error}; use another optimizer"
            ) from error


def _step(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    weight = torch.ones(shape, dtype=dtype)
    trial, (parameter,) = step_trial(optimizer, group, [weight], [[torch.ones(shape, dtype=dtype)]])
    held = [trial, *(value for value in vars(trial).values() if isinstance(value, Optimizer))]
    return sum(_state_bytes(one, parameter) for one in held) / parameter.nbytes


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    state: Any = optimizer.state if isinstance(optimizer.state, defaultdict | dict) else {}
    leaves = tree_leaves(dict(state.get(parameter, {})))
    return sum(_bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 1)


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; of a subclass those of the tensors that it is made of, but for its levels."""
    inner = inner_tensors(tensor)
    return sum(_bytes(part) for name, part in inner.items() if name != "qmap") if inner else tensor.nbytes


#: Bytes of a stored parameter, of one in use, of a gradient and of a reduced one, by the Trainer's precision.
_PRECISIONS = {
    "32-true": ("float32", 4, 4, 4, 4),
    "bf16-mixed": ("bfloat16", 4, 2, 4, 4),
    "16-mixed": ("float16", 4, 2, 4, 4),
    "bf16-true": ("bfloat16", 2, 2, 2, 2),
    "16-true": ("float16", 2, 2, 2, 2),
}


def run_state(
    config: dict[str, Any], model: Any, gather: str | None = None, reduce: str | None = None
) -> tuple[StateFormat, OptimizerState]:
    """Returns the bytes of a run's tensors, and the state of its optimizer.

    Args:
        config: Config of the user.
        model: Task or LightningModule of the config.
        gather: Dtype in which parameters are gathered; None for the run's own.
        reduce: Dtype in which gradients are reduced; None for the run's own.

    Raises:
        DloError: The precision or a dtype is not planned, or the optimizer cannot take a step.
    """
    trainer = config.get("trainer") or {}
    fused = any(find_part(config, name) is not None for name in ("Compile", "CompileBlocks"))
    if gather is None and find_batch_norms(model):
        gather = "float32"  # Batch norms refuse weights in half precision.
    state = state_format(read_precision(config), fused=fused, gather=gather, reduce=reduce)
    dtype = torch.float32 if state.parameter == SIZES["float32"] else getattr(torch, state.compute)
    if strategy_options(trainer.get("strategy")).get("bf16_weights") == "stochastic":
        # Weights and kept gradients are bf16; gradients are reduced, and steps taken, in single precision.
        state, dtype = replace(state, parameter=2, gathered=2, gradient=2, reduced=4), torch.float32
    optimizer = measure_optimizer(on_meta(model), dtype)
    in_backward = find_part(config, "OptimizerInBackward") is not None
    return replace(state, state=optimizer.moments * dtype.itemsize, steps_in_backward=in_backward), optimizer


def state_format(precision: str, *, fused: bool, gather: str | None = None, reduce: str | None = None) -> StateFormat:
    """Returns the bytes of a run's tensors on an accelerator; the optimizer is Adam, with two moments.

    Args:
        precision: Precision of the Trainer, by its full name.
        fused: Whether the run compiles its model.
        gather: Dtype in which parameters are gathered; None for that of the products.
        reduce: Dtype in which gradients are reduced; None for that of the stored parameters.

    Raises:
        DloError: The precision is another than 32-bit, bfloat16 or float16, or has no such dtype.
    """
    if precision not in _PRECISIONS:
        raise DloError(
            f"trainer.precision must be one of {', '.join(_PRECISIONS)} to be planned, got {precision}; set bf16-mixed"
        )
    compute, parameter, gathered, gradient, reduced = _PRECISIONS[precision]
    own = dict.fromkeys(["float32", compute] if precision.endswith("mixed") else [compute])
    for key, name in (("gather", gather), ("reduce", reduce)):
        if name not in (None, *own):
            raise DloError(
                f"--fix {key} must be {' or '.join(own)} under precision {precision}, got {name}; leave it out, or set"
                " another trainer.precision"
            )
    gathered, reduced = SIZES.get(gather or "", gathered), SIZES.get(reduce or "", reduced)
    return StateFormat(
        compute,
        parameter,
        gathered,
        gradient,
        reduced,
        2.0 * parameter,
        precision.endswith("mixed"),
        fused=fused,
        compiled=fused,
    )


def profile_run(model: Any, datamodule: Any, state: StateFormat, device: str = "cuda") -> ModelProfile:
    """Returns the profile of a config's model.

    Under autocast a layout that gathers parameters in half precision has other activations than one that casts them.

    A LightningModule other than a Task has no plan: only data parallelism and ZeRO divide it.

    Raises:
        DloError: The shapes of a batch are unknown, or a step fails on fake tensors.
    """
    model = on_meta(model)
    plan = _completed(model, datamodule) if isinstance(model, Task) else _inferred(model)
    batch = batch_of(model, datamodule)
    profile = profile_formats(model, batch, plan, state, device)
    # Rules of projections that were inferred do not say what runs between them.
    has_own = isinstance(model, Task) and has_rules(model.parallel_plan())
    return profile if has_own else replace(profile, sequence_parallel=False)


def profile_formats(model: Any, batch: Any, plan: ParallelPlan | None, state: StateFormat, device: str) -> ModelProfile:
    """Returns a model's profile on the parameters that a run gathers, and on those that autocast casts if there are."""
    dtype: torch.dtype = getattr(torch, state.compute)
    if not state.autocasts:
        return profile_model(model, batch, plan, dtype=dtype, device=device)
    uncast = profile_model(model, batch, plan, dtype=torch.float32, autocast=dtype, device=device)
    if state.gathered > dtype.itemsize:
        return uncast
    profile = profile_model(model, batch, plan, dtype=dtype, autocast=dtype, device=device)
    return replace(profile, uncast=uncast)


def _completed(task: Task, datamodule: Any) -> ParallelPlan:
    """Returns the plan of a task's model with tensor rules, inferred ones if it brings none and some can be found."""
    plan = task.parallel_plan()
    try:
        return TensorParallel().complete_plan(task, plan, 1, datamodule)
    except DloError:
        return plan  # The report's reason why tp is left out says that the plan has no rules.


def on_meta(model: Any) -> Any:
    """Returns a task or LightningModule with its model on the meta device, if it is not built yet."""
    if isinstance(model, Task):
        return model.on_meta()
    if not any(True for _ in model.parameters()):
        with torch.device("meta"):
            model.configure_model()
    return model


def batch_of(model: Any, datamodule: Any) -> Any:
    """Returns a batch with the shapes of a run's: the task's example, or the first of its data."""
    batch = find_example(model, datamodule) if isinstance(model, Task) else None
    return first_batch(datamodule) if batch is None else batch


def _inferred(model: nn.Module) -> ParallelPlan | None:
    try:
        return ParallelPlan.infer(model)
    except DloError:
        return None


def first_batch(datamodule: Any) -> Any:
    """Returns the first training batch of a datamodule, for its shapes.

    Raises:
        DloError: The config lacks a datamodule, or it cannot load its data here.
    """
    if datamodule is None:
        raise DloError(
            "data must be a datamodule where the task has no example_batch, got none; implement Task.example_batch, or"
            " add data: to the config"
        )
    try:
        datamodule.prepare_data()
        datamodule.setup("fit")
        return next(iter(datamodule.train_dataloader()))
    except DloError:
        raise
    except Exception as error:
        raise DloError(
            f"data must load a batch here where the task has no example_batch, got {type(error).__name__}: {error};"
            " implement Task.example_batch, which needs no data"
        ) from error

"""Plans a run from its config, and reports the plans as text, JSON and configs.

The state of the run's optimizer is measured: it takes a step on tensors like the parameters, fake tensors of their
shapes, or where it does not run on those, such as one whose state is quantised, real tensors of smaller shapes. So it
is right for a user's own optimizer.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.batches import tree_leaves
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensorMode
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_framework.units import format_bytes
from dlo_plugins.parallel.gathered_dtype import find_batch_norms
from dlo_plugins.parallel.optimizer_probe import Kind, probe_optimizer, shrink_shape, step_trial
from dlo_plugins.parallel.tensor.inferred_rules import has_rules
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.plan.layout import SIZES, Request, StateFormat
from dlo_plugins.plan.machine import Machine, load_machine
from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_plugins.plan.plan_config import find_part, read_batch, read_device, strategy_options, write_yaml
from dlo_plugins.plan.plan_search import Candidate, PlanSearch, Rejection, SearchResult, summarise_rejections
from dlo_plugins.plan.rank_memory import RankMemory
from dlo_plugins.plan.rank_verification import RankVerification

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


def _find_optimizers(found: Any) -> Iterator[Optimizer]:
    """Yields the optimizers in what `configure_optimizers` returns."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from _find_optimizers(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for entry in found:
            yield from _find_optimizers(entry)


def _moments(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Returns the bytes of the state for each byte of a parameter."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # torch prints the traceback of each operator that fails.
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _step(optimizer, group, shape, dtype)
    except Exception:
        try:
            return _step(optimizer, group, shrink_shape(shape), dtype)
        except Exception as error:
            raise DloError(
                f"optimizer must take a step on a tensor of shape {list(shape)} to be planned, got"
                f" {type(error).__name__} from {type(optimizer).__name__}: {error}; use another optimizer"
            ) from error
    finally:
        log.setLevel(level)


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
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    names = [name for name in tensor.__tensor_flatten__()[0] if name != "qmap"]
    return sum(_bytes(getattr(tensor, name)) for name in names)


#: What the figures lack, by the class of a part of the config.
_PARTS = {
    "LowPrecision": "products in 8 bits; they have the rate of the Trainer's precision",
    "Quantise": "the rounding of weights and inputs in training",
    "GradientCompression": "compression: gradients are reduced in full, and its buffers take no memory",
    "WeightEMA": "the average of the weights: another copy of each rank's trained parameters",
    "DiLoCo": "outer steps: ranks are taken to reduce gradients each step, and its copies take no memory",
    "Prune": "masks and removed weights; the model is the one before pruning",
    "Freeze": "parameters that are frozen in part of the run; all are taken to train",
    "LayerDrop": "blocks that are left out; all of them run",
    "StochasticDepthSchedule": "branches that are left out; all of them run",
    "TokenDrop": "tokens that are left out; all of them are computed",
    "SequenceLength": "shorter sequences in part of the run; rows have the data's full length",
    "ProgressiveResizing": "smaller images in part of the run; they have their full size",
    "DynamicBatchSize": "other batch sizes in part of the run",
    "MicroBatchFinder": "its own choice of the micro-batch, which replaces the plan's; leave it out",
}


def find_unmodelled(config: dict[str, Any], optimizer: OptimizerState, second_models: int = 0) -> list[str]:
    """Returns a sentence for each part of a run that the figures lack.

    Args:
        config: Config of the user.
        optimizer: State of the run's optimizer.
        second_models: Number of second models, such as a teacher.
    """
    found = []
    for name, what in _PARTS.items():
        options = find_part(config, name)
        rounds = name != "Quantise" or (options or {}).get("when") == "aware"
        if options is not None and rounds:
            found.append(f"{name}: {what}")
    strategy = strategy_options((config.get("trainer") or {}).get("strategy"))
    if strategy.get("async_tp"):
        found.append("async_tp: communication of tp that overlaps computation; all of it is exposed")
    if second_models:
        found.append("the second model, such as a teacher: its parameters take memory, and its forward time")
    if optimizer.error:
        found.append(
            f"the optimizer, which could not be built without a trainer ({optimizer.error}): Adam's two moments"
        )
    if optimizer.kind != "elementwise":
        found.append(
            f"{optimizer.name}: computation beyond what it reads and writes, full gradients for its step, and"
            " uneven shares: under sharding each rank steps full tensors"
        )
    return found


#: Bytes of a stored parameter, of one in use, of a gradient and of a reduced one, by the Trainer's precision.
_PRECISIONS = {
    "32-true": ("float32", 4, 4, 4, 4),
    "bf16-mixed": ("bfloat16", 4, 2, 4, 4),
    "16-mixed": ("float16", 4, 2, 4, 4),
    "bf16-true": ("bfloat16", 2, 2, 2, 2),
    "16-true": ("float16", 2, 2, 2, 2),
}


@dataclass(frozen=True)
class PlannedRun:
    """Plans of a run.

    Attributes:
        profile: Profile of its model.
        machine: Machine.
        request: Resources and wishes.
        nodes: Number of nodes.
        result: Result of the search.
        config: Config of the user.
        state: Bytes of the run's tensors.
        unmodelled: Sentences on what of the run is not in the figures.
    """

    profile: ModelProfile
    machine: Machine
    request: Request
    nodes: int
    result: SearchResult
    config: dict[str, Any]
    state: StateFormat
    unmodelled: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Writes each plan as a config, `plan_1.yaml` and so on, and returns the files.

        Raises:
            DloError: The folder cannot be written, or the config has no batch size to set.
        """
        texts = [write_yaml(c, self.config, self.nodes, self.state, n) for n, c in enumerate(self.result.candidates, 1)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [folder / f"plan_{number}.yaml" for number in range(1, len(texts) + 1)]
            for file, text in zip(files, texts, strict=True):
                file.write_text(text)
        except OSError as error:
            raise DloError(f"plan: --out must be a folder that can be written, got {folder}: {error}") from error
        return files


def plan_run(
    config: dict[str, Any], model: Any, datamodule: Any, gpus: int, nodes: int | None, options: argparse.Namespace,
    second_models: int = 0,
) -> PlannedRun:  # fmt: skip
    """Returns the plans of a run.

    Args:
        config: Config of the user.
        model: Task or LightningModule of the config, without recomputation.
        datamodule: Datamodule of the config, or None.
        gpus: Number of GPUs of all nodes.
        nodes: Number of nodes; None for as few as the machine allows.
        options: Checked options of `dlo plan`.
        second_models: Number of second models, such as a teacher.

    Raises:
        DloError: The model cannot be profiled, no layout is possible, or nothing fits.
    """
    batch = options.batch or read_batch(config)
    if batch is None:
        raise DloError(
            "plan: --batch must be the rows of a step where data.init_args.batch_size does not say, got none; set"
            " --batch 256"
        )
    state, optimizer = run_state(config, model, options.fix.get("gather"), options.fix.get("reduce"))
    if options.measure is not None:
        options.machine = measure_here(config, state, gpus, options.out)
    machine = load_machine(options.machine)
    nodes = nodes or -(-gpus // machine.ranks_per_node)
    if gpus % nodes:
        fix = f"set --gpus {gpus // nodes * nodes}" if gpus > nodes else f"set --nodes {gpus}"
        raise DloError(f"plan: --gpus must be divisible by --nodes, got {gpus} and {nodes}; {fix}")
    machine = replace(machine, ranks_per_node=gpus // nodes)
    machine.rate(state.compute)
    whole = find_part(config, "Compile")
    rotor = whole is None or whole.get("scope") == "blocks"
    request = Request(gpus, options.memory or machine.memory, batch, options.fix, options.top, rotor)
    profile = profile_run(model, datamodule, state, machine.device)
    verify = None
    if isinstance(model, Task) and profile.blocks:
        verify = RankVerification(model.on_meta(), datamodule, config, nodes, state, request.memory)
    result = PlanSearch(profile, machine, state, request).run(verify)
    unmodelled = find_unmodelled(config, optimizer, second_models)
    return PlannedRun(profile, machine, request, nodes, result, config, state, unmodelled)


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
    precision = str(trainer.get("precision") or "32-true")
    fused = any(find_part(config, name) is not None for name in ("Compile", "CompileBlocks"))
    if gather is None and find_batch_norms(model):
        gather = "float32"  # Batch norms refuse weights in half precision.
    state = state_format(precision, fused=fused, gather=gather, reduce=reduce)
    dtype = torch.float32 if state.parameter == SIZES["float32"] else getattr(torch, state.compute)
    if strategy_options(trainer.get("strategy")).get("bf16_weights") == "stochastic":
        # Weights and kept gradients are bf16; gradients are reduced, and steps taken, in single precision.
        state, dtype = replace(state, parameter=2, gathered=2, gradient=2, reduced=4), torch.float32
    optimizer = measure_optimizer(on_meta(model), dtype)
    in_backward = find_part(config, "OptimizerInBackward") is not None
    return replace(state, state=optimizer.moments * dtype.itemsize, steps_in_backward=in_backward), optimizer


def measure_here(config: dict[str, Any], state: StateFormat, gpus: int, out: Path | None) -> str:
    """Measures this machine for a config, writes a machine file, and returns its path."""
    from dlo_plugins.plan.measurement import measure_machine, write_machine

    path = (out or Path()) / "machine.yaml"
    write_machine(measure_machine(state.compute, gpus, read_device(config)), path)
    return str(path)


def state_format(precision: str, *, fused: bool, gather: str | None = None, reduce: str | None = None) -> StateFormat:
    """Returns the bytes of a run's tensors on an accelerator; the optimizer is Adam, with two moments.

    Args:
        precision: Precision of the Trainer.
        fused: Whether the run compiles its model.
        gather: Dtype in which parameters are gathered; None for that of the products.
        reduce: Dtype in which gradients are reduced; None for that of the stored parameters.

    Raises:
        DloError: The precision is another than 32-bit, bfloat16 or float16, or has no such dtype.
    """
    plain = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(precision, precision)
    if plain not in _PRECISIONS:
        raise DloError(
            f"trainer.precision must be one of {', '.join(_PRECISIONS)} to be planned, got {precision}; set bf16-mixed"
        )
    compute, parameter, gathered, gradient, reduced = _PRECISIONS[plain]
    own = dict.fromkeys(["float32", compute] if plain.endswith("mixed") else [compute])
    for key, name in (("gather", gather), ("reduce", reduce)):
        if name not in (None, *own):
            raise DloError(
                f"--fix {key} must be {' or '.join(own)} under precision {plain}, got {name}; leave it out, or set"
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
        plain.endswith("mixed"),
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
    found = profile_formats(model, batch, plan, state, device)
    # Rules of projections that were inferred do not say what runs between them.
    has_own = isinstance(model, Task) and has_rules(model.parallel_plan())
    return found if has_own else replace(found, sequence_parallel=False)


def profile_formats(model: Any, batch: Any, plan: ParallelPlan | None, state: StateFormat, device: str) -> ModelProfile:
    """Returns a model's profile on the parameters that a run gathers, and on those that autocast casts if there are."""
    dtype: torch.dtype = getattr(torch, state.compute)
    if not state.autocasts:
        return profile_model(model, batch, plan, dtype=dtype, device=device)
    uncast = profile_model(model, batch, plan, dtype=torch.float32, autocast=dtype, device=device)
    if state.gathered > dtype.itemsize:
        return uncast
    found = profile_model(model, batch, plan, dtype=dtype, autocast=dtype, device=device)
    return replace(found, uncast=uncast)


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
    batch = model.example_batch(datamodule) if isinstance(model, Task) else None
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


def report_json(planned: PlannedRun) -> dict[str, Any]:
    """Returns the plans and the nearest rejections as JSON data."""
    return {
        "machine": planned.machine.name,
        "gpus": planned.request.gpus,
        "nodes": planned.nodes,
        "memory": planned.request.memory,
        "global_batch": planned.request.global_batch,
        "parameters": planned.profile.parameters,
        "layouts": planned.result.count,
        "not_in_figures": planned.unmodelled,
        "plans": [candidate.to_json() for candidate in planned.result.candidates],
        "rejected": [
            {"layout": str(r.layout), "kind": r.kind, "value": r.value, "limit": r.limit, "text": str(r)}
            for r in _nearest(planned)
        ],
    }


def report_text(planned: PlannedRun) -> str:
    """Returns the plans and the nearest rejections as text."""
    request, profile = planned.request, planned.profile
    unit = "tokens/s" if profile.length else "rows/s"
    lines = [
        f"{profile.model}, {profile.parameters:,} parameters, on {request.gpus} {planned.machine.name}"
        f" with {request.memory / 1e9:.4g} GB, {planned.nodes} node{'s' * (planned.nodes > 1)}, {request.global_batch}"
        " rows a step",
        f"{planned.result.count:,} layouts, of which {len(planned.result.rejections):,} were rejected",
        "",
    ]
    for number, candidate in enumerate(planned.result.candidates, 1):
        lines += _candidate_lines(number, candidate, unit)
    lines += [f"not in the figures: {what}" for what in planned.unmodelled]
    rejected = [f"  {rejection}" for rejection in _nearest(planned)]
    lines += ["", "rejected, the nearest:", *rejected] if rejected else []
    sizes = {f"tp={size}" for size in range(2, request.gpus + 1) if request.gpus % size == 0} | {"tp"}
    lines += [f"  {why}" for key, why in profile.why_not.items() if key in sizes][:2]
    return "\n".join(lines)


def _nearest(planned: PlannedRun) -> list[Rejection]:
    result = planned.result
    return summarise_rejections(result.rejections, result.candidates[0].time.total)


def _candidate_lines(number: int, candidate: Candidate, unit: str) -> list[str]:
    time, memory = candidate.time, candidate.memory
    seconds = [f"{name} {value / time.total:.0%}" for name, value in vars(time).items() if value / time.total >= 0.005]
    parts = [
        f"{f.name} {getattr(memory, f.name) / 1e9:.1f}" for f in fields(RankMemory) if getattr(memory, f.name) > 5e7
    ]
    return [
        f"{number}. {candidate.layout}",
        f"   {time.total:.3g} s a step, {candidate.throughput:,.0f} {unit}, MFU {candidate.mfu:.1%}:"
        f" {', '.join(seconds)}",
        f"   {memory.total / 1e9:.1f} GB a rank: {', '.join(parts)}"
        + (f"; {format_bytes(candidate.host_bytes)} on the host" if candidate.host_bytes else ""),
        f"   {candidate.reason}" + ("; simulated ranks run it" if candidate.is_verified else ""),
        *([f"   {candidate.caveat}"] if candidate.caveat else []),
    ]

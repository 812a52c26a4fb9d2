"""Simulates ranks of a mesh of any size in one process, without memory, and checks a training step on them.

A simulated rank runs the code of a real run: the strategy's appliers cut the model, the pipeline keeps its stages,
FSDP2 shards them, and a step runs forward and backward. Tensors are torch's fake tensors (`FakeTensorMode`: shapes and
dtypes without values), and the process group is torch's fake one, in which each collective returns at once.

Departure from a run: values are unknown, so the task's loss may be replaced by one with the same communication
(:func:`substitute_loss`), and each row of a batch is one document.

:func:`dry_run_step` tries a small batch on each distinct rank before processes start. A failure is an error only if
the same step succeeds on one rank with the uncut model. So an operator without a fake implementation, or a forward that
branches on values, raises nothing: such a model is checked only partly.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework import fake_kernels
from dlo_framework.batches import batch_size, map_rows, tree_leaves, tree_map
from dlo_framework.distributed.gradient_check import may_freeze, still_trained, trains_by_loss, unused_message
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.vocab_parallel import shard_of
from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.plan import Applier, ParallelPlan, Phase, Rule
from dlo_framework.task import Task, find_example
from dlo_framework.task_abilities import WeighsMicroBatches
from dlo_plugins.parallel.fsdp.sharded_optimizers import UsedParams
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.mesh.parallelize import MeshOptions, ParallelRun, parallelize
from dlo_plugins.parallel.mesh.pipelined_task import PipelinedTask, PipelineOptions
from dlo_plugins.parallel.pipeline.model_stages import make_stages
from dlo_plugins.parallel.pipeline.pipeline_schedules import make_placement, make_schedule
from dlo_plugins.parallel.tensor.rule_candidates import block_kind

#: Device of the fake tensors.
_DEVICE = torch.device("cpu")
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_CONVERTED = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def fix_split(task: Task, strategy: Any, spec: MeshSpec, datamodule: Any) -> PipelineOptions:
    """Returns a strategy's pipelining with the blocks of each stage fixed, so that ranks need not count costs.

    Args:
        task: Task with its model on the meta device.
        strategy: MeshStrategy.
        spec: Mesh, without -1.
        datamodule: Datamodule that may know the batch's shapes.
    """
    pipelining: PipelineOptions = strategy.pipelining
    if spec.pp == 1:
        return pipelining
    split = pipelining.choose_split(task, task.parallel_plan(), spec.pp, datamodule)
    return replace(pipelining, split=None if isinstance(split, str) else list(split))


@contextlib.contextmanager
def simulated_rank(
    task: Task,
    strategy: Any,
    pipelining: PipelineOptions,
    spec: MeshSpec,
    rank: int,
    batch: Any = None,
    *,
    own_loss: bool = False,
) -> Iterator[RankView]:
    """Makes this process a rank of a mesh inside the block, with its part of a task cut and sharded.

    Args:
        task: Task with its model on the meta device; it is not changed.
        strategy: MeshStrategy.
        pipelining: Options of its pipeline, with blocks assigned to stages.
        spec: Mesh, without -1.
        rank: Number of the rank.
        batch: Batch of one data-parallel rank, or None.
        own_loss: Whether a step computes the task's own loss; by default :func:`substitute_loss`.

    Raises:
        DloError: The process is already a rank, or the model cannot be cut.
    """
    if dist.is_initialized():
        raise DloError(
            "a mesh simulation must run outside of process groups, got a rank of one; run it in its own process"
        )
    precision = str(strategy.precision_plugin.precision)
    with (
        isolate_rng(include_cuda=False),
        fake_world(rank, spec.world_size),
        fake_kernels.fake_tensors(),
    ):
        own = fake_kernels.fake_copy(task, _CONVERTED.get(precision))
        appliers = copy.deepcopy(strategy.appliers)
        view = RankView(
            MeshOptions(spec, appliers, pipelining, precision, _DEVICE), tree_map(fake_kernels.fake_like, batch)
        )
        with _autocast(precision):
            view.cut_and_shard(own, own_loss)
            yield view


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of a fake world of any size inside the block, without communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it to print the rank, and does not restore it.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def substitute_loss(model: nn.Module, outputs: Any, batch: Any) -> Tensor:
    """Returns a scalar of the outputs, with the communication of a loss over a split vocabulary.

    Args:
        model: Model, whose output projection may be split over the ranks of tensor parallelism.
        outputs: Outputs of the model: hidden states `[B, L, D]` where the task computes its loss from them.
        batch: Batch, which is not used.
    """
    heads = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    split_head = next(((module, shard) for module in heads if (shard := shard_of(module)) is not None), None)
    first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad)
    if split_head is None or first.shape[-1] == split_head[1].size:
        return first.float().sum()
    module, shard = split_head
    logits = module(shard.enter(first.flatten(0, -2)), split=True).float()
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return shard.cross_entropy(logits, targets).sum()


class RankView:
    """Rank of a fake world, with a fake task.

    Args:
        options: Options of the run, with blocks assigned to stages.
        batch: Batch of fake tensors, or None.

    Attributes:
        task: Fake task, once it has been cut.
        sharded: Sharding of the task, once it has been cut.
        pipelined: Pipelined task; None without a pipeline.
        groups: Process groups of the rank.
        without_gradient: Names of the trainable parameters without a gradient in the last step.
    """

    task: Any
    sharded: ShardedModule

    def __init__(self, options: MeshOptions, batch: Any) -> None:
        self.options, self._batch = options, batch
        self.pipelined: PipelinedTask | None = None
        self.without_gradient: list[str] = []
        self.groups = _FakeGroups(options.spec, _DEVICE.type)

    @property
    def model(self) -> nn.Module:
        """Model of the task, after it has been cut."""
        model: nn.Module = self.task.model
        return model

    def cut_and_shard(self, task: Task, own_loss: bool = False) -> None:
        """Prepares a task as a run does before its first step."""
        self.task = task
        if not own_loss:
            task.__dict__["loss"] = partial(substitute_loss, task.model)
        declared = task.abilities()
        task.__dict__["abilities"] = lambda: declared | {WeighsMicroBatches: _EqualWeights()}
        self.options.appliers.ordered.append(_WhenCut(self._record_stages))
        self.sharded = parallelize(ParallelRun(task, self.options, self.groups, torch.initial_seed())).sharded
        self._usage = UsedParams(self.sharded)
        self._usage.announced = True  # Each backward here belongs to a step.

    def _record_stages(self, pipelined: PipelinedTask) -> None:
        self.pipelined = pipelined
        if self._batch is not None:
            parts = pipelined.split_training_batch(self._shard_batch(self._batch))
            policy = self.options.shard_options(self.task).policy
            with _materialised(pipelined.task.model, policy.param_dtype):
                pipelined.pipeline.record_shapes(parts, pipelined._forward)

    def _shard_batch(self, batch: Any) -> Any:
        return self.options.appliers.context.shard_batch(batch)

    def step(self) -> None:
        """Runs forward and backward of the batch, as ``MeshEngine`` does."""
        task, sharded = self.task, self.sharded
        for parameter in sharded.parameters.values():
            parameter.grad = None
        self._usage.used.clear()
        batch = self._shard_batch(self._batch)
        if self.pipelined is None:
            loss = sharded.call(lambda: task.loss(_forward(task, batch), batch))
        else:
            sharded.set_sync(False)
            sharded.set_keep_gathered(True)
            sharded.gather_roots()
            self.pipelined.train(batch, torch.ones(()))
            self._usage.record_accumulated()
        sharded.set_keep_gathered(False)
        sharded.set_sync(True)
        if self.pipelined is None:
            loss.backward()
        else:
            sharded.reduce_accumulated()
        self.without_gradient = self._usage.absent()
        sharded.average_gradients()
        sharded.reduce_partial()
        if self.pipelined is not None:
            self.pipelined.pipeline.tied.sum_gradients()


def fewest_micro_batches(pipelining: PipelineOptions, spec: MeshSpec) -> int:
    """Returns the smallest number of micro-batches that a schedule can run and that divides the wanted number."""
    wanted = pipelining.count_micro_batches(spec.pp)
    for number in (1, spec.pp, 2 * spec.pp):
        with contextlib.suppress(DloError):
            if wanted % number == 0:
                make_schedule(pipelining.schedule, spec.pp, number, pipelining.stages_per_rank)
                return number
    return wanted


class _EqualWeights(WeighsMicroBatches):
    """Equal weights of all micro-batches: placeholders have no samples to count."""

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> list[float]:
        """Returns the weights."""
        return [1 / len(micro_batches)] * len(micro_batches)


class _WhenCut(Applier):
    """Calls a function with the pipelined task, after the model is cut into stages and before it is sharded."""

    phase, axis, needs_plan = Phase.STAGES, "pp", False

    def __init__(self, callback: Callable[[PipelinedTask], None]) -> None:
        self._callback = callback

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Leaves the model alone."""

    def apply_to_run(self, run: Any) -> None:
        """Calls the function."""
        self._callback(run.pipelined)


class _FakeGroups(MeshGroups):
    """Groups whose meshes have real tensors of ranks, since torch reads their values."""

    def device_mesh(self) -> DeviceMesh:
        with fake_kernels.unset_fake_temporarily():
            return super().device_mesh()

    def data_mesh(self, copies: str, shards: str) -> DeviceMesh:
        with fake_kernels.unset_fake_temporarily():
            return super().data_mesh(copies, shards)

    def expert_mesh(self, copies: str, shards: str) -> DeviceMesh:
        with fake_kernels.unset_fake_temporarily():
            return super().expert_mesh(copies, shards)


def _forward(task: Any, batch: Any) -> Any:
    args, kwargs = task.inputs(batch)
    return task.forward(*args, **kwargs)


@contextlib.contextmanager
def _materialised(module: nn.Module, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Makes other ranks' stages runnable inside the block, with parameters in the dtype that sharding gathers.

    Args:
        module: Model whose stages are not sharded yet.
        param_dtype: Dtype in which FSDP2 gathers parameters; None for their own.
    """
    places = list(fake_kernels.tensor_places(module))
    parameters = [place for place in places if isinstance(place[2], nn.Parameter)]
    buffers = [place for place in places if place[2].is_meta and not isinstance(place[2], nn.Parameter)]
    fake = [*fake_kernels.fake_places(parameters, param_dtype), *fake_kernels.fake_places(buffers)]
    with fake_kernels.tensors_replaced(fake):
        yield


def simulated_precision(precision: Any) -> Precision:
    """Returns a run's precision plugin for simulated CPU ranks; Lightning's Trainer takes fp16 on accelerators only.

    Args:
        precision: `trainer.precision` of the config; None for the default.
    """
    name = {"bf16": "bf16-mixed", "16": "16-mixed"}.get(str(precision), str(precision))
    if name in _AUTOCAST:
        return MixedPrecision(name, "cpu")  # type: ignore[arg-type]
    return HalfPrecision(name) if name in ("bf16-true", "16-true") else Precision()  # type: ignore[arg-type]


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(_DEVICE.type, dtype=dtype)


#: Rows of a micro-batch: batch norm needs more than one value.
_ROWS = 2
#: Axes that cut a model, in the order in which the fix tries smaller sizes.
_CUTTING = ("ep", "tp", "cp", "pp")


@dataclass(frozen=True)
class Failure:
    """Failure of a step.

    Attributes:
        error: Exception that was raised.
        rank: Number of the rank.
        where: Name of the innermost module of the model that was running; empty if none was.
        in_backward: Whether the backward raised it.
        is_certain: Whether a run fails in the same way on any number of ranks.
    """

    error: Exception
    rank: int
    where: str
    in_backward: bool
    is_certain: bool = False


def dry_run_step(
    strategy: Any,
    task: Task,
    spec: MeshSpec,
    datamodule: Any = None,
    *,
    trains: bool = True,
    callbacks: Sequence[Callback] = (),
    shortened_only: bool = False,
) -> None:
    """Checks that each distinct rank of a mesh can run a training step.

    A task without an `example_batch` is cut on each of them, without a step. A process that is already a rank checks
    nothing.

    Args:
        strategy: MeshStrategy.
        task: Task with its model on the meta device; it is not changed.
        spec: Mesh, without -1.
        datamodule: Datamodule that may know the shapes of a batch.
        trains: Whether the run trains, so that each trainable parameter must get a gradient.
        callbacks: Callbacks of the run; a user's callback may freeze parameters before the first step.
        shortened_only: Whether a failure with fewer blocks counts, where a single process can run those; by default the
            full model decides, which takes much longer.

    Raises:
        DloError: A rank's step fails that a single process can run; the message has the layer, its rules, and a mesh
            that works. Or a step leaves trainable parameters without a gradient, which is an error of the run too.
    """
    if dist.is_initialized():
        return
    example = find_example(task, datamodule)
    if example is None:
        _Rehearsal(strategy, task, datamodule, None, own_loss=False, tp=spec.tp).check(spec)
        return
    trains = trains and trains_by_loss(task) and not strategy.appliers.shard.find_unused
    trains = trains and not any(may_freeze(callback) for callback in callbacks)
    failure: Failure | None = None
    models = [tried for tried in (_shortened(task, strategy, spec), task) if tried is not None]
    models = models[:1] if shortened_only else models
    for tried in models:
        # A loss that needs values or a trainer cannot run: then the substitute loss decides.
        for own_loss in (True, False):
            rehearsal = _Rehearsal(strategy, tried, datamodule, example, own_loss, tp=spec.tp)
            failure = rehearsal.run(spec, needs_gradients=trains and own_loss)
            if failure is None:
                return
            if _is_unsupported(failure):
                if not own_loss:
                    _log_unchecked(failure)
                    return
            elif failure.is_certain or rehearsal.run(MeshSpec(dp_shard=1)) is None:
                if tried is models[-1]:
                    raise _refusal(failure, rehearsal, spec) from failure.error
                break  # Blocks that others need may have been removed.
    if failure is not None:
        _log_unchecked(failure)


def _log_unchecked(failure: Failure) -> None:
    """Logs that no step could be rehearsed, with or without a mesh, so that the check was only partial."""
    why = str(failure.error).partition("\n")[0][:200] or type(failure.error).__name__
    where = f" in {failure.where}" if failure.where else ""
    rank_zero_info(f"the mesh was checked without a step, because a step fails on fake tensors: {why}{where}")


class _Rehearsal:
    """Runner of a task's steps on ranks of any mesh."""

    def __init__(self, strategy: Any, task: Task, datamodule: Any, example: Any, own_loss: bool, tp: int) -> None:
        self.strategy, self.task, self._datamodule = strategy, task, datamodule
        self._example, self._own_loss = example, own_loss
        self.plan: ParallelPlan = task.parallel_plan()
        if tp > 1:
            self.plan = strategy.appliers.tensor.complete_plan(task, self.plan, tp, datamodule)

    def check(self, spec: MeshSpec) -> None:
        """Cuts the model for each distinct rank."""
        pipelining = fix_split(self.task, self.strategy, spec, self._datamodule)
        for rank in _distinct_ranks(self.task, self.plan, pipelining, spec):
            with simulated_rank(self.task, self.strategy, pipelining, spec, rank):
                pass

    def run(self, spec: MeshSpec, needs_gradients: bool = False) -> Failure | None:
        """Returns the first failure of a step of a mesh's distinct ranks; None if all succeed.

        Args:
            spec: Mesh, without -1.
            needs_gradients: Whether a trainable parameter without a gradient is a failure.
        """
        rank, names, absent = 0, {}, list[str]()
        try:
            pipelining = fix_split(self.task, self.strategy, spec, self._datamodule)
            parts = fewest_micro_batches(pipelining, spec) if spec.pp > 1 else 1
            pipelining = replace(pipelining, micro_batches=parts)
            batch = repeat_rows(self._example, _ROWS * parts)
            for rank in _distinct_ranks(self.task, self.plan, pipelining, spec):
                with simulated_rank(
                    self.task, self.strategy, pipelining, spec, rank, batch, own_loss=self._own_loss
                ) as view:
                    names = {id(module): name for name, module in view.model.named_modules()}
                    view.step()
                    if needs_gradients:
                        absent += view.without_gradient
        except Exception as error:
            in_backward = any(f.f_code.co_name in ("backward", "_engine_run_backward") for f in _frames(error))
            return Failure(error, rank, _innermost(error, self.task.model, names), in_backward)
        if absent := still_trained(self.task, absent):
            message = unused_message(absent, self.strategy.allow_unused, self.task)
            return Failure(DloError(message), rank, "", in_backward=True, is_certain=True)
        return None


def _is_unsupported(failure: Failure) -> bool:
    """Returns whether fake tensors lack an implementation, so that the failure is not the model's."""
    error: BaseException | None = failure.error
    while error is not None:
        if isinstance(error, fake_kernels.UNSUPPORTED) or (
            isinstance(error, NotImplementedError) and "aten" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _distinct_ranks(task: Any, plan: ParallelPlan, pipelining: Any, spec: MeshSpec) -> list[int]:
    """Returns one rank for each kind of ranks whose stages have the same kinds of blocks."""
    if spec.pp == 1:
        return [0]
    where = make_placement(pipelining.schedule, spec.pp, pipelining.stages_per_rank)
    stages = make_stages(task.model, plan, where.stages, pipelining.split or "balanced")
    by_kind: dict[Any, int] = {}
    for pp in range(spec.pp):
        held = where.stages_of(pp)
        blocks = [block_kind(task.model.get_submodule(name)) for stage in held for name in stages.blocks_of(stage)]
        ends = [stage for stage in held if stage in (0, where.stages - 1)]
        by_kind.setdefault((tuple(ends), tuple(blocks)), spec.rank(Coordinates(pp, 0, 0, 0, 0)))
    return list(by_kind.values())


def _shortened(task: Any, strategy: Any, spec: MeshSpec) -> Any:
    """Returns a copy of a task with fewer blocks, at least one of each kind; None if no block can be removed.

    With a given split, which counts the blocks, all are kept.
    """
    pipelining = strategy.pipelining
    blocks: list[str] = task.parallel_plan().block_names(task.model)
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1 or (spec.pp > 1 and pipelining.split is not None):
        return None
    parent = task.model.get_submodule(next(iter(parents)))
    if not isinstance(parent, nn.ModuleList) or len(parent) != len(blocks):
        return None
    seen: set[Any] = set()
    kept = 0
    for number, block in enumerate(parent):
        kind = block_kind(block)
        if kind not in seen:
            seen.add(kind)
            kept = number + 1
    stages = make_placement(pipelining.schedule, spec.pp, pipelining.stages_per_rank).stages if spec.pp > 1 else 1
    kept = max(kept, stages, 2)
    if kept >= len(blocks):
        return None
    short: Any = fake_kernels.copy_modules(task)
    del short.model.get_submodule(next(iter(parents)))[kept:]
    return short


def repeat_rows(example: Any, rows: int) -> Any:
    """Returns an example batch whose first sample is repeated for this number of rows."""

    def repeat(values: Any) -> Any:
        return values[:1].expand(rows, *values.shape[1:]) if isinstance(values, Tensor) else values

    return map_rows(repeat, example, batch_size(example))


# --- message of a failure --------------------------------------------------------------------------------------


def _frames(error: BaseException) -> Iterator[Any]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _innermost(error: BaseException, model: nn.Module, names: dict[int, str]) -> str:
    """Returns the name of the innermost module of a model in which an error was raised."""
    innermost = ""
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            innermost = names[id(module)]
    return innermost


def _refusal(failure: Failure, rehearsal: _Rehearsal, spec: MeshSpec) -> DloError:
    """Returns the error for a user: the rule, the failure, and a mesh that works."""
    if isinstance(failure.error, DloError):
        return failure.error
    model, where = type(rehearsal.task.model).__name__, failure.where
    what = f"'{where}'{_rules(rehearsal, where)}" if where else "the model"
    phase = "backward" if failure.in_backward else "forward"
    lines = str(failure.error).strip().splitlines()
    reason = f": {lines[0]}" if lines else ""
    return DloError(
        f"each rank of {_axes(spec)} must be able to train its part of {model}, got {type(failure.error).__name__} in"
        f" the {phase} of {what} on rank {failure.rank}{reason}; {_fix(rehearsal, spec)}"
    )


def _rules(rehearsal: _Rehearsal, where: str) -> str:
    """Returns the tensor rules of a module and its submodules, for a message."""
    rules: dict[str, str] = {}
    for name, _ in rehearsal.task.model.get_submodule(where).named_modules():
        full = f"{where}.{name}" if name else where
        rule = rehearsal.plan.rule_for(full)
        if rule not in (Rule.REPLICATE, Rule.SEQUENCE):
            rules.setdefault(name or where.rpartition(".")[2], str(rule))
    shown = ", ".join(f"{name}: {rule}" for name, rule in list(rules.items())[:6])
    return f" (rules {shown})" if shown else ""


def _axes(spec: MeshSpec) -> str:
    sizes = {**spec.sizes, "ep": spec.ep}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _fix(rehearsal: _Rehearsal, spec: MeshSpec) -> str:
    """Returns the fix: the largest size of one axis with which the step succeeds."""
    for axis in _CUTTING:
        size = spec.axis_size(axis)
        for smaller in (number for number in range(size - 1, 0, -1) if size % number == 0):
            tried = replace(spec, **{axis: smaller})
            if tried.dp_shard * tried.cp % tried.ep == 0 and rehearsal.run(tried) is None:
                advice = f"set {axis} to {smaller}"
                if axis == "tp":
                    advice += ", or change the plan's tensor rules for this module (Task.parallel_plan)"
                return advice
    return "use dp_shard for these ranks"

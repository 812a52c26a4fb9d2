"""Simulates one rank of a mesh of any size in one process, without memory.

It runs the code of a real run: the strategy's appliers cut the model, the pipeline keeps its stages, FSDP2 shards them,
and a step runs forward and backward. Tensors are torch's fake tensors (`FakeTensorMode`: shapes and dtypes without
values), and the process group is torch's fake one, in which each collective returns at once.

Departure from a run: values are unknown, so the task's loss is replaced by one with the same communication
(:func:`substitute_loss`), and each row of a batch is one document.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.applier import Applier, Phase
from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.vocab_parallel import shard_of
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import (
    TensorPlace,
    fake_copy,
    fake_like,
    fake_places,
    fake_tensors,
    tensor_places,
    tensors_replaced,
    unset_fake_temporarily,
)
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_plugins.fsdp.sharding import ShardedModule
from dlo_plugins.fsdp.used_params import UsedParams
from dlo_plugins.mesh.parallelize import MeshOptions, ParallelRun, parallelize
from dlo_plugins.mesh.pipeline_options import PipelineOptions
from dlo_plugins.mesh.pipelined_task import PipelinedTask
from dlo_plugins.pipeline.pipeline_schedules import make_schedule

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
        fake_tensors(),
    ):
        own = fake_copy(task, _CONVERTED.get(precision))
        appliers = copy.deepcopy(strategy.appliers)
        view = RankView(MeshOptions(spec, appliers, pipelining, precision, _DEVICE), tree_map(fake_like, batch))
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
    found = next(((module, shard) for module in heads if (shard := shard_of(module)) is not None), None)
    first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad)
    if found is None or first.shape[-1] == found[1].size:
        return first.float().sum()
    module, shard = found
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
        task.__dict__["micro_batch_weights"] = lambda parts: [1 / len(parts)] * len(parts)
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
        """Runs forward and backward of the batch, as :class:`~dlo_plugins.mesh.mesh_engine.MeshEngine` does."""
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
            loss = sharded.call_with_backwards(self.pipelined.train, batch, torch.ones(()))["loss"]
            self._usage.record_accumulated()
        sharded.set_keep_gathered(False)
        sharded.set_sync(True)
        loss.backward()
        self.without_gradient = self._usage.absent()
        sharded.average_gradients()
        sharded.reduce_partial_gradients()
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
        with unset_fake_temporarily():
            return super().device_mesh()

    def data_mesh(self, copies: str, shards: str) -> DeviceMesh:
        with unset_fake_temporarily():
            return super().data_mesh(copies, shards)

    def expert_mesh(self, copies: str, shards: str) -> DeviceMesh:
        with unset_fake_temporarily():
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
    parameters, buffers = list[TensorPlace](), list[TensorPlace]()
    for place in tensor_places(module):
        if isinstance(place[2], nn.Parameter):
            parameters.append(place)
        elif place[2].is_meta:
            buffers.append(place)
    with tensors_replaced([*fake_places(parameters, param_dtype), *fake_places(buffers)]):
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

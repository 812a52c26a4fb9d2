"""One rank's part in a mesh of any size, in one process without memory: what it holds, and what passes in a step.

The code is the one that runs: the strategy's appliers cut the model, the pipeline takes its stages, FSDP2 shards them,
and a step goes forward and backward through all of it. Under it lie torch's fake tensors (`FakeTensorMode`: shapes and
dtypes without values) and its fake process group, in which each collective ends at once.

Departure from a run: values are not known, so the task's loss gives way to one that passes the same between ranks
(:func:`stand_in_loss`), and each row of a batch is one document.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.held import local
from dlo_framework.distributed.vocabulary import shard_of
from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.task import Task, batch_length
from dlo_plugins.fake_kernels import FakeKernels
from dlo_plugins.fsdp.sharding import Sharding
from dlo_plugins.fsdp.usage import Usage
from dlo_plugins.mesh.holdings import Held
from dlo_plugins.mesh.parts import rows_of
from dlo_plugins.mesh.pipelined import PipelinedTask
from dlo_plugins.mesh.pipelining import Pipelining
from dlo_plugins.mesh.traffic import Traffic, TrafficCount, grown
from dlo_plugins.pipeline.engine import Pipeline
from dlo_plugins.pipeline.gates import Passage, Shapes
from dlo_plugins.pipeline.layout import signatures
from dlo_plugins.pipeline.leaks import LeakCheck
from dlo_plugins.pipeline.schedules import make_schedule

#: Fake tensors say that they lie here.
_DEVICE = torch.device("cpu")
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_CONVERTED = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@dataclass(frozen=True)
class SimulatedRank:
    """A rank as it would be.

    Attributes:
        rank: its number.
        place: on the mesh.
        held: bytes of its parameters, their gradients and Adam's two moments.
        traffic: of one optimizer step; empty where no batch was given.
    """

    rank: int
    place: Coordinates
    held: Held
    traffic: tuple[Traffic, ...]


def simulate(task: Task, strategy: Any, spec: MeshSpec, ranks: Sequence[int], batch: Any = None) -> list[SimulatedRank]:
    """Returns what chosen ranks of a mesh hold, and what passes between them and others in an optimizer step.

    A step is one batch: without a pipeline one forward and backward, with one as many as there are micro-batches.

    Args:
        task: whose model may be there already or not; it is left as it is.
        strategy: A MeshStrategy with its appliers, schedule and precision; its own axes do not count.
        spec: the mesh, without -1.
        ranks: to be looked at, one after the other.
        batch: of one data-parallel rank, as the task's loaders give it; of its tensors shapes and dtypes alone count,
            and they may lie on the meta device. None counts no traffic.

    Raises:
        DloError: in a process that is a rank of something already, and if the model cannot be cut so.
    """
    task = task.on_meta()
    pipelining = fixed_pipelining(task, strategy, spec, None)
    found = []
    for rank in ranks:
        with simulated_rank(task, strategy, pipelining, spec, rank, batch) as view:
            traffic = () if batch is None else view.traffic_of_a_step()
            found.append(SimulatedRank(rank, spec.coordinates(rank), held_bytes(view.sharding), traffic))
    return found


def fixed_pipelining(task: Task, strategy: Any, spec: MeshSpec, datamodule: Any) -> Pipelining:
    """Returns a strategy's pipelining with the blocks of each stage fixed, so that no rank has to weigh them.

    Args:
        task: with its model on the meta device.
        strategy: A MeshStrategy.
        spec: the mesh, without -1.
        datamodule: may tell the batch's shapes.
    """
    pipelining: Pipelining = strategy.pipelining
    if spec.pp == 1:
        return pipelining
    split = pipelining.split_of(task, task.parallel_plan(), spec.pp, datamodule)
    return replace(pipelining, split=None if isinstance(split, str) else list(split))


@contextlib.contextmanager
def simulated_rank(
    task: Task,
    strategy: Any,
    pipelining: Pipelining,
    spec: MeshSpec,
    rank: int,
    batch: Any = None,
    *,
    own_loss: bool = False,
) -> Iterator[RankView]:
    """Makes this process a rank of a mesh inside the block, with its part of a task cut and sharded.

    Args:
        task: with its model on the meta device; it is left as it is.
        strategy: A MeshStrategy.
        pipelining: its pipeline's, with blocks shared out to stages.
        spec: the mesh, without -1.
        rank: Number of the rank.
        batch: of one data-parallel rank, or None.
        own_loss: Whether a step computes the task's own loss; by default :func:`stand_in_loss`.

    Raises:
        DloError: in a process that is a rank of something already, and if the model cannot be cut so.
    """
    if dist.is_initialized():
        raise DloError("a mesh is simulated in a process of its own, and this one is a rank already; leave its group")
    own = copy_modules(task)
    precision = str(strategy.precision_plugin.precision)
    with (
        isolate_rng(include_cuda=False),
        fake_world(rank, spec.world_size),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeKernels(),
    ):
        _make_fake(own, _CONVERTED.get(precision))
        view = RankView(strategy, pipelining, spec, _faked(batch))
        with _autocast(precision):
            view.cut_and_shard(own, own_loss)
            yield view


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of as many as one likes, inside the block; what it sends reaches nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before what it prints, and leaves that so.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def held_bytes(sharding: Sharding) -> Held:
    """Returns the bytes of what a rank holds of a module that has been cut and sharded.

    Gradients are those of a step's end, divided as parameters are; the optimizer is Adam, with two moments.
    """
    parameters = list(sharding.parameters.values())
    sizes = [(p.requires_grad, local(p).numel() * p.element_size()) for p in parameters]
    trained = sum(size for is_trained, size in sizes if is_trained)
    return Held(sum(size for _, size in sizes), trained, 2 * trained)


def stand_in_loss(model: nn.Module, outputs: Any, batch: Any) -> Tensor:
    """Returns a scalar that depends on the outputs and passes between ranks what a loss over a split vocabulary passes.

    Args:
        model: whose output projection may be split over the ranks of tensor parallelism.
        outputs: of it: hidden states `[B, L, D]` where the task computes its loss from them.
        batch: does not count.
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
    """A rank of a fake world, as a strategy has it there.

    Args:
        strategy: A MeshStrategy; a copy of it is used.
        pipelining: its pipeline's, with blocks shared out to stages.
        spec: of the world.
        batch: of fake tensors; None for none.

    Attributes:
        task: Fake task, once it has been cut.
        sharding: Of the module, once it has been cut.
        pipelined: The task as the pipeline's stages have it; None without a pipeline.
        without_gradient: Names of the trainable parameters that the last step gave no gradient.
    """

    task: Any
    sharding: Sharding

    def __init__(self, strategy: Any, pipelining: Pipelining, spec: MeshSpec, batch: Any) -> None:
        self.spec, self.pipelining, self._batch = spec, pipelining, batch
        self.pipelined: PipelinedTask | None = None
        self.without_gradient: list[str] = []
        self._groups = _FakeGroups(spec, _DEVICE.type)
        self._strategy = copy.copy(strategy)
        self._strategy.set_appliers(copy.deepcopy(strategy.appliers))
        self._strategy.parallel_devices = [_DEVICE] * spec.world_size
        self._strategy.cluster_environment = None
        self._strategy.pipelining, self._strategy._groups = pipelining, self._groups
        self._strategy.mesh_spec = lambda: spec
        self._strategy.broadcast = lambda obj, src=0: obj  # There is no other rank.

    @property
    def model(self) -> nn.Module:
        """The task's model, cut."""
        model: nn.Module = self.task.model
        return model

    def cut_and_shard(self, task: Task, own_loss: bool = False) -> None:
        """Does with a task what a run does with it before its first step."""
        self.task = task
        self._strategy._lightning_module = self._strategy.model = task
        if not own_loss:
            task.__dict__["loss"] = partial(stand_in_loss, task.model)
        task.__dict__["micro_batch_weights"] = lambda parts: [1 / len(parts)] * len(parts)
        self.sharding = self._strategy.parallelize(_Fresh(), self._when_cut)
        self._usage = Usage(self.sharding)
        self._usage.announced = True  # Every backward of a step here is the step's own.

    def _when_cut(self, pipelined: PipelinedTask) -> None:
        self.pipelined = pipelined
        if self._batch is not None:
            parts = pipelined.training_parts(self._shared(self._batch))
            with _all_here(pipelined.task.model):
                _learn_shapes(pipelined.pipeline, parts, pipelined._forward)

    def _shared(self, batch: Any) -> Any:
        return self._strategy._shared(batch)

    def traffic_of_a_step(self) -> tuple[Traffic, ...]:
        """Returns what passes in forward and backward of the batch.

        Micro-batches of one shape pass the same, each of them, so of many that go through a pipeline two counts are
        enough: those of steps with the fewest that the schedule can run, and with as many again.
        """
        wanted, least = self.pipelining.parts(self.spec.pp), fewest_parts(self.pipelining, self.spec)
        if self.pipelined is None or wanted % least or len(self.pipelined._split(self._batch, wanted)) != wanted:
            return self.step()
        rows = batch_length(self._batch)
        if rows % wanted or wanted <= 2 * least:
            return self.step()
        fewest, twice = (self._count(self._some(times * least, wanted)) for times in (1, 2))
        return grown(fewest, twice, wanted // least - 1)

    def _some(self, parts: int, of: int) -> Any:
        """Returns the rows of the batch's first micro-batches, and has the pipeline expect so many."""
        assert self.pipelined is not None
        self.pipelined.micro_batches = parts
        length = batch_length(self._batch)
        return rows_of(self._batch, length, 0, length // of * parts)

    def step(self) -> tuple[Traffic, ...]:
        """Runs forward and backward of the batch, and returns what passes."""
        return self._count(self._batch)

    def _count(self, batch: Any) -> tuple[Traffic, ...]:
        """Does what :class:`~dlo_plugins.mesh.steps.MeshSteps` does between Lightning's hooks, in their order."""
        task, sharding = self.task, self.sharding
        for parameter in sharding.parameters.values():
            parameter.grad = None
        self._usage.used.clear()
        batch = self._shared(batch)
        with TrafficCount(self._axis_of) as count:
            if self.pipelined is None:
                loss = sharding.call(lambda: task.loss(_forward(task, batch), batch))
            else:
                sharding.set_sync(False)
                sharding.set_keep_gathered(True)
                loss = sharding.call(self.pipelined.train, batch, torch.ones(()))["loss"]
                self._usage.record_accumulated()
            sharding.set_keep_gathered(False)
            sharding.set_sync(True)
            loss.backward()
            self.without_gradient = self._usage.absent()
            sharding.average_scalars()
            sharding.reduce_partial_gradients()
            if self.pipelined is not None:
                self.pipelined.pipeline.tied.sum_gradients()
        return count.found

    def _axis_of(self, name: str) -> str:
        axes = next((axes for axes, group in self._groups._groups.items() if group.group_name == name), None)
        return "all" if axes is None else " x ".join(axes)


def fewest_parts(pipelining: Pipelining, spec: MeshSpec) -> int:
    """Returns the smallest number of micro-batches that a schedule can run, and that divides the wanted one."""
    wanted = pipelining.parts(spec.pp)
    for number in (1, spec.pp, 2 * spec.pp):
        with contextlib.suppress(DloError):
            if wanted % number == 0:
                make_schedule(pipelining.schedule, spec.pp, number, pipelining.stages_per_rank)
                return number
    return wanted


class _Fresh:
    """What a strategy asks of a Trainer before its first step."""

    ckpt_path = None


class _FakeGroups(MeshGroups):
    """Groups whose meshes are made of real numbers: torch reads ranks off them."""

    def device_mesh(self) -> DeviceMesh:
        with unset_fake_temporarily():
            return super().device_mesh()

    def data_mesh(self, copies: str, shards: str) -> DeviceMesh:
        with unset_fake_temporarily():
            return super().data_mesh(copies, shards)


def _forward(task: Any, batch: Any) -> Any:
    args, kwargs = task.inputs(batch)
    return task.forward(*args, **kwargs)


def _learn_shapes(pipeline: Pipeline, parts: Sequence[Any], forward: Any) -> None:
    """Learns hidden states' shapes without other ranks, as :meth:`Pipeline.rehearse` does for meta tensors."""
    known = signatures(parts, pipeline.model, pipeline.device)
    needed = min(max(pipeline.own_stages) + 1, pipeline.stages.count - 1)
    for key, part in dict(zip(known, parts, strict=True)).items():
        hidden, shapes = None, Shapes()
        for stage in range(needed):
            check = LeakCheck() if stage else None
            passage = Passage(pipeline.model, pipeline.stages, stage, pipeline.device, hidden, shapes, True, check)
            result = passage.run(partial(forward, part))
            pipeline._shapes[stage + 1, key] = shapes = passage.known
            pipeline._exchange.learn(stage + 1, key, result, shapes)
            hidden = result.detach().requires_grad_(result.requires_grad)


def _entries(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for part in module.modules():
        for entries in (part._parameters, part._buffers):
            yield from ((entries, key, tensor) for key, tensor in list(entries.items()) if tensor is not None)


def _fake_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    new: Tensor = torch.empty(tensor.shape, dtype=wanted, device=_DEVICE)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):  # Those note there where they lie.
        new.__dict__.update(tensor.__dict__)  # Marks that optimizers' groupings look at.
    return new


def copy_modules(task: Task) -> Task:
    """Returns a copy of a task that has the task's own parameters and buffers: a model in memory takes none twice."""
    return copy.deepcopy(task, {id(tensor): tensor for _, _, tensor in _entries(task)})


def _make_fake(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Puts fake tensors in the place of a module's own; tied ones stay one."""
    made: dict[int, Tensor] = {}
    for entries, key, tensor in _entries(module):
        entries[key] = made.setdefault(id(tensor), _fake_like(tensor, dtype))


@contextlib.contextmanager
def _all_here(module: nn.Module) -> Iterator[None]:
    """Lets a forward go through other ranks' stages too, inside the block."""
    gone = [(entries, key, tensor) for entries, key, tensor in _entries(module) if tensor.device.type == "meta"]
    for entries, key, tensor in gone:
        entries[key] = _fake_like(tensor)
    try:
        yield
    finally:
        for entries, key, tensor in gone:
            entries[key] = tensor


def _faked(batch: Any) -> Any:
    return tree_map(lambda leaf: _fake_like(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(_DEVICE.type, dtype=dtype)

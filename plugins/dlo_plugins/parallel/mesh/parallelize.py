"""Parallelizes a module on a mesh: every applier in the order of its phase, the pipeline's cut and FSDP included."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlo_framework.data.description import run_datamodule
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.meta_init import check_initialisable, on_meta
from dlo_framework.errors import DloError
from dlo_framework.local_memory import memory_of
from dlo_framework.mesh import MeshSpec
from dlo_framework.placed_model import Context, PlacedModel
from dlo_framework.plan import Applier, ParallelPlan, Phase, named_tensors
from dlo_framework.shards import Layout, get_layout
from dlo_framework.strategy_contract import plain_name
from dlo_framework.task import Task
from dlo_plugins.parallel.context.context_parallel import ContextParallel
from dlo_plugins.parallel.experts.expert_parallel import ExpertParallel
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.sharding import ShardedModule, ShardOptions
from dlo_plugins.parallel.gathered_dtype import Bf16Weights
from dlo_plugins.parallel.mesh.pipelined_task import PipelinedTask, PipelineOptions, check_inside
from dlo_plugins.parallel.pipeline.model_stages import Split
from dlo_plugins.parallel.pipeline.pipeline_engine import MicroBatchState, Pipeline
from dlo_plugins.parallel.pipeline.pipeline_schedules import flushes
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.user_code import check_held


@dataclass
class MeshAppliers:
    """Appliers of a run on a mesh.

    Attributes:
        tensor: Applier of the axis `tp`.
        context: Applier of the axis `cp`.
        experts: Applier of the axis `ep`.
        shard: Applier of the data axes.
        ordered: All appliers, in the order of their phases.
    """

    tensor: TensorParallel
    context: ContextParallel
    experts: ExpertParallel
    shard: FullyShard
    ordered: list[Applier]

    @classmethod
    def from_options(
        cls,
        given: Sequence[Applier],
        cp_method: Literal["ring", "ulysses"],
        sequence_parallel: bool,
        async_tp: bool | int = False,
    ) -> MeshAppliers:
        """Returns the user's appliers, and those of the axes that the user has not given.

        Args:
            given: Appliers of the user.
            cp_method: Method of ContextParallel, unless the user gives that applier.
            sequence_parallel: Option of TensorParallel, unless the user gives that applier.
            async_tp: Option of TensorParallel, unless the user gives that applier.

        Raises:
            DloError: Two appliers have one class, an object is not an applier, or the options contradict each other.
        """
        for applier in given:
            if not isinstance(applier, Applier):
                raise DloError(
                    f"appliers must derive from dlo_framework.plan.Applier, got a {type(applier).__name__}; derive"
                    " its class from Applier"
                )
        kinds = [type(applier) for applier in given]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise DloError(f"appliers must have different classes, got {twice.__name__} twice; leave one out")
        tensor = _first(given, TensorParallel) or TensorParallel(sequence_parallel, async_tp)
        context = _first(given, ContextParallel) or ContextParallel(method=cp_method)
        experts = _first(given, ExpertParallel) or ExpertParallel()
        shard = _first(given, FullyShard) or FullyShard()
        missing = [applier for applier in (tensor, context, experts, shard) if applier not in given]
        return cls(tensor, context, experts, shard, sorted([*given, *missing], key=lambda applier: applier.phase))


Kind = TypeVar("Kind", bound=Applier)


def _first(appliers: Sequence[Applier], kind: type[Kind]) -> Kind | None:
    return next((applier for applier in appliers if isinstance(applier, kind)), None)


#: Key of a module's :class:`ParallelState` in its ``__dict__``.
_STATE = "_dlo_parallel"


@dataclass(frozen=True)
class MeshOptions:
    """Options of MeshStrategy for one run.

    Attributes:
        spec: Mesh, without -1.
        appliers: Appliers of the run.
        pipelining: Options of the pipeline.
        precision: Precision of the Trainer.
        device: Device on which this rank computes.
        bf16_weights: Kind of bf16 weights; None for weights in the precision's dtype.
        separate_copies: Whether each copy of the model trains by itself.
    """

    spec: MeshSpec
    appliers: MeshAppliers
    pipelining: PipelineOptions
    precision: str
    device: torch.device
    bf16_weights: Bf16Weights | None = None
    separate_copies: bool = False

    @property
    def cuts_model(self) -> bool:
        """Whether the mesh cuts the model's computation, and not only its state."""
        return self.spec.pp * self.spec.cp * self.spec.tp * self.spec.ep > 1

    def shard_options(self, module: LightningModule | None) -> ShardOptions:
        """Returns the options by which a module's parameters are sharded; None for a module that is not known yet."""
        whole_steps, spec = module is None or module.automatic_optimization, self.spec
        if spec.pp == 1 or flushes(self.pipelining.schedule):
            # With stochastic rounding too FSDP2 gathers bf16: it then sums gradients in single precision.
            gathered = None if self.bf16_weights is None else "bfloat16"
            return self.appliers.shard.options(self.precision, spec, self.device, module, whole_steps, gathered)
        # Two versions of the parameters are in use all the time, so that each rank has both of them in full.
        alone = dataclasses.replace(spec, dp_replicate=1, dp_shard=1, cp=1)
        gathered = "bfloat16" if self.bf16_weights == "masters" else None
        options = self.appliers.shard.options(self.precision, alone, self.device, module, whole_steps, gathered)
        return dataclasses.replace(options, full_parameters=True)

    def cut_options(self) -> dict[str, Any]:
        """Returns the options, by name, that cannot change after the model has been cut."""
        spec, pipelining = self.spec, self.pipelining
        options: dict[str, Any] = {}
        if spec.pp > 1:
            options |= {"schedule": pipelining.schedule, "split": pipelining.split}
            options |= {"stages_per_rank": pipelining.stages_per_rank}
        if spec.cp > 1:
            options["cp_method"] = self.appliers.context.method
        if spec.tp > 1:
            options["sequence_parallel"] = self.appliers.tensor.sequence_parallel
            options["async_tp"] = self.appliers.tensor.async_tp
        return options

    def check(self, module: Any, datamodule: Any = None) -> Task:
        """Checks that the axes can cut a module's model; returns the module with the model on the meta device.

        Raises:
            DloError: They cannot; the message computes the nearest sizes that work.
        """
        self._check_task(module)
        task, spec = module.on_meta(), self.spec
        plan = self.checked_plan(task, datamodule)
        self.appliers.tensor.check(task.model, plan, spec.tp)
        self.appliers.context.check(task.model, plan, spec.cp, spec.tp)
        self.appliers.experts.check(task.model, plan, spec.ep)
        if spec.pp > 1:
            self.pipelining.check(task, plan, spec, datamodule)
        checked: Task = task
        return checked

    def checked_plan(self, task: Any, datamodule: Any = None) -> ParallelPlan:
        """Returns the plan of a task's model, with inferred tensor rules if it needs some and brings none.

        Raises:
            DloError: The module has none, the plan does not fit the model, or the loss needs what the mesh divides.
        """
        self._check_task(task)
        plan: ParallelPlan = task.parallel_plan()
        plan.validate(task.model)
        check_inside(task, self.spec, self.appliers.tensor.sequence_parallel)
        return plan if self.spec.tp == 1 else self.appliers.tensor.complete_plan(task, plan, self.spec.tp, datamodule)

    def _check_task(self, module: Any) -> None:
        if not isinstance(module, Task):
            raise DloError(
                f"a module with axes {self.spec} or appliers must have a parallel plan, got"
                f" {type(module).__name__} without one; make it a dlo_framework.Task (docs/write/task.md), or use"
                " dp_shard and dp_replicate alone"
            )


@dataclass
class ParallelState:
    """What a mesh has made of a module; the module keeps it for its next run, and for other strategies.

    Attributes:
        sharded: Sharding of the module.
        context: Applier that shards its sequences; None if no axis cuts the model.
        tensor: Applier that shards its layers; None if no axis cuts the model.
        pipelined: Task with the pipeline's stages; None without a pipeline.
        cut_options: Options of the strategy, by name, that cannot change after the model has been cut.
    """

    sharded: ShardedModule
    context: ContextParallel | None = None
    tensor: TensorParallel | None = None
    pipelined: PipelinedTask | None = None
    cut_options: dict[str, Any] = field(default_factory=dict)

    def attach(self, module: LightningModule) -> None:
        """Notes the state on its module."""
        module.__dict__[_STATE] = self

    @staticmethod
    def of(module: LightningModule) -> ParallelState | None:
        """Returns a module's state; None for a module that no mesh has sharded."""
        state = module.__dict__.get(_STATE)
        assert state is None or isinstance(state, ParallelState)
        return state

    def check_unchanged(self, options: MeshOptions, trains: bool) -> None:
        """Checks that the options by which the module was sharded, in this run or an earlier one, are those of now.

        Raises:
            DloError: They are not.
        """
        known: ShardedModule = self.sharded
        module: Any = known.module
        name, device = type(module).__name__, options.device
        if (options.shard_options(module), options.spec) != (
            known.options,
            known.groups.spec,
        ) or known.device != device:
            raise DloError(
                f"options must be those of the earlier run that has sharded {name}, got others; build a new model for a"
                " strategy with these"
            )
        if trains and options.separate_copies != known.groups.separate_copies:
            raise DloError(
                f"copies of {name} must train by themselves in all of its runs or in none, got an earlier run"
                f" {'with' if known.groups.separate_copies else 'without'} DiLoCo; build a new model for this one"
            )
        cut_by, ours = self.cut_options, options.cut_options()
        other = [key for key, value in ours.items() if key in cut_by and cut_by[key] != value]
        if trains and other:
            raise DloError(
                f"{other[0]} must stay as {name} was cut by an earlier run with {other[0]}={cut_by[other[0]]}, got"
                f" {other[0]}={ours[other[0]]}; build a new model for it"
            )


@dataclass
class ParallelRun:
    """Record of a parallelization, which each applier gets: what it works on, and what it has made.

    Attributes:
        module: Module that trains.
        options: Options of the strategy.
        groups: Process groups of the mesh.
        seed: Seed for modules on the meta device.
        plan: Plan of the module's model; None if no applier needs it.
        mesh: DeviceMesh of all axes; None without a plan.
        pipelined: Task with the pipeline's stages, after the model is cut into them.
        sharded: Sharding of the module, after it is sharded.
    """

    module: Any
    options: MeshOptions
    groups: MeshGroups
    seed: int
    plan: ParallelPlan | None = None
    mesh: DeviceMesh | None = None
    pipelined: PipelinedTask | None = None
    sharded: ShardedModule | None = None

    @property
    def model(self) -> nn.Module:
        """Model of the module, which appliers rewrite."""
        model: nn.Module = self.module.model
        return model

    @property
    def layout(self) -> Layout:
        """Slices and stages that appliers have made of the module's tensors."""
        return Layout() if self.plan is None else get_layout(self.model).with_prefix("model")


class CutIntoStages(Applier):
    """Cuts a model into the pipeline's stages, of which this rank keeps its own.

    Args:
        options: Options of the strategy.
        split: Number of blocks of each stage.
    """

    phase = Phase.STAGES
    axis = "pp"

    def __init__(self, options: MeshOptions, split: Split) -> None:
        self._options, self._split = options, split
        self.pipeline: Pipeline

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Cuts a model in place, and notes on its layout which tensors other stages have."""
        pipelining, layout = self._options.pipelining, get_layout(module)
        self.pipeline = pipeline = Pipeline(
            module,
            plan,
            mesh["pp"].get_group(),
            schedule=pipelining.schedule,
            stages_per_rank=pipelining.stages_per_rank,
            split=self._split,
            device=self._options.device,
        )
        firsts = [pipeline.stages.blocks[first] for first in pipeline.stages.first[1:-1]]
        self._options.appliers.tensor.gather_between_stages(module, plan, firsts)
        names, own = [name for name, _ in named_tensors(module)], pipeline.ownership
        layout.other_stages |= {name for name in names if not own(name)}
        layout.tied_copies |= {name for name in names if own(name) and not own.is_first_holder(name)}

    def apply_to_run(self, run: Any) -> None:
        """Cuts a run's model, and pipelines its task."""
        super().apply_to_run(run)
        spec, context = self._options.spec, self._options.appliers.context
        micro_batches = self._options.pipelining.count_micro_batches(spec.pp)
        state = MicroBatchState(context.selected_rows, context.restore_rows) if spec.cp > 1 else None
        select = context.select_rows if spec.cp > 1 else None
        run.pipelined = PipelinedTask(run.module, self.pipeline, micro_batches, select, state)


def parallelize(run: ParallelRun, loads_weights: bool = False) -> ParallelState:
    """Applies every applier to a run's module, in the order of their phases; returns the result, noted on the module.

    Args:
        run: Record of the run, with the module, its options and its groups.
        loads_weights: Whether the run loads weights, so that a module on the meta device needs no initial values.

    Raises:
        DloError: The model cannot be cut.
    """
    module, options, spec = run.module, run.options, run.options.spec
    if on_meta(module):
        check_initialisable(module, loads_weights=loads_weights)
    given = options.appliers.ordered
    appliers = [applier for applier in given if applier.axis is None or spec.axis_size(applier.axis) > 1]
    if options.cuts_model or any(applier.needs_plan for applier in appliers):
        run.plan = options.checked_plan(module, run_datamodule(module._trainer))
        _move_to_device(module, options.device)
        run.mesh = run.groups.device_mesh()
    if spec.pp > 1:  # Stages are balanced by the costs of the full model, before any applier changes it.
        assert run.plan is not None
        datamodule = run_datamodule(module._trainer)
        split = options.pipelining.choose_split(module, run.plan, spec.pp, datamodule)
        appliers = sorted([CutIntoStages(options, split), *appliers], key=lambda applier: applier.phase)
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    for applier in appliers:
        applier.apply_to_run(run)
        if run.plan is not None and run.sharded is None:
            _check_plain(module.model, applier)
    assert run.sharded is not None, "FullyShard is among the appliers"
    now = {id(parameter) for parameter in module.parameters()}
    check_held(module, {name: one for name, one in before.items() if id(one()) not in now})
    if run.pipelined is not None:
        run.pipelined.pipeline.weight_gradients_ready = run.sharded.accumulate_gradients
    state = ParallelState(run.sharded, pipelined=run.pipelined)
    if run.plan is not None:
        state.context, state.tensor = options.appliers.context, options.appliers.tensor
        state.cut_options = options.cut_options()
    state.attach(module)
    return state


def _move_to_device(task: Any, device: torch.device) -> None:
    """Moves a task's tensors to a device, with the first rank's values; a task on the meta device is left alone."""
    if on_meta(task):
        return
    for tensor in [*task.parameters(), *task.buffers()]:
        tensor.data = tensor.data.to(device)
        broadcast_values(tensor.data)


def _check_plain(module: nn.Module, applier: Applier) -> None:
    """Checks that an applier that runs before FullyShard has left plain parameters.

    Raises:
        DloError: The applier has sharded a parameter itself.
    """
    name = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
    if name is not None:
        raise DloError(
            f"appliers must leave sharding to FullyShard, got a DTensor '{name}' from {type(applier).__name__}; derive"
            " it from FullyShard and set its options, or leave it out"
        )


def frozen_options(options: MeshOptions, *, dtype: torch.dtype | None = None, offload: bool = False) -> MeshOptions:
    """Returns the options by which a mesh places a frozen model.

    They are those of the run's model, without what belongs to that model alone: the names of its units, the split of
    its blocks, recomputation, a delay of gradients, and the user's own appliers. Experts are sharded as other
    parameters are, without `ep`.

    Args:
        options: Options of the run.
        dtype: Dtype of the frozen model's parameters; None for the Trainer's precision.
        offload: Whether shards are in CPU memory; they are too where those of the run's model are.
    """
    shard = copy.copy(options.appliers.shard)
    shard.units, shard.recompute, shard.offload = None, False, shard.offload or offload
    if dtype is not None:
        shard.dtypes = (None, None, None)
    # A schedule that flushes has one version of the weights, which ranks may shard; the stages are the same.
    pipelining = options.pipelining
    if options.spec.pp > 1 and not flushes(pipelining.schedule):
        pipelining = replace(pipelining, schedule="1F1B")
    tensor, context = options.appliers.tensor, options.appliers.context
    appliers = MeshAppliers.from_options([shard], context.method, tensor.sequence_parallel, tensor.async_tp)
    return replace(
        options,
        spec=replace(options.spec, ep=1),
        appliers=appliers,
        pipelining=replace(pipelining, split=None),
        precision=options.precision if dtype is None else "32-true",
    )


class FrozenMesh(PlacedModel):
    """Frozen task that a mesh has parallelized.

    Args:
        task: Task whose model has been cut and sharded.
        device: Device on which this rank computes.
        state: Result of the parallelization.
        context: Context of a forward, such as autocast.
    """

    def __init__(
        self, task: Any, device: torch.device, state: ParallelState, *, context: Context = contextlib.nullcontext
    ) -> None:
        self._state, self.sharded = state, state.sharded
        super().__init__(task, device, context=context, moved=True)

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage of a pipeline; True without one."""
        pipelined = self._state.pipelined
        return pipelined is None or pipelined.pipeline.is_last

    def own_part(self, batch: Any) -> Any:
        """Returns this rank's shard of the batch's sequences, or the batch where ranks do not share them."""
        context = self._state.context
        return batch if context is None or context.sequence is None else context.shard_batch(batch)

    def _forward(self, batch: Any) -> Any:
        batch, pipelined = self.own_part(batch), self._state.pipelined
        return super()._forward(batch) if pipelined is None else pipelined.outputs(batch)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.sharded.call(function, *args)
        finally:
            self.sharded.reshard()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters outside of units inside the block."""
        roots = [root for root in self.sharded.roots if isinstance(root, FSDPModule)]
        for root in roots:
            root.unshard()
        try:
            yield
        finally:
            for root in roots:
                root.reshard()

    def shards(self) -> dict[str, Any]:
        """Returns this rank's shards of the task's state by name, without tensors of other stages."""
        return self.sharded.shards({plain_name(name): value for name, value in self.task.state_dict().items()})

    def refresh(self) -> None:
        """Makes the next forward see the shards' values, after they have been written to."""
        self.sharded.refresh()

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's shards and of its buffers."""
        buffers = (buffer for buffer in self.task.buffers() if not buffer.is_meta)
        return memory_of([*self.sharded.parameters.values(), *buffers])

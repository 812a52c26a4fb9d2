"""Data, tensor, pipeline and context parallelism by composition, in one Lightning strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from dlo_framework.applier import Applier, Phase
from dlo_framework.cuts import Layout, layout_of
from dlo_framework.distributed.canonical import OWNER, ShardOwner
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.initialise import check_initialisable, on_meta
from dlo_framework.distributed.units import find_units
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.runs import is_first_process
from dlo_framework.task import Task
from dlo_plugins.appliers.context_parallel import ContextParallel
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.appliers.order import in_order
from dlo_plugins.appliers.tensor_parallel import TensorParallel
from dlo_plugins.fsdp.mesh import check_reshard
from dlo_plugins.fsdp.optimizers import OptimizerShares
from dlo_plugins.fsdp.policy import default_param_dtype
from dlo_plugins.fsdp.sharding import Sharding, ShardOptions, match_units
from dlo_plugins.fsdp.usage import Usage
from dlo_plugins.mesh.drawing import MeshDescription, describe, modelled
from dlo_plugins.mesh.pipelined import PipelinedTask, check_inside, check_predict
from dlo_plugins.mesh.pipelining import Pipelining
from dlo_plugins.mesh.steps import MeshSteps
from dlo_plugins.pipeline.assign import Split
from dlo_plugins.strategies.mesh_rehearsal import rehearse_step
from dlo_plugins.tensor.coverage import NEARLY_ALL

#: Appliers that do nothing where their axis has one rank.
_OWN = (TensorParallel, ContextParallel)
#: Under this name a module that has been sharded keeps how, for the next run of it.
_SHARDING = "_dlo_sharding"
#: Likewise one that has been cut: the applier that shares its sequences, and its pipeline, for later strategies too;
#: and the options that it was cut by.
_CONTEXT, PIPELINED, _CUT_BY = "_dlo_context", "_dlo_pipelined", "_dlo_cut_by"


class MeshStrategy(MeshSteps):
    """Lays the ranks out as a mesh of up to five axes, and cuts the model along them.

    `{class_path: MeshStrategy, init_args: {dp_shard: 2, tp: 2}}`: the product of the axes is the number of ranks.
    What is cut, and where, the task's parallel plan says; neither the model's code, nor the loss curve, nor the
    checkpoint changes. With dp_shard alone it is FSDPStrategy, which works for any module.

    Aliases: `mesh`.

    Args:
        pp: ranks among which the model's blocks are shared as the stages of a pipeline.
        dp_replicate: copies of the model, each for other samples.
        dp_shard: ranks that see other samples and share one copy's parameters, gradients and optimizer state; -1, as
            any axis may be, for all ranks that the others leave.
        cp: ranks that share each sequence (causal language models).
        tp: ranks that share each layer.
        schedule: in which order stages compute: `GPipe`, `1F1B`, `Interleaved1F1B`, `ZBH1`, `ZBV` or `DualPipeV`.
        micro_batches: parts into which each rank's batch goes through the pipeline; by default four for each stage.
        stages_per_rank: of the pipeline, for `Interleaved1F1B`; by default what the schedule has.
        split: blocks of each stage, such as `[5, 7]`; by default they are shared out by cost.
        cp_method: `ring` attention or `ulysses`; see ContextParallel.
        sequence_parallel: whether the ranks of tp also share the sequence between their layers, which divides what
            activations are left there.
        appliers: what rewrites the model beside what the axes ask for, or in place of it, in any order:
            ActivationCheckpoint, CompileBlocks, FullyShard, your own.
        meta_init: whether `configure_model` builds the model without memory, which each unit gets as it is sharded:
            for models larger than one device's memory. Each module's `reset_parameters` then initialises it, alike
            on any number of ranks; a model without these needs a checkpoint to start from.
        timeout_minutes: how long a collective may take before a rank gives the others up.

    Raises:
        DloError: if options contradict each other, or do not fit the ranks or the model.
    """

    builds_on_device = False

    def __init__(
        self,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        tp: int = 1,
        schedule: str = "1F1B",
        micro_batches: int | None = None,
        stages_per_rank: int | None = None,
        split: list[int] | None = None,
        cp_method: Literal["ring", "ulysses"] = "ring",
        sequence_parallel: bool = False,
        appliers: list[Applier] | None = None,
        meta_init: bool = False,
        timeout_minutes: float = 10.0,
    ) -> None:
        super().__init__(timeout_minutes=timeout_minutes)
        axes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        if dp_shard == -1 and -1 in (pp, dp_replicate, cp, tp):
            axes["dp_shard"] = 1
        self.spec, self.meta_init = MeshSpec(**axes), meta_init
        self.set_appliers(in_order(list(appliers or []), cp_method, sequence_parallel))
        self._groups: MeshGroups | None = None
        self.pipelining = Pipelining(schedule, micro_batches, stages_per_rank, split)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the short name known: ``--trainer.strategy mesh``."""
        strategy_registry.register("mesh", cls, description="a mesh of parallel axes", override=True)

    # --- before processes start ----------------------------------------------------------------------------

    def set_appliers(self, appliers: Sequence[Applier]) -> None:
        """Sets the appliers, a TensorParallel, a ContextParallel and a FullyShard among them, by phase."""
        self.appliers = list(appliers)
        self.fully_shard = next(applier for applier in self.appliers if isinstance(applier, FullyShard))
        self._context = next(applier for applier in self.appliers if isinstance(applier, ContextParallel))
        self._tensor = next(applier for applier in self.appliers if isinstance(applier, TensorParallel))
        #: Whether there are appliers that no axis asks for.
        self._rewrites = any(not isinstance(applier, (*_OWN, FullyShard)) for applier in self.appliers)

    def mesh_spec(self) -> MeshSpec:
        """Returns the mesh of this run.

        Raises:
            DloError: if its axes do not make up the ranks; the message computes sizes that do.
        """
        return self.spec.resolve(self.num_nodes * self.num_processes)

    def _configure_launcher(self) -> None:
        """Checks what the Trainer's options decide, as soon as they are known: no process has started yet."""
        spec = self.mesh_spec()
        check_reshard(self.fully_shard.reshard_after_forward, spec.dp_shard * spec.cp)
        self._options(whole_steps=True)
        if spec.pp > 1:
            self.pipelining.check_schedule(spec.pp)
        if self.fully_shard.offload and self.root_device.type == "cuda" and self._process_group_backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # Shards in CPU memory are saved and compared too.
        super()._configure_launcher()

    def check_model(
        self, module: Any, datamodule: Any = None, *, trains: bool = True, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Checks that the mesh's axes can cut a model, before any process starts.

        Args:
            module: the task; its model is built on the meta device for it.
            datamodule: whose batches are to be cut.
            trains: Whether the run trains; evaluation needs no gradients.
            callbacks: Callbacks of the run.

        Raises:
            DloError: if they cannot; the message computes the nearest sizes that work.
        """
        spec = self.mesh_spec()
        if not _cuts(spec):
            return
        self._plan_of(module)
        task = module.on_meta()
        plan = task.parallel_plan()
        plan.validate(task.model)
        check_inside(task, spec, self._tensor.sequence_parallel)
        self._tensor.check(task.model, plan, spec.tp)
        self._context.check(task.model, plan, spec.cp, spec.tp)
        if spec.pp > 1:
            self.pipelining.check(task, plan, spec, datamodule)
        if is_first_process():  # The others would find the same, at the same time.
            rehearse_step(self, task, spec, datamodule, trains=trains, callbacks=callbacks)

    def check_predict(self, module: Any) -> None:
        """Checks that a model that the mesh cuts can predict, before any process starts.

        Raises:
            DloError: if it is cut into a pipeline's stages, and the task writes text.
        """
        if self.mesh_spec().pp > 1:
            check_predict(module)

    def describe(self, module: Any, datamodule: Any = None) -> MeshDescription:
        """Returns who holds what of a module, for `dlo mesh`; nothing is started, and the model has no memory.

        Raises:
            DloError: if the mesh does not fit the ranks or the model.
        """
        precision, spec, pipelining = str(self.precision_plugin.precision), self.mesh_spec(), self.pipelining
        task, plan = modelled(module)
        pipelined: Any = task if spec.pp > 1 and plan is not None else None
        return describe(
            *(task, plan, spec),
            sequence_parallel=self._tensor.sequence_parallel,
            schedule=pipelining.schedule,
            stages_per_rank=pipelining.stages_per_rank,
            split=pipelining.split_of(pipelined, plan, spec.pp, datamodule) if pipelined and plan else "balanced",
            micro_batches=pipelining.parts(spec.pp),
            nodes=self.num_nodes,
            element_size={"bf16-true": 2, "16-true": 2, "64-true": 8}.get(precision),
        )

    def _options(self, whole_steps: bool) -> ShardOptions:
        precision, spec, default = str(self.precision_plugin.precision), self.mesh_spec(), None
        if spec.dp_replicate * spec.dp_shard * spec.cp > 1:
            default = default_param_dtype(precision, self.root_device, self.lightning_module)
        options = self.fully_shard.options(precision, whole_steps, default)
        if spec.pp > 1 and options.reshard_after_forward is None:
            # Each micro-batch would gather a stage's parameters anew, forward and backward.
            return replace(options, reshard_after_forward=False)
        return options

    # --- setting up ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shards the module, unless an earlier run has, and builds the optimizers."""
        module = self._module()
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        known: Sharding | None = module.__dict__.get(_SHARDING)
        if known is None and self._layer_sync:
            self.model = self._layer_sync.apply(module)  # Not while fitting alone: sharded modules stay as they are.
        self.model = self.precision_plugin.convert_module(module)
        self.shard(trainer)
        self.setup_precision_plugin()
        self.guard_forwards(trainer)
        self.barrier("sharded")

    def needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of a part of the module takes all ranks: of any if FSDP has sharded it."""
        spec, own = self.mesh_spec(), self._module()
        if spec.dp_shard == 1 and module is not own and module is not getattr(own, "model", None):
            return False
        return spec.dp_shard * spec.cp * spec.tp * spec.pp > 1 and super().needs_all_ranks(module)

    def shard(self, trainer: Trainer) -> None:
        """Cuts and shards the module and, while fitting, its optimizers' state."""
        module = self._module()
        known: Sharding | None = module.__dict__.get(_SHARDING)
        if known is None:
            self._log_coverage(module)
            known = self.parallelize(trainer)
            module.__dict__[_SHARDING] = known
        self.sharding = self._checked(known, trains=trainer.state.fn == TrainerFn.FITTING)
        self.sharding.collect_params()
        self._context = module.__dict__.get(_CONTEXT, self._context)
        self.pipelined = module.__dict__.get(PIPELINED)
        self.bring_the_rest()
        if self.mesh_spec().tp > 1:  # These ranks see the same data, and metrics would count it twice.
            for submodule in module.modules():
                if isinstance(submodule, Metric):
                    submodule.process_group = self.groups.group("pp", "dp_replicate", "dp_shard", "cp")
        if self.pipelined is not None:
            self.pipelined.micro_batches = self.pipelining.parts(self.mesh_spec().pp)
            self.pipelined.share_metrics(self.mesh_spec())
            self.pipelined.gathering = self.groups.data if self.mesh_spec().dp_shard > 1 else None
        if self._usage is not None:
            self._usage.remove()
        self._usage = self._shares = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self._shares = OptimizerShares(self.optimizers, self.sharding)
            self._usage = Usage(self.sharding)
            self._open = False
        is_plain = not (known.is_sharded or _cuts(self.mesh_spec()))
        undo = None if not is_plain else (lambda: None) if self._usage is None else self._usage.remove
        module.__dict__[OWNER] = ShardOwner(self, self.world_size, undo)

    def take_over(self, owner: ShardOwner, model: LightningModule) -> None:
        """Leaves a module as another mesh has sharded it: :meth:`shard` checks that it is what this one would make."""
        if _SHARDING not in model.__dict__:
            super().take_over(owner, model)

    @property
    def groups(self) -> MeshGroups:
        """The process groups of the mesh."""
        if self._groups is None:
            self._groups = MeshGroups(self.mesh_spec(), self.root_device.type, self._timeout)
        return self._groups

    def _log_coverage(self, task: Any) -> None:
        """Logs what of the model tensor parallelism divides, where it leaves more than norms in full."""
        tp = self.mesh_spec().tp
        if tp > 1:
            found = self._tensor.coverage(task.model, self._checked_plan(task), tp)
            if found.share < NEARLY_ALL:
                rank_zero_info(f"tensor parallelism {found.sentence()}")

    def parallelize(self, trainer: Any, when_cut: Callable[[PipelinedTask], None] | None = None) -> Sharding:
        """Applies every applier to the module, in the order of their phases; returns how FullyShard has sharded it.

        Args:
            trainer: tells the checkpoint that the run starts from.
            when_cut: called with the pipeline when the model has been cut into stages, and is not sharded yet.

        Raises:
            DloError: if the model cannot be cut so.
        """
        module: Any = self._module()
        spec = self.mesh_spec()
        seed, layout = self.broadcast(torch.initial_seed()), Layout()
        if on_meta(module):
            check_initialisable(module, loads_weights=trainer.ckpt_path is not None)
        plan: ParallelPlan | None = None
        if _cuts(spec) or self._rewrites:
            plan, layout = self._checked_plan(module), layout_of(module.model)
            _place(module, self.root_device)
            mesh, split = self.groups.device_mesh(), self._split(module, plan)
        sharding: Sharding | None = None
        is_cut = spec.pp == 1
        for applier in self.appliers:
            if applier.phase > Phase.CONTEXT and not is_cut:
                assert plan is not None
                pipelined, is_cut = self._cut_into_stages(module, plan, split), True
                if when_cut is not None:
                    when_cut(pipelined)
            if applier is self.fully_shard:
                sharding = self._shard(module, seed, layout if plan is None else layout.under("model"))
            elif plan is not None:
                applier.apply(module.model, mesh, plan)
                if sharding is None:
                    _check_plain(module, applier)
        if plan is not None:
            module.__dict__[_CONTEXT] = self._context
            module.__dict__[_CUT_BY] = self._cut_by()
        assert sharding is not None
        return sharding

    def _checked_plan(self, task: Any) -> ParallelPlan:
        plan: ParallelPlan = self._plan_of(task)()
        plan.validate(task.model)
        check_inside(task, self.mesh_spec(), self._tensor.sequence_parallel)
        return plan

    def _split(self, task: Any, plan: ParallelPlan) -> Split:
        """Returns the blocks of each stage, by the costs of the full model: no applier has changed it yet."""
        spec, datamodule = self.mesh_spec(), getattr(task._trainer, "datamodule", None)
        return self.pipelining.split_of(task, plan, spec.pp, datamodule) if spec.pp > 1 else "balanced"

    def _cut_into_stages(self, task: Any, plan: ParallelPlan, split: Split) -> PipelinedTask:
        """Cuts the model into the pipeline's stages, of which this rank keeps its own."""
        layout = layout_of(task.model)
        pipeline = self.pipelining.build(task, plan, self.groups.group("pp"), split, self.root_device)
        stages = pipeline.stages
        self._tensor.part_stages(task.model, plan, [stages.blocks[first] for first in stages.first[1:-1]])
        names = [name for name, _ in _tensors(task.model)]
        layout.elsewhere |= {name for name in names if not pipeline.holds(name)}
        layout.repeated |= {name for name in names if pipeline.holds(name) and not pipeline.holds.first(name)}
        select = self._context.select_rows if self.mesh_spec().cp > 1 else None
        pipelined = PipelinedTask(task, pipeline, self.pipelining.parts(self.mesh_spec().pp), select)
        task.__dict__[PIPELINED] = pipelined
        return pipelined

    def _shard(self, module: Any, seed: int, layout: Layout) -> Sharding:
        units = find_units(module) if self.fully_shard.units is None else match_units(module, self.fully_shard.units)
        units = [unit for unit in units if not any(name.startswith(f"{unit}.") for name in layout.elsewhere)]
        options = self._options(module.automatic_optimization)
        return Sharding(module, units, self.groups, self.root_device, options, seed, layout)

    def _plan_of(self, task: Any) -> Any:
        """Returns what makes a task's plan.

        Raises:
            DloError: for a plain LightningModule, which has none.
        """
        if not isinstance(task, Task):
            raise DloError(
                f"axes {self.mesh_spec()} and appliers go by a parallel plan, which {type(task).__name__} does not"
                " have; make it a dlo_framework.Task (docs: your own task), or use dp_shard and dp_replicate alone"
            )
        return task.parallel_plan

    def _cut_by(self) -> dict[str, Any]:
        """Returns the options, by name, that a model that has been cut keeps."""
        spec, pipelining = self.mesh_spec(), self.pipelining
        found: dict[str, Any] = {}
        if spec.pp > 1:
            found |= {"schedule": pipelining.schedule, "split": pipelining.split}
            found |= {"stages_per_rank": pipelining.stages_per_rank}
        if spec.cp > 1:
            found["cp_method"] = self._context.method
        if spec.tp > 1:
            found["sequence_parallel"] = self._tensor.sequence_parallel
        return found

    def _checked(self, known: Sharding, trains: bool) -> Sharding:
        """Returns an earlier run's sharding, if it is what this strategy would have made."""
        wanted = (self._options(self._module().automatic_optimization), self.mesh_spec())
        if wanted != (known.options, known.groups.spec) or known.device != self.root_device:
            raise DloError(
                f"{type(known.module).__name__} has been sharded by an earlier run with other options, and stays so;"
                " build the model anew for a strategy with these"
            )
        cut_by, ours = known.module.__dict__.get(_CUT_BY, {}), self._cut_by()
        other = [name for name, value in ours.items() if name in cut_by and cut_by[name] != value]
        if trains and other:
            raise DloError(
                f"{type(known.module).__name__} has been cut by an earlier run with {other[0]}={cut_by[other[0]]}, and"
                f" stays so; given {other[0]}={ours[other[0]]}: build the model anew for it"
            )
        self._groups = known.groups
        return known

    # --- what the ranks share ------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the samples that this rank sees; those of one model see the same."""
        spec = self.mesh_spec()
        return {"num_replicas": spec.data_size, "rank": spec.data_rank(self.global_rank)}

    @property
    def gradient_ranks(self) -> int:
        """Over how many ranks gradients are averaged."""
        spec = self.mesh_spec()
        return spec.data_size * spec.cp

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Group of the ranks that see different data."""
        return self.groups.data

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the ranks that see other data, unless a group is given; the others have the same.

        What is no mean or sum, the largest memory say, is of all ranks.
        """
        if group is None and isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg", "sum"):
            group = self.groups.data
        return super().reduce(tensor, group=group, reduce_op=reduce_op)

    def watch_losses(self, look: Callable[[Tensor], None]) -> bool:
        """Calls a function with the losses of a pipeline's micro-batches, on the ranks of its last stage."""
        if self.pipelined is None:
            return False
        self.pipelined.pipeline.loss_ready = look
        return True

    def share_buffers(self) -> None:
        """Gives the ranks that hold the same the first one's buffers, and all stages what one computes with."""
        super().share_buffers()
        if self.pipelined is not None:
            self.pipelined.share_buffers()

    def counted(self, batch: Any) -> Any:
        """Returns a batch with what ranks that share its sequences have to know of its documents."""
        return self._context.counted(batch)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, counted; one that a callback has moved before stays as it is."""
        return super().batch_to_device(self.counted(batch), device, dataloader_idx)

    def _shared(self, batch: Any) -> Any:
        return self._context.shard_batch(batch)

    @property
    def shard_size(self) -> int:
        """How many ranks share one copy of the model."""
        spec = self.mesh_spec()
        return spec.world_size // spec.dp_replicate

    def about(self) -> dict[str, Any]:
        """Returns what a checkpoint's manifest says of the run."""
        sizes = self.mesh_spec().sizes
        shown = {axis: size for axis, size in sizes.items() if size > 1 or axis.startswith("dp_")}
        return {**super().about(), "mesh": shown}


def _cuts(spec: MeshSpec) -> bool:
    """Whether a mesh cuts a model, and not only its state."""
    return spec.pp * spec.cp * spec.tp > 1


def _place(task: Any, device: torch.device) -> None:
    """Puts a task's tensors on a device, with the first rank's values; one without memory stays as it is."""
    if on_meta(task):
        return
    for tensor in [*task.parameters(), *task.buffers()]:
        tensor.data = tensor.data.to(device)
        broadcast_values(tensor.data)


def _check_plain(module: nn.Module, applier: Applier) -> None:
    """Checks that an applier that runs before FullyShard has left parameters that it can shard.

    Raises:
        DloError: if it has sharded one itself.
    """
    name = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
    if name is not None:
        raise DloError(
            f"appliers must leave sharding to FullyShard, got a DTensor '{name}' from {type(applier).__name__}; derive"
            " it from FullyShard and set its options, or leave it out"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)

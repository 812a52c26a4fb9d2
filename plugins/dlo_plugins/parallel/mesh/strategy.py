"""Composes data, tensor, pipeline and context parallelism in one Lightning strategy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from dlo_framework.ability import Ability
from dlo_framework.data.description import run_datamodule
from dlo_framework.distributed.checkpointing import ShardOwner
from dlo_framework.distributed.gradient_check import USED_AT_THE_END, check_gradients, run_check
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.precision import keep_dtypes, wide_dtype
from dlo_framework.distributed.step_primitives import loss_scaler
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_framework.errors import DloError, check_choice
from dlo_framework.local_memory import local_tensor
from dlo_framework.mesh import MeshSpec
from dlo_framework.placed_model import PlacedModel
from dlo_framework.plan import Applier
from dlo_framework.run.runs import is_first_process
from dlo_framework.shards import Shard
from dlo_framework.strategy_abilities import (
    ArrangesRanks,
    DelayedGradients,
    HalfPrecisionGradients,
    Pipelined,
    Replicas,
    SplitsSequences,
    StepsInBackward,
)
from dlo_framework.strategy_contract import PlacesSecondModel, loads_checkpoint
from dlo_framework.task import Task, inner_model
from dlo_plugins.parallel.fsdp.sharded_optimizers import OptimizerShards
from dlo_plugins.parallel.fsdp.sharding import check_reshard
from dlo_plugins.parallel.gathered_dtype import (
    Bf16Weights,
    check_precision,
    prepare_weights,
)
from dlo_plugins.parallel.mesh.mesh_description import MeshDescription, describe_mesh, prepare_model
from dlo_plugins.parallel.mesh.mesh_engine import MeshEngine
from dlo_plugins.parallel.mesh.mesh_simulation import dry_run_step
from dlo_plugins.parallel.mesh.parallelize import (
    FrozenMesh,
    MeshAppliers,
    MeshOptions,
    ParallelRun,
    ParallelState,
    frozen_options,
    parallelize,
)
from dlo_plugins.parallel.mesh.pipelined_task import PipelinedTask, PipelineOptions, check_predict
from dlo_plugins.parallel.pipeline.pipeline_schedules import flushes
from dlo_plugins.parallel.tensor.tp_plan import NEARLY_ALL
from dlo_plugins.parallel.user_code import JointGradients, watch_hooks


class MeshStrategy(ShardedStrategy, ArrangesRanks):
    """Arranges the ranks as a mesh of up to five axes, and parallelizes the model along them.

    `{class_path: MeshStrategy, init_args: {dp_shard: 2, tp: 2}}`: the product of the axes is the number of ranks. The
    task's parallel plan says where the model may be cut; the model's code, the loss curve and the checkpoint do not
    change. With dp_shard alone it equals FSDPStrategy, which works for any module.

    Aliases: `mesh`.

    Args:
        pp: Number of ranks of a pipeline, which have the model's blocks as its stages.
        dp_replicate: Number of copies of the model, each with other samples.
        dp_shard: Number of ranks with other samples that shard one copy's parameters, gradients and optimizer state.
            -1, which any axis may be, for all remaining ranks.
        cp: Number of ranks that shard each sequence (causal language models).
        tp: Number of ranks that shard each layer.
        ep: Number of ranks among which the experts of each mixture are divided. It divides dp_shard x cp, and takes no
            further ranks; see ExpertParallel.
        schedule: Name of the pipeline's schedule: one of dlo's (`docs/concepts/strategies.md` compares them), or one
            that a file under `plugins:` or an installed package registers.
        micro_batches: Number of micro-batches of each rank's batch in the pipeline; by default four per rank of `pp`.
        stages_per_rank: Number of stages of a rank, for `Interleaved1F1B`; by default the schedule's.
        split: Number of blocks of each stage, such as `[5, 7]`; by default they are balanced by cost.
        cp_method: Method of context parallelism, `ring` attention or `ulysses`; see ContextParallel.
        sequence_parallel: Whether the ranks of tp also shard the sequence between their layers, which divides the
            activations there.
        async_tp: Whether matrix products overlap with the collectives of tp in forward, chunk by chunk; see
            TensorParallel. A number sets the chunks of a product.
        appliers: Appliers in addition to those of the axes, or in place of them, in any order: ActivationCheckpoint,
            CompileBlocks, FullyShard, your own.
        meta_init: Whether `configure_model` builds the model on the meta device, and each unit is allocated when it
            is sharded: for models larger than one device's memory. Each module's `reset_parameters` then initialises
            it, alike on any number of ranks; a model without these needs a checkpoint to start from.
        bf16_weights: Kind of bf16 weights: `masters` has sharded master weights in single precision, `stochastic` has
            none, and rounds each optimizer's step stochastically. By default weights have the precision's dtype.
        timeout_minutes: Timeout of a collective in minutes, after which a rank aborts the run.

    Raises:
        DloError: Options contradict each other, or do not fit the ranks or the model.
    """

    zero_stage = 3
    #: Fix in the message about parameters without a gradient.
    allow_unused = (
        "set find_unused by the strategy's `appliers: [{class_path: FullyShard, init_args: {find_unused: true}}]`"
    )

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
        async_tp: bool | int = False,
        appliers: list[Applier] | None = None,
        meta_init: bool = False,
        bf16_weights: Bf16Weights | None = None,
        timeout_minutes: float = 10.0,
        ep: int = 1,
    ) -> None:
        check_choice("bf16_weights", bf16_weights, get_args(Bf16Weights))
        super().__init__(timeout_minutes=timeout_minutes)
        self.bf16_weights = bf16_weights
        axes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        if dp_shard == -1 and -1 in (pp, dp_replicate, cp, tp):
            axes["dp_shard"] = 1
        self.spec, self.meta_init = MeshSpec(**axes, ep=ep), meta_init
        self.appliers = MeshAppliers.from_options(appliers or [], cp_method, sequence_parallel, async_tp)
        self.separates = False  # whether each copy trains by itself
        self._context = self.appliers.context  # of the module's first run, if an earlier run has cut it
        self._groups: MeshGroups | None = None
        self.engine: MeshEngine | None = None
        self.pipelining = PipelineOptions(schedule, micro_batches, stages_per_rank, split)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the short name: ``--trainer.strategy mesh``."""
        strategy_registry.register("mesh", cls, description="a mesh of parallel axes", override=True)

    # --- before processes start ----------------------------------------------------------------------------

    @property
    def _options(self) -> MeshOptions:
        """Options of this run, with the mesh's sizes known."""
        precision = str(self.precision_plugin.precision)
        spec, kind = self.mesh_spec(), self.bf16_weights
        return MeshOptions(spec, self.appliers, self.pipelining, precision, self.root_device, kind, self.separates)

    def mesh_spec(self) -> MeshSpec:
        """Returns the mesh of this run.

        Raises:
            DloError: The product of the axes is not the number of ranks; the message computes sizes that fit.
        """
        return self.spec.resolve(self.num_nodes * self.num_processes)

    def _configure_launcher(self) -> None:
        """Checks the options against the Trainer's, before processes start."""
        spec = self.mesh_spec()
        check_precision(self.bf16_weights, str(self.precision_plugin.precision), self.appliers.shard.dtypes[0])
        if self.appliers.tensor.async_tp and spec.tp == 1:
            raise DloError("async_tp must be left out without tensor parallelism, got tp=1; leave it out, or set tp")
        check_reshard(self.appliers.shard.reshard_after_forward, spec.dp_shard * spec.cp)
        options = self._options.shard_options(self.lightning_module)
        if spec.pp > 1:
            self.pipelining.check_schedule(spec.pp, str(self.precision_plugin.precision))
            if options.full_parameters:
                self.zero_stage = 1
        if self.appliers.shard.offload and self.root_device.type == "cuda" and self._process_group_backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # Saving communicates shards in CPU memory.
        super()._configure_launcher()

    def check_model(
        self, module: Any, datamodule: Any = None, *, trains: bool = True, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Checks that the mesh's axes can cut a model, before any process starts.

        Args:
            module: Task, whose model is built on the meta device.
            datamodule: Datamodule whose batches are sliced.
            trains: Whether the run trains; evaluation needs no gradients.
            callbacks: Callbacks of the run.

        Raises:
            DloError: The axes cannot cut the model; the message computes the nearest sizes that work.
        """
        options = self._options

        def check_cut() -> None:
            task = options.check(module, datamodule)
            if is_first_process():  # The others would repeat the same work.
                dry_run_step(self, task, options.spec, datamodule, trains=trains, callbacks=callbacks)

        if options.cuts_model:
            run_check(check_cut)
        elif trains and not self.appliers.shard.find_unused:
            check_gradients(module, datamodule, callbacks, allow=self.allow_unused)

    def check_predict(self, module: Any) -> None:
        """Checks that a model on this mesh can predict, before any process starts.

        Raises:
            DloError: The mesh has a pipeline, and the task generates without it.
        """
        if self.mesh_spec().pp > 1:
            check_predict(module)

    def describe(self, module: Any, datamodule: Any = None, *, dtype: torch.dtype | None = None) -> MeshDescription:
        """Returns the mesh's description with each rank's bytes, for `dlo mesh`; it starts and allocates nothing.

        Raises:
            DloError: The mesh does not fit the ranks or the model.
        """
        precision, spec, pipelining = str(self.precision_plugin.precision), self.mesh_spec(), self.pipelining
        size = {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(precision) if dtype is None else dtype.itemsize
        task, plan = prepare_model(module)
        tensor, model = self.appliers.tensor, task.model if isinstance(task, Task) else None
        if plan is not None and model is not None and spec.tp > 1:
            plan = tensor.complete_plan(task, plan, spec.tp, datamodule)
        pipelined: Any = task if spec.pp > 1 and plan is not None else None
        options, computed = self._options.shard_options(None), None
        if options.has_masters and dtype is None:
            param_dtype = options.policy.param_dtype
            computed = size or 4 if param_dtype is None else param_dtype.itemsize
        return describe_mesh(
            task,
            plan,
            spec,
            sequence_parallel=self.appliers.tensor.sequence_parallel,
            schedule=pipelining.schedule,
            stages_per_rank=pipelining.stages_per_rank,
            split=pipelining.choose_split(pipelined, plan, spec.pp, datamodule) if pipelined and plan else "balanced",
            micro_batches=pipelining.count_micro_batches(spec.pp),
            nodes=self.num_nodes,
            element_size=size,
            rounded=self.bf16_weights == "stochastic" and dtype is None,
            computed=computed,
            inferred=() if model is None else tensor.describe_inferred(model),
            context="" if plan is None or model is None else self.appliers.context.describe(model, plan, spec.cp),
        )

    # --- setting up ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shards the module, unless an earlier run has done so, and builds the optimizers.

        Raises:
            DloError: if a callback unfreezes parameters during the run, or averages parameters that are sharded.
        """
        module = self._module()
        assert self.accelerator is not None
        self._check_callbacks(trainer)
        self.accelerator.setup(trainer)
        if self._layer_sync and ParallelState.of(module) is None:
            self.model = self._layer_sync.apply(module)  # In evaluation too: a sharded module cannot be changed later.
        with keep_dtypes(module):
            self.model = self.precision_plugin.convert_module(module)
        self.shard(trainer)
        self.setup_precision_plugin()
        self._guard_forwards(trainer)
        self._begin_training_streams()
        self.barrier("sharded")

    def _needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of a submodule communicates: that of any submodule does if FSDP has sharded it."""
        spec, own = self.mesh_spec(), self._module()
        if spec.dp_shard == spec.ep == 1 and module not in (own, inner_model(own)):
            return False
        return spec.dp_shard * spec.cp * spec.tp * spec.pp > 1 and super()._needs_all_ranks(module)

    def _keeps_plain_parameters(self, module: LightningModule) -> bool:
        """Returns whether parameters are plain, full tensors: FSDP2 makes DTensors of those that several ranks have."""
        return self.world_size == 1 and not self._options.shard_options(module).needs_fsdp

    def shard(self, trainer: Trainer) -> None:
        """Cuts and shards the module and, while fitting, its optimizers' state."""
        module, spec, fitting = self._module(), self.mesh_spec(), trainer.state.fn == TrainerFn.FITTING
        self._rounding = prepare_weights(self.bf16_weights, module)
        state, options = ParallelState.of(module), self._options
        if state is None:
            self._log_coverage(module)
            run = ParallelRun(module, options, self.groups, self.broadcast(torch.initial_seed()))
            state = parallelize(run, loads_weights=loads_checkpoint(trainer))
        state.check_unchanged(options, trains=fitting)
        self._groups = state.sharded.groups
        state.sharded.collect_params()
        self._context = state.context or self._context
        self.move_metrics()
        if spec.tp > 1:  # These ranks have the same data, which metrics would count twice.
            for submodule in module.modules():
                if isinstance(submodule, Metric):
                    submodule.process_group = self.groups.group("pp", "dp_replicate", "dp_shard", "cp")
        if state.pipelined is not None:
            state.pipelined.micro_batches = self.pipelining.count_micro_batches(spec.pp)
            state.pipelined.share_metrics(spec)
            state.pipelined.gathering = self.groups.data_group if spec.dp_shard > 1 else None
        if self.engine is not None:
            self.engine.stop_recording()
        self.engine = MeshEngine(module, state, self.appliers.shard, self.allow_unused)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self.engine.begin_fit(self.optimizers, self._rounding)
        is_plain = not (state.sharded.is_sharded or options.cuts_model)
        self.own(module, self.world_size, self.engine.stop_recording if is_plain else None)

    def _restore_full_parameters(self, owner: ShardOwner, model: LightningModule) -> None:
        """Keeps a module that another mesh strategy has sharded; :meth:`shard` checks that its options are the same."""
        if ParallelState.of(model) is None:
            super()._restore_full_parameters(owner, model)

    @property
    def groups(self) -> MeshGroups:
        """Process groups of the mesh."""
        if self._groups is None:
            self._groups = MeshGroups(
                self.mesh_spec(), self.root_device.type, self._timeout, separate_copies=self.separates
            )
        return self._groups

    def _log_coverage(self, task: Any) -> None:
        """Logs the share of the model that tensor parallelism divides, if more than norms are replicated."""
        tp = self.mesh_spec().tp
        if tp > 1:
            plan = self._options.checked_plan(task, run_datamodule(task._trainer))
            coverage = self.appliers.tensor.coverage(task.model, plan, tp)
            if coverage.sharded_fraction < NEARLY_ALL:
                rank_zero_info(f"tensor parallelism {coverage.describe()}")
            for line in self.appliers.tensor.describe_inferred(task.model):
                rank_zero_info(line)

    def _guard_forwards(self, trainer: Trainer) -> None:
        """Watches forwards outside of steps, and the user's hooks."""
        super()._guard_forwards(trainer)
        self._guards += watch_hooks(trainer, self._around_hook)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _around_hook(self, hook: str) -> Iterator[None]:
        """Watches a hook of the user's, other than ``optimizer_step``, which runs a step."""
        with self._running.around_hook(hook):
            divided = "" if hook.startswith("optimizer_step ") else self._divided_gradients()
            with JointGradients(divided) if divided else contextlib.nullcontext():
                yield

    def _divided_gradients(self) -> str:
        """Returns the axes of which a rank has other gradients than the others, in words."""
        spec, engine = self.mesh_spec(), self._running
        sizes = {"pp": spec.pp, "tp": 1 if engine.gives_full_values else spec.tp, "ep": spec.ep}
        return " and ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)

    # --- steps ---------------------------------------------------------------------------------------------

    @property
    def _pipelined(self) -> PipelinedTask | None:
        return self.engine.pipelined if self.engine is not None else None

    @property
    def _state(self) -> OptimizerShards:
        return self._running.shares

    @property
    def _running(self) -> MeshEngine:
        assert self.engine is not None, "setup comes first"
        return self.engine

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's training step, with its parameters gathered."""
        with self._running.reset_on_error(), self.precision_plugin.train_step_context():
            return self._running.train(self._shard_batch(batch), *args, loss_scale=self._loss_scale)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer, whose closure runs the training step and the hooks before the step."""
        with self._running.full_values("optimizer step"):
            return super().optimizer_step(*args, **kwargs)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's validation step, with its parameters gathered."""
        with self._running.reset_on_error(), self.precision_plugin.val_step_context():
            return self._running.evaluate("validation_step", self._shard_batch(batch), *args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's test step, with its parameters gathered."""
        with self._running.reset_on_error(), self.precision_plugin.test_step_context():
            return self._running.evaluate("test_step", self._shard_batch(batch), *args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's predict step, with its parameters gathered."""
        with self._running.reset_on_error(), self.precision_plugin.predict_step_context():
            return self._running.predict(batch, *args)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward pass, with complete gradients in ``on_after_backward``; resets the sharding if it raises."""
        module, precision = self._module(), self.precision_plugin
        with self._running.reset_on_error():
            self.pre_backward(closure_loss)
            loss = precision.pre_backward(closure_loss, module)
            if self._pipelined is None:
                precision.backward(loss, module, optimizer, *args, **kwargs)
            else:  # The schedule has run it.
                self._running.sharded.reduce_accumulated()
            self._running.reduce_gradients()
            loss = precision.post_backward(loss, module)
            self.post_backward(loss)
        return loss

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Opens the accumulation window."""
        self._running.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Sets the gradients of the optimizer shards."""
        self._running.after_backward()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        self._running.ends_window = False
        try:
            yield
        finally:
            self._running.ends_window = True

    def on_train_end(self) -> None:
        """Ends the micro-batches in flight, so that a later run finds none."""
        if self._pipelined is not None:
            self._pipelined.pipeline.drain()
        self._free_gathered()

    def _loss_scale(self) -> Tensor:
        """Returns Lightning's factor of the loss for backward, from accumulation and the loss scale.

        It is in single precision at least: a third in bf16 is 0.2% too large.
        """
        scale = torch.ones((), dtype=wide_dtype(), device=self.root_device)
        scale /= self._module().trainer.accumulate_grad_batches
        scaler = loss_scaler(self.precision_plugin)
        return scale if scaler is None else scaler.scale(scale)

    # --- this rank's state ---------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state by name, with this rank's shards of the parameters."""
        self._free_gathered()
        state = super().lightning_module_state_dict()
        return state if self.engine is None else self.engine.sharded.shards(state)

    def local_tensors(self) -> list[Tensor]:
        """Returns the memory of this rank's parameters and buffers."""
        self._free_gathered()
        held = [*self._module().parameters(), *self._module().buffers()]
        masters = None if self.engine is None else self.engine.sharded.masters
        held += [] if masters is None else [shard.data for shard in masters.shards.values()]
        return [local_tensor(tensor) for tensor in held if not tensor.is_meta]

    def refresh(self) -> None:
        """Makes the next use of parameters see the shards' values, after these were written from outside."""
        if self.engine is not None:
            self.engine.sharded.refresh()

    def _free_gathered(self) -> None:
        if self.engine is not None:
            self.engine.sharded.reshard()

    def full_size(self, name: str, parameter: Tensor) -> int:
        """Returns the number of elements of the full tensor of a parameter that tensor parallelism may have cut."""
        cut = self._running.sharded.layout.slices.get(name)
        return parameter.numel() if cut is None else cut.full_shape(parameter.shape).numel()

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        return self._running.state_bytes(self.optimizers)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        return self._running.shares.gradient_norm(optimizer)

    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, averaged over the ranks."""
        return self._running.accumulated_gradients()

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation, to which the next micro-batches add their gradients."""
        self._running.restore_gradients(saved)

    @contextlib.contextmanager
    def guard_hooks(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Checks that hooks compute no norm of a rank's gradients, and change them so that the optimizer sees it."""
        divided, shares = self._divided_gradients(), self._running.shares
        with JointGradients(divided) if divided else contextlib.nullcontext(), shares.guard_gradients(optimizer):
            yield

    # --- what the ranks share ------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the distributed sampler: ranks that share a copy of the model get the same samples."""
        spec = self.mesh_spec()
        return {"num_replicas": spec.data_size, "rank": spec.data_rank(self.global_rank)}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces means and sums over the data-parallel ranks, unless a group is given; the others have the same value.

        Other reductions, such as that of the largest memory, are over all ranks.
        """
        if group is None and isinstance(tensor, Tensor) and str(reduce_op).lower() in ("mean", "avg", "sum"):
            group = self.groups.data_group
        return super().reduce(tensor, group=group, reduce_op=reduce_op)

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities, by the mesh's axes and the options."""
        spec, answers = self.mesh_spec(), MeshAbilities(self)
        kinds: tuple[type[Ability], ...] = (PlacesSecondModel, Replicas, SplitsSequences, StepsInBackward)
        abilities: dict[type[Ability], Ability | str] = super().abilities() | dict.fromkeys(kinds, answers)
        abilities[HalfPrecisionGradients] = self.appliers.shard
        if spec.dp_replicate == 1:
            abilities[Replicas] = Replicas.one_copy
        if spec.pp > 1:
            abilities[StepsInBackward] = (
                f"pp={spec.pp} adds up the gradients of micro-batches, so that those of all of a stage's parameters"
                " exist before the last micro-batch's backward; set pp=1"
            )
        elif self.appliers.shard.find_unused:
            abilities[StepsInBackward] = USED_AT_THE_END
        if self._pipelined is not None:
            abilities[Pipelined] = self._pipelined
        if spec.pp > 1 and not flushes(self.pipelining.schedule):
            abilities[Replicas] = (
                "its schedule applies the gradients of the step before, which belong to weights before an outer step;"
                " set schedule: 1F1B"
            )
            if self.engine is not None:
                abilities[DelayedGradients] = self.engine
        return abilities

    def _share_buffers(self) -> None:
        """Broadcasts buffers over data-parallel ranks, and from the stage that computes with each to the others."""
        if self.engine is not None:  # Otherwise no run has begun, and a checkpoint saves the plain module.
            self.engine.sharded.share_buffers()
        if self._pipelined is not None:
            self._pipelined.share_buffers()

    def attach_counts(self, batch: Any) -> Any:
        """Returns a batch with counts of its documents, for ranks that shard its sequences."""
        return self._context.add_document_counts(batch)

    def _shard_batch(self, batch: Any) -> Any:
        """Returns this rank's shard of a batch that the ranks of one model share."""
        return batch if self._context.sequence is None else self._context.shard_batch(batch)

    def about(self) -> dict[str, Any]:
        """Returns the run's description for a checkpoint's manifest."""
        sizes = self.mesh_spec().sizes
        shown = {axis: size for axis, size in sizes.items() if size > 1 or axis.startswith("dp_")}
        shown |= {"ep": self.mesh_spec().ep} if self.mesh_spec().ep > 1 else {}
        return {**super().about(), "mesh": shown}


class MeshAbilities(PlacesSecondModel, Replicas, SplitsSequences, StepsInBackward):
    """Answers of a mesh to features that not all strategies have.

    Args:
        strategy: Strategy of the mesh.
    """

    def __init__(self, strategy: MeshStrategy) -> None:
        self._strategy = strategy

    def check_frozen(self, task: Any, datamodule: Any = None) -> None:
        """Checks that the mesh's axes can cut a frozen task's model, before any process starts.

        Raises:
            DloError: The axes cannot cut the model; the message computes the nearest sizes that work.
        """
        options = frozen_options(self._strategy._options)
        if options.cuts_model:
            options.check(task, datamodule)
            if is_first_process():
                twin = copy.copy(self._strategy)
                twin.appliers, twin.pipelining = options.appliers, options.pipelining
                dry_run_step(twin, task, options.spec, datamodule, trains=False)

    def place_frozen(
        self, task: Any, *, dtype: torch.dtype | None = None, offload: bool = False, loads_weights: bool = False
    ) -> PlacedModel:
        """Cuts and shards a frozen task along the mesh's axes, by its own plan."""
        strategy, seed = self._strategy, torch.initial_seed()
        options = frozen_options(strategy._options, dtype=dtype, offload=offload)
        run = ParallelRun(task, options, strategy.groups, strategy.broadcast(seed))
        state = parallelize(run, loads_weights=loads_weights)
        if state.pipelined is not None and options.spec.dp_shard > 1:
            state.pipelined.gathering = strategy.groups.data_group
        context = strategy.precision_plugin.forward_context if dtype is None else contextlib.nullcontext
        return FrozenMesh(task, strategy.root_device, state, context=context)

    def place_own(self) -> PlacedModel:
        """Returns the run's own model for forwards outside of steps."""
        module = self._strategy.lightning_module
        state = None if module is None else ParallelState.of(module)
        assert state is not None, "setup comes first"
        context = self._strategy.precision_plugin.forward_context
        return FrozenMesh(module, self._strategy.root_device, state, context=context)

    @property
    def separates(self) -> bool:  # type: ignore[override]
        """Whether each copy trains by itself."""
        return self._strategy.separates

    def separate_copies(self) -> None:
        """Makes each copy train by itself, on the samples of its own ranks."""
        self._strategy.separates = True

    def replica_norm(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the 2-norm over a copy's ranks of tensors laid out as parameters, each element counted once."""
        assert self._strategy.engine is not None, "setup comes first"
        return self._strategy.engine.shares.norm_of_shards(values)

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with this rank's tensors whose gradients are reduced."""
        if self._strategy.engine is not None:
            self._strategy.engine.watch_gradients(ready)

    def sequence_multiple(self) -> int:
        """Returns the number of which a sequence's length must be a multiple: 1 where no ranks share sequences."""
        spec = self._strategy.mesh_spec()
        shards = 2 * spec.cp if spec.cp > 1 else 1
        return shards * spec.tp if self.sequence_parallel else shards

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks of tp share the tokens between their layers."""
        return self._strategy.appliers.tensor.sequence_parallel and self._strategy.mesh_spec().tp > 1

    @contextlib.contextmanager
    def full_sequences(self) -> Iterator[None]:
        """Makes each rank run the model on full sequences inside the block; cp ranks then write the same text."""
        engine = self._strategy.engine
        if engine is not None and engine.pipelined is not None:
            engine.pipelined.pipeline.drain()  # Backwards in flight recompute over shards of sequences.
        with self._strategy._context.use_full_sequences():
            yield

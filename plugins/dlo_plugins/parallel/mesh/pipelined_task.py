"""Runs a task's steps through a pipeline: slices batches into micro-batches, and takes metrics from the last stage.

All ranks of a pipeline get the same batch. The first stage uses its inputs, the last one its targets, and all stages
use what forward computes from its arguments, such as positions and masks. :class:`PipelineOptions` checks the options
before processes start.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from dlo_framework.ability import find_ability
from dlo_framework.batches import batch_size, rebuild, slice_batch
from dlo_framework.data.description import DataDescription
from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.distributed.precision import wide_dtype
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.models.experts.auxiliary_loss import set_scale
from dlo_framework.plan import ParallelPlan
from dlo_framework.strategy_abilities import Pipelined
from dlo_framework.task import Task, find_example, given_outputs, log_measures, measure
from dlo_framework.task_abilities import Generates, LooksInside, WeighsMicroBatches
from dlo_plugins.parallel.pipeline.exchange import batch_signatures
from dlo_plugins.parallel.pipeline.model_stages import PartCosts, Split, balance_stages, flop_costs, make_stages
from dlo_plugins.parallel.pipeline.pipeline_engine import MicroBatchState, Pipeline
from dlo_plugins.parallel.pipeline.pipeline_schedules import make_placement, make_schedule
from dlo_plugins.parallel.pipeline.simulation import StageCosts, simulate


@dataclass(frozen=True)
class PipelineOptions:
    """Options of MeshStrategy for its pipeline.

    Attributes:
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches of a batch; by default four per rank of the pipeline.
        stages_per_rank: Number of stages of a rank; by default the schedule's.
        split: Number of blocks of each stage; by default they are balanced by cost.
    """

    schedule: str = "1F1B"
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    split: list[int] | None = None

    def count_micro_batches(self, ranks: int) -> int:
        """Returns the number of micro-batches of a batch for a pipeline of this number of ranks."""
        return self.micro_batches or 4 * ranks

    def check_schedule(self, ranks: int, precision: str = "32-true") -> None:
        """Checks that the schedule can run on this number of ranks, with a precision.

        Args:
            ranks: Number of ranks of the pipeline.
            precision: Precision of the Trainer.

        Raises:
            DloError: The schedule cannot; the message computes the fix. Or its gradients have a delay of one step, and
                the loss has a scale, which may change between a gradient and its step.
        """
        schedule = make_schedule(self.schedule, ranks, self.count_micro_batches(ranks), self.stages_per_rank)
        # Raises where ranks wait for one another.
        simulate(schedule, StageCosts.equal(schedule.placement.stages))
        if precision == "16-mixed" and not schedule.flushes:
            raise DloError(
                f"precision must be without a loss scale for {self.schedule}, whose gradients are applied one step"
                " later, got 16-mixed; set bf16-mixed, or schedule to 1F1B"
            )

    def check(self, task: Task, plan: ParallelPlan, spec: MeshSpec, datamodule: Any) -> None:
        """Checks that a task, its model and its data fit the pipeline.

        Args:
            task: Task with its model, which may be on the meta device.
            plan: Plan of its model.
            spec: Mesh.
            datamodule: Datamodule whose batches are sliced.

        Raises:
            DloError: They do not fit; the message computes the fix.
        """
        check_task(task)
        batch, parts = DataDescription(datamodule).batch_size, self.count_micro_batches(spec.pp)
        # The number of blocks needed does not depend on their costs, which each rank counts when it cuts.
        where = make_schedule(self.schedule, spec.pp, parts, self.stages_per_rank).placement
        make_stages(task.model, plan, where.stages, self.split or "balanced")
        if isinstance(batch, int) and batch // spec.data_size < parts:
            raise DloError(
                f"batch_size must give each of {spec.data_size} pipelines at least {parts} samples, one per"
                f" micro-batch, got {batch}, which gives each {batch // spec.data_size}; set micro_batches to"
                f" {max(batch // spec.data_size, 1)} or less, or batch_size to {parts * spec.data_size}"
            )

    def choose_split(self, task: Task, plan: ParallelPlan, ranks: int, datamodule: Any) -> Split:
        """Returns the number of blocks of each stage: the given one, or the one with the cheapest largest stage.

        Args:
            task: Task with its full model, which no other axis has cut yet.
            plan: Plan of its model.
            ranks: Number of ranks of the pipeline.
            datamodule: Datamodule that may know the batch's shapes.
        """
        if self.split is not None:
            return self.split
        stages = make_placement(self.schedule, ranks, self.stages_per_rank).stages
        has_choice = len(plan.block_names(task.model, repeated=True)) > stages
        costs = forward_costs(task, plan, datamodule) if has_choice else None
        if costs is None:
            return "balanced"
        return balance_stages(costs.blocks, stages, costs.stem, costs.head)


def forward_costs(task: Task, plan: ParallelPlan, datamodule: Any) -> PartCosts | None:
    """Counts the floating-point operations of each part of the model in a forward and its loss, without computing.

    They are the same on all ranks and devices, because they depend on shapes only.

    Args:
        task: Task with its full model, on a device or the meta device.
        plan: Plan of its model.
        datamodule: Datamodule that may know the batch's shapes, or None.

    Returns:
        Costs of the parts, without a loss that needs its trainer or values. None where the task has no example batch,
        or torch cannot count without values; then stages are balanced by parameters.
    """
    batch = find_example(task, datamodule)
    if batch is None:
        return None
    try:
        alone = _without_memory(task)
    except Exception:  # Attributes of a task need not be copied.
        return None

    def run() -> None:
        device = next((tensor.device for tensor in alone.model.parameters()), torch.device("cpu"))
        here = move_data_to_device(batch, device)
        args, kwargs = alone.inputs(here)
        outputs = alone(*args, **kwargs)
        # A loss that needs its trainer, or values, is not counted; its cost is usually small.
        with contextlib.suppress(RuntimeError, AttributeError):
            alone.loss(outputs, here)

    return flop_costs(alone.model, plan, run)


def _without_memory(task: Task) -> Any:
    """Returns a copy of a task with its tensors on the meta device, and without its trainer.

    Modules of the copy may keep what they compute, and its loss communicates with nobody.
    """
    memo: dict[int, Any] = {id(task._trainer): None, id(task._fabric): None}
    for tensor in [*task.parameters(), *task.buffers()]:
        meta_tensor = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(meta_tensor, tensor.requires_grad) if is_parameter else meta_tensor
    return copy.deepcopy(task, memo)


#: First number of the streams of random numbers of evaluated batches; lower ones are those of training.
_EVALUATIONS = 2**40

#: Shape of the tensors, without rows, and dtype of each list state of a metric.
_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _list_shapes(metric: Any) -> _Shapes:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: ((0, *state[-1].shape[1:]), state[-1].dtype)
        for name, state in states.items()
        if isinstance(state, list) and state and isinstance(state[-1], Tensor)
    }


class _LastStageGather:
    """Function for torchmetrics' ``dist_sync_fn`` that gathers a metric's state from ranks of the last stage only."""

    def __init__(self, spec: MeshSpec, place: int) -> None:
        self._spec, self._place = spec, place

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the states of the last stage's ranks, in the order of ranks."""
        states: list[Tensor] = gather_all_tensors(value, group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        pairs = zip(ranks, states, strict=True)
        return [state for rank, state in pairs if self._spec.coordinates(rank).pp == self._place]


class PipelinedTask(Pipelined):
    """Trains and evaluates a task through a pipeline.

    Args:
        task: Task whose model has been cut.
        pipeline: Pipeline of the model.
        micro_batches: Number of micro-batches of a training batch.
        select: Callback before each forward, which gets the micro-batch's first row and number of rows.
        state: State that `select` changes, and that a backward which recomputes needs again.

    Raises:
        DloError: The task has its own training step, or parameters outside of its model.
    """

    def __init__(
        self,
        task: Task,
        pipeline: Pipeline,
        micro_batches: int,
        select: Callable[[int, int], None] | None = None,
        state: MicroBatchState | None = None,
    ) -> None:
        check_task(task)
        self.task, self.pipeline, self.micro_batches = task, pipeline, micro_batches
        self._select = select
        #: Group of the data-parallel ranks with which this rank gathers parameters.
        self.gathering: dist.ProcessGroup | None = None
        self._buffers = list(self._shared_buffers())
        self._rows: dict[int, tuple[int, int]] = {}
        self._evaluated = 0  # Number of batches that have been evaluated since the last one of training.
        #: Shape and dtype of the output of :meth:`run_on_all_ranks`, by the shapes of its input.
        self._output_layouts: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}
        pipeline.micro_batch_state = state

    def train(self, batch: Any, seed: Tensor, accumulates: bool = False, ends_window: bool = True) -> dict[str, Tensor]:
        """Runs forward and backward of a batch; returns `{"loss": loss}`, the same on all ranks.

        Gradients are computed when it returns, and the loss has no graph.

        Args:
            batch: Batch on the device.
            seed: Factor of the loss for backward.
            accumulates: Whether the optimizer step accumulates the batch before too.
            ends_window: Whether the optimizer steps after this batch.

        Raises:
            DloError: The batch has fewer samples than the schedule can run.
        """
        parts = self.split_training_batch(batch)
        weights = self.task.ability(WeighsMicroBatches).micro_batch_weights(parts)
        set_scale(seed / len(parts))
        self._evaluated, trainer = 0, self.task._trainer
        total = self.pipeline.train_step(
            parts,
            self._forward,
            self.task.loss,
            weights,
            seed,
            stream=0 if trainer is None else trainer.fit_loop.total_batch_idx,
            sum_tied=False,
            accumulates=accumulates,
            ends_window=ends_window,
        )
        return {"loss": total.to(wide_dtype())}

    def outputs(self, batch: Any) -> Any:
        """Returns the model's outputs for a batch, on the last stage's rank; None elsewhere."""
        parts = self._split(batch, self._evaluated_parts(batch_size(batch)))
        outputs = self.pipeline.evaluate(parts, self._forward, self._next_stream())
        rows = [batch_size(part) for part in parts]
        return None if outputs is None else concat_batches(outputs, [number / sum(rows) for number in rows])

    def _next_stream(self) -> int:
        self._evaluated += 1
        return _EVALUATIONS + self._evaluated

    def _evaluated_parts(self, length: int) -> int:
        """Returns the number of micro-batches of an evaluated batch: at most one for each rank of the pipeline.

        Where each micro-batch gathers parameters, all ranks that gather use the number of the shortest batch.
        """
        parts = min(self.pipeline.placement.ranks, length)
        if self.gathering is None:
            return parts
        least = torch.tensor(parts, device=self.pipeline.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.gathering)
        return int(least)

    def evaluate(self, batch: Any, batch_idx: int | None = None) -> None:
        """Updates the metrics with a batch on the last stage's rank, and logs them on all ranks.

        Args:
            batch: Batch on the device.
            batch_idx: Index of the batch in validation, for `after_validation_step`; None in a test.
        """
        outputs, before = self.outputs(batch), self._updates()
        with self.pipeline.without_other_stages():
            measures = measure(self.task, outputs, batch) if self.pipeline.is_last else {}
        updated = {
            name: (count, _list_shapes(self.task.get_submodule(name)))
            for name, count in self._updates().items()
            if count != before[name]
        }
        message: list[Any] = [({name: self._encode_measure(value) for name, value in measures.items()}, updated)]
        dist.broadcast_object_list(message, group=self.pipeline.group, group_src=self._source)
        if not self.pipeline.is_last:
            values, updated = message[0]
            measures = {name: self._decode_measure(value) for name, value in values.items()}
            self._count_as_updated(updated)
        log_measures(self.task, measures, batch)
        if batch_idx is not None and (generates := self.task.find_ability(Generates)) is not None:
            generates.after_validation_step(batch_idx)

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Broadcasts each buffer, such as a norm's statistics, from the stage that computes with it to all stages.

        Checkpoints save the first stage's copy of tensors that all stages have.
        """
        for module, name, source in self._buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                broadcast_values(buffer, self.pipeline.group, source)

    def _shared_buffers(self) -> Iterator[tuple[nn.Module, str, int]]:
        """Yields the persistent buffers that all stages have, and the rank of the stage that computes with each.

        They are collected once, while all stages have the same ones: a buffer that a loss adds later is in the last
        stage only.
        """
        for prefix, module in self.task.named_modules():
            for name in module._buffers:
                if name in module._non_persistent_buffers_set:
                    continue
                inside, _, rest = f"{prefix}.{name}".partition(".")
                stages, placement = self.pipeline.stages, self.pipeline.placement
                stage = stages.writer_stage(rest) if inside == "model" else stages.count - 1
                if stage is not None:
                    yield module, name, placement.rank_of(stage)

    def share_metrics(self, spec: MeshSpec) -> None:
        """Makes metrics reduce over the last stage's ranks only.

        The other ranks never update: they would not change a sum, but would change a mean.
        """
        counting = _LastStageGather(spec, self._source)
        for module in self.task.modules():
            if isinstance(module, Metric):
                module.dist_sync_fn = counting  # torchmetrics (1.0 to 1.9) calls it with a state and a group.

    def _updates(self) -> dict[str, int]:
        """Returns the number of updates of each of the task's metrics, by name."""
        metrics = ((name, module) for name, module in self.task.named_modules() if isinstance(module, Metric))
        return {name: metric.update_count for name, metric in metrics}

    def _count_as_updated(self, updates: dict[str, tuple[int, _Shapes]]) -> None:
        """Marks metrics as updated, so that they compute again from the last stage's states.

        A reach into torchmetrics (1.0 to 1.9), which has no method for it and reads these two attributes. List states
        get a tensor without rows, because ranks can only gather tensors with the same number of dims.
        """
        for name, (count, shapes) in updates.items():
            metric: Any = self.task.get_submodule(name)
            metric._update_count, metric._computed = count, None
            for state, (shape, dtype) in shapes.items():
                if not getattr(metric, state):
                    getattr(metric, state).append(torch.empty(shape, dtype=dtype, device=self.pipeline.device))

    def predict(self, batch: Any, batch_idx: int) -> Any:
        """Returns the task's predictions for a batch, the same on all ranks of the pipeline.

        Outputs are broadcast through the CPU, because a tensor is unpickled to the device of the rank that sent it.

        Raises:
            DloError: The task runs the model by itself to predict.
        """
        check_predict(self.task)
        if self.task.find_ability(Generates) is not None:  # It calls :meth:`run_on_all_ranks` for each token.
            return self.task.predict_step(batch, batch_idx)
        outputs = self.outputs(batch)
        message = [move_data_to_device(outputs, torch.device("cpu"))]
        dist.broadcast_object_list(message, group=self.pipeline.group, group_src=self._source)
        if not self.pipeline.is_last:
            outputs = move_data_to_device(message[0], self.pipeline.device)
        with given_outputs(self.task, outputs):
            return self.task.predict_step(batch, batch_idx)

    def run_on_all_ranks(self, part: Any, forward: Callable[[Any], Tensor]) -> Tensor:
        """Runs a forward through the stages, without gradients; returns its output on all ranks of the pipeline.

        Where ranks share sequences, call it inside the strategy's `full_sequences`.

        Args:
            part: Tensors of one micro-batch, the same on all ranks, whose shapes decide those of hidden states.
            forward: Function that calls the model on the micro-batch and returns a tensor, which each stage runs up to
                its end.
        """
        (key,) = batch_signatures([part], self.pipeline.model, self.pipeline.device)
        if self._select is not None:
            self._rows = {id(part): (0, batch_size(part))}
            self._select(*self._rows[id(part)])
        outputs = self.pipeline.evaluate([part], forward, self._next_stream())
        if len(self._output_layouts) >= self.pipeline.most_shapes:
            self._output_layouts.clear()
        if key not in self._output_layouts:
            message = [None if outputs is None else (tuple(outputs[0].shape), outputs[0].dtype)]
            dist.broadcast_object_list(message, group=self.pipeline.group, group_src=self._source)
            assert message[0] is not None
            self._output_layouts[key] = message[0]
        shape, dtype = self._output_layouts[key]
        output = torch.empty(shape, dtype=dtype, device=self.pipeline.device) if outputs is None else outputs[0]
        output = output.contiguous()
        dist.broadcast(output, group=self.pipeline.group, group_src=self._source)
        return output

    def register_loss_hook(self, hook: Callable[[Tensor], None]) -> bool:
        """Calls a function with the losses of micro-batches, on the ranks of the last stage."""
        if self.pipeline.delays:
            return False
        self.pipeline.loss_ready = hook
        return True

    @property
    def stages_per_rank(self) -> int:  # type: ignore[override]
        """Number of stages that this rank runs in a forward."""
        return len(self.pipeline.own_stages)

    @property
    def _source(self) -> int:
        placement = self.pipeline.placement
        return placement.rank_of(placement.stages - 1)

    def _forward(self, part: Any) -> Any:
        if self._select is not None:
            self._select(*self._rows[id(part)])
        args, kwargs = self.task.inputs(part)
        return self.task.forward(*args, **kwargs)

    def split_training_batch(self, batch: Any) -> list[Any]:
        """Returns a batch's micro-batches: fewer than the option's where the batch is short, as an epoch's last may be.

        Raises:
            DloError: The schedule cannot run on fewer micro-batches.
        """
        length = batch_size(batch)
        if length >= self.micro_batches:
            return self._split(batch, self.micro_batches)
        count = next((number for number in range(length, 0, -1) if self.pipeline.can_run(number)), None)
        if count is None:
            raise DloError(
                f"a rank's batch must have at least one sample per micro-batch, got {length} samples, and"
                f" {self.pipeline.schedule} on {self.pipeline.placement.ranks} ranks cannot run that few micro-batches;"
                " set drop_last=True in the loader if the batch is an epoch's last, or else a larger batch_size or 1F1B"
            )
        return self._split(batch, count)

    def _split(self, batch: Any, count: int) -> list[Any]:
        length = batch_size(batch)
        edges = [length * number // count for number in range(count + 1)]
        spans = [(first, last - first) for first, last in itertools.pairwise(edges)]
        parts = [slice_batch(batch, first, size) for first, size in spans]
        self._rows = {id(part): span for part, span in zip(parts, spans, strict=True)}
        return parts

    def _encode_measure(self, value: Metric | Tensor) -> Any:
        """Returns a measure in the form in which it is broadcast: a metric's name, or a tensor's value."""
        if isinstance(value, Tensor):
            return float(value)
        name = next((name for name, module in self.task.named_modules() if module is value), None)
        if name is None:
            raise DloError(
                "a task's metrics must be its attributes under pp > 1, so that all stages find them, got a"
                f" {type(value).__name__} that is none; set it in setup()"
            )
        return name

    def _decode_measure(self, message: Any) -> Metric | Tensor:
        if isinstance(message, str):
            metric = self.task.get_submodule(message)
            assert isinstance(metric, Metric)
            return metric
        return torch.tensor(message, dtype=wide_dtype(), device=self.pipeline.device)


def check_task(task: Task) -> None:
    """Checks that a task trains by its inputs() and loss(), and only its model, of which a pipeline's stages consist.

    Raises:
        DloError: The task has its own training step or backward, or trainable parameters outside of its model.
    """
    for name in ("training_step", "backward"):
        if getattr(type(task), name) is not getattr(Task, name):
            raise DloError(
                f"a task under pp > 1 must train by inputs() and loss(), got a {name} of {type(task).__name__}; move"
                " its code there, or use pp: 1"
            )
    outside = [name for name, p in task.named_parameters() if p.requires_grad and not name.startswith("model.")]
    if outside:
        raise DloError(
            f"trainable parameters under pp > 1 must be in the task's model, got '{outside[0]}'"
            f"{f' and {len(outside) - 1} more' if outside[1:] else ''} of {type(task).__name__}; make it a part of the"
            " model (of its head, if the loss uses it: return it with the outputs), or use pp: 1"
        )


def check_predict(task: Any) -> None:
    """Checks that a task predicts from forwards of its model that a pipeline runs.

    Raises:
        DloError: The task runs the model by itself, and not by the pipeline.
    """
    generates = find_ability(task, Generates)
    if generates is not None and not generates.generates_in_stages:
        raise DloError(
            f"a task that generates must set generates_in_stages under pp > 1, got {type(task).__name__}; run its"
            " forwards by contract_of(strategy).ability(Pipelined).run_on_all_ranks, or predict with pp: 1"
            " (checkpoints load on any mesh)"
        )


def check_inside(task: Any, spec: MeshSpec, sequence_parallel: bool) -> None:
    """Checks that each rank has the blocks and the full sequences that a task needs.

    Raises:
        DloError: The mesh divides blocks or sequences.
    """
    inside = find_ability(task, LooksInside)
    if inside is None:
        return
    by_axis = {axis: f"{axis}={size}" for axis, size in (("pp", spec.pp), ("cp", spec.cp)) if size > 1}
    by_axis |= {"sequence_parallel": "sequence_parallel: true"} if sequence_parallel and spec.tp > 1 else {}
    divided = [text for axis, text in by_axis.items() if axis in inside.divided_by]
    if divided:
        needed = "all blocks and full sequences" if "pp" in inside.divided_by else "full sequences"
        raise DloError(
            f"a rank must have {needed} for the loss of {type(task).__name__}"
            f" ({inside.looks_inside_by}), got {' and '.join(divided)}, which divides them; use the other axes"
            f"{inside.looks_inside_fix}"
        )


def concat_batches(parts: list[Any], weights: Sequence[float]) -> Any:
    """Returns the outputs of a batch from those of its parts: tensors are concatenated, scalars averaged.

    Args:
        parts: Outputs of the parts: tensors, or lists, tuples, dicts and dataclasses of them (transformers' outputs
            too). Other plain data is equal in all parts.
        weights: Weights of the parts, which sum to one, for the mean of scalars.

    Raises:
        DloError: The outputs are of another kind.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(parts)
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        # The exact value where it does not depend on the part, such as a learned temperature.
        return first + sum(weight * (part - first) for weight, part in zip(weights, parts, strict=True))
    if isinstance(first, dict):
        values = {key: concat_batches([part[key] for part in parts], weights) for key in first}
        return values if type(first) is dict else type(first)(**values)
    if isinstance(first, list | tuple):
        return rebuild(first, [concat_batches(list(items), weights) for items in zip(*parts, strict=True)])
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: concat_batches([getattr(part, name) for part in parts], weights) for name in names}
        )
    plain = first is None or isinstance(first, Tensor | str | bytes | int | complex | torch.dtype | torch.device)
    if plain and all(bool(part == first) for part in parts):
        return first
    got = f"{'different values of' if plain else 'a'} {type(first).__name__}"
    raise DloError(
        "a model's outputs under pp > 1 must be tensors, or lists, tuples, dicts and dataclasses of them, so that those"
        f" of micro-batches can be concatenated, got {got}; leave it out if it is not needed (for"
        " transformers' models, use_cache=False), or use pp: 1"
    )

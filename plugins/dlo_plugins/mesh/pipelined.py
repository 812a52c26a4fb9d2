"""A task's steps where its model is cut into the stages of a pipeline: batches in parts, measures from the last stage.

Every rank of a pipeline sees the same batch. The first stage takes its inputs from it, the last one its targets, and
all of them what a forward makes of its arguments on the way, such as positions and masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from dlo_framework.distributed.collectives import broadcast_values
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.task import Task, batch_length
from dlo_plugins.mesh.parts import joined, rows_of
from dlo_plugins.pipeline.engine import Pipeline

#: Of a metric's states that are lists: the shape of their tensors, less the rows, and the dtype.
_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _list_shapes(metric: Any) -> _Shapes:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: ((0, *state[-1].shape[1:]), state[-1].dtype)
        for name, state in states.items()
        if isinstance(state, list) and state and isinstance(state[-1], Tensor)
    }


class _Counting:
    """Gathers a metric's state for torchmetrics' ``dist_sync_fn``, and keeps what ranks of the last stage have."""

    def __init__(self, spec: MeshSpec, place: int) -> None:
        self._spec, self._place = spec, place

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the states of the ranks that count, in the order of ranks."""
        states: list[Tensor] = gather_all_tensors(value, group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        pairs = zip(ranks, states, strict=True)
        return [state for rank, state in pairs if self._spec.coordinates(rank).pp == self._place]


class PipelinedTask:
    """Trains and evaluates a task through a pipeline.

    Args:
        task: whose model has been cut.
        pipeline: of the model.
        micro_batches: into how many parts a batch is cut in training.
        select: told which rows of the batch the model is given next: the first, and how many.

    Raises:
        DloError: if the task has a training step of its own, or parameters outside of its model.
    """

    def __init__(
        self, task: Task, pipeline: Pipeline, micro_batches: int, select: Callable[[int, int], None] | None = None
    ) -> None:
        check_steps(task)
        check_outside(task)
        self.task, self.pipeline, self.micro_batches = task, pipeline, micro_batches
        self._select = select
        #: Ranks with other data, with which this one gathers parameters.
        self.gathering: dist.ProcessGroup | None = None
        self._buffers = list(self._shared_buffers())
        self._rows: dict[int, tuple[int, int]] = {}
        self._spans: list[tuple[int, int]] = []
        if select is not None:  # For what is computed again in backward.
            pipeline.before_backward = lambda stage, number, complete: select(*self._spans[number])

    def train(self, batch: Any, seed: Tensor) -> dict[str, Tensor]:
        """Runs forward and backward of a batch; returns `{"loss": loss}`, on all ranks alike.

        The loss has a graph of one addition, so that whoever calls backward on it finds something to do: gradients are
        there already.

        Args:
            batch: on the device.
            seed: what the loss is multiplied by for backward.

        Raises:
            DloError: for a batch with fewer samples than the schedule can run.
        """
        parts = self.training_parts(batch)
        weights = self.task.micro_batch_weights(parts)
        total = self.pipeline.train_step(parts, self._forward, self.task.loss, weights, seed, sum_tied=False)
        anchor = torch.zeros((), device=total.device, requires_grad=True)
        return {"loss": total.float() + anchor}

    def outputs(self, batch: Any) -> Any:
        """Returns the model's outputs for a batch, on the last stage's rank; None elsewhere."""
        parts = self._split(batch, self._evaluated_parts(batch_length(batch)))
        found = self.pipeline.evaluate(parts, self._forward)
        return None if found is None else joined(found)

    def _evaluated_parts(self, length: int) -> int:
        """Returns into how many micro-batches an evaluated batch is cut: at most one for each rank of the pipeline.

        Where parameters are gathered for each micro-batch, all ranks that gather have the number of the shortest batch.
        """
        parts = min(self.pipeline.placement.ranks, length)
        if self.gathering is None:
            return parts
        least = torch.tensor(parts, device=self.pipeline.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.gathering)
        return int(least)

    def evaluate(self, batch: Any) -> None:
        """Updates the metrics of a batch on the last stage's rank, and logs them on all."""
        outputs, before = self.outputs(batch), self._updates()
        found = self.task.measured(outputs, batch) if self.pipeline.is_last else {}
        updated = {
            name: (count, _list_shapes(self.task.get_submodule(name)))
            for name, count in self._updates().items()
            if count != before[name]
        }
        told: list[Any] = [({name: self._tell(value) for name, value in found.items()}, updated)]
        dist.broadcast_object_list(told, group=self.pipeline.group, group_src=self._source)
        if not self.pipeline.is_last:
            values, updated = told[0]
            found = {name: self._hear(value) for name, value in values.items()}
            self._count_as_updated(updated)
        self.task.log_measured(found, batch)

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Gives all stages what the one that computes with a buffer has made of it, such as a norm's statistics.

        Checkpoints take the first stage's copy of what all stages have.
        """
        for module, name, source in self._buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                broadcast_values(buffer, self.pipeline.group, source)

    def _shared_buffers(self) -> Iterator[tuple[nn.Module, str, int]]:
        """Yields the saved buffers that all stages have, and the rank whose copy counts.

        They are looked up once, while stages are alike: one that a loss adds later is in the last alone.
        """
        for prefix, module in self.task.named_modules():
            for name in module._buffers:
                if name in module._non_persistent_buffers_set:
                    continue
                inside, _, rest = f"{prefix}.{name}".partition(".")
                stages, placement = self.pipeline.stages, self.pipeline.placement
                stage = stages.writer(rest) if inside == "model" else stages.count - 1
                if stage is not None:
                    yield module, name, placement.rank_of(stage)

    def share_metrics(self, spec: MeshSpec) -> None:
        """Has metrics sum up what the last stage's ranks have counted, and leave out the others, which count nothing.

        These would be harmless in a sum, but not in a mean.
        """
        counting = _Counting(spec, self._source)
        for module in self.task.modules():
            if isinstance(module, Metric):
                module.dist_sync_fn = counting  # torchmetrics (1.0 to 1.9) calls it with a state and a group.

    def _updates(self) -> dict[str, int]:
        """Returns how often each of the task's metrics has been updated."""
        metrics = ((name, module) for name, module in self.task.named_modules() if isinstance(module, Metric))
        return {name: metric.update_count for name, metric in metrics}

    def _count_as_updated(self, updates: dict[str, tuple[int, _Shapes]]) -> None:
        """Makes metrics compute anew: what the last stage has counted comes to them when ranks sum up.

        torchmetrics (1.0 to 1.9) has no method for it, and asks these two attributes. States that are lists get a
        tensor without rows: ranks gather tensors of equally many dims alone.
        """
        for name, (count, shapes) in updates.items():
            metric: Any = self.task.get_submodule(name)
            metric._update_count, metric._computed = count, None
            for state, (shape, dtype) in shapes.items():
                if not getattr(metric, state):
                    getattr(metric, state).append(torch.empty(shape, dtype=dtype, device=self.pipeline.device))

    def predict(self, batch: Any, batch_idx: int) -> Any:
        """Returns what the task predicts for a batch, on all ranks of the pipeline alike.

        The outputs pass by way of the CPU: a tensor that is unpickled lies on the device of the rank it comes from.

        Raises:
            DloError: if the task runs the model by itself for it.
        """
        check_predict(self.task)
        outputs = self.outputs(batch)
        told = [move_data_to_device(outputs, torch.device("cpu"))]
        dist.broadcast_object_list(told, group=self.pipeline.group, group_src=self._source)
        if not self.pipeline.is_last:
            outputs = move_data_to_device(told[0], self.pipeline.device)
        with self.task.given_outputs(outputs):
            return self.task.predict_step(batch, batch_idx)

    @property
    def _source(self) -> int:
        placement = self.pipeline.placement
        return placement.rank_of(placement.stages - 1)

    def _forward(self, part: Any) -> Any:
        if self._select is not None:
            self._select(*self._rows[id(part)])
        args, kwargs = self.task.inputs(part)
        return self.task.forward(*args, **kwargs)

    def training_parts(self, batch: Any) -> list[Any]:
        """Returns a batch's micro-batches: fewer than of others, if it is too short, as an epoch's last may be.

        Raises:
            DloError: if the schedule cannot run so few.
        """
        length = batch_length(batch)
        if length >= self.micro_batches:
            return self._split(batch, self.micro_batches)
        found = next((number for number in range(length, 0, -1) if self.pipeline.can_run(number)), None)
        if found is None:
            raise DloError(
                f"each micro-batch has at least one sample, but a rank has a batch of {length}, and"
                f" {self.pipeline.schedule} on {self.pipeline.placement.ranks} ranks cannot run so few micro-batches;"
                " set drop_last=True in the loader if it is an epoch's last; else a larger batch_size, or 1F1B"
            )
        return self._split(batch, found)

    def _split(self, batch: Any, count: int) -> list[Any]:
        length = batch_length(batch)
        edges = [length * number // count for number in range(count + 1)]
        spans = [(first, last - first) for first, last in itertools.pairwise(edges)]
        parts = [rows_of(batch, length, first, size) for first, size in spans]
        self._rows = {id(part): span for part, span in zip(parts, spans, strict=True)}
        self._spans = spans
        return parts

    def _tell(self, value: Metric | Tensor) -> Any:
        """Returns what the other ranks are told of a measure: where the task has it, or its value."""
        if isinstance(value, Tensor):
            return float(value)
        name = next((name for name, module in self.task.named_modules() if module is value), None)
        if name is None:
            raise DloError(
                f"a task's metrics are its attributes, so that all stages of a pipeline find them, but a"
                f" {type(value).__name__} is not; set it in setup()"
            )
        return name

    def _hear(self, told: Any) -> Metric | Tensor:
        if isinstance(told, str):
            metric = self.task.get_submodule(told)
            assert isinstance(metric, Metric)
            return metric
        return torch.tensor(told, device=self.pipeline.device)


def check_steps(task: Task) -> None:
    """Checks that a task trains by its inputs and its loss, which is what a pipeline runs.

    Raises:
        DloError: if it has a training step of its own.
    """
    if type(task).training_step is not Task.training_step:
        raise DloError(
            f"pp > 1 trains by a task's inputs() and loss(), but {type(task).__name__} has a training_step of its own;"
            " move what it does there, or use pp: 1"
        )


def check_outside(task: Task) -> None:
    """Checks that all that trains is in the model: a pipeline's stages are made of it, and the rest is in none.

    Raises:
        DloError: if a task has parameters of its own.
    """
    outside = [name for name, p in task.named_parameters() if p.requires_grad and not name.startswith("model.")]
    if outside:
        raise DloError(
            f"pp > 1 shares out the parameters of a task's model, but {type(task).__name__} trains '{outside[0]}'"
            f"{f' and {len(outside) - 1} more' if outside[1:] else ''} outside of it; make it a part of the model (of"
            " its head, if the loss uses it: return it with the outputs), or use pp: 1"
        )


def check_predict(task: Any) -> None:
    """Checks that a task predicts from what its model makes of a batch at once, which is what a pipeline runs.

    Raises:
        DloError: if it runs the model by itself, as one that writes text does.
    """
    if getattr(task, "generates", False):
        raise DloError(
            f"pp > 1 runs a model once for each batch, and {type(task).__name__} runs it for each token that it writes;"
            " predict with pp: 1, or in one process: a checkpoint goes from any mesh to any other"
        )


def check_inside(task: Any, spec: MeshSpec, sequence_parallel: bool) -> None:
    """Checks that a task whose loss looks inside the blocks finds all of them, and whole sequences, on each rank.

    Raises:
        DloError: if a mesh divides them.
    """
    if not getattr(task, "looks_inside", False):
        return
    divided = [f"{axis}={size}" for axis, size in (("pp", spec.pp), ("cp", spec.cp)) if size > 1]
    divided += ["sequence_parallel: true"] if sequence_parallel and spec.tp > 1 else []
    if divided:
        raise DloError(
            f"the loss of {type(task).__name__} needs what all of its model's blocks make of whole sequences (the"
            f" routers' logits, by output_router_logits: true), which {' and '.join(divided)} divides among ranks; use"
            " the other axes, or set output_router_logits: false"
        )

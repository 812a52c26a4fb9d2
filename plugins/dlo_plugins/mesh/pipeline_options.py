"""Configures a mesh's pipeline: its schedule, its micro-batches and the blocks of its stages."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_plugins.mesh.pipelined_task import check_outside, check_steps
from dlo_plugins.pipeline.costs import PartCosts, flop_costs
from dlo_plugins.pipeline.pipeline_schedules import flushes, make_placement, make_schedule
from dlo_plugins.pipeline.simulation import StageCosts, simulate
from dlo_plugins.pipeline.stage_assignment import Split, balance_stages, check_pipeline


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

    def check_schedule(self, ranks: int) -> None:
        """Checks that the schedule can run on this number of ranks.

        Args:
            ranks: Number of ranks of the pipeline.

        Raises:
            DloError: The schedule cannot; the message computes the fix.
        """
        schedule = make_schedule(self.schedule, ranks, self.count_micro_batches(ranks), self.stages_per_rank)
        # Raises where ranks wait for one another.
        simulate(schedule, StageCosts.equal(schedule.placement.stages))

    def check_delay(self, precision: str) -> None:
        """Checks that a schedule whose gradients have a delay of one step can run with a precision.

        Args:
            precision: Precision of the Trainer.

        Raises:
            DloError: The loss has a scale, which may change between a gradient and its step.
        """
        if precision == "16-mixed" and not flushes(self.schedule):
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
        check_steps(task)
        check_outside(task)
        batch, parts = getattr(datamodule, "batch_size", None), self.count_micro_batches(spec.pp)
        # The number of blocks needed does not depend on their costs, which each rank counts when it cuts.
        check_pipeline(
            *(task.model, plan, spec.pp, self.schedule, parts, self.stages_per_rank, self.split or "balanced")
        )
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
        costs = forward_costs(task, plan, datamodule)
        if costs is None:
            return "balanced"
        stages = make_placement(self.schedule, ranks, self.stages_per_rank).stages
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
    batch = task.example_batch(datamodule)
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
        found = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(found, tensor.requires_grad) if is_parameter else found
    return copy.deepcopy(task, memo)

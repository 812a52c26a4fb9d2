"""How a mesh's pipeline is laid out: its schedule, its micro-batches, and who has which blocks."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_plugins.mesh.pipelined import check_outside, check_steps
from dlo_plugins.pipeline.assign import Split, make_stages
from dlo_plugins.pipeline.balance import balanced_split
from dlo_plugins.pipeline.costs import PartCosts, flop_costs
from dlo_plugins.pipeline.engine import Pipeline
from dlo_plugins.pipeline.schedules import make_schedule, placement


@dataclass(frozen=True)
class Pipelining:
    """The options of MeshStrategy that its pipeline goes by; see there."""

    schedule: str = "1F1B"
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    split: list[int] | None = None

    def parts(self, ranks: int) -> int:
        """Returns into how many micro-batches a batch is cut for a pipeline of so many ranks."""
        return self.micro_batches or 4 * ranks

    def check_schedule(self, ranks: int) -> None:
        """Checks that the schedule can run on so many ranks.

        Raises:
            DloError: if it cannot; the message computes the fix.
        """
        make_schedule(self.schedule, ranks, self.parts(ranks), self.stages_per_rank)

    def check(self, task: Task, plan: ParallelPlan, spec: MeshSpec, datamodule: Any) -> None:
        """Checks that a task, its model and its data can go through the pipeline.

        Args:
            task: with its model, which may lie on the meta device.
            plan: of its model.
            spec: the mesh.
            datamodule: whose batches are to be cut.

        Raises:
            DloError: if they cannot; the message computes the fix.
        """
        check_steps(task)
        check_outside(task)
        stages = placement(self.schedule, spec.pp, self.stages_per_rank).stages
        # Whether blocks suffice does not depend on their costs, which each rank counts when it cuts.
        make_stages(task.model, plan, stages, self.split or "balanced")
        batch, parts = getattr(datamodule, "batch_size", None), self.parts(spec.pp)
        if isinstance(batch, int) and batch // spec.data_size < parts:
            raise DloError(
                f"each of {parts} micro-batches has at least one sample, but batch_size {batch} gives each"
                f" of {spec.data_size} pipelines {batch // spec.data_size}; set micro_batches to"
                f" {max(batch // spec.data_size, 1)} or less, or batch_size to {parts * spec.data_size}"
            )

    def split_of(self, task: Task, plan: ParallelPlan, ranks: int, datamodule: Any) -> Split:
        """Returns how many blocks each stage gets: as given, or so that the dearest stage is as cheap as can be.

        Args:
            task: with its model, whole: no other axis has cut it yet.
            plan: of its model.
            ranks: of the pipeline.
            datamodule: may tell the batch's shapes.
        """
        if self.split is not None:
            return self.split
        costs = forward_costs(task, plan, datamodule)
        if costs is None:
            return "balanced"
        stages = placement(self.schedule, ranks, self.stages_per_rank).stages
        return balanced_split(costs.blocks, stages, costs.stem, costs.head)

    def build(
        self, task: Task, plan: ParallelPlan, group: dist.ProcessGroup, split: Split, device: torch.device
    ) -> Pipeline:
        """Cuts a task's model into stages, of which this rank keeps its own."""
        model: Any = task.model
        return Pipeline(
            *(model, plan, group),
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            split=split,
            device=device,
        )


def forward_costs(task: Task, plan: ParallelPlan, datamodule: Any) -> PartCosts | None:
    """Returns the floating-point operations of each part in a forward and its loss, counted without computing.

    They are the same on all ranks and devices, for they depend on shapes alone.

    Args:
        task: with its model, whole, on a device or the meta device.
        plan: of its model.
        datamodule: may tell the batch's shapes; None where there is none.

    Returns:
        The costs; None where the task knows no batch, or torch cannot count without values. Then parameters count.
        A loss that needs its trainer or values is left out.
    """
    batch = task.example_batch(datamodule)
    if batch is None:
        return None
    alone: Any = copy.copy(task)
    alone._trainer = None  # Its loss must look at no other ranks.

    def run() -> None:
        device = next((tensor.device for tensor in alone.model.parameters()), torch.device("cpu"))
        here = move_data_to_device(batch, device)
        args, kwargs = alone.inputs(here)
        outputs = alone(*args, **kwargs)
        # One that asks for its trainer, or for values, is not weighed; it seldom weighs much.
        with contextlib.suppress(RuntimeError, AttributeError):
            alone.loss(outputs, here)

    return flop_costs(alone.model, plan, run)

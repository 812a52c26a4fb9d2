"""Communication of a step by part: predicted from the layout, and counted on a simulated rank that runs the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dlo_framework.cli.lightning_cli import DloParser
from dlo_framework.distributed.traffic import Traffic
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_plugins.mesh.mesh_simulation import simulate_ranks, simulated_precision
from dlo_plugins.planner.expert_exchange import exchanged_bytes
from dlo_plugins.planner.layout import Layout, repeats_messages
from dlo_plugins.planner.stage_parameters import (
    Stage,
    divides_end,
    expert_count,
    local_bytes,
    local_count,
    partial_count,
)
from dlo_plugins.planner.step_time import TimeModel

#: Kinds of communication that ring and all-to-all attention have, and sharded data parallelism over `cp` has not.
_PASSED = ("send", "receive", "all_to_all")
_MESH_STRATEGY = "dlo_plugins.strategies.mesh.MeshStrategy"


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a rank of the first stage communicates in an optimizer step.

    A buffer of n bytes counts n, as in the ZeRO paper: the output of an all-gather, the input of a reduce-scatter.

    Attributes:
        tensor: Collectives of tensor parallelism.
        context: Keys, values and their gradients that pass the ranks of `cp`.
        gathering: Gathered parameters.
        gradients: Reduced gradients.
        pipeline: Messages of the pipeline, sent and received.
        experts: Tokens and outputs that the ranks of `ep` exchange, those of a rank's own experts included.
    """

    tensor: float = 0.0
    context: float = 0.0
    gathering: float = 0.0
    gradients: float = 0.0
    pipeline: float = 0.0
    experts: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


def predict_traffic(times: TimeModel, layout: Layout) -> StepTraffic:
    """Returns the communication of a rank of the first stage of a layout."""
    mesh, stages = layout.mesh, times.stages(layout)
    own = [stages[stage] for stage in times.placement(layout).stages_of(0)] if mesh.pp > 1 else [stages[0]]
    numbers = times.placement(layout).stages_of(0) if mesh.pp > 1 else (0,)
    hidden, count = times.hidden(layout), layout.micro_batches
    ends = sum((number > 0) + (number < layout.stages - 1) for number in numbers)
    return StepTraffic(
        tensor=sum(
            count * _tensor(times, layout, stage) + partial_count(stage, layout) * times.state.gradient for stage in own
        ),
        context=count * sum(_context(times, layout, stage) for stage in own),
        gathering=sum(_gathering(times, layout, stage) for stage in own),
        gradients=sum(_gradients(times, layout, stage) for stage in own),
        pipeline=2 * count * ends * hidden,
        experts=count * sum(_experts(layout, stage) for stage in own),
    )


def _tensor(times: TimeModel, layout: Layout, stage: Stage) -> float:
    """Returns the bytes of a micro-batch.

    Each region sums its output in forward and its input's gradient in backward. With a sharded sequence that is a
    reduce-scatter, and a gather of the input before it; backward gathers the input once more for weight gradients.
    The one key and value of multi-query attention are gathered, and their gradients scattered. Under autocast outputs
    have the dtype of products; inputs, and their gradients, that of the layer before.
    """
    mesh = layout.mesh
    if mesh.tp == 1:
        return 0.0
    profile, found = times.profile_of(layout), 0.0
    for part, mode, number in stage:
        if not part.collectives and profile.blocks and divides_end(part, profile):
            # The embedding sums its output, and the head its input's gradient.
            found += (1 + layout.sequence_parallel) * profile.blocks[0].gathered * layout.micro_batch / mesh.cp
        if layout.sequence_parallel:
            once, both = part.left + part.entered, 2 * (part.left + part.entered) + part.gathered_again
        else:
            once, both = part.left, part.left + part.entered
        both += 2 * part.key_value
        if part.collectives and part.modes.get(mode, part.modes["none"]).gathers_again:
            both += once + part.key_value - part.left / part.collectives * (not part.repeats_last)
        found += number * both * layout.micro_batch / mesh.cp
    return found


def _experts(layout: Layout, stage: Stage) -> float:
    """Returns the bytes of a micro-batch: tokens to experts and outputs back, in backward their gradients."""
    return sum(number * exchanged_bytes(part, layout) * (2 + repeats_messages(mode)) for part, mode, number in stage)


def _context(times: TimeModel, layout: Layout, stage: Stage) -> float:
    """Returns the bytes of a micro-batch: keys and values go round in both passes, in backward with their gradients."""
    cp = layout.mesh.cp
    if cp == 1:
        return 0.0
    share, found = times.share(layout), 0.0
    for part, mode, number in stage:
        passes = 3 + repeats_messages(mode)
        for product, repeats in part.forward.products:
            if product.is_attention:
                one = product.on(share)
                found += passes * number * repeats * (cp - 1) * one.batch * one.n * one.k * one.size
    return found


def _gathering(times: TimeModel, layout: Layout, stage: Stage) -> float:
    """Returns the bytes of a step: each block twice a micro-batch under ZeRO 3, everything once otherwise."""
    if layout.sharers == 1 or layout.zero < 1:
        return 0.0
    mesh, state, profile = layout.mesh, times.state, times.profile_of(layout)
    found = 0.0
    for part, _, number in stage:
        one: Stage = ((part, "", 1),)
        experts, own = (expert_count(one, mesh.tp), _own_experts(one, layout)) if mesh.ep > 1 else (0.0, 0.0)
        size = number * (local_bytes(one, mesh.tp, state.gathered) + (own - experts) * state.gathered)
        again = layout.zero == 3 and mesh.pp == 1
        is_root = part is profile.stem or part is profile.head  # The root's unit stays gathered for backward.
        found += size * (layout.micro_batches * (1 if is_root else 2) if again else 1)
    return found


def _gradients(times: TimeModel, layout: Layout, stage: Stage) -> float:
    """Returns the bytes of a step: gradients reduced over the shards, and their shards over the replicas."""
    mesh, element = layout.mesh, times.state.reduced
    size = local_count(stage, mesh.tp, trained=True) * element
    repeats = layout.micro_batches if layout.reduce_each else 1
    if layout.zero == 0:
        return size if layout.sharers * mesh.dp_replicate > 1 else 0.0
    shards = size / layout.sharers  # Of experts too, under any `ep`.
    if mesh.ep > 1:
        experts = expert_count(stage, mesh.tp, trained=True)
        size += (_own_experts(stage, layout, trained=True) - experts) * element
    found = size * repeats if layout.sharers > 1 else 0.0
    return found + (shards * repeats if mesh.dp_replicate > 1 else 0.0)


def _own_experts(stage: Stage, layout: Layout, *, trained: bool = False) -> float:
    """Returns the number of parameters of a rank's own experts that other ranks of its copy share with it."""
    mesh = layout.mesh
    return expert_count(stage, mesh.tp, trained=trained) / mesh.ep if layout.expert_sharers > 1 else 0.0


def count_traffic(config: dict[str, Any], task: Task, datamodule: Any, layout: Layout) -> StepTraffic | None:
    """Returns the communication of the run's own step on a simulated rank of the first stage.

    Args:
        config: Config of the run.
        task: Task.
        datamodule: Datamodule of the config.
        layout: Layout of the run.

    Returns:
        None for a strategy without a mesh, a task without an example of a batch, and a step that simulated ranks
        cannot run.
    """
    entry = (config.get("trainer") or {}).get("strategy")
    name = str(entry.get("class_path") if isinstance(entry, dict) else entry).rpartition(".")[2]
    example = task.example_batch(datamodule)
    if name not in ("mesh", "MeshStrategy") or example is None:
        return None
    mesh = layout.mesh
    parser = DloParser()
    parser.add_argument("--strategy", type=Strategy)
    options = {**((entry.get("init_args") or {}) if isinstance(entry, dict) else {}), **mesh.sizes}
    found = {"class_path": _MESH_STRATEGY, "init_args": options}
    strategy: Any = parser.instantiate_classes(parser.parse_object({"strategy": found})).strategy
    strategy.precision_plugin = simulated_precision((config.get("trainer") or {}).get("precision"))
    strategy.parallel_devices = [torch.device("cpu")] * mesh.world_size
    rows = layout.micro_batch * (layout.micro_batches if mesh.pp > 1 else 1)

    def with_rows(tensor: Tensor) -> Tensor:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    batch = tree_map_only(Tensor, with_rows, example)
    try:
        (rank,) = simulate_ranks(task, strategy, mesh, [0], batch)
    except DloError:
        return None
    return _by_part(rank.traffic, layout)


def recorded_traffic(summary: Mapping[str, Any], layout: Layout) -> StepTraffic | None:
    """Returns the communication of a step that a run on a mesh has recorded; None where it has not.

    Args:
        summary: Content of the run's `summary.json`.
        layout: Layout of the run.
    """
    rows = summary.get("traffic")
    return None if rows is None else _by_part((Traffic(**row) for row in rows), layout, of_step=True)


def _by_part(traffic: Iterable[Traffic], layout: Layout, *, of_step: bool = False) -> StepTraffic:
    """Returns communication as that of a step, by part.

    Args:
        traffic: Communication of a batch.
        layout: Layout of the run.
        of_step: Whether it is that of a step already.
    """
    found = dict.fromkeys(StepTraffic().parts, 0.0)
    repeats = 1 if layout.mesh.pp > 1 or of_step else layout.micro_batches
    for one in traffic:
        axes = one.axis.split(" x ")
        if axes == ["tp"]:
            name, times = "tensor", repeats
        elif axes == ["pp"]:
            name, times = "pipeline", repeats
        elif axes == ["ep"]:
            name, times = "experts", repeats
        elif "cp" in axes and one.kind in _PASSED:
            name, times = "context", repeats
        elif one.kind == "all_gather":
            name, times = "gathering", repeats if layout.zero == 3 else 1
        else:
            name, times = "gradients", repeats if layout.reduce_each else 1
        found[name] += times * one.bytes
    return StepTraffic(**found)

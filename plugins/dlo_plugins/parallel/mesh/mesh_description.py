"""Describes a mesh as text and JSON: the ranks' coordinates and groups, and the bytes of a model's state on each.

Bytes follow from shapes alone, without a process group.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_framework.units import format_bytes, format_table
from dlo_plugins.parallel.fsdp.row_shards import row_range, shard_dim
from dlo_plugins.parallel.gathered_dtype import find_exact_parameters
from dlo_plugins.parallel.pipeline.model_stages import Split, Stages, make_stages
from dlo_plugins.parallel.pipeline.pipeline_schedules import flushes, make_placement
from dlo_plugins.parallel.tensor.tp_plan import NEARLY_ALL, Coverage, Division, measure_coverage
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan


@dataclass(frozen=True)
class RankStateBytes:
    """Bytes of a model's state on one rank.

    Attributes:
        parameters: Bytes of parameters, trained and frozen.
        gradients: Bytes of the trained parameters' gradients, as they are sharded at a step's end.
        optimizer: Bytes of Adam's two moments of the trained parameters.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


class _Kind(NamedTuple):
    """Parameters with the same shape, division and stages."""

    shape: tuple[int, ...]
    division: Division | None
    element_size: int
    state_size: int
    is_trained: bool
    stages: tuple[int, ...]
    is_expert: bool


def _count_bytes(counted: Iterable[tuple[_Kind, int]]) -> RankStateBytes:
    """Returns the bytes of parameters, given the number of elements of each kind."""
    parameters = gradients = optimizer = 0
    for kind, elements in counted:
        parameters += elements * kind.element_size
        gradients += elements * kind.element_size * kind.is_trained
        optimizer += elements * 2 * kind.state_size * kind.is_trained
    return RankStateBytes(parameters, gradients, optimizer)


def _rank_bytes(
    kinds: Mapping[_Kind, int],
    spec: MeshSpec,
    place: Coordinates,
    stages: set[int],
    delayed_by: int | None,
    computed: int | None,
) -> RankStateBytes:
    """Returns the bytes of state on a rank.

    Args:
        kinds: Number of parameters of each kind.
        spec: Mesh, without -1.
        place: Coordinates of the rank.
        stages: Numbers of its stages.
        delayed_by: Last stage of a pipeline whose gradients have a delay of one step, with two versions of parameters
            and gradients, which `dp_shard` does not shard; None without a delay.
        computed: Bytes of a floating-point element of both versions, beside master weights that `dp_shard` shards; None
            without master weights.
    """
    shards, full = list[tuple[_Kind, int]](), list[tuple[_Kind, int]]()
    for kind, count in kinds.items():
        if stages.isdisjoint(kind.stages):
            continue
        shape = list(kind.shape)
        sharers, number = spec.dp_shard * spec.cp, place.dp_shard * spec.cp + place.cp
        if kind.is_expert:
            shape[0] //= spec.ep
            sharers, number = spec.expert_shards, number // spec.ep
        if kind.division is not None and spec.tp > 1:
            shape[kind.division.dim] = kind.division.slice_for(spec.tp, place.tp).length
        elements = math.prod(shape)
        full.append((kind, count * elements))
        if shard_dim(torch.Size(shape), sharers, kind.is_expert):
            elements //= sharers
        elif shape:
            elements = row_range(torch.Size(shape), sharers, number)[1]
        shards.append((kind, count * elements))
    held = _count_bytes(shards)
    if delayed_by is None:
        return held
    version = _count_bytes([(kind._replace(element_size=computed or kind.element_size), n) for kind, n in full])
    copies = version.gradients * (delayed_by not in stages)  # The last stage has no micro-batch in flight.
    masters = held.parameters if computed else 0
    return RankStateBytes(version.parameters + copies + masters, 2 * _count_bytes(full).gradients, held.optimizer)


#: Maximum numbers of ranks, of groups of an axis and of ranks of a group that are shown in full.
_RANKS, _GROUPS, _MEMBERS = 32, 8, 8


@dataclass(frozen=True)
class StageDescription:
    """Stage of a pipeline.

    Attributes:
        stage: Number of the stage.
        pp: Rank of the axis `pp` that has it.
        blocks: Names of its blocks.
        around: Names `stem` and `head`, if the stage has them.
    """

    stage: int
    pp: int
    blocks: tuple[str, ...]
    around: tuple[str, ...]


@dataclass(frozen=True)
class RankDescription:
    """Rank of a mesh.

    Attributes:
        rank: Number of the rank.
        node: Number of its node.
        place: Coordinates on the axes.
        stages: Numbers of its stages.
        state_bytes: Bytes of state on it.
        second_bytes: Bytes of second models' parameters on its device.
    """

    rank: int
    node: int
    place: Coordinates
    stages: tuple[int, ...]
    state_bytes: RankStateBytes
    second_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of the state and of second models."""
        return self.state_bytes.total + self.second_bytes


@dataclass(frozen=True)
class SecondModel:
    """Model beside the one that trains, such as a teacher.

    Attributes:
        model: Class name of the model.
        parameters: Number of parameters.
        unsharded: Bytes of the parameters in a single process.
        is_offloaded: Whether they are in CPU memory, and not counted on the devices.
    """

    model: str
    parameters: int
    unsharded: int
    is_offloaded: bool

    def text(self) -> str:
        """Returns a line about the model."""
        place = ", in CPU memory: not counted" if self.is_offloaded else ", frozen"
        return f"{self.model}, {self.parameters:,} parameters: {format_bytes(self.unsharded)}{place}"


@dataclass(frozen=True)
class MixtureDescription:
    """Mixtures of experts of a model on a mesh.

    Attributes:
        mixtures: Number of mixtures.
        experts: Number of experts of each; of the first, where they differ.
        local: Number of those that a rank computes.
        top_k: Number of experts of a token; None if it is not known.
        parameters: Number of parameters of all experts.
        active: Number of parameters that a token uses, of the full model.
    """

    mixtures: int
    experts: int
    local: int
    top_k: int | None
    parameters: int
    active: int

    def describe(self, total: int) -> str:
        """Returns the description as text.

        Args:
            total: Number of parameters of the model.
        """
        each = f"{self.top_k} for a token: {self.active:,} of {total:,} parameters are active"
        return (
            f"{self.mixtures} mixtures of {self.experts} experts"
            + (f", {each}" if self.top_k is not None else "")
            + (f"; each rank has {self.local}" if self.local < self.experts else "; each rank has all")
        )


@dataclass(frozen=True)
class MeshDescription:
    """Mesh with a model on it.

    Attributes:
        spec: Sizes of the mesh.
        nodes: Number of nodes, with the same number of ranks each.
        model: Class name of the model.
        parameters: Number of parameters of the model.
        unsharded: Bytes of state in a single process.
        schedule: Name of the pipeline's schedule and number of micro-batches; None without a pipeline.
        stages: Stages of the pipeline; a single one without a pipeline.
        groups: Groups of ranks along each axis of more than one rank.
        ranks: All ranks.
        coverage: Share of the model that tensor parallelism divides; None without it.
        inferred: Lines about tensor rules that were inferred: what they cut, and what stays whole and why.
        context: Line about attention and full sequences under context parallelism; empty without it.
        seconds: Second models of the run.
        mixtures: Mixtures of experts of the model; None without any.
    """

    spec: MeshSpec
    nodes: int
    model: str
    parameters: int
    unsharded: RankStateBytes
    schedule: tuple[str, int] | None
    stages: tuple[StageDescription, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    ranks: tuple[RankDescription, ...]
    coverage: Coverage | None = None
    inferred: tuple[str, ...] = ()
    context: str = ""
    seconds: tuple[SecondModel, ...] = ()
    mixtures: MixtureDescription | None = None

    def beside(self, second: MeshDescription, is_offloaded: bool) -> MeshDescription:
        """Returns the description of a run that has a second model too.

        Args:
            second: Description of the second model on the same mesh, of which the parameters count.
            is_offloaded: Whether its parameters are in CPU memory.
        """
        about = SecondModel(second.model, second.parameters, second.unsharded.parameters, is_offloaded)
        sizes = [0 if is_offloaded else rank.state_bytes.parameters for rank in second.ranks]
        ranks = [
            replace(rank, second_bytes=rank.second_bytes + size) for rank, size in zip(self.ranks, sizes, strict=True)
        ]
        return replace(self, ranks=tuple(ranks), seconds=(*self.seconds, about))

    @property
    def largest(self) -> RankDescription:
        """Rank with the most bytes; the first of several."""
        return max(self.ranks, key=lambda rank: (rank.total, -rank.rank))

    def to_json(self) -> dict[str, Any]:
        """Returns the description as JSON data; sizes are in bytes."""
        return {
            "mesh": self.spec.sizes | ({"ep": self.spec.ep} if self.spec.ep > 1 else {}),
            "world_size": self.spec.world_size,
            "nodes": self.nodes,
            "model": {"class": self.model, "parameters": self.parameters, "bytes": asdict(self.unsharded)},
            "second_models": [asdict(second) for second in self.seconds],
            "schedule": self.schedule and {"name": self.schedule[0], "micro_batches": self.schedule[1]},
            "tensor_parallel": self.coverage and self.coverage.to_json(),
            "inferred_rules": list(self.inferred),
            "context_parallel": self.context or None,
            "experts": self.mixtures and asdict(self.mixtures),
            "stages": [asdict(stage) for stage in self.stages],
            "groups": self.groups,
            "ranks": [
                {
                    "rank": rank.rank,
                    "node": rank.node,
                    "coordinates": rank.place._asdict(),
                    "stages": rank.stages,
                    "bytes": asdict(rank.state_bytes),
                    "second_bytes": rank.second_bytes,
                }
                for rank in self.ranks
            ],
            "largest": self.largest.rank,
        }

    def text(self) -> str:
        """Returns the description as text, with some of the ranks and groups of a large world."""
        return "\n".join([*self._head(), "", *self._group_lines(), "", *self._stage_lines(), "", *self._rank_lines()])

    def _head(self) -> list[str]:
        spec = self.spec
        nodes = f"{self.nodes} node" + (f"s of {spec.world_size // self.nodes}" if self.nodes > 1 else "")
        lines = [
            f"mesh   {spec}: {spec.world_size} rank{'s' * (spec.world_size > 1)} on {nodes}",
            f"model  {self.model}, {self.parameters:,} parameters: {format_bytes(self.unsharded.parameters)}, and with"
            f" gradients and Adam's state {format_bytes(self.unsharded.total)}",
        ]
        lines += [f"second {second.text()}" for second in self.seconds]
        if self.schedule is not None:
            lines.append(f"steps  {self.schedule[0]}, {self.schedule[1]} micro-batches")
        if self.coverage is not None:
            lines.append(f"tp     {self.coverage.describe()}")
        lines += [f"       {line}" for line in self.inferred]
        if self.context:
            lines.append(f"cp     {self.context}")
        if self.mixtures is not None:
            lines.append(f"moe    {self.mixtures.describe(self.parameters)}")
        return lines

    def _group_lines(self) -> list[str]:
        rows = [["axis", "groups", "ranks"]]
        for axis, groups in self.groups.items():
            shown = [f"[{_shortened([str(rank) for rank in group], _MEMBERS)}]" for group in groups]
            rows.append([axis, f"{len(groups)} of {len(groups[0])}", _shortened(shown, _GROUPS)])
        return format_table(rows) if len(rows) > 1 else ["no groups: there is one rank"]

    def _stage_lines(self) -> list[str]:
        rows = [["stage", "pp", "blocks", "with"]]
        rows += [[str(s.stage), str(s.pp), collapse_ranges(s.blocks), " and ".join(s.around)] for s in self.stages]
        return format_table(rows)

    def _rank_lines(self) -> list[str]:
        axes = [axis for axis, size in self.spec.sizes.items() if size > 1]
        seconds = ["second"] if self.seconds else []
        sizes = ["parameters", "gradients", "Adam", *seconds, "total"]
        rows = [["rank", "node", *axes, "stages", "tensors", "shard", *sizes]]
        last = -1
        for rank in self._shown():
            if rank.rank != last + 1:
                rows.append(["..."])
            last = rank.rank
            spec, place, held = self.spec, rank.place, rank.state_bytes
            tensors, shards = "whole", spec.dp_shard * spec.cp
            if self.coverage is not None:
                share = self.coverage.sharded_fraction
                tensors = f"{place.tp + 1}/{spec.tp}" + (f" of {share:.0%}" if share < NEARLY_ALL else "")
            counted = [held.parameters, held.gradients, held.optimizer, *([rank.second_bytes] if seconds else [])]
            rows.append(
                [
                    *(str(rank.rank), str(rank.node), *(str(getattr(place, axis)) for axis in axes)),
                    *(",".join(map(str, rank.stages)), tensors),
                    f"{place.dp_shard * spec.cp + place.cp + 1}/{shards}" if shards > 1 else "whole",
                    *(format_bytes(size) for size in (*counted, rank.total)),
                ]
            )
        most = self.largest
        return [*format_table(rows), f"the most: rank {most.rank}, {format_bytes(most.total)}"]

    def _shown(self) -> list[RankDescription]:
        """Returns all ranks of a small world, or the first, the last, and the first of each stage of a large one."""
        if len(self.ranks) <= _RANKS:
            return list(self.ranks)
        a_stage = len(self.ranks) // self.spec.pp
        firsts = range(0, len(self.ranks), a_stage)
        wanted = {*range(4), *(firsts if len(firsts) <= _RANKS // 2 else (firsts[1], firsts[-1]))}
        wanted |= {len(self.ranks) - 1, self.largest.rank}
        return [self.ranks[number] for number in sorted(wanted)]


def describe_mesh(
    module: nn.Module,
    plan: ParallelPlan | None,
    spec: MeshSpec,
    *,
    sequence_parallel: bool = False,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    split: Split = "balanced",
    micro_batches: int = 1,
    nodes: int = 1,
    element_size: int | None = None,
    rounded: bool = False,
    computed: int | None = None,
    inferred: Sequence[str] = (),
    context: str = "",
) -> MeshDescription:
    """Returns a mesh's description.

    Args:
        module: Task that trains; it may be on the meta device, and is not changed. Without a plan, any module.
        plan: Plan of its model; None for a module without one, which only data parallelism divides.
        spec: Mesh, without -1.
        sequence_parallel: Option of MeshStrategy, as are the next four.
        schedule: Name of the pipeline's schedule.
        stages_per_rank: Number of stages of a rank, for schedules that leave it open.
        split: Number of blocks of each stage, or `balanced`.
        micro_batches: Number of micro-batches of a step.
        nodes: Number of nodes.
        element_size: Bytes of a floating-point element; None for each parameter's own.
        rounded: Whether weights and gradients are bf16 and the optimizer's state is in single precision, as under
            `bf16_weights: stochastic`.
        computed: Bytes of a floating-point element of full parameters beside master weights; None without these.
        inferred: Lines about inferred tensor rules.
        context: Line about modules that get full sequences under context parallelism.

    Raises:
        DloError: The mesh cannot cut the model.
    """
    model = module if plan is None else module.get_submodule("model")
    divisions: dict[str, Division] = {}
    stages: Stages | None = None
    coverage: Coverage | None = None
    mixtures: list[Mixture] = []
    described = [StageDescription(0, 0, (), ("stem", "head"))]
    where = make_placement(schedule, spec.pp, stages_per_rank)
    if plan is not None:
        described = [replace(described[0], blocks=tuple(plan.block_names(model)))]
        mixtures = find_mixtures(model, plan)
        if spec.tp > 1:
            divisions = make_tp_plan(model, plan, spec.tp, sequence_parallel).divisions
            coverage = measure_coverage(model, divisions)
        if spec.pp > 1:
            stages = make_stages(model, plan, where.stages, split)
            ends = {0: ("stem",), where.stages - 1: ("head",)}
            described = [
                StageDescription(number, where.rank_of(number), tuple(stages.blocks_of(number)), ends.get(number, ()))
                for number in range(where.stages)
            ]
    experts = {name for mixture in mixtures for name in mixture.stacked} if spec.ep > 1 else set()
    exact = find_exact_parameters(module) if rounded else set()
    kinds: Counter[_Kind] = Counter()
    for full_name, parameter in module.named_parameters():
        name = full_name.removeprefix("model.") if full_name.startswith("model.") else ""
        size = element_size if element_size and parameter.is_floating_point() else parameter.element_size()
        if rounded and parameter.dtype == torch.float32 and id(parameter) not in exact:
            size = 2
        state = max(size, 4) if rounded else size
        held_by = tuple(range(len(described))) if stages is None else stages.stages_of(name)
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        kinds[_Kind(shape, divisions.get(name), size, state, trained, held_by, name in experts)] += 1
    known: dict[Coordinates, RankStateBytes] = {}
    delayed_by = where.stages - 1 if spec.pp > 1 and not flushes(schedule) else None
    ranks = []
    for rank in range(spec.world_size):
        place = spec.coordinates(rank)
        own = tuple(where.stages_of(place.pp)) if spec.pp > 1 else (0,)
        alike = place._replace(dp_replicate=0)
        if alike not in known:
            known[alike] = _rank_bytes(kinds, spec, alike, set(own), delayed_by, computed)
        ranks.append(RankDescription(rank, rank * nodes // spec.world_size, place, own, known[alike]))
    axes = spec.sizes | {"ep": spec.ep}
    return MeshDescription(
        spec=spec,
        nodes=nodes,
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        unsharded=_count_bytes((kind, count * math.prod(kind.shape)) for kind, count in kinds.items()),
        schedule=(schedule, micro_batches) if spec.pp > 1 else None,
        stages=tuple(described),
        groups={axis: groups_along(spec, axis) for axis, size in axes.items() if size > 1},
        ranks=tuple(ranks),
        coverage=coverage,
        inferred=tuple(inferred),
        context=context,
        mixtures=_describe_mixtures(model, mixtures, spec.ep),
    )


def prepare_model(module: Any) -> tuple[nn.Module, ParallelPlan | None]:
    """Returns a module with its model, on the meta device unless it has been built, and the model's plan."""
    if isinstance(module, Task):
        task = module.on_meta()
        try:
            return task, task.parallel_plan()
        except DloError:  # The plan names no blocks; only pp, cp and tp need them, and were checked before.
            return task, None
    if next(module.parameters(), None) is None:
        module = copy.deepcopy(module)
        with torch.device("meta"):
            module.configure_model()
    return module, None


def groups_along(spec: MeshSpec, axis: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of ranks that differ along one axis only, or in `ep`."""
    groups: dict[Coordinates, list[int]] = {}
    for rank in range(spec.world_size):
        place = spec.coordinates(rank)
        if axis == "ep":
            number = (place.dp_shard * spec.cp + place.cp) // spec.ep
            alike = place._replace(dp_shard=number, cp=0)
        else:
            alike = place._replace(**{axis: 0})
        groups.setdefault(alike, []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in groups.values()))


def _describe_mixtures(model: nn.Module, mixtures: Sequence[Mixture], ep: int) -> MixtureDescription | None:
    if not mixtures:
        return None
    first = mixtures[0]
    total = sum(parameter.numel() for parameter in model.parameters())
    parameters = sum(mixture.count_parameters(model) for mixture in mixtures)
    return MixtureDescription(
        mixtures=len(mixtures),
        experts=first.count,
        local=first.count // ep,
        top_k=first.top_k,
        parameters=parameters,
        active=total - parameters + sum(mixture.count_active(model) for mixture in mixtures),
    )


def collapse_ranges(names: Sequence[str]) -> str:
    """Returns names with runs of consecutive numbers at their ends collapsed: `layers.0-3, norm`."""
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None:
            runs.append(name)
            continue
        stem, number = match.group(1), int(match.group(2))
        last = runs[-1] if runs else ""
        if isinstance(last, tuple) and last[0] == stem and last[2] + 1 == number:
            runs[-1] = (stem, last[1], number)
        else:
            runs.append((stem, number, number))
    shown = [run if isinstance(run, str) else f"{run[0]}{run[1]}" + f"-{run[2]}" * (run[1] < run[2]) for run in runs]
    return ", ".join(shown)


def _shortened(items: Sequence[str], most: int) -> str:
    return " ".join(items if len(items) <= most else [*items[: most - 2], "...", items[-1]])

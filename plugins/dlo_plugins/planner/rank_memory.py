"""Predicts the memory of a rank by part: state, gathered units, activations in flight, the loss, and buffers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dlo_plugins.pipeline.actions import ActionKind
from dlo_plugins.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.planner.layout import Layout
from dlo_plugins.planner.memory_walk import MemoryWalk
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.work import Part, Share, Stage, local_bytes, local_count


@dataclass(frozen=True)
class InFlight:
    """Micro-batches that a rank keeps for backward.

    Attributes:
        stages: Stages of the rank.
        together: Micro-batches of each stage when the rank has most of them.
        most: Largest number of each stage, at whatever time.
        inputs: Micro-batches of each stage of which it has only the input then, because it recomputes the others.
    """

    stages: tuple[int, ...]
    together: tuple[int, ...]
    most: tuple[int, ...]
    inputs: tuple[int, ...] = (0,)


def count_in_flight(layout: Layout) -> tuple[InFlight, ...]:
    """Returns the micro-batches in flight on each rank of a layout's pipeline.

    A stage keeps a micro-batch's activations from its forward, or its recomputation, until its backward, or until its
    weight gradient.
    """
    if layout.mesh.pp == 1:
        return (InFlight((0,), (1,), (1,)),)
    return _replay(*replay_key(layout))


def replay_key(layout: Layout) -> tuple[str, int, int, int | None]:
    """Returns what decides the micro-batches in flight: the schedule, ranks, micro-batches and stages of a rank.

    A schedule's steady state repeats, so that more micro-batches keep no more in flight.
    """
    count = min(layout.micro_batches, 4 * layout.stages)
    return layout.schedule, layout.mesh.pp, count, layout.stages_option


@functools.lru_cache(maxsize=4096)
def _replay(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None) -> tuple[InFlight, ...]:
    schedule = make_schedule(name, ranks, micro_batches, stages_per_rank)
    if not schedule.flushes:
        schedule = schedule.unroll(2)
    ends = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    recomputed, found = schedule.recomputed_stages, []
    for rank, order in enumerate(schedule.orders):
        own = tuple(schedule.placement.stages_of(rank))
        live, most = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        inputs = dict.fromkeys(own, 0)
        together, with_inputs = live, inputs
        largest = (0, 0)
        for action in order:
            stage, kind = action.stage, action.kind
            if kind in (ends, ActionKind.BACKWARD):
                live[stage] -= 1
            elif kind is ActionKind.RECOMPUTE or (kind is ActionKind.FORWARD and stage not in recomputed):
                live[stage] += 1
                most[stage] = max(most[stage], live[stage])
                inputs[stage] -= kind is ActionKind.RECOMPUTE
            elif kind is ActionKind.FORWARD:
                inputs[stage] += 1
            size = sum(live.values()), sum(inputs.values())
            if size > largest:
                together, with_inputs, largest = dict(live), dict(inputs), size
        counts = (tuple(of[stage] for stage in own) for of in (together, most, with_inputs))
        found.append(InFlight(own, *counts))
    return tuple(found)


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of a rank at its peak.

    Attributes:
        parameters: Stored parameters.
        gradients: Gradients, with those that a step accumulates before it reduces them.
        optimizer: State of the optimizer, master weights included.
        gathered: Parameters that are gathered for computation.
        activations: Activations that forward keeps, of all micro-batches in flight; under Rotor, all that its budget
            counts.
        working: Activations of the block that runs, and of what it recomputes.
        loss: Logits and the loss's gradients, beyond what the blocks need when they run.
        overhead: Context of the device, and what the allocator takes beyond the tensors.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    working: float
    loss: float
    overhead: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(vars(self).values())

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageBytes:
    """Activations of a stage.

    Attributes:
        kept: Bytes that a micro-batch in flight keeps.
        working: Bytes of the block that runs, beyond those.
        loss: Bytes of logits and of the loss's gradients; 0 without the head.
    """

    kept: float
    working: float
    loss: float


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a pipeline with equal stages and as many micro-batches in flight.

    Attributes:
        ranks: Stages of each rank.
        together: Micro-batches of each stage when a rank has most of them.
        most: Largest number of micro-batches of each stage.
        inputs: Micro-batches of each stage of which a rank has only the input then.
    """

    ranks: tuple[tuple[int, ...], ...]
    together: tuple[int, ...]
    most: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class RankActivations:
    """Activations of Rotor's schedules on the ranks of the pipeline.

    Attributes:
        bytes: Bytes on a rank of each group.
        region: Largest number of blocks that are recomputed together, whose parameters stay gathered meanwhile.
    """

    bytes: tuple[float, ...]
    region: int


@dataclass(frozen=True)
class _RankParameters:
    """Parameters of a rank.

    Attributes:
        stored: Bytes as they are stored, before sharding.
        full: Bytes as computation uses them.
        trained: Number of trained ones.
        full_trained: Number of trained ones of which the rank computes gradients: of its own experts alone.
        units: Bytes of the two largest units, as computation uses them.
        unit_trained: Number of trained ones in the two units that have most.
    """

    stored: float
    full: float
    trained: float
    full_trained: float
    units: float
    unit_trained: float


class MemoryModel:
    """Predicts the memory of a model's ranks.

    Args:
        times: Time model, which knows the stages.
    """

    def __init__(self, times: TimeModel) -> None:
        self._times, self.state = times, times.state
        self._counts: dict[tuple[object, ...], _RankParameters] = {}
        self._known: dict[tuple[object, ...], StageBytes] = {}
        self._groups: dict[tuple[object, ...], tuple[RankGroup, ...]] = {}
        self._even: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._walk = MemoryWalk(times)

    def largest(self, layout: Layout, rotor: RankActivations | None = None) -> RankMemory:
        """Returns the memory of the rank of the pipeline that needs most.

        Args:
            layout: Layout.
            rotor: Activations under Rotor; None for the layout's own recomputation.
        """
        walks = rotor is None and self._walks
        found = self._walked(layout) if walks else self._of_groups(layout, rotor)
        return max(found, key=lambda memory: memory.total)

    @property
    def _walks(self) -> bool:
        """Whether the largest moment of a step counts: an accelerator's allocator keeps blocks of other moments."""
        return self._times.machine.device == "cpu"

    def _walked(self, layout: Layout) -> list[RankMemory]:
        """Returns the memory of each rank without Rotor, at the moment of a step when it is largest."""
        machine = self._times.machine
        return [
            RankMemory(*moment, machine.reserved + machine.fragmentation * sum(moment))
            for moment in self._walk.ranks(layout)
        ]

    def least_state(self, layout: Layout) -> float:
        """Returns a lower bound of the largest rank's memory: an even share of the state, and what is reserved.

        Gradients that accumulate in full count in place of their shards.
        """
        mesh, state = layout.mesh, self.state
        key = (mesh.tp, mesh.ep)
        if key not in self._even:
            everything = tuple((part, "", 1) for part in self._times.profile.parts)
            self._even[key] = (
                local_bytes(everything, mesh.tp, state.parameter),
                local_bytes(everything, mesh.tp, state.gathered, mesh.ep),
                local_count(everything, mesh.tp, trained=True),
                local_count(everything, mesh.tp, trained=True, ep=mesh.ep),
            )
        local, gathered, trained, full_trained = (count / mesh.pp for count in self._even[key])
        stored, sharers = layout.stored_sharers(state), layout.state_sharers
        gradients = 0.0 if state.steps_in_backward else trained * state.gradient / stored
        if stored > 1 and layout.micro_batches > 1 and not layout.reduce_each:
            gradients = max(gradients, full_trained * state.reduced)
        kept = local / stored + gradients + trained * state.state / sharers
        if stored > 1 and layout.zero < 3:
            kept += gathered
        machine = self._times.machine
        return kept * (1 + machine.fragmentation) + machine.reserved

    def ranks(self, layout: Layout, rotor: RankActivations | None = None) -> list[RankMemory]:
        """Returns the memory of each rank of the pipeline."""
        if rotor is None and self._walks:
            return self._walked(layout)
        by_stage = {
            stages: memory
            for group, memory in zip(self.groups(layout), self._of_groups(layout, rotor), strict=True)
            for stages in group.ranks
        }
        return [by_stage[flying.stages] for flying in count_in_flight(layout)]

    def groups(self, layout: Layout) -> tuple[RankGroup, ...]:
        """Returns the ranks of the pipeline, of which those of one group have equal stages."""
        stages = self._times.stages(layout)
        key = (id(stages), *replay_key(layout))
        if key not in self._groups:
            flying = count_in_flight(layout)
            found: dict[object, list[InFlight]] = {}
            for rank in flying:
                ends = (0 in rank.stages, layout.stages - 1 in rank.stages)
                kinds = tuple(id(stages[stage]) for stage in rank.stages)
                found.setdefault((ends, kinds, rank.together, rank.most, rank.inputs), []).append(rank)
            self._groups[key] = tuple(
                RankGroup(tuple(rank.stages for rank in ranks), ranks[0].together, ranks[0].most, ranks[0].inputs)
                for ranks in found.values()
            )
        return self._groups[key]

    def _of_groups(self, layout: Layout, rotor: RankActivations | None) -> list[RankMemory]:
        stages = self._times.stages(layout)
        found = []
        for number, group in enumerate(self.groups(layout)):
            own = group.ranks[0]
            kept = self._activations(layout, stages, group) if rotor is None else (rotor.bytes[number], 0.0, 0.0)
            found.append(self._sum(self._state(layout, stages, own, rotor.region if rotor else 1), kept))
        return found

    def available(self, layout: Layout, memory: float, region: int = 1) -> float:
        """Returns the bytes that the state leaves for activations on the rank that has the fewest.

        Args:
            layout: Layout.
            memory: Bytes of a rank.
            region: Number of blocks whose parameters are gathered at once, beside the next one's.
        """
        stages, machine = self._times.stages(layout), self._times.machine
        tensors = (memory - machine.reserved) / (1 + machine.fragmentation)
        groups = self.groups(layout)
        return tensors - max(sum(self._state(layout, stages, group.ranks[0], region)) for group in groups)

    def _sum(self, state: tuple[float, float, float, float], activations: tuple[float, float, float]) -> RankMemory:
        machine = self._times.machine
        excess = machine.fragmentation * (sum(state) + sum(activations))
        return RankMemory(*state, *activations, machine.reserved + excess)

    def _count(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int]) -> _RankParameters:
        """Returns a rank's parameters."""
        mesh, state = layout.mesh, self.state
        key = (mesh.tp, mesh.ep, mesh.pp, *(id(stages[stage]) for stage in own))
        if key not in self._counts:
            parts = tuple(item for stage in own for item in stages[stage])
            stored = local_bytes(parts, mesh.tp, state.parameter)
            full = local_bytes(parts, mesh.tp, state.gathered, mesh.ep)
            trained = local_count(parts, mesh.tp, trained=True)
            full_trained = local_count(parts, mesh.tp, trained=True, ep=mesh.ep)
            tied = self._times.profile.tied
            if mesh.pp > 1 and layout.stages - 1 in own and tied.total:
                copy = tied.local(mesh.tp)
                stored, full = stored + copy * state.parameter, full + copy * state.gathered
                trained, full_trained = trained + copy, full_trained + copy
            units, unit_trained = full, full_trained
            if sum(times for *_, times in parts) != 1:
                each = [((*item[:2], 1),) for item in parts]
                units = sum(sorted(local_bytes(one, mesh.tp, state.gathered, mesh.ep) for one in each)[-2:])
                trained_each = (local_count(one, mesh.tp, trained=True, ep=mesh.ep) for one in each)
                unit_trained = sum(sorted(trained_each)[-2:])
            self._counts[key] = _RankParameters(stored, full, trained, full_trained, units, unit_trained)
        return self._counts[key]

    def _state(
        self, layout: Layout, stages: Sequence[Stage], own: Sequence[int], region: int
    ) -> tuple[float, float, float, float]:
        """Returns the bytes of parameters, gradients, optimizer and gathered units of a rank."""
        state = self.state
        own_parameters = self._count(layout, stages, own)
        trained, units = own_parameters.trained, own_parameters.units
        stored = layout.stored_sharers(state)
        gathered = gradients = 0.0
        if stored > 1:
            if region > 1:
                units += (region - 1) * max(
                    local_bytes(((b, "", 1),), layout.mesh.tp, state.gathered, layout.mesh.ep)
                    for b in self._blocks(layout, stages, own)
                )
            gathered = own_parameters.full if layout.zero < 3 else min(units, own_parameters.full)
            # Gradients of a step's micro-batches accumulate before they are reduced; a single one's by unit.
            accumulates = layout.micro_batches > 1 and not layout.reduce_each
            full_trained = own_parameters.full_trained
            gradients = state.reduced * full_trained if accumulates else state.gathered * own_parameters.unit_trained
        gathered += self._casts(layout, stages, own)
        parameters = own_parameters.stored / stored
        if layout.delays:  # Gradients of the step before, and the weights of the micro-batches in flight.
            gradients += trained * state.gradient
            one, other = state.version_sizes(layout)
            parameters *= one / state.parameter
            parameters += trained * other * (layout.stages - 1 not in own)
        if not state.steps_in_backward:
            gradients += trained * state.gradient / stored
        return (
            parameters,
            gradients,
            state.state * trained / layout.state_sharers,
            gathered,
        )

    def _casts(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int]) -> float:
        """Returns the bytes of casts: of all parts that keep their activations, and of one block that repeats them.

        Those of blocks that Rotor keeps are among their activations.
        """
        kept = again = 0.0
        for part, mode, times in (item for stage in own for item in stages[stage]):
            size = self._times.cast_bytes(part, layout)
            if mode == "none":
                kept += times * size
            elif layout.recompute != "rotor":
                again = max(again, size)
        return kept + again

    def _blocks(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int]) -> Sequence[Part]:
        profile = self._times.profile_of(layout)
        return [p for stage in own for p, _, _ in stages[stage] if p is not profile.stem and p is not profile.head]

    def stage_bytes(self, layout: Layout, stage: Stage) -> StageBytes:
        """Returns the activations of a stage, without its input."""
        share = self._times.share(layout)
        key = (id(stage), share)
        if key not in self._known:
            kept = working = loss = 0.0
            for part, name, times in stage:
                way = part.modes.get(name, part.modes["none"])
                everything, saved = (mode.kept(self.state.compiled).on(share) for mode in (part.modes["none"], way))
                if part is self._times.profile_of(layout).head:
                    loss = self.loss_bytes(layout)
                    continue
                kept += times * (saved + part.output.on(share))
                buffers = layout.exchanged_bytes(part)
                working = max(working, everything - saved + part.transient.on(share) + buffers)
            self._known[key] = StageBytes(kept, working, loss)
        return self._known[key]

    def _activations(self, layout: Layout, stages: Sequence[Stage], group: RankGroup) -> tuple[float, float, float]:
        """Returns the bytes that are kept, those of the block that runs, and those of the loss beyond that."""
        own, hidden = group.ranks[0], self._times.hidden(layout)
        found = [self.stage_bytes(layout, stages[stage]) for stage in own]
        kept = 0.0
        for stage, count, inputs, one in zip(own, group.together, group.inputs, found, strict=True):
            kept += inputs * hidden * (stage > 0)
            # Each stage keeps its first block's input, and may free its output where it has been sent.
            frees = self.state.frees_sent and stage < layout.stages - 1
            kept += count * (one.kept + hidden * (not frees))
        working = max(one.working for one in found)
        return kept, working, max(0.0, max(one.loss for one in found) - working)

    def loss_bytes(self, layout: Layout) -> float:
        """Returns the bytes of a micro-batch's logits and of the loss's gradients."""
        head, share = self._times.profile_of(layout).head, self._times.share(layout)
        everything = head.modes["none"].kept(self.state.compiled).on(share)
        return self._logits_fraction(layout) * (everything + head.transient.on(share))

    def _logits_fraction(self, layout: Layout) -> float:
        """Returns the fraction of a micro-batch's logits that are in memory at once."""
        profile = self._times.profile_of(layout)
        if profile.max_logits is None:
            return 1.0
        mesh = layout.mesh
        share = Share(layout.micro_batch / mesh.cp, mesh.tp)
        logits = max((p.on(share).m * p.on(share).n for p, _ in profile.head.forward.products), default=0.0)
        return min(1.0, profile.max_logits / logits) if logits else 1.0

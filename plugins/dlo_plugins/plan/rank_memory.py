"""Predicts the memory of a rank by part: state, gathered units, activations in flight, the loss, and buffers.

Parts of one moment are added. A step of one micro-batch has two: the end of forward, with the gradients of the step
before, which are freed then; and a backward, which has the gradients of a block's work, and new ones as it frees
activations. Gradients of several micro-batches are there all the time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlo_plugins.memory.planning import InFlight, replay_in_flight
from dlo_plugins.parallel.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.plan.layout import Layout
from dlo_plugins.plan.step_time import RotorPlan, TimeModel
from dlo_plugins.plan.work import Stage, trained_count


@functools.lru_cache(maxsize=4096)
def _replay(*key: Any) -> tuple[InFlight, ...]:
    return tuple(replay_in_flight(make_schedule(*key)))


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


class RankGroup(NamedTuple):
    """Ranks of a pipeline with equal stages and as many micro-batches in flight.

    Attributes:
        ranks: Stages of each rank.
        flying: Micro-batches in flight on the first of them.
    """

    ranks: list[tuple[int, ...]]
    flying: InFlight


class _State(NamedTuple):
    """Bytes of a rank's state.

    Attributes:
        parameters: Stored parameters.
        gradients: Gradients that stay from one micro-batch, or one step, to the next.
        optimizer: State of the optimizer.
        gathered: Gathered parameters and casts.
        unit: Gradients of the units whose backward runs, before they are reduced.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    unit: float


class _Counts(NamedTuple):
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
        self._counts: dict[tuple[object, ...], _Counts] = {}
        self._known: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._groups: dict[tuple[object, ...], list[RankGroup]] = {}

    def largest(self, layout: Layout, rotor: RotorPlan | None = None) -> RankMemory:
        """Returns the memory of the rank of the pipeline that needs most.

        Args:
            layout: Layout.
            rotor: Plan of Rotor; None for the layout's own recomputation.
        """
        return max(self._of_groups(layout, rotor), key=lambda memory: memory.total)

    def ranks(self, layout: Layout, rotor: RotorPlan | None = None) -> list[RankMemory]:
        """Returns the memory of each rank of the pipeline."""
        of_groups = zip(self.groups(layout), self._of_groups(layout, rotor), strict=True)
        by_stages = {stages: memory for group, memory in of_groups for stages in group.ranks}
        return [by_stages[flying.stages] for flying in in_flight(layout)]

    def least_state(self, layout: Layout) -> float:
        """Returns a lower bound of the largest rank's memory: an even share of the state, and what is reserved.

        Gradients that accumulate in full count in place of their shards.
        """
        mesh, state, machine = layout.mesh, self.state, self._times.machine
        everything = tuple((part, "", 1) for part in self._times.profile.parts)
        counts = self._count(layout, [everything], [0])
        stored, sharers = layout.stored_sharers(state), layout.state_sharers
        gradients = 0.0 if state.steps_in_backward else counts.trained * state.gradient / stored
        if stored > 1 and layout.micro_batches > 1 and not layout.reduce_each:
            gradients = max(gradients, counts.full_trained * state.reduced)
        kept = counts.stored / stored + gradients + counts.trained * state.state / sharers
        if stored > 1 and layout.zero < 3:
            kept += counts.full
        return kept / mesh.pp * (1 + machine.fragmentation) + machine.reserved

    def groups(self, layout: Layout) -> list[RankGroup]:
        """Returns the ranks of the pipeline, of which those of one group have equal stages."""
        stages = self._times.stages(layout)
        key = (id(stages), *_replay_key(layout))
        if key not in self._groups:
            groups: dict[object, RankGroup] = {}
            for rank in in_flight(layout):
                ends = (0 in rank.stages, layout.stages - 1 in rank.stages)
                kinds = tuple(id(stages[stage]) for stage in rank.stages)
                groups.setdefault((ends, kinds, *rank[1:]), RankGroup([], rank)).ranks.append(rank.stages)
            self._groups[key] = list(groups.values())
        return self._groups[key]

    def _of_groups(self, layout: Layout, rotor: RotorPlan | None) -> list[RankMemory]:
        stages, machine = self._times.stages(layout), self._times.machine
        memories = []
        for number, group in enumerate(self.groups(layout)):
            parameters, gradients, optimizer, gathered, unit = self._state(
                layout, stages, group.flying.stages, rotor.region if rotor else 1
            )
            if rotor is not None:
                kept, working, loss = rotor.activations[number], 0.0, 0.0
            else:
                kept, working, loss = self._activations(layout, stages, group.flying)
            if rotor is not None or layout.micro_batches > 1:
                gradients, loss = gradients + unit, max(0.0, loss - working)
            # A forward has the gradients of the step before, a backward new ones in place of its activations.
            elif gradients + kept + loss >= unit + working + max(gradients, kept):
                working = 0.0
            else:
                gradients, kept = (unit, kept) if kept >= gradients else (unit + gradients, 0.0)
                loss = 0.0
            parts = (parameters, gradients, optimizer, gathered, kept, working, loss)
            memories.append(RankMemory(*parts, machine.reserved + machine.fragmentation * sum(parts)))
        return memories

    def available(self, layout: Layout, memory: float, region: int = 1) -> float:
        """Returns the bytes that the state leaves for activations on the rank that has the fewest.

        Args:
            layout: Layout.
            memory: Bytes of a rank.
            region: Number of blocks whose parameters are gathered at once, beside the next one's.
        """
        stages, machine = self._times.stages(layout), self._times.machine
        tensors = (memory - machine.reserved) / (1 + machine.fragmentation)
        own = (group.flying.stages for group in self.groups(layout))
        return tensors - max(sum(self._state(layout, stages, each, region)) for each in own)

    def _count(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int]) -> _Counts:
        """Returns a rank's parameters."""
        mesh, state = layout.mesh, self.state
        parts = tuple(item for stage in own for item in stages[stage])
        ties = mesh.pp > 1 and len(stages) > 1 and layout.stages - 1 in own
        key = (mesh.tp, mesh.ep, ties, *(id(part) for part, *_ in parts), *(times for *_, times in parts))
        if key not in self._counts:
            units = sorted(part.local_bytes(mesh.tp, state.gathered, mesh.ep) for part, *_ in parts)
            trained = sorted(part.local_count(mesh.tp, trained=True, ep=mesh.ep) for part, *_ in parts)
            tied = self._times.profile.tied.local(mesh.tp) if ties else 0.0
            stored, full = (
                sum(times * part.local_bytes(mesh.tp, element, ep) for part, _, times in parts) + tied * element
                for element, ep in ((state.parameter, 1), (state.gathered, mesh.ep))
            )
            self._counts[key] = _Counts(
                stored, full, trained_count(parts, mesh.tp) + tied, trained_count(parts, mesh.tp, mesh.ep) + tied,
                sum(units[-2:]), sum(trained[-2:]),
            )  # fmt: skip
        return self._counts[key]

    def _state(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int], region: int) -> _State:
        """Returns the bytes of the state of a rank with some stages."""
        state, counts, stored = self.state, self._count(layout, stages, own), layout.stored_sharers(self.state)
        trained = counts.trained
        gathered = unit = 0.0
        gradients = 0.0 if state.steps_in_backward else trained * state.gradient / stored
        if stored > 1:
            units = counts.units
            if region > 1:
                blocks = (part for stage in own for part, *_ in stages[stage] if "full" in part.modes)
                sizes = (block.local_bytes(layout.mesh.tp, state.gathered, layout.mesh.ep) for block in blocks)
                units += (region - 1) * max(sizes)
            gathered = counts.full if layout.zero < 3 else min(units, counts.full)
            # Gradients of a step's micro-batches accumulate before they are reduced; a single one's by unit.
            if layout.micro_batches > 1 and not layout.reduce_each:
                gradients = state.reduced * counts.full_trained
            else:
                unit = state.gathered * counts.unit_trained
        parameters = counts.stored / stored
        if layout.delays:  # Gradients of the step before, and the weights of the micro-batches in flight.
            gradients += trained * state.gradient
            one, other = state.version_sizes(layout)
            parameters *= one / state.parameter
            parameters += trained * other * (layout.stages - 1 not in own)
        return _State(
            parameters,
            gradients,
            state.state * trained / layout.state_sharers,
            gathered + self._casts(layout, stages, own),
            unit,
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

    def stage_bytes(self, layout: Layout, stage: Stage) -> tuple[float, float, float]:
        """Returns the bytes of a stage that a micro-batch keeps, of the block that runs beyond those, and of the loss.

        Its input is not among them.
        """
        fraction = self._times.fraction(layout)
        key = (id(stage), fraction)
        if key not in self._known:
            kept = working = loss = 0.0
            for part, name, times in stage:
                if part is self._times.profile_of(layout).head:
                    loss = self.loss_bytes(layout)
                    continue
                way, compiled = part.modes.get(name, part.modes["none"]), self.state.compiled
                everything, saved = (mode.kept(compiled).on(fraction) for mode in (part.modes["none"], way))
                kept += times * (saved + part.output.on(fraction))
                buffers = layout.exchanged_bytes(part)
                working = max(working, everything - saved + part.transient.on(fraction) + buffers)
            self._known[key] = (kept, working, loss)
        return self._known[key]

    def _activations(self, layout: Layout, stages: Sequence[Stage], flying: InFlight) -> tuple[float, float, float]:
        """Returns the bytes that are kept, those of the block that runs, and those of the loss."""
        hidden = self._times.hidden(layout)
        by_stage = [self.stage_bytes(layout, stages[stage]) for stage in flying.stages]
        kept = 0.0
        for stage, count, inputs, one in zip(flying.stages, flying.together, flying.inputs, by_stage, strict=True):
            kept += inputs * hidden * (stage > 0)
            # Each stage keeps its first block's input, and may free its output where it has been sent.
            frees = self.state.frees_sent and stage < layout.stages - 1
            kept += count * (one[0] + hidden * (not frees))
        return kept, max(one[1] for one in by_stage), max(one[2] for one in by_stage)

    def loss_bytes(self, layout: Layout) -> float:
        """Returns the bytes of a micro-batch's logits and of the loss's gradients; fewer if the loss takes chunks."""
        profile, fraction = self._times.profile_of(layout), self._times.fraction(layout)
        head, limit = profile.head, profile.max_logits
        everything = head.modes["none"].kept(self.state.compiled).on(fraction) + head.transient.on(fraction)
        products = (product.on(fraction._replace(sequence_parallel=False)) for product, _ in head.forward.products)
        logits = max((product.m * product.n for product in products), default=0.0)
        return everything if limit is None or not logits else everything * min(1.0, limit / logits)


def _replay_key(layout: Layout) -> tuple[str, int, int, int | None]:
    """Returns what decides the micro-batches in flight: the schedule, ranks, micro-batches and stages of a rank.

    A schedule's steady state repeats, so that more micro-batches keep no more in flight.
    """
    count = min(layout.micro_batches, 4 * layout.stages)
    return layout.schedule, layout.mesh.pp, count, layout.stages_option


def in_flight(layout: Layout) -> tuple[InFlight, ...]:
    """Returns the micro-batches in flight on each rank of a layout's pipeline."""
    return (InFlight(),) if layout.mesh.pp == 1 else _replay(*_replay_key(layout))

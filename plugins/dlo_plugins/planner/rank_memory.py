"""Predicts the memory of a rank by part: state, gathered units, activations in flight, the loss, and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dlo_plugins.pipeline.actions import ActionKind
from dlo_plugins.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.planner.layout import Layout
from dlo_plugins.planner.step_time import Stage, TimeModel, local_count
from dlo_plugins.planner.work import Share


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of a rank at its peak.

    Attributes:
        parameters: Stored parameters.
        gradients: Gradients, with those that a step accumulates before it reduces them.
        optimizer: State of the optimizer, master weights included.
        gathered: Parameters that are gathered for computation.
        activations: Activations that forward keeps, of all micro-batches in flight.
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
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer


class MemoryModel:
    """Predicts the memory of a model's ranks.

    Args:
        times: Time model, which knows the stages.
    """

    def __init__(self, times: TimeModel) -> None:
        self._times, self.state = times, times.state
        self._live: dict[tuple[object, ...], list[dict[int, int]]] = {}

    def largest(self, layout: Layout) -> RankMemory:
        """Returns the memory of the rank of the pipeline that needs most."""
        return max(self.ranks(layout), key=lambda memory: memory.total)

    def least_state(self, layout: Layout) -> float:
        """Returns a lower bound of the largest rank's memory: an even share of the state, and what is reserved."""
        mesh, state = layout.mesh, self.state
        profile = self._times.profile
        local = sum(part.parameters.inside / mesh.tp + part.parameters.outside for part in profile.parts) / mesh.pp
        trained = sum(part.trained.inside / mesh.tp + part.trained.outside for part in profile.parts) / mesh.pp
        stored = layout.sharers if layout.zero >= 2 else 1
        kept = local * state.parameter / stored + trained * (
            state.gradient / stored + state.state / (layout.sharers if layout.zero else 1)
        )
        if layout.zero == 2 and layout.sharers > 1:
            kept += local * state.gathered
        machine = self._times.machine
        return kept * (1 + machine.fragmentation) + machine.reserved

    def ranks(self, layout: Layout) -> list[RankMemory]:
        """Returns the memory of each rank of the pipeline."""
        stages = self._times.stages(layout)
        if layout.mesh.pp == 1:
            return [self._rank(layout, stages, [0], {0: 1})]
        where = self._times.placement(layout)
        known: dict[object, RankMemory] = {}
        found = []
        for rank, live in enumerate(self._in_flight(layout)):
            own = where.stages_of(rank)
            ends = tuple((id(stages[s]), live.get(s, 0), s == 0, s == layout.stages - 1) for s in own)
            if ends not in known:
                known[ends] = self._rank(layout, stages, own, live)
            found.append(known[ends])
        return found

    def _in_flight(self, layout: Layout) -> list[dict[int, int]]:
        """Returns, for each rank and stage, the number of micro-batches in flight when the rank has most of them.

        A stage keeps a micro-batch's activations from its forward until its backward, or until its weight gradient.
        """
        # A schedule's steady state repeats, so that more micro-batches keep no more in flight.
        count = min(layout.micro_batches, 4 * layout.stages)
        key = (layout.schedule, layout.mesh.pp, count, layout.stages_per_rank)
        if key in self._live:
            return self._live[key]
        schedule = make_schedule(layout.schedule, layout.mesh.pp, count, layout.stages_option)
        ends = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
        found = []
        for order in schedule.orders:
            live: dict[int, int] = {}
            most: dict[int, int] = {}
            for action in order:
                if action.kind is ActionKind.FORWARD:
                    live[action.stage] = live.get(action.stage, 0) + 1
                    if sum(live.values()) > sum(most.values()):
                        most = dict(live)
                elif action.kind in (ends, ActionKind.BACKWARD):
                    live[action.stage] -= 1
            found.append(most)
        self._live[key] = found
        return found

    def _rank(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int], live: dict[int, int]) -> RankMemory:
        mesh, state, machine = layout.mesh, self.state, self._times.machine
        parts = tuple(item for stage in own for item in stages[stage])
        units = sorted(local_count(((*item[:2], 1),), mesh.tp) for item in parts)[-2:]
        total, trained = local_count(parts, mesh.tp), local_count(parts, mesh.tp, trained=True)
        profile = self._times.profile
        if mesh.pp > 1 and layout.stages - 1 in own and profile.tied.total:
            tied = profile.tied.inside / mesh.tp + profile.tied.outside
            total, trained = total + tied, trained + tied
        share = layout.sharers
        stored = share if layout.zero >= 2 else 1
        gathered = gradients = 0.0
        if layout.zero >= 2 and share > 1:
            unit = sum(units) if len(parts) > 1 or parts[0][2] > 1 else total
            gathered = state.gathered * (total if layout.zero == 2 else unit)
            # Gradients of a step's micro-batches accumulate before they are reduced; a single one's by unit.
            accumulates = layout.micro_batches > 1 and not layout.reduce_each
            gradients = state.reduced * trained if accumulates else state.gathered * unit
        activations, working, loss = self._activations(layout, stages, own, live)
        fixed = total * state.parameter / stored
        optimizer = state.state * trained / (share if layout.zero else 1)
        gradients += trained * state.gradient / stored
        tensors = fixed + gradients + optimizer + gathered + activations + working + loss
        return RankMemory(
            fixed, gradients, optimizer, gathered, activations, working, loss,
            machine.reserved + machine.fragmentation * tensors,
        )  # fmt: skip

    def _activations(
        self, layout: Layout, stages: Sequence[Stage], own: Sequence[int], live: dict[int, int]
    ) -> tuple[float, float, float]:
        """Returns the bytes that are kept, those of the block that runs, and those of the loss beyond that."""
        mesh = layout.mesh
        share = Share(layout.micro_batch / mesh.cp, mesh.tp, layout.sequence_parallel and mesh.tp > 1)
        kept = working = loss = 0.0
        for stage in own:
            for part, name, times in stages[stage]:
                way = part.modes.get(name, part.modes["none"])
                everything, saved = (mode.kept(self.state.compiled).on(share) for mode in (part.modes["none"], way))
                if part is self._times.profile.head:
                    at_once = self._logits_fraction(layout)
                    loss = at_once * (everything + part.transient.on(share))
                    continue
                kept += live.get(stage, 0) * times * (saved + part.output.on(share))
                working = max(working, everything - saved + part.transient.on(share))
            hidden = self._times.profile.blocks[0].output.on(share) if self._times.profile.blocks else 0.0
            if stage:  # Its input, which the stage before has sent.
                kept += live.get(stage, 0) * hidden
            if self.state.frees_sent and stage < layout.stages - 1:
                kept -= live.get(stage, 0) * hidden
        return kept, working, max(0.0, loss - working)

    def _logits_fraction(self, layout: Layout) -> float:
        """Returns the fraction of a micro-batch's logits that are in memory at once."""
        profile = self._times.profile
        if profile.max_logits is None:
            return 1.0
        mesh = layout.mesh
        share = Share(layout.micro_batch / mesh.cp, mesh.tp)
        logits = max((p.on(share).m * p.on(share).n for p, _ in profile.head.forward.products), default=0.0)
        return min(1.0, profile.max_logits / logits) if logits else 1.0

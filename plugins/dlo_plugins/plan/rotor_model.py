"""Predicts Rotor on the stages of a layout: their chains, the schedules within a budget, time and memory.

The callback Rotor divides its budget as here (:mod:`dlo_plugins.memory.planning`), on chains that it measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlo_framework.errors import DloError
from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.planning import MeasuredChain
from dlo_plugins.memory.rotor import LeastMemory, solve
from dlo_plugins.memory.schedule import Chain, Link, Mode, Node, Recompute, Schedule, Stage, offloaded_bytes
from dlo_plugins.plan.layout import Layout
from dlo_plugins.plan.rank_memory import MemoryModel, RankGroup
from dlo_plugins.plan.step_time import RotorPlan, TimeModel
from dlo_plugins.plan.work import Part

#: Modes of a block, as the callback measures them.
_MODES = ("none", "selective")
#: Number of times that a budget is lowered for the parameters that a region gathers.
_ATTEMPTS = 4
#: Number of states of the program that offloads; a run's own is larger, and its schedule no slower.
_STATES = 100


@dataclass(frozen=True)
class _StageChain:
    """Chain of a stage, with what bounds its schedules.

    Attributes:
        measured: Chain as the callback measures it.
        least: Bytes that any schedule needs at least.
        steps: Bytes that can be dropped, and their seconds a byte, the cheapest first.
    """

    measured: MeasuredChain
    least: int
    steps: tuple[tuple[float, float], ...]

    def least_seconds(self, budget: int, rate: float | None = None) -> float:
        """Returns a lower bound of a micro-batch's recomputation: bytes are dropped in fractions of blocks.

        Args:
            budget: Bytes.
            rate: Bytes a second to the host, if they may be copied there: in no time while forward runs.
        """
        chain = self.measured.chain
        head = chain.stages[-1].modes[0]
        room = budget - self.measured.stem - chain.input - head.backward_peak
        need = float(sum(stage.modes[0].saved for stage in chain.stages) - room)
        slowest = math.inf
        if rate is not None:
            need -= rate * sum(max(mode.forward for mode in stage.modes) for stage in chain.stages)
            slowest = 1 / rate
        seconds = 0.0
        for size, cost in self.steps:
            if need <= size or cost >= slowest:
                return seconds + max(need, 0.0) * min(cost, slowest)
            seconds, need = seconds + size * cost, need - size
        return math.inf


class RotorModel:
    """Predicts Rotor in the layouts of one model on one machine.

    Args:
        times: Time model.
        memory: Memory model.
    """

    def __init__(self, times: TimeModel, memory: MemoryModel) -> None:
        self._times, self._memory = times, memory
        self._chains: dict[tuple[object, ...], _StageChain] = {}
        self._solved: dict[tuple[int, int, bool], Schedule | None] = {}
        self._host = times.machine.host
        self._link = None if self._host is None else Link(self._host.bandwidth, self._host.bandwidth)
        self._least_budgets: dict[int, int] = {}

    def plan(self, layout: Layout) -> RotorPlan | None:
        """Returns the schedules of a layout within its budget; None if a stage has none, or the host is too small.

        Args:
            layout: Layout with a budget.
        """
        chains, repeated, waits = self.chains(layout), [0.0] * layout.stages, [0.0] * layout.stages
        totals, region, host = [], 1, 0.0
        for group in self._memory.groups(layout):
            total = copied = 0
            for place, share in enumerate(self._shares(layout, chains, group)):
                chain = chains[group.flying.stages[place]]
                schedule = self._solve(chain, share, layout.offload)
                if schedule is None:
                    return None
                for stages in group.ranks:
                    again = schedule.time - schedule.waited - chain.measured.chain.kept_time
                    repeated[stages[place]] = max(0.0, again)
                    waits[stages[place]] = schedule.waited
                total += group.flying.most[place] * (chain.measured.stem + schedule.peak)
                copied += group.flying.most[place] * offloaded_bytes(chain.measured.chain, schedule)
                region = max(region, longest_region(schedule.nodes))
            totals.append(float(total))
            host = max(host, copied)
        if self._host is not None and host > self._host.memory:
            return None
        return RotorPlan(tuple(totals), region, float(host), tuple(repeated), tuple(waits))

    def fit(self, layout: Layout, memory: float) -> Layout | float:
        """Returns a layout with the largest budget that a memory allows; the bytes that it needs if none fits.

        Of offloading, the least bytes are not known: inf.

        Args:
            layout: Layout under `rotor`.
            memory: Bytes of a rank.
        """
        region, total = 1, math.inf
        for _ in range(_ATTEMPTS):
            tried = replace(layout, budget=round_budget(self._memory.available(layout, memory, region)))
            plan = self.plan(tried)
            if plan is None:
                return math.inf if layout.offload else max(self._least(layout, region), memory)
            total = self._memory.largest(tried, plan).total
            if total <= memory:
                return tried
            region = plan.region
        return total

    def _least(self, layout: Layout, region: int) -> float:
        """Returns the memory of the rank that needs most, with the least budget in which each stage has a schedule."""
        chains, totals = self.chains(layout), []
        for group in self._memory.groups(layout):
            own = [chains[stage] for stage in group.flying.stages]
            peaks = sum(count * chain.measured.kept_peak for count, chain in zip(group.flying.most, own, strict=True))
            needs = [self._least_budget(chain) + chain.measured.stem for chain in own]
            totals.append(max(need * peaks / chain.measured.kept_peak for need, chain in zip(needs, own, strict=True)))
        return self._memory.largest(layout, RotorPlan(tuple(totals), region)).total

    def _least_budget(self, chain: _StageChain) -> int:
        if id(chain) not in self._least_budgets:
            self._least_budgets[id(chain)] = LeastMemory(chain.measured.chain).budget
        return self._least_budgets[id(chain)]

    def least_repeated(self, layout: Layout) -> tuple[float, ...]:
        """Returns a lower bound of each stage's recomputation in a micro-batch, within a layout's budget."""
        chains, seconds = self.chains(layout), [0.0] * layout.stages
        for group in self._memory.groups(layout):
            for place, share in enumerate(self._shares(layout, chains, group)):
                rate = self._link.to_host if layout.offload and self._link else None
                least = chains[group.flying.stages[place]].least_seconds(share, rate)
                for stages in group.ranks:
                    seconds[stages[place]] = least
        return tuple(seconds)

    def least_memory(self, layout: Layout) -> float:
        """Returns a lower bound of the memory of the rank that needs most, under any budget."""
        chains, totals = self.chains(layout), []
        for group in self._memory.groups(layout):
            own = zip(group.flying.most, group.flying.stages, strict=True)
            totals.append(float(sum(count * chains[stage].least for count, stage in own)))
        return self._memory.largest(layout, RotorPlan(tuple(totals))).total

    def _shares(self, layout: Layout, chains: Sequence[_StageChain], group: RankGroup) -> list[int]:
        """Returns the bytes of a micro-batch in each stage of a rank, in proportion to what it takes in full."""
        peaks = [chains[stage].measured.kept_peak for stage in group.flying.stages]
        total = sum(count * peak for count, peak in zip(group.flying.most, peaks, strict=True))
        return [int(layout.budget * (peak / total)) if total else layout.budget for peak in peaks]

    def _solve(self, chain: _StageChain, budget: int, offload: bool) -> Schedule | None:
        key = id(chain), budget, offload
        if key not in self._solved:
            size = max(0, budget - chain.measured.stem)
            try:
                if offload and self._link is not None:
                    known = self._solve(chain, budget, False)
                    schedule = solve_offload(chain.measured.chain, size, self._link, states=_STATES, known=known)
                    self._solved[key] = schedule
                else:
                    self._solved[key] = solve(chain.measured.chain, size)
            except DloError:  # The least budget is larger.
                self._solved[key] = None
        return self._solved[key]

    def chains(self, layout: Layout) -> list[_StageChain]:
        """Returns the chain of each stage of a layout, for one micro-batch."""
        split, chains, at = self._times.split(layout), [], 0
        profile = self._times.profile_of(layout)
        fraction = self._times.fraction(layout)
        for number, count in enumerate(split):
            blocks = profile.blocks[at : at + count]
            ends = number == 0, number == len(split) - 1
            key = (*map(id, blocks), ends, fraction)
            if key not in self._chains:
                self._chains[key] = self._make_chain(blocks, layout, *ends)
            chains.append(self._chains[key])
            at += count
        return chains

    def _make_chain(self, blocks: Sequence[Part], layout: Layout, is_first: bool, is_last: bool) -> _StageChain:
        times, fraction = self._times, self._times.fraction(layout)
        known = {id(part): self._stage(part, layout) for part in blocks}
        stages = [known[id(part)] for part in blocks]
        profile = times.profile_of(layout)
        head = profile.head
        peak, seconds = 0, (0.0, 0.0)
        if is_last:
            peak, seconds = math.ceil(self._memory.loss_bytes(layout)), times.seconds(head, layout, "none")
        stages.append(Stage("head", 0, (Mode("all", 0, *seconds, 0, peak),)))
        chain = Chain(tuple(stages), math.ceil(times.hidden(layout)))
        stem = profile.stem.modes["none"].kept(times.state.compiled).on(fraction) if is_first else 0.0
        measured = MeasuredChain(chain, math.ceil(stem))
        needs = [peak] + [
            chain.input_of(n) + stage.output + min(mode.saved + mode.backward_peak for mode in stage.modes)
            for n, stage in enumerate(stages[:-1])
        ]
        steps = sorted((step for stage in stages[:-1] for step in _steps(stage)), key=lambda step: step[1])
        return _StageChain(measured, measured.stem + chain.input + max(needs), tuple(steps))

    def _stage(self, part: Part, layout: Layout) -> Stage:
        fraction, compiled = self._times.fraction(layout), self._times.state.compiled
        output = math.ceil(part.output.on(fraction))
        transient = math.ceil(part.transient.on(fraction) + layout.exchanged_bytes(part))
        casts = math.ceil(self._times.cast_bytes(part, layout))
        inside = math.ceil(part.modes["none"].kept(compiled).on(fraction)) + casts
        modes = []
        for name in _MODES:
            saved = math.ceil(part.modes[name].kept(compiled).on(fraction)) + casts * (name == "none")
            peak = inside - saved + transient
            seconds = self._times.seconds(part, layout, name)
            keeps_all = name == "none"  # What a selective policy keeps is not copied.
            mode = "all" if keeps_all else name
            modes.append(Mode(mode, output + saved, *seconds, transient, peak, movable=keeps_all))
        return Stage(part.name, output, tuple(modes), inside + transient)


def longest_region(nodes: Sequence[Node]) -> int:
    """Returns the largest number of blocks that a schedule recomputes together; 1 without such regions."""
    sizes = [
        max(node.last - node.first + 1, longest_region(node.inner)) for node in nodes if isinstance(node, Recompute)
    ]
    return max([1, *sizes])


def round_budget(size: float) -> int:
    """Returns a budget in full kilobytes, as a config has it."""
    return int(max(size, 0.0) // 1000) * 1000


def _steps(stage: Stage) -> list[tuple[float, float]]:
    """Returns the bytes that a block can drop and their seconds a byte: the lower hull of its choices."""
    first = stage.modes[0]
    points = [(mode.saved, mode.forward + mode.backward - first.forward - first.backward) for mode in stage.modes]
    points.append((0, stage.forward))
    at = points[0]
    steps: list[tuple[float, float]] = []
    while at[0] > 0:
        below = [point for point in points if point[0] < at[0]]
        best = min(below, key=lambda point: ((point[1] - at[1]) / (at[0] - point[0]), point[0]))
        steps.append((at[0] - best[0], max(0.0, (best[1] - at[1]) / (at[0] - best[0]))))
        at = best
    return steps

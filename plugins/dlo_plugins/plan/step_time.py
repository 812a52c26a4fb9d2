"""Predicts the time of a step: roofline of each operation, exposed communication, the pipeline's makespan, optimizer.

Calculon: Isaev et al., SC 2023, is the closest model. Departures: operations come from a profile of the user's own
model, matrix products have an efficiency by shape, and a pipeline is simulated action by action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlo_plugins.parallel.pipeline.model_stages import balance_stages
from dlo_plugins.parallel.pipeline.pipeline_schedules import Placement, make_placement, make_schedule, splits_backward
from dlo_plugins.parallel.pipeline.simulation import StageCosts, simulate
from dlo_plugins.plan.layout import Layout, StateFormat, repeats_messages
from dlo_plugins.plan.machine import Machine
from dlo_plugins.plan.model_profile import ModelProfile
from dlo_plugins.plan.work import Part, RankFraction, Stage, trained_count

#: Seconds of a micro-batch in a stage: forward, backward, and the parts of a step that they are made of.
_Seconds = tuple[float, float, dict[str, float]]
#: Bytes that clipping and an elementwise optimizer read and write for each byte of parameters, gradients and state:
#: for Adam in single precision 4 for the norm, 8 to clip, 28 to step, of 16.
_OPTIMIZER_TRAFFIC = 2.5


_placement = functools.cache(make_placement)
_splits_backward = functools.cache(splits_backward)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of an optimizer step on the slowest rank, in seconds.

    Attributes:
        compute: Products and other kernels of forward and backward.
        recompute: Work that backward repeats.
        tensor: Exposed communication of tensor parallelism.
        context: Exposed communication of context parallelism.
        gathering: Exposed gathering of parameters.
        gradients: Exposed reduction of gradients.
        bubble: Wait for other stages of the pipeline, messages included.
        optimizer: Optimizer step.
        experts: Exchange of tokens between the ranks of `ep`.
        copies: Waits for activations on their way to the host and back.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    gathering: float
    gradients: float
    bubble: float
    optimizer: float
    experts: float = 0.0
    copies: float = 0.0

    @property
    def total(self) -> float:
        """Time of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class PartTime:
    """Seconds of a micro-batch in a part of the model.

    Attributes:
        forward: Computation of forward.
        backward: Computation of backward, without what it repeats.
        repeated: Computation that backward repeats.
        tensor: Communication of tensor parallelism in forward, in backward and in what backward repeats.
        context: Communication of context parallelism beyond the attention that it overlaps, in forward and backward.
        experts: Exchange of tokens between the ranks of `ep` in forward, in backward and in what backward repeats.
    """

    forward: float
    backward: float
    repeated: float
    tensor: tuple[float, float, float]
    context: tuple[float, float]
    experts: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RotorPlan:
    """Rotor's schedules of a layout.

    Attributes:
        activations: Bytes of activations on a rank of each group of the pipeline's ranks.
        region: Largest number of blocks that are recomputed together, whose parameters stay gathered meanwhile.
        host: Bytes in the host's memory, of the rank with most.
        repeated: Seconds that a step recomputes, for each stage and micro-batch.
        waits: Seconds that it waits for copies to and from the host.
    """

    activations: tuple[float, ...]
    region: int = 1
    host: float = 0.0
    repeated: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()


class TimeModel:
    """Predicts times of one model on one machine.

    Args:
        profile: Profile of the model.
        machine: Machine.
        state: Bytes of the run's tensors.
    """

    def __init__(self, profile: ModelProfile, machine: Machine, state: StateFormat) -> None:
        self.profile, self.machine, self.state = profile, machine, state
        self._known: dict[tuple[object, ...], Any] = {}

    def _once(self, key: tuple[object, ...], compute: Callable[[], Any]) -> Any:
        """Returns the value of a key, which is computed the first time."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def profile_of(self, layout: Layout) -> ModelProfile:
        """Returns the profile on the parameters that a layout computes with: gathered ones, or ones to cast."""
        return self.profile.uncast if self.profile.uncast is not None and self._casts(layout) else self.profile

    def _casts(self, layout: Layout) -> bool:
        return self.state.casts(layout) > 0

    def fraction(self, layout: Layout) -> RankFraction:
        """Returns the fraction of a micro-batch's activations that a rank has."""
        mesh = layout.mesh
        return RankFraction(layout.micro_batch / mesh.cp, mesh.tp, layout.sequence_parallel and mesh.tp > 1, mesh.ep)

    def hidden(self, layout: Layout) -> float:
        """Returns the bytes of a block's output on a rank; 0 for a model without blocks."""
        blocks = self.profile_of(layout).blocks
        return blocks[0].output.on(self.fraction(layout)) if blocks else 0.0

    def part_time(self, part: Part, layout: Layout, mode: str) -> PartTime:
        """Returns the times of a micro-batch in a part, which depend on `tp`, `cp`, `ep`, the rows and the mode."""
        mesh = layout.mesh
        ep = mesh.ep if part.exchanged or part.cast.total else 1
        own = (id(part.forward), part.cast, mesh.tp, mesh.cp, ep, layout.micro_batch, layout.sequence_parallel, mode)
        times: PartTime = self._once(("part", *own), lambda: self._compute_part(part, layout, mode))
        return times

    def _compute_part(self, part: Part, layout: Layout, mode: str) -> PartTime:
        fraction = self.fraction(layout)
        seconds = functools.partial(
            self.machine.work_seconds, fraction=fraction, dtype=self.state.compute, fused=self.state.fused
        )
        way = part.modes.get(mode, part.modes["none"])
        cast = self._cast_seconds(part, layout)
        forward, backward, again = self._sums(part, layout)
        return PartTime(
            seconds(part.forward) + cast,
            seconds(part.backward, backward=True) + cast,
            seconds(way.repeated) + cast * (way.repeated.eager.number > 0),
            (forward, backward, again if way.gathers_again else 0.0),
            self._ring(part, layout, mode),
            self._exchange(part, layout, mode),
        )

    def _sums(self, part: Part, layout: Layout) -> tuple[float, float, float]:
        """Returns the time in which the ranks of `tp` sum outputs of regions in forward, and inputs' gradients.

        With a sharded sequence, both passes gather one of these and scatter the sum of the other. The last is that of a
        forward which backward repeats.
        """
        mesh = layout.mesh
        if mesh.tp == 1:
            return 0.0, 0.0, 0.0
        if not part.collectives:
            return self._ends(part, layout)
        sizes = (part.left, part.entered)
        if layout.sequence_parallel:
            sizes = ((part.left + part.entered) / 2,) * 2
        rows = layout.micro_batch / mesh.cp / part.collectives
        forward, backward = (
            part.collectives * self.machine.collective_seconds(size * rows, mesh.tp, 1, reduces_and_gathers=True)
            for size in sizes
        )
        # Backward gathers a region's input once more, beside the products of its gradient.
        again = (self.machine.overlap_slowdown - 1) * forward / 2 if layout.sequence_parallel else 0.0
        return forward, backward + again, forward

    def _exchange(self, part: Part, layout: Layout, mode: str) -> tuple[float, float, float]:
        """Returns the seconds of a micro-batch's exchange under `ep`: forward, backward and what backward repeats.

        With k experts of a token, a rank's T tokens of width D take 2 k T D (1 - 1 / ep) elements in forward, to the
        experts and back, and as many in backward; routers are taken as balanced. Nothing overlaps it.
        """
        size, mesh = layout.exchanged_bytes(part), layout.mesh
        once = 2 * self.machine.exchange_seconds(size / 2, mesh.ep, mesh.tp)
        return once, once, once if repeats_messages(mode) else 0.0

    def _ends(self, part: Part, layout: Layout) -> tuple[float, float, float]:
        """Returns the time of the communication of a stem or a head that `tp` divides.

        The embedding sums its output, and the head its input's gradient. With a sharded sequence the other pass gathers
        the gradient of the embedding's output, and the head's input.
        """
        profile = self.profile_of(layout)
        is_head = part is profile.head
        # A tied weight is among the stem's parameters.
        divided = part.parameters.inside + (profile.tied.inside if is_head else 0.0)
        if not (profile.blocks and divided and (is_head or part is profile.stem)):
            return 0.0, 0.0, 0.0
        size = profile.blocks[0].gathered * layout.micro_batch / layout.mesh.cp
        seconds = self.machine.collective_seconds(size, layout.mesh.tp, 1, reduces_and_gathers=True)
        gathered = seconds / 2 if layout.sequence_parallel else 0.0
        return (gathered, seconds, 0.0) if is_head else (seconds, gathered, 0.0)

    def _cast_seconds(self, part: Part, layout: Layout) -> float:
        """Returns the time in which autocast casts a part's weights, and backward their gradients back."""
        size = self.state.casts(layout)
        moved = self.cast_bytes(part, layout) * (1 + self.state.parameter / size) if size else 0.0
        return self.machine.moving_seconds(moved)

    def cast_bytes(self, part: Part, layout: Layout) -> float:
        """Returns the bytes of the casts of a part's weights on a rank."""
        size = self.state.casts(layout)
        return size * part.cast_count(layout.mesh.tp, layout.mesh.ep) if size else 0.0

    def _ring(self, part: Part, layout: Layout, mode: str) -> tuple[float, float]:
        """Returns the exposed time of ring attention: keys and values pass all ranks of `cp` while attention runs.

        Recomputation repeats the ring of forward, and `selective` without the attention that it overlaps. In compiled
        code that keeps the ring's result.
        """
        mesh = layout.mesh
        if mesh.cp == 1:
            return 0.0, 0.0
        fraction = RankFraction(layout.micro_batch / mesh.cp, mesh.tp, False)
        exposed, alone = [0.0, 0.0], 0.0
        for backward, work in enumerate((part.forward, part.backward)):
            for product, count in work.products:
                if not product.is_attention:
                    continue
                own = product.on(fraction)
                size = 2 * own.batch * own.n * own.k * own.size * (1 + backward)
                rate, latency = self.machine.link_of(mesh.cp, mesh.tp)
                sending = (mesh.cp - 1) * (latency + size / rate)
                running = count * self.machine.product_seconds(own, self.state.compute, backward=bool(backward))
                exposed[backward] += max(0.0, sending - running * (mesh.cp - 1) / mesh.cp)
                alone += sending * (not backward)
        again = exposed[0] if mode == "full" else alone * (repeats_messages(mode) and not self.state.compiled)
        return exposed[0], exposed[1] + again

    def split(self, layout: Layout) -> tuple[int, ...]:
        """Returns the number of blocks of each stage: the given one, or the one with the cheapest largest stage."""
        if layout.split is not None:
            return layout.split
        if layout.stages == 1:
            return (len(self.profile.blocks),)
        profile = self.profile_of(layout)

        def balance() -> tuple[int, ...]:
            # Costs of one row: the ratios of blocks hardly depend on the number of rows, and on `ep`.
            one = replace(layout, micro_batch=1, mesh=replace(layout.mesh, cp=1, ep=1))
            modes = [self.mode_of(layout, number) for number in range(len(profile.blocks))]
            costs = [sum(self.seconds(part, one, mode)) for part, mode in zip(profile.blocks, modes, strict=True)]
            ends = [sum(self.seconds(part, one, "none")) for part in (profile.stem, profile.head)]
            return split_blocks(costs, layout.stages, *ends)

        key = (layout.stages, layout.mesh.tp, layout.recompute, layout.every, self._casts(layout))
        split: tuple[int, ...] = self._once(("split", *key), balance)
        return split

    def seconds(self, part: Part, layout: Layout, mode: str) -> tuple[float, float]:
        """Returns the seconds of a micro-batch in forward and in backward, without gathering."""
        times = self.part_time(part, layout, mode)
        return (
            times.forward + times.tensor[0] + times.context[0] + times.experts[0],
            times.backward + times.repeated + sum(times.tensor[1:]) + times.context[1] + sum(times.experts[1:]),
        )

    def mode_of(self, layout: Layout, number: int) -> str:
        """Returns the mode of a block."""
        return layout.recompute if number % layout.every == 0 else "none"

    def stages(self, layout: Layout) -> tuple[Stage, ...]:
        """Returns the parts of each stage, with their modes of recomputation and how often each occurs."""
        split = self.split(layout)
        key = ("stages", split, layout.recompute, layout.every, self._casts(layout))
        stages: tuple[Stage, ...] = self._once(key, lambda: self._make_stages(layout, split))
        return stages

    def _make_stages(self, layout: Layout, split: tuple[int, ...]) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        profile, at = self.profile_of(layout), 0
        for number, count in enumerate(split):
            parts: dict[tuple[int, str], tuple[Part, str, int]] = {}
            if number == 0:
                parts[-1, ""] = (profile.stem, "none", 1)
            for block in range(at, at + count):
                part, mode = profile.blocks[block], self.mode_of(layout, block)
                known = parts.get((id(part), mode), (part, mode, 0))
                parts[id(part), mode] = (part, mode, known[2] + 1)
            if number == len(split) - 1:
                parts[-2, ""] = (profile.head, "none", 1)
            stages.append(tuple(parts.values()))
            at += count
        known_stages: dict[Stage, Stage] = {}
        return tuple(known_stages.setdefault(stage, stage) for stage in stages)

    def least_pass(self, layout: Layout) -> float:
        """Returns a lower bound of a micro-batch's seconds in all stages together, whatever is recomputed.

        It has computation, the communication of `tp` and `ep`, and gathering. Longer computation hides more gathering,
        but never more than it takes itself.
        """
        plain, blocks = replace(layout, recompute="none"), (len(self.profile.blocks),)
        (everything,) = self._once(("all", self._casts(layout)), lambda: self._make_stages(plain, blocks))
        times = [(self.part_time(part, layout, mode), n) for part, mode, n in everything]
        own = sum(n * (t.forward + t.backward + sum(t.tensor[:2]) + sum(t.experts[:2])) for t, n in times)
        return own + sum(self._gathering(everything, layout))

    def step(self, layout: Layout, rotor: RotorPlan | None = None, *, exact: bool = True) -> StepTime:
        """Returns the time of a step.

        Args:
            layout: Layout of the run.
            rotor: Plan of Rotor; None for the layout's own recomputation.
            exact: Whether a pipeline is simulated; otherwise its makespan is a lower bound.
        """
        stages, count = self.stages(layout), layout.micro_batches
        known = {id(stage): self._costs(stage, layout) for stage in stages}
        costs = [known[id(stage)] for stage in stages]
        forward = [cost[0] for cost in costs]
        again = self.recomputed_stages(layout)
        nothing = (0.0,) * len(stages)
        more, waiting = (rotor.repeated, rotor.waits or nothing) if rotor is not None else (nothing, nothing)
        backward = [cost[1] + sum(extra) for cost, *extra in zip(costs, more, waiting, strict=True)]
        # A schedule's own recomputation is an action beside forward and backward.
        work = [f * (1 + (s in again)) + b for s, (f, b) in enumerate(zip(forward, backward, strict=True))]
        own = self._slowest(layout, work)
        busy = count * sum(work[stage] for stage in own)
        makespan = busy
        if layout.mesh.pp > 1:
            makespan = (
                self._simulated(layout, forward, backward) if exact else self._formula(layout, forward, backward, work)
            )
            # Ranks that share a processor are faster while others wait.
            makespan = max(busy, makespan / self.machine.contention)
        sums = {name: count * sum(costs[stage][2][name] for stage in own) for name in costs[0][2]}
        sums["recompute"] += count * sum(more[stage] + forward[stage] * (stage in again) for stage in own)
        copies = count * sum(waiting[stage] for stage in own)
        distinct = {id(stage): (stage, cost[1]) for stage, cost in zip(stages, costs, strict=True)}.values()
        gradients = max(self._gradient_sync(layout, stage, seconds) for stage, seconds in distinct)
        optimizer = max(self._optimizer(layout, stage) for stage, _ in distinct)
        return StepTime(
            **sums, gradients=gradients * len(own), bubble=max(makespan - busy, 0.0), optimizer=optimizer * len(own),
            copies=copies,
        )  # fmt: skip

    def _costs(self, stage: Stage, layout: Layout) -> _Seconds:
        """Returns a micro-batch's seconds in a stage, with gathering and the accumulation of gradients."""
        forward, backward, parts = self._computation(stage, layout)
        gather, added = self._gathering(stage, layout), self._accumulation(stage, layout)
        parts = {**parts, "compute": parts["compute"] + added, "gathering": sum(gather)}
        return forward + gather[0], backward + gather[1] + added, parts

    def _computation(self, stage: Stage, layout: Layout) -> _Seconds:
        """Returns a micro-batch's seconds in a stage, with the communication of `tp` and `cp`."""

        def compute() -> _Seconds:
            times = [(self.part_time(part, layout, mode), n) for part, mode, n in stage]
            seconds = [(self.seconds(part, layout, mode), n) for part, mode, n in stage]
            return (
                sum(n * one[0] for one, n in seconds),
                sum(n * one[1] for one, n in seconds),
                {
                    "compute": sum(n * (t.forward + t.backward) for t, n in times),
                    "recompute": sum(n * t.repeated for t, n in times),
                    **{
                        key: sum(n * sum(getattr(t, key)) for t, n in times) for key in ("tensor", "context", "experts")
                    },
                },
            )

        computation: _Seconds = self._once(("stage", *self._stage_key(stage, layout)), compute)
        return computation

    def _stage_key(self, stage: Stage, layout: Layout) -> tuple[object, ...]:
        """Returns what decides a micro-batch's seconds in a stage."""
        mesh = layout.mesh
        return id(stage), mesh.tp, mesh.cp, mesh.ep, layout.micro_batch, layout.sequence_parallel

    def _slowest(self, layout: Layout, seconds: Sequence[float]) -> Sequence[int]:
        """Returns the stages of the pipeline's rank that computes longest."""
        if layout.mesh.pp == 1:
            return [0]
        where = self.placement(layout)
        return max((where.stages_of(rank) for rank in range(where.ranks)), key=lambda own: sum(seconds[s] for s in own))

    def _accumulation(self, stage: Stage, layout: Layout) -> float:
        """Returns the time to add a micro-batch's gradients to those of the step; a single micro-batch adds nothing."""
        if layout.micro_batches == 1 or self.state.accumulates_in_products:
            return 0.0
        trained = trained_count(stage, layout.mesh.tp, layout.mesh.ep)
        moved = trained * (self.state.gathered + 2 * self.state.gradient)
        return self.machine.moving_seconds(moved)

    def placement(self, layout: Layout) -> Placement:
        """Returns the placement of a layout's stages on the ranks of its pipeline."""
        return _placement(layout.schedule, layout.mesh.pp, layout.stages_option)

    def transfer(self, layout: Layout) -> float:
        """Returns the seconds of a message between stages: a block's output."""
        block = self.profile_of(layout).blocks[0]
        size = block.output.total * layout.micro_batch / layout.mesh.cp
        return self.machine.send_seconds(size, layout.mesh.world_size // layout.mesh.pp)

    def _simulated(self, layout: Layout, forward: Sequence[float], backward: Sequence[float]) -> float:
        schedule = make_schedule(layout.schedule, layout.mesh.pp, layout.micro_batches, layout.stages_option)
        half = [time / 2 for time in backward]
        costs = StageCosts(forward, half, half, self.transfer(layout))
        if schedule.flushes:
            return simulate(schedule, costs).makespan
        # A step in the middle of others.
        return simulate(schedule.unroll(3), costs).makespan - simulate(schedule.unroll(2), costs).makespan

    def recomputed_stages(self, layout: Layout) -> frozenset[int]:
        """Returns the stages that a layout's schedule recomputes by itself."""
        if layout.mesh.pp == 1:
            return frozenset()
        count = min(layout.micro_batches, 4 * layout.stages)
        key = ("recomputed", layout.schedule, layout.mesh.pp, layout.stages_per_rank)
        own = (layout.schedule, layout.mesh.pp, count, layout.stages_option)
        stages: frozenset[int] = self._once(key, lambda: make_schedule(*own).recomputed_stages)
        return stages

    def _formula(
        self, layout: Layout, forward: Sequence[float], backward: Sequence[float], work: Sequence[float]
    ) -> float:
        """Returns a lower bound of the makespan, which equal stages of 1F1B and of its interleaved form reach.

        A rank begins when its first stage's input arrives, and after its last backward the stages before have theirs;
        where weight gradients are apart, it may compute these meanwhile.
        """
        where = self.placement(layout)
        splits = _splits_backward(layout.schedule)
        passes = [f + b * (not splits) for f, b in zip(forward, backward, strict=True)]
        if layout.delays:
            passes = [0.0] * len(passes)
        bound = 0.0
        for rank in range(where.ranks):
            own = where.stages_of(rank)
            busy = sum(work[stage] for stage in own)
            bound = max(bound, layout.micro_batches * busy + sum(passes[: min(own)]))
        return bound

    def _gathering(self, stage: Stage, layout: Layout) -> tuple[float, float]:
        """Returns the exposed gathering of a stage's parameters in forward and in backward of a micro-batch.

        ZeRO 3 gathers each unit while the unit before computes. ZeRO 2 keeps it until the step's end: it gathers once a
        step, which is divided among the micro-batches here.
        """
        if layout.sharers == 1 or layout.zero < 2:
            return 0.0, 0.0
        keeps = layout.zero < 3

        def compute() -> tuple[float, float]:
            exposed = [0.0, 0.0]
            for part, mode, times in stage:
                seconds = self._part_gathering(part, layout)
                for at, running in enumerate(self.seconds(part, layout, mode)):
                    if not (at and keeps):
                        exposed[at] += times * self.machine.exposed(seconds, running)
            return exposed[0], exposed[1]

        key = ("gathered", *self._stage_key(stage, layout), layout.sharers, keeps)
        forward, backward = self._once(key, compute)
        return (forward / layout.micro_batches, backward / layout.micro_batches) if keeps else (forward, backward)

    def _part_gathering(self, part: Part, layout: Layout) -> float:
        tp, size = layout.mesh.tp, self.state.gathered
        return self._among_sharers(layout, part.local_bytes(tp, size), size * part.expert_count(tp))

    def _part_reduction(self, part: Part, layout: Layout) -> float:
        tp, size = layout.mesh.tp, self.state.reduced
        counts = part.local_count(tp, trained=True), part.expert_count(tp, trained=True)
        return self._among_sharers(layout, size * counts[0], size * counts[1])

    def _among_sharers(self, layout: Layout, size: float, experts: float) -> float:
        """Returns the time to gather bytes, or to reduce and scatter them, of which those of experts are divided."""
        mesh = layout.mesh
        experts = experts if mesh.ep > 1 else 0.0
        seconds = self.machine.collective_seconds(size - experts, layout.sharers, mesh.tp)
        return seconds + self.machine.collective_seconds(experts / mesh.ep, mesh.expert_shards, mesh.tp * mesh.ep)

    def _gradient_sync(self, layout: Layout, stage: Stage, backward: float) -> float:
        """Returns the exposed reduction of a stage's gradients, which overlaps the last micro-batch's backward."""
        mesh = layout.mesh
        trained = trained_count(stage, mesh.tp)
        size = trained * self.state.reduced
        replicas = mesh.dp_replicate
        if layout.zero == 0:
            seconds = self.machine.collective_seconds(
                size, layout.sharers * replicas, mesh.tp, reduces_and_gathers=True
            )
            return self.machine.exposed(seconds, backward) if self.state.overlaps else seconds
        seconds = sum(times * self._part_reduction(part, layout) for part, _, times in stage)
        once = 0.0
        if layout.zero == 1:
            own = layout.delays and not self.state.has_delayed_masters(layout)
            element = self.state.parameter if own else self.state.gathered
            once = self.machine.collective_seconds(trained * element, layout.sharers, mesh.tp)
        if replicas > 1:
            seconds += self.machine.collective_seconds(
                size / layout.sharers, replicas, mesh.tp * layout.sharers, reduces_and_gathers=True
            )
        times = layout.micro_batches if layout.reduce_each else 1
        if not self.state.overlaps:
            return seconds * times + once
        return self.machine.exposed(seconds + once, backward) + (times - 1) * self.machine.exposed(seconds, backward)

    def _optimizer(self, layout: Layout, stage: Stage) -> float:
        trained = trained_count(stage, layout.mesh.tp)
        own = trained / layout.state_sharers
        state = self.state
        moved = _OPTIMIZER_TRAFFIC * (state.parameter + state.gradient + state.state)
        if state.scales_loss:
            moved += 2 * state.gradient  # The scaler's division reads and writes them.
        return self.machine.moving_seconds(own * moved)


def split_blocks(costs: Sequence[float], stages: int, stem: float, head: float) -> tuple[int, ...]:
    """Returns the number of blocks of each stage, with the least cost of the most expensive stage.

    Equal blocks need no search: among the splits with the least maximum, stages in the middle get the most blocks, as
    the first stages have the most micro-batches in flight.

    Args:
        costs: Costs of the blocks.
        stages: Number of stages.
        stem: Cost of what the first stage runs before its blocks.
        head: Cost of what the last stage runs after its blocks.
    """
    if max(costs) - min(costs) > 1e-9 * max(costs):
        return tuple(balance_stages(costs, stages, stem, head))
    cost, blocks = costs[0], len(costs)
    around = [stem, *[0.0] * (stages - 2), head]
    limits = {count * cost + extra for count in range(1, blocks + 1) for extra in (0.0, stem, head)}
    for limit in sorted(limits):
        most = [int((limit - extra) / cost + 1e-9) for extra in around]
        if min(most) >= 1 and sum(most) >= blocks:
            return tuple(_reduce(most, sum(most) - blocks))
    return tuple(balance_stages(costs, stages, stem, head))


def _reduce(counts: list[int], excess: int) -> list[int]:
    """Returns counts with an excess taken off the largest ones, the first stages before the others."""
    while excess:
        at = counts.index(max(counts))
        counts[at] -= 1
        excess -= 1
    return counts

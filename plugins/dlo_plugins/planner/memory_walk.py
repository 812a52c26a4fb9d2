"""Walks through a rank's step, and finds the moment with the most bytes: state, gathered units, activations, the loss.

Forward and backward are walked block by block; a pipeline's actions are replayed. Gradients of the last step stay until
the first backward, as Lightning frees them there. Buffers are those of FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlo_plugins.pipeline.actions import ActionKind
from dlo_plugins.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.work import Part, Share, Stage, expert_count, local_bytes, local_count


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step; see :class:`~dlo_plugins.planner.rank_memory.RankMemory`."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    loss: float = 0.0


class _Action(NamedTuple):
    """Action of a pipeline's rank, with what is in flight when it begins.

    Attributes:
        live: Micro-batches in flight, by stage.
        stage: Stage that runs.
        is_forward: Whether it is a forward.
        with_gradients: Stages whose gradients are being accumulated.
        inputs: Micro-batches of which only the input is kept, by stage.
    """

    live: tuple[tuple[int, int], ...]
    stage: int
    is_forward: bool
    with_gradients: frozenset[int]
    inputs: tuple[tuple[int, int], ...] = ()


class _Item(NamedTuple):
    """Equal parts of a stage, on a rank: bytes, but for the counts of parameters.

    Attributes:
        kept: Bytes that one of them keeps for backward, with its output.
        forward: Bytes that its forward uses beyond what is kept of it.
        backward: Bytes that its backward uses beyond that, with what it recomputes.
        again: Bytes at the end of a forward that backward repeats, before it has gradients; 0 for none.
        alone: Bytes of those of `unit` that no other rank shares: a rank's own experts. They are copied for computation
            without a buffer, and their gradients are their shards.
        alone_trained: Number of those of `own_trained`.
        at_peak: Share of the gradients that exist at the peak of a backward that repeats forward.
        unit: Bytes of its parameters as computation uses them, which are gathered together.
        casts: Bytes of their casts, which autograd keeps. Lightning turns autocast's own cache off.
        trained: Number of trained parameters.
        own_trained: Number of those of which the rank computes gradients: of its own experts alone.
        times: Number of these parts.
        is_block: Whether it is a block, and so gathered by itself.
        is_head: Whether it is the head with the loss.
        repeats: Whether its forward runs again in backward, so that autograd keeps no casts.
    """

    kept: float
    forward: float
    backward: float
    unit: float
    casts: float
    trained: float
    own_trained: float
    times: int
    is_block: bool
    is_head: bool
    repeats: bool = False
    again: float = 0.0
    alone: float = 0.0
    alone_trained: float = 0.0
    at_peak: float = 1.0


class MemoryWalk:
    """Predicts the memory of a model's ranks.

    Args:
        times: Time model, which knows the stages.
    """

    def __init__(self, times: TimeModel) -> None:
        self._times, self.state = times, times.state
        self._actions: dict[tuple[object, ...], list[list[_Action]]] = {}

    def ranks(self, layout: Layout) -> list[Moment]:
        """Returns each rank of the pipeline at the moment when it needs most."""
        stages = self._times.stages(layout)
        if layout.mesh.pp == 1:
            return [self._rank(layout, stages, [0], [])]
        where = self._times.placement(layout)
        return [
            self._rank(layout, stages, where.stages_of(rank), actions)
            for rank, actions in enumerate(self._replay(layout))
        ]

    def _replay(self, layout: Layout) -> list[list[_Action]]:
        """Returns the distinct actions of each rank of the pipeline.

        A stage keeps a micro-batch's activations from its forward, or its recomputation, until its backward, or until
        its weight gradient. A forward that is recomputed later needs no more than its recomputation.
        """
        # A schedule's steady state repeats, so that more micro-batches keep no more in flight.
        count = min(layout.micro_batches, 4 * layout.stages)
        key = (layout.schedule, layout.mesh.pp, count, layout.stages_per_rank)
        if key in self._actions:
            return self._actions[key]
        schedule = make_schedule(layout.schedule, layout.mesh.pp, count, layout.stages_option)
        if not schedule.flushes:
            schedule = schedule.unroll(2)
        ends = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
        recomputed, found = schedule.recomputed_stages, []
        for order in schedule.orders:
            live: dict[int, int] = {}
            begun: set[int] = set()
            inputs: dict[int, int] = {}
            actions: dict[_Action, None] = {}
            for action in order:
                at, is_forward = action.stage, action.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE)
                if action.kind is ActionKind.FORWARD and at in recomputed:
                    inputs[at] = inputs.get(at, 0) + 1
                    continue
                if action.kind is ActionKind.RECOMPUTE:
                    inputs[at] -= 1
                held = (tuple(sorted(of.items())) for of in (live, inputs))
                actions[_Action(next(held), at, is_forward, frozenset(begun), next(held))] = None
                if is_forward:
                    live[at] = live.get(at, 0) + 1
                else:
                    begun.add(at)
                    live[at] -= action.kind in (ends, ActionKind.BACKWARD)
            found.append(list(actions))
        self._actions[key] = found
        return found

    def _rank(self, layout: Layout, stages: Sequence[Stage], own: Sequence[int], actions: Sequence[_Action]) -> Moment:
        mesh, state = layout.mesh, self.state
        parts = tuple(item for stage in own for item in stages[stage])
        trained, profile = local_count(parts, mesh.tp, trained=True), self._times.profile
        size, full = local_bytes(parts, mesh.tp, state.parameter), local_bytes(parts, mesh.tp, state.gathered, mesh.ep)
        own_trained = local_count(parts, mesh.tp, trained=True, ep=mesh.ep)
        tied = 0.0
        if mesh.pp > 1 and layout.stages - 1 in own and profile.tied.total:
            tied = profile.tied.local(mesh.tp)
            size, full, trained = size + tied * state.parameter, full + tied * state.gathered, trained + tied
            own_trained += tied
        walk = _Walk(layout, state, full, trained, own_trained, tied)
        items = {stage: self._items(layout, stages[stage]) for stage in own}
        moments = walk.step(items[0]) if mesh.pp == 1 else walk.pipeline(items, actions, self._received(layout, own))
        parameters = size / walk.stored
        most = max(moments, key=sum)
        if layout.delays:  # Gradients of the step before, and the weights of the micro-batches in flight.
            most = most._replace(gradients=most.gradients + trained * state.gradient)
            one, other = state.version_sizes(layout)
            parameters *= one / state.parameter
            parameters += trained * other * (layout.stages - 1 not in own)
        return most._replace(
            parameters=parameters,
            optimizer=state.state * trained / layout.state_sharers,
        )

    def _received(self, layout: Layout, own: Sequence[int]) -> dict[int, float]:
        """Returns the bytes of a stage's input, which the stage before has sent, less an output that is freed."""
        hidden = self._times.hidden(layout)
        freed = hidden if self.state.frees_sent else 0.0
        return {stage: hidden * (stage > 0) - freed * (stage < layout.stages - 1) for stage in own}

    def _items(self, layout: Layout, stage: Stage) -> list[_Item]:
        """Returns the parts of a stage in the order of forward."""
        mesh = layout.mesh
        share = self._times.share(layout)
        profile, compiled = self._times.profile_of(layout), self.state.compiled
        found = []
        for part, name, times in stage:
            one = ((part, name, 1),)
            counts = (
                local_bytes(one, mesh.tp, self.state.gathered, mesh.ep),
                self._times.cast_bytes(part, layout),
                local_count(one, mesh.tp, trained=True),
                local_count(one, mesh.tp, trained=True, ep=mesh.ep),
            )
            everything = part.modes["none"].kept(compiled).on(share)
            if part is profile.head:
                found.append(_Item(*self._head(part, share, everything), *counts, 1, False, True))
                continue
            way = part.modes.get(name, part.modes["none"])
            saved, backward = way.kept(compiled).on(share), part.peaks.backward.on(share)
            forward = (part.peaks.forward if way is part.modes["none"] else part.peaks.unsaved).on(share)
            if name == "selective":
                forward = max(0.0, part.peaks.selective.on(share) - saved)
            kept, again = saved + part.output.on(share), everything - saved
            # Tokens on their way to experts and back are alive when the experts' own tensors are not.
            buffers = layout.exchanged_bytes(part)
            forward, backward = max(forward, buffers), max(backward, buffers)
            repeated = again + max(part.peaks.forward.on(share), buffers) if again > 0 else 0.0
            is_block = part is not profile.stem
            item = _Item(kept, forward, again + backward, *counts, times, is_block, False, again > 0, repeated)
            item = item._replace(at_peak=part.gradients_at_peak if again > 0 else 1.0)
            if mesh.ep > 1 and layout.expert_sharers == 1:
                own = expert_count(one, mesh.tp) / mesh.ep
                own_trained = expert_count(one, mesh.tp, trained=True) / mesh.ep
                item = item._replace(alone=own * self.state.gathered, alone_trained=own_trained)
            found.append(item)
        return found

    def _head(self, part: Part, share: Share, everything: float) -> tuple[float, float, float]:
        """Returns the bytes that the head and the loss keep, and those that forward and backward use beyond them.

        A loss in chunks computes its gradients in forward: it keeps those of the hidden states and of the projection.
        """
        limit = self._times.profile.max_logits
        products = [product.on(share) for product, _ in part.forward.products]
        if limit is None or not products:
            return everything, part.peaks.forward.on(share), part.peaks.backward.on(share)
        last = max(products, key=lambda product: product.m * product.n)
        logits = last.m * last.n
        kept = max(0.0, everything - 4 * logits) + last.size * last.m * last.k + 4 * last.n * last.k
        return kept, min(limit, logits) * (last.size + 4), 0.0


class _Walk:
    """Walk through a rank's step.

    Args:
        layout: Layout of the run.
        state: Bytes of the run's tensors.
        full: Bytes of the rank's parameters as computation uses them.
        trained: Number of trained parameters.
        own_trained: Number of those of which the rank computes gradients: of its own experts alone.
        tied: Number of those that another stage has too.
    """

    def __init__(
        self, layout: Layout, state: StateFormat, full: float, trained: float, own_trained: float, tied: float
    ) -> None:
        self.layout, self.state, self.full, self.trained, self.tied = layout, state, full, trained, tied
        self.own_trained = own_trained
        self.stored = layout.stored_sharers(state)
        #: Whether parameters are gathered in units: FSDP2 does so for copies of the model too.
        self.gathers = self.stored > 1 or (layout.zero == 0 and layout.mesh.dp_replicate > 1 and not layout.delays)
        self.keeps_gathered = layout.zero in (1, 2)

    def step(self, items: Sequence[_Item]) -> Iterator[Moment]:
        """Yields the moments of a step without a pipeline."""
        state, layout = self.state, self.layout
        reduced = self.trained * state.gradient / self.stored
        accumulates = layout.micro_batches > 1
        full = self.own_trained * state.reduced if self.gathers and not layout.reduce_each else reduced
        before = full if accumulates else 0.0 if state.steps_in_backward else reduced
        yield from self._forward(items, before)
        is_persistent = state.accumulates_in_products
        yield from self._backward(items, before if accumulates or is_persistent else 0.0, accumulates or is_persistent)

    def pipeline(
        self, items: dict[int, list[_Item]], actions: Sequence[_Action], received: dict[int, float]
    ) -> Iterator[Moment]:
        """Yields the moments of a pipeline's rank."""
        kept = {s: received[s] + sum(item.times * item.kept for item in items[s] if not item.is_head) for s in items}
        heads = {s: sum(item.kept for item in items[s] if item.is_head) for s in items}
        size = self.state.reduced if self.gathers else self.state.gradient
        counts = {s: size * sum(item.times * item.own_trained for item in items[s]) for s in items}
        counts[max(items)] += size * self.tied
        casts = {s: sum(item.times * item.casts * (not item.repeats) for item in items[s]) for s in items}
        for action in actions:
            cast = sum(number * casts[s] for s, number in action.live)
            others = sum(number * kept[s] for s, number in action.live)
            others += sum(number * received[s] for s, number in action.inputs)
            losses = sum(number * heads[s] for s, number in action.live)
            has = self.state.accumulates_in_products or action.stage in action.with_gradients
            gradients = sum(counts[s] for s in (items if self.state.accumulates_in_products else action.with_gradients))
            own = items[action.stage]
            if action.is_forward:
                others += received[action.stage]
                moments = self._forward(own, gradients)
            else:  # Its own activations are part of the walk.
                others -= kept[action.stage] - received[action.stage]
                losses -= heads[action.stage]
                cast -= casts[action.stage]
                moments = self._backward(own, gradients, has)
            for moment in moments:
                yield moment._replace(
                    gathered=moment.gathered + cast, activations=moment.activations + others, loss=moment.loss + losses
                )

    def _forward(self, items: Sequence[_Item], gradients: float) -> Iterator[Moment]:
        kept = gathered = casts = 0.0
        for item in items:
            so_far = gathered + item.times * item.unit, casts + item.casts * (1 if item.repeats else item.times)
            at_once = self._gathered(items, item, *so_far)
            if item.is_head:
                yield Moment(gradients=gradients, gathered=at_once, activations=kept, loss=item.kept + item.forward)
            else:
                held = kept + item.times * item.kept
                yield Moment(gradients=gradients, gathered=at_once, activations=held, working=item.forward)
            kept += item.times * item.kept * (not item.is_head)
            gathered += item.times * item.unit * item.is_block
            casts += item.times * item.casts * (item.is_block and not item.repeats)

    def _backward(self, items: Sequence[_Item], gradients: float, accumulates: bool) -> Iterator[Moment]:
        """Yields the moments of a backward.

        Args:
            items: Parts of the stage.
            gradients: Bytes of the gradients before it.
            accumulates: Whether these include the gradients that it computes.
        """
        state, done = self.state, 0.0
        kept = sum(item.times * item.kept for item in items if not item.is_head)
        for item in reversed(items):
            at_once = self._gathered(items, item, math.inf, self._kept_casts(items, item))
            own = self._new_gradients(item, accumulates)
            for count in {item.times, 1}:
                before = 0.0 if accumulates or state.steps_in_backward else done + (item.times - count) * item.trained
                moment = Moment(gradients=gradients + before * state.gradient / self.stored + own, gathered=at_once)
                if item.is_head:
                    yield moment._replace(activations=kept, loss=item.kept + item.backward)
                else:
                    left = kept - (item.times - count) * item.kept
                    if item.repeats:
                        yield moment._replace(gradients=moment.gradients - own, activations=left, working=item.again)
                    yield moment._replace(activations=left, working=item.backward)
            kept -= item.times * item.kept * (not item.is_head)
            done += item.times * item.trained

    def _kept_casts(self, items: Sequence[_Item], item: _Item) -> float:
        """Returns the bytes of the blocks' casts while a part's backward runs: a repeated forward casts again."""
        kept = sum(other.times * other.casts for other in items if other.is_block and not other.repeats)
        return kept + item.casts * (item.is_block and item.repeats)

    def _new_gradients(self, item: _Item, accumulates: bool) -> float:
        """Returns the bytes of the gradients that a part's backward computes, before they are added or reduced."""
        state = self.state
        if not self.gathers or self.layout.mesh.pp > 1:
            # One tensor's at a time, if they are added: of a block about a quarter.
            one = 0.25 if item.is_block else 1.0
            return item.own_trained * state.gathered * (min(one, item.at_peak) if accumulates else item.at_peak)
        # Its gradients, a buffer of them all that is reduced, and their shard.
        once = state.gathered * (not accumulates or self.layout.reduce_each) * item.at_peak
        shared = item.own_trained - item.alone_trained
        return shared * (once + state.reduced) + item.trained * state.reduced / self.stored

    def _gathered(self, items: Sequence[_Item], item: _Item, so_far: float, casts: float) -> float:
        """Returns the bytes of gathered parameters and of their casts, and the buffer that the next arrive in.

        Args:
            items: Parts of the stage.
            item: Part that runs.
            so_far: Bytes of the parameters of the parts that have run, and of this one.
            casts: Bytes of their casts.
        """
        outer = [other for other in items if not other.is_block]
        before = sum(other.unit for other in outer)
        found, unit = 0.0, item.unit if item.is_block else 0.0
        buffer = unit - item.alone
        if self.gathers and self.layout.mesh.pp > 1:  # Gathered once a step, before the micro-batches.
            found = self.full
        elif self.gathers:
            found = min(before + so_far, self.full) if self.keeps_gathered else before + unit
            found += buffer
        every = sum(other.times * other.casts for other in items)
        return found + min(sum(other.casts for other in outer) + casts, every)

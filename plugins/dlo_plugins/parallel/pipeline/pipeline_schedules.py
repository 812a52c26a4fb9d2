"""Pipeline schedules as pure data: the order of actions of each rank.

GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism. Huang et al., 2019, arXiv 1811.06965.
1F1B: Memory-Efficient Pipeline-Parallel DNN Training. Narayanan et al., 2021, arXiv 2006.09503.
Interleaved1F1B: Efficient Large-Scale Language Model Training on GPU Clusters. Narayanan et al., 2021, arXiv
2104.04473.
ZBH1: Zero Bubble Pipeline Parallelism. Qi, Wan, Huang & Lin, 2024, arXiv 2401.10241.
ZBV: Pipeline Parallelism with Controllable Memory. Qi, Wan, Amar & Lin, 2024, arXiv 2405.15362.
Varuna: Varuna: Scalable, Low-cost Training of Massive Deep Learning Models. Athlur, Saran, Sivathanu, Ramjee & Kwatra,
2022, arXiv 2111.04007, section 3.2; its orders are those of the authors' own generator.
PipeDream2BW: Memory-Efficient Pipeline-Parallel DNN Training. Narayanan et al., 2021, arXiv 2006.09503, section 3.1.

Interleaved1F1B has two or more stages a rank, ZBV has two, the others one.

Departures: ZBV always uses the order that has no bubble where forward, input gradient and weight gradient take equally
long, whatever the actual costs. ZBH1 bounds the number of deferred weight gradients, not memory itself. In Varuna, a
rank runs its order also where a gradient is late; the paper's then runs forwards whose hidden states it has.
PipeDream2BW applies a step's gradients on all ranks at the end of the next step, where the paper's ranks apply them one
after the other, as each has them; the weights are the same, with one more set of gradients in memory.

A schedule is a function that is registered in :data:`SCHEDULES`, in this file, in a user's file under ``plugins:``, or
in an installed package with an entry point in the group ``dlo_framework.pipeline_schedules``.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlo_framework.errors import DloError
from dlo_framework.extensions import NamedFunctions


class ActionKind(enum.StrEnum):
    """Kind of computation that a stage runs for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: the input gradient and the weight gradients."""
    INPUT = "I"
    """First part of backward: the input gradient, for which the previous stage waits."""
    WEIGHT = "W"
    """Second part of backward: the weight gradients that an `INPUT` has deferred."""
    RECOMPUTE = "R"
    """Forward again, with the activations for backward. A stage's `FORWARD` keeps only its input if one follows."""


class Action(NamedTuple):
    """One computation of a rank: its kind, the stage and the micro-batch.

    A negative micro-batch is one of the step before, counted from its end; see `Schedule.flushes`.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def is_backward(self) -> bool:
        """Whether the action computes the input gradient, for which the previous stage waits."""
        return self.kind in (ActionKind.BACKWARD, ActionKind.INPUT)


@dataclass(frozen=True)
class Placement:
    """Placement of a pipeline's stages on its ranks.

    Args:
        ranks: Number of ranks in the pipeline.
        stages_per_rank: Number of stages that each rank holds.
        shape: Order in which ranks get the stages: `loop` is 0, 1, 2, 0, 1, 2; `v` (two stages a rank) is
            0, 1, 2, 2, 1, 0.
    """

    ranks: int
    stages_per_rank: int = 1
    shape: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds a stage."""
        if self.shape == "v" and stage >= self.ranks:
            return 2 * self.ranks - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that a rank holds, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def neighbours(self) -> list[tuple[int, int]]:
        """Returns the pairs of ranks that exchange hidden states."""
        steps = ((self.rank_of(stage), self.rank_of(stage + 1)) for stage in range(self.stages - 1))
        return [(one, other) for one, other in steps if one != other]


F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT  # noqa: E741
R = ActionKind.RECOMPUTE


@dataclass(frozen=True)
class Schedule:
    """Schedule of a step: the actions of each rank.

    Attributes:
        name: Name of the schedule.
        placement: Placement of the stages on ranks.
        micro_batches: Number of micro-batches in a step.
        orders: Actions of each rank, in the order in which it runs them.
        flushes: Whether a step ends with all its backwards. Otherwise the backwards of its last micro-batches run in
            the next step, with negative numbers: -1 is the last micro-batch of the step before.
    """

    name: str
    placement: Placement
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]
    flushes: bool = True

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are separate actions, apart from input gradients."""
        return any(action.kind is W for order in self.orders for action in order)

    @property
    def recomputed_stages(self) -> frozenset[int]:
        """Stages that keep only the inputs of their forwards, and recompute before each backward."""
        return frozenset(action.stage for order in self.orders for action in order if action.kind is R)

    def drain(self) -> Schedule:
        """Returns the schedule of the backwards that a step leaves to the next one, if no next one follows."""
        orders = tuple(tuple(a for a in order if a.micro_batch < 0) for order in self.orders)
        return Schedule(f"{self.name}, drained", self.placement, 0, orders, self.flushes)

    def unroll(self, steps: int) -> Schedule:
        """Returns the schedule of several steps in a row, with all their backwards and micro-batches numbered through.

        Args:
            steps: Number of steps of this schedule's micro-batches.
        """
        orders = []
        for order, drained in zip(self.orders, self.drain().orders, strict=True):
            numbered = [
                action._replace(micro_batch=action.micro_batch + step * self.micro_batches)
                for step, of_step in enumerate([*[order] * steps, drained])
                for action in of_step
            ]
            orders.append(tuple(action for action in numbered if action.micro_batch >= 0))
        return Schedule(self.name, self.placement, steps * self.micro_batches, tuple(orders))


@dataclass(frozen=True)
class ScheduleRule:
    """Rule of a schedule for any number of ranks and micro-batches.

    Attributes:
        order: Function of the placement, a rank and the number of micro-batches that returns the rank's actions.
        stages_per_rank: Number of stages that each rank holds; None leaves it to the user.
        shape: Order in which ranks get the stages; see :class:`Placement`.
        splits_backward: Whether weight gradients may be separate actions, apart from input gradients; without it an
            order that has any is refused.
        flushes: Whether a step ends with all its backwards; see :class:`Schedule`. Without it, weights have a delay of
            one step.
        check: Function of the numbers of ranks and of micro-batches that raises a DloError for numbers that the
            schedule cannot run; None where it can run any.
        bubble: Function of the numbers of ranks, micro-batches and stages a rank, and of the costs of a micro-batch's
            forward, input gradient and weight gradient on a rank, that returns the paper's time that a step of equal
            stages takes beyond its work; None for a paper without a formula.
    """

    order: Callable[[Placement, int, int], list[Action]]
    stages_per_rank: int | None = 1
    shape: Literal["loop", "v"] = "loop"
    splits_backward: bool = False
    flushes: bool = True
    check: Callable[[int, int], None] | None = None
    bubble: Callable[[int, int, int, float, float, float], float] | None = None


#: Schedules by the name that ``MeshStrategy.schedule`` has; options of ``register`` are those of :class:`ScheduleRule`.
SCHEDULES: NamedFunctions[ScheduleRule] = NamedFunctions("schedule", "dlo_framework.pipeline_schedules", ScheduleRule)


def make_placement(name: str, ranks: int, stages_per_rank: int | None = None) -> Placement:
    """Returns the placement of a schedule's stages on ranks.

    Args:
        name: Name of the schedule, in upper or lower case.
        ranks: Number of ranks in the pipeline.
        stages_per_rank: Number of stages that each rank holds, for schedules that leave it open; 2 by default there.

    Raises:
        DloError: If no such schedule exists, or it does not have this number of stages a rank.
    """
    known, rule = _find_rule(name)
    fixed = rule.stages_per_rank
    if fixed is None:
        if stages_per_rank is not None and stages_per_rank < 2:
            raise DloError(
                f"stages_per_rank must be 2 or more for {known}, got {stages_per_rank}; set stages_per_rank=2, or"
                " schedule=1F1B"
            )
        return Placement(ranks, stages_per_rank or 2, rule.shape)
    if stages_per_rank not in (None, fixed):
        raise DloError(
            f"stages_per_rank must be {fixed} for {known}, got {stages_per_rank}; leave stages_per_rank out, or set"
            " schedule=Interleaved1F1B"
        )
    return Placement(ranks, fixed, rule.shape)


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """Returns the schedule of a step.

    Args:
        name: Name of the schedule, in upper or lower case.
        ranks: Number of ranks in the pipeline.
        micro_batches: Number of micro-batches in a step.
        stages_per_rank: Number of stages that each rank holds, for schedules that leave it open; 2 by default there.

    Raises:
        DloError: If no such schedule exists, its actions are not as it was registered, or it cannot run these numbers;
            the message computes the nearest that it can run.
    """
    where = make_placement(name, ranks, stages_per_rank)
    known, rule = _find_rule(name)
    if micro_batches < 1:
        raise DloError(f"micro_batches must be at least 1, got {micro_batches}; set {2 * ranks}")
    if rule.check is not None:
        rule.check(ranks, micro_batches)
    orders = tuple(_order(known, rule, where, rank, micro_batches) for rank in range(ranks))
    for rank, order in enumerate(orders):
        _check_order(known, rule.flushes, order, where.stages_of(rank), micro_batches, where.stages - 1)
        if not rule.splits_backward and any(action.kind in (I, W) for action in order):
            raise DloError(
                f"schedule {known} must be registered with splits_backward=True to run input and weight gradients"
                f" (I, W), got them on rank {rank}; add it to register(), or use full backwards (B)"
            )
    return Schedule(known, where, micro_batches, orders, rule.flushes)


def _order(name: str, rule: ScheduleRule, where: Placement, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """Returns a rank's actions.

    Raises:
        DloError: The schedule's function raises, or returns no list of actions.
    """
    what = f"schedule {name} ({rule.order.__module__}.{rule.order.__qualname__})"
    try:
        actions = tuple(rule.order(where, rank, micro_batches))
    except DloError:
        raise
    except Exception as error:
        raise DloError(
            f"{what} must return a rank's actions for (placement, rank, micro_batches), got"
            f" {type(error).__name__}: {error}; correct the function"
        ) from error
    other = next((action for action in actions if not isinstance(action, Action)), None)
    if other is not None:
        raise DloError(f"{what} must return Actions, got {other!r}; return Action(kind, stage, micro_batch)")
    return actions


#: Kinds of actions that a stage runs for a micro-batch, in this order.
_COMPLETE = ("FB", "FIW", "FRB", "FRIW")


def _check_order(
    name: str, flushes: bool, order: Sequence[Action], stages: Sequence[int], micro_batches: int, last: int
) -> None:
    """Checks that a rank's order computes each of its stages for each micro-batch once, in the order of dependencies.

    A backward of the step before stands for the same one of this step, which the next step runs. A stage before the
    last one recomputes all of its micro-batches or none.
    """
    own: dict[tuple[int, int], str] = {(stage, n): "" for stage in stages for n in range(micro_batches)}
    wanted, carried = len(own), defaultdict[tuple[int, int], str](str)
    for action in order:
        least = 0 if flushes or action.kind is not B else -micro_batches
        if action.micro_batch < least or (not flushes and action.kind not in (F, B)):
            raise DloError(
                f"schedule {name} must run {'micro-batches of its own step' if flushes else 'full backwards (B)'},"
                f" got {action}; " + ("register it with flushes=False" if flushes else "correct the rank's order")
            )
        if action.micro_batch < 0:
            carried[action.stage, action.micro_batch + micro_batches] += action.kind
        else:
            own[action.stage, action.micro_batch] = own.get(action[1:], "") + action.kind
    runs = {at: own.get(at, "") + carried[at] for at in (*own, *list(carried))}
    wrong = next((at for at, kinds in runs.items() if kinds not in _COMPLETE), None)
    if wrong is not None or len(runs) > wanted:
        stage, number = wrong or list(runs)[-1]
        raise DloError(
            f"schedule {name} must run a forward (F), a recomputation (R) or none, and a backward (B, or I and W) once"
            f" for each micro-batch of a rank's stages, got {' '.join(runs[stage, number]) or 'nothing'} for stage"
            f" {stage} and micro-batch {number}; correct the rank's order"
        )
    for stage in stages:
        recomputed = sum("R" in runs[stage, n] for n in range(micro_batches))
        if recomputed and (recomputed < micro_batches or stage == last):
            raise DloError(
                f"schedule {name} must recompute all micro-batches of a stage or none, and none of the last stage, got"
                f" {recomputed} of {micro_batches} for stage {stage}{' (the last)' if stage == last else ''}; correct"
                " the rank's order"
            )


def flushes(name: str) -> bool:
    """Returns whether a schedule's step ends with all its backwards, so that its gradients are those of the step."""
    return _find_rule(name)[1].flushes


def splits_backward(name: str) -> bool:
    """Returns whether a schedule computes weight gradients separately from input gradients."""
    return _find_rule(name)[1].splits_backward


def theoretical_bubble(
    name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float] = (1.0, 1.0, 1.0), chunks: int = 1
) -> float | None:
    """Returns the time that a step takes beyond its work, by the paper's formula for equal stages; None without one.

    Args:
        name: Name of the schedule.
        ranks: Number of ranks in the pipeline.
        micro_batches: Number of micro-batches in a step: at least `ranks` for the zero-bubble schedules.
        costs: Costs of a micro-batch on a rank, over all its stages: forward, input gradient, weight gradient.
        chunks: Number of stages that each rank holds.
    """
    bubble = _find_rule(name)[1].bubble
    return None if bubble is None else bubble(ranks, micro_batches, chunks, *costs)


def forward_only(where: Placement, micro_batches: int) -> Schedule:
    """Returns the schedule of an evaluation: any number of micro-batches, in groups of as many as there are ranks."""
    orders = []
    for rank in range(where.ranks):
        groups = [range(n, min(n + where.ranks, micro_batches)) for n in range(0, micro_batches, where.ranks)]
        orders.append(
            tuple(Action(F, stage, number) for group in groups for stage in where.stages_of(rank) for number in group)
        )
    return Schedule("evaluation", where, micro_batches, tuple(orders))


def _find_rule(name: str) -> tuple[str, ScheduleRule]:
    """Returns a schedule's own name and its rule; upper or lower case and hyphens make no difference."""
    plain = str(name).lower().replace("-", "")
    # Installed packages are asked only for a name that no loaded schedule has: that reads all their metadata.
    for names in (SCHEDULES.loaded, SCHEDULES.names):
        for known in names():
            if known.lower().replace("-", "") == plain:
                return known, SCHEDULES.get(known)
    return str(name), SCHEDULES.get(str(name))


@SCHEDULES.register("GPipe", bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w))
def _gpipe(where: Placement, rank: int, number: int) -> list[Action]:
    return [Action(F, rank, n) for n in range(number)] + [Action(B, rank, n) for n in range(number)]


@SCHEDULES.register("1F1B", bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w))
def _one_forward_one_backward(where: Placement, rank: int, number: int) -> list[Action]:
    warm_up = min(number, where.ranks - rank - 1)
    order = [Action(F, rank, n) for n in range(warm_up)]
    for n in range(number):
        if n + warm_up < number:
            order.append(Action(F, rank, n + warm_up))
        order.append(Action(B, rank, n))
    return order


def _check_interleaved(ranks: int, micro_batches: int) -> None:
    if micro_batches % ranks:
        near = [n for n in (micro_batches // ranks * ranks, -(-micro_batches // ranks) * ranks) if n]
        raise DloError(
            f"micro_batches must be a multiple of the pipeline's {ranks} ranks for Interleaved1F1B, got"
            f" {micro_batches}; set {' or '.join(map(str, near))}, or schedule=1F1B"
        )


@SCHEDULES.register(
    "Interleaved1F1B",
    stages_per_rank=None,
    check=_check_interleaved,
    bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
)
def _interleaved(where: Placement, rank: int, number: int) -> list[Action]:
    ranks, chunks = where.ranks, where.stages_per_rank
    total = number * chunks

    def step(kind: ActionKind, n: int) -> Action:
        """Returns the rank's n-th forward or backward: a group of micro-batches runs in one chunk, then in the next."""
        chunk = n // ranks % chunks
        chunk = chunk if kind is F else chunks - 1 - chunk
        return Action(kind, chunk * ranks + rank, n // (ranks * chunks) * ranks + n % ranks)

    warm_up = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    order = [step(F, n) for n in range(warm_up)]
    for n in range(total):
        if n + warm_up < total:
            order.append(step(F, n + warm_up))
        order.append(step(B, n))
    return order


@SCHEDULES.register("ZBH1", splits_backward=True, bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i - w))
def _zb_h1(where: Placement, rank: int, number: int) -> list[Action]:
    """1F1B in which rank r defers r weight gradients, and computes them where it would wait for other ranks."""
    order: list[Action] = []
    waiting: deque[int] = deque()
    for action in _one_forward_one_backward(where, rank, number):
        if action.kind is F:
            order.append(action)
            continue
        order.append(Action(I, rank, action.micro_batch))
        waiting.append(action.micro_batch)
        if len(waiting) > rank:
            order.append(Action(W, rank, waiting.popleft()))
    return order + [Action(W, rank, n) for n in waiting]


class _Writer:
    """Writer of a rank's order for a V of two stages; each call adds the next micro-batch of a kind and a stage."""

    def __init__(self, where: Placement, rank: int) -> None:
        self.down, self.up = where.stages_of(rank)
        self.order: list[Action] = []
        self.done: dict[tuple[ActionKind, int], int] = defaultdict(int)
        self.waiting: deque[tuple[int, int]] = deque()

    def add(self, kind: ActionKind, stage: int) -> None:
        counted = I if kind is B else kind  # A full backward counts as an input gradient.
        number = self.done[counted, stage]
        self.done[counted, stage] += 1
        self.order.append(Action(kind, stage, number))
        if kind is I:
            self.waiting.append((stage, number))

    def weight(self, stage: int | None = None) -> None:
        """Adds the oldest deferred weight gradient, of a stage or of both; nothing if none is deferred."""
        oldest = next((item for item in self.waiting if stage in (None, item[0])), None)
        if oldest is not None:
            self.waiting.remove(oldest)
            self.order.append(Action(W, *oldest))

    def both(self, stage: int) -> None:
        self.add(I, stage)
        self.weight(stage)


# The formula holds where the three costs are equal; the rest is the wait for the first forward.
@SCHEDULES.register(
    "ZBV", stages_per_rank=2, shape="v", splits_backward=True, bubble=lambda p, m, v, f, i, w: (p - 1) * f / 2
)
def _zbv(where: Placement, rank: int, micro_batches: int) -> list[Action]:
    ranks, write = where.ranks, _Writer(where, rank)
    number = max(micro_batches, 2 * ranks - 1)  # Enough to fill the pipeline; the extra ones are dropped below.
    down, up, done = write.down, write.up, write.done
    for _ in range(2 * (ranks - rank) - 1):
        write.add(F, down)
    for _ in range(rank):
        write.add(F, up)
        write.add(F, down)
    for _ in range(ranks - rank):
        write.add(F, up)
        write.both(up)
    while done[F, up] < done[F, down] or done[F, down] < number:
        if done[F, down] < number:
            write.add(F, down)
        write.both(down)
        write.add(F, up)
        write.both(up)
    for _ in range(rank):
        write.add(I, down)
        write.add(I, up)
    for _ in range(ranks - rank):
        write.add(I, down)
        write.weight(down)
    for stage in (up, down):
        while any(waiting == stage for waiting, _ in write.waiting):
            write.weight(stage)
    return [action for action in write.order if action.micro_batch < micro_batches]


# The paper has no formula; this one holds where a backward takes twice as long as a forward, and its work includes
# recomputation.
@SCHEDULES.register("Varuna", bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) - (1 + (m - 1) % 3) * f * (p > 1))
def _varuna(where: Placement, rank: int, number: int) -> list[Action]:
    """Each stage but the last recomputes, and a forward runs only while no gradient is on its way."""
    return list(_varuna_orders(where.ranks, number)[rank])


@functools.lru_cache(maxsize=64)
def _varuna_orders(ranks: int, number: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the orders of all ranks by the paper's rules, in steps of a forward's time; a backward takes two.

    1. The last stage runs a backward right after its forward, from that forward's activations.
    2. Another stage begins to recompute when the next stage is halfway through the backward: it has the activations
       when the gradient arrives.
    3. A stage that has recomputed a micro-batch runs its backward next, so that it never has activations of two.
    4. A stage runs a forward if it can do nothing else.
    """
    last = ranks - 1
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    #: Micro-batches that a stage can run, by its rules in the order of their precedence.
    ready: list[dict[ActionKind, deque[int]]] = [{W: deque(), B: deque(), R: deque(), F: deque()} for _ in orders]
    ready[0][F].extend(range(number))
    while True:
        running: list[tuple[int, ActionKind, int]] = []
        for stage, queues in enumerate(ready):
            kind = next((kind for kind, queue in queues.items() if queue), None)
            if kind is not None:
                running.append((stage, kind, queues[kind].popleft()))
        if not running:
            return tuple(map(tuple, orders))
        for stage, kind, n in running:
            if kind is not W:  # W is the second half of the backward here, not an action of its own.
                orders[stage].append(Action(kind, stage, n))
            if kind is F:
                following = (stage + 1, F) if stage < last else (stage, B)
                ready[following[0]][following[1]].append(n)
            elif kind is R:
                ready[stage][B].append(n)
            elif kind is B:
                ready[stage][W].append(n)
                if stage:
                    ready[stage - 1][R].append(n)


def _check_two_versions(ranks: int, micro_batches: int) -> None:
    if micro_batches < ranks:
        raise DloError(
            f"micro_batches must be at least {ranks}, the number of stages, for PipeDream2BW, got {micro_batches}; set"
            f" {ranks}, or schedule=1F1B"
        )


# It waits before its first step and after its last one only.
@SCHEDULES.register("PipeDream2BW", flushes=False, check=_check_two_versions, bubble=lambda p, m, v, f, i, w: 0.0)
def _two_versions(where: Placement, rank: int, number: int) -> list[Action]:
    """1F1B without an end: each forward is followed by the backward of the micro-batch that has come back by then."""
    in_flight = where.ranks - rank - 1
    return [Action(kind, rank, n - in_flight * (kind is B)) for n in range(number) for kind in (F, B)]

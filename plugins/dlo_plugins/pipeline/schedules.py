"""Pipeline schedules: for each rank, what it does in which order. Pure data; nothing here runs anything.

GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism. Huang et al., 2019, arXiv 1811.06965.
1F1B: Memory-Efficient Pipeline-Parallel DNN Training. Narayanan et al., 2021, arXiv 2006.09503.
Interleaved1F1B: Efficient Large-Scale Language Model Training on GPU Clusters. Narayanan et al., 2021, arXiv
2104.04473.
ZBH1: Zero Bubble Pipeline Parallelism. Qi, Wan, Huang & Lin, 2024, arXiv 2401.10241.
ZBV: Pipeline Parallelism with Controllable Memory. Qi, Wan, Amar & Lin, 2024, arXiv 2405.15362.
DualPipeV: DeepSeek-V3 Technical Report. 2024, arXiv 2412.19437, section 3.2.1, cut in half along its symmetry.

Interleaved1F1B has two or more stages a rank, ZBV and DualPipeV have two, the others one.

Departures: the order of ZBV is the one that has no bubble where forward, input gradient and weight gradient take
equally long, whatever the costs are; in DualPipeV, what the paper overlaps (a forward and a backward of other
micro-batches) follow each other, as one device computes them no faster together; ZBH1 bounds how many weight gradients
wait, not memory itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.pipeline.actions import Action, Kind, Placement

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


@dataclass(frozen=True)
class Schedule:
    """What each rank does.

    Attributes:
        name: of the schedule.
        placement: of the stages on ranks.
        micro_batches: of a step.
        orders: each rank's actions, in the order in which it runs them.
    """

    name: str
    placement: Placement
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return any(action.kind is W for order in self.orders for action in order)


@dataclass(frozen=True)
class _Family:
    """A schedule's order for a rank, and what it asks for."""

    order: Callable[[Placement, int, int], list[Action]]
    stages_per_rank: int | None = 1
    shape: Literal["loop", "v"] = "loop"
    splits: bool = False


def placement(name: str, ranks: int, stages_per_rank: int | None = None) -> Placement:
    """Returns where a schedule has its stages.

    Args:
        name: of the schedule; upper and lower case count the same.
        ranks: of the pipeline.
        stages_per_rank: for schedules that leave it open; by default 2 there.

    Raises:
        DloError: for a schedule that does not exist, or another number of stages than it has.
    """
    known, family = _family(name)
    fixed = family.stages_per_rank
    if fixed is None:
        if stages_per_rank is not None and stages_per_rank < 2:
            raise DloError(
                f"{known} has 2 or more stages a rank, given {stages_per_rank}; set stages_per_rank=2, or schedule=1F1B"
            )
        return Placement(ranks, stages_per_rank or 2, family.shape)
    if stages_per_rank not in (None, fixed):
        raise DloError(
            f"{known} has {fixed} stage{'s' * (fixed > 1)} a rank, given {stages_per_rank}; leave stages_per_rank out,"
            " or set schedule=Interleaved1F1B"
        )
    return Placement(ranks, fixed, family.shape)


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """Returns what each rank does in a step.

    Args:
        name: GPipe, 1F1B, Interleaved1F1B, ZBH1, ZBV or DualPipeV.
        ranks: of the pipeline.
        micro_batches: of the step.
        stages_per_rank: for Interleaved1F1B; 2 by default.

    Raises:
        DloError: for a schedule that does not exist, and for numbers that it cannot work with; the message says which
            are near that it can.
    """
    where = placement(name, ranks, stages_per_rank)
    known, family = _family(name)
    _check_micro_batches(known, ranks, micro_batches)
    orders = tuple(tuple(family.order(where, rank, micro_batches)) for rank in range(ranks))
    return Schedule(known, where, micro_batches, orders)


def splits_backward(name: str) -> bool:
    """Returns whether a schedule computes weight gradients apart from input gradients."""
    return _family(name)[1].splits


def forward_only(where: Placement, micro_batches: int) -> Schedule:
    """Returns the order of an evaluation, for any number of micro-batches: as many at a time as there are ranks."""
    orders = []
    for rank in range(where.ranks):
        groups = [range(n, min(n + where.ranks, micro_batches)) for n in range(0, micro_batches, where.ranks)]
        orders.append(
            tuple(Action(F, stage, number) for group in groups for stage in where.stages_of(rank) for number in group)
        )
    return Schedule("evaluation", where, micro_batches, tuple(orders))


def _family(name: str) -> tuple[str, _Family]:
    found = next((known for known in FAMILIES if known.lower() == str(name).lower().replace("-", "")), None)
    if found is None:
        raise DloError(
            f"unknown schedule '{name}'{did_you_mean(str(name), FAMILIES)}; available: {', '.join(FAMILIES)}"
        )
    return found, FAMILIES[found]


def _check_micro_batches(name: str, ranks: int, number: int) -> None:
    if number < 1:
        raise DloError(f"a step has at least one micro-batch, given micro_batches={number}; set {2 * ranks}")
    if name == "Interleaved1F1B" and number % ranks:
        near = [n for n in (number // ranks * ranks, -(-number // ranks) * ranks) if n]
        raise DloError(
            f"Interleaved1F1B runs micro-batches in groups of as many as there are pipeline ranks ({ranks}), given"
            f" micro_batches={number}; set {' or '.join(map(str, near))}, or schedule=1F1B"
        )
    if name == "DualPipeV" and number < 2 * ranks:
        raise DloError(
            f"DualPipeV fills {2 * ranks} stages on {ranks} ranks with at least as many micro-batches, given"
            f" micro_batches={number}; set {2 * ranks}, or schedule=ZBV"
        )


def _gpipe(where: Placement, rank: int, number: int) -> list[Action]:
    return [Action(F, rank, n) for n in range(number)] + [Action(B, rank, n) for n in range(number)]


def _one_forward_one_backward(where: Placement, rank: int, number: int) -> list[Action]:
    warm_up = min(number, where.ranks - rank - 1)
    order = [Action(F, rank, n) for n in range(warm_up)]
    for n in range(number):
        if n + warm_up < number:
            order.append(Action(F, rank, n + warm_up))
        order.append(Action(B, rank, n))
    return order


def _interleaved(where: Placement, rank: int, number: int) -> list[Action]:
    ranks, chunks = where.ranks, where.stages_per_rank
    total = number * chunks

    def step(kind: Kind, n: int) -> Action:
        """The rank's n-th forward, or backward: a group of micro-batches through one chunk, then the next."""
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


def _zb_h1(where: Placement, rank: int, number: int) -> list[Action]:
    """1F1B in which rank r lets r weight gradients wait, and computes them while it would wait for others."""
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
    """Writes a rank's order for a V of two stages: the next micro-batch of a kind and a stage, each time."""

    def __init__(self, where: Placement, rank: int) -> None:
        self.down, self.up = where.stages_of(rank)
        self.order: list[Action] = []
        self.done: dict[tuple[Kind, int], int] = defaultdict(int)
        self.waiting: deque[tuple[int, int]] = deque()

    def add(self, kind: Kind, stage: int) -> None:
        counted = I if kind is B else kind  # A full backward takes the place of an input gradient.
        number = self.done[counted, stage]
        self.done[counted, stage] += 1
        self.order.append(Action(kind, stage, number))
        if kind is I:
            self.waiting.append((stage, number))

    def weight(self, stage: int | None = None) -> None:
        """Adds the weight gradient that has waited longest: of a stage, or of all; nothing if none waits."""
        found = next((item for item in self.waiting if stage in (None, item[0])), None)
        if found is not None:
            self.waiting.remove(found)
            self.order.append(Action(W, *found))

    def both(self, stage: int) -> None:
        self.add(I, stage)
        self.weight(stage)


def _zbv(where: Placement, rank: int, given: int) -> list[Action]:
    ranks, write = where.ranks, _Writer(where, rank)
    number = max(given, 2 * ranks - 1)  # As many as fill the pipeline; those that are not there are dropped below.
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
    return [action for action in write.order if action.micro_batch < given]


def _dualpipe_v(where: Placement, rank: int, number: int) -> list[Action]:
    ranks, write = where.ranks, _Writer(where, rank)
    down, up = write.down, write.up
    for _ in range(2 * (ranks - rank - 1)):
        write.add(F, down)
    for _ in range(rank + 1):
        write.add(F, down)
        write.add(F, up)
    for _ in range(ranks - rank - 1):
        write.add(I, up)
        write.weight()
        write.add(F, up)
    for _ in range(number - 2 * ranks + rank + 1):
        write.add(F, down)
        write.add(B, up)
        write.add(F, up)
        write.add(B, down)
    for _ in range(ranks - rank - 1):
        write.add(B, up)
        write.add(F, up)
        write.add(B, down)
    split = False
    for n in range(rank + 1):
        # From the middle on, weight gradients wait: they fill what would be the bubble at the end.
        split = split or (n == (rank + 1) // 2 and rank % 2 == 1)
        write.add(I if split else B, up)
        split = split or (n == (rank + 1) // 2 and rank % 2 == 0)
        write.add(I if split else B, down)
    for _ in range(ranks - rank - 1):
        write.weight()
        write.add(I if split else B, down)
    while write.waiting:
        write.weight()
    return write.order


#: By name; `stages_per_rank` None leaves it to the user.
FAMILIES = {
    "GPipe": _Family(_gpipe),
    "1F1B": _Family(_one_forward_one_backward),
    "Interleaved1F1B": _Family(_interleaved, stages_per_rank=None),
    "ZBH1": _Family(_zb_h1, splits=True),
    "ZBV": _Family(_zbv, 2, "v", splits=True),
    "DualPipeV": _Family(_dualpipe_v, 2, "v", splits=True),
}

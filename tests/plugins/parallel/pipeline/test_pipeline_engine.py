"""What the engine keeps, calls and records while it runs."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import RankFailed, run_distributed
from dlo_plugins.parallel.pipeline.exchange import Transport
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_plugins.parallel.pipeline.pipeline_schedules import Action, ActionKind, make_schedule
from dlo_plugins.parallel.pipeline.simulation import MeasuredCosts
from dlo_plugins.parallel.pipeline.timeline import draw_comparison, simulate_ideal
from support.on_ranks import on_ranks
from support.pipeline_nets import FLUSHING, most_in_flight, plain

NUMBER = 8


class Watched(torch.autograd.Function):
    """Saves a tensor for backward whose life is watched."""

    alive: ClassVar[weakref.WeakSet[Tensor]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept = torch.zeros(1)
        Watched.alive.add(ctx.kept)
        Watched.most = max(Watched.most, len(Watched.alive))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Watching(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return self.block(Watched.apply(hidden), **kwargs)


@on_ranks(2)
def test_activations_live_as_long_as_the_schedule_says(rank: int, world_size: int) -> None:
    known = {"GPipe": NUMBER, "1F1B": 2 - rank, "Varuna": 1}
    for schedule in FLUSHING:
        case = plain(NUMBER)
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        # The first block of each stage tells how many micro-batches of it are kept.
        for stage in pipeline.own_stages:
            name = pipeline.stages.blocks_of(stage)[0]
            case.model.layers[int(name.split(".")[1])] = Watching(case.model.get_submodule(name))  # type: ignore[index]
        case.step(pipeline)
        gc.collect()
        assert not Watched.alive, schedule
        Watched.most = 0
        case.step(pipeline)
        order = make_schedule(schedule, world_size, NUMBER).orders[rank]
        # Backward frees what the weight gradients do not need: of that an input gradient is the end.
        ends = {kind: kind for kind in ActionKind} | {ActionKind.INPUT: ActionKind.BACKWARD}
        whole = [Action(ends[a.kind], *a[1:]) for a in order if a.kind is not ActionKind.WEIGHT]
        assert Watched.most == most_in_flight(whole) == known.get(schedule, Watched.most), schedule


@on_ranks(2)
def test_what_has_arrived_is_let_go_of(rank: int, world_size: int) -> None:
    bounds = {"GPipe": (12, 12), "1F1B": (0, 2)}
    for schedule in FLUSHING:
        case = plain(12)
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        for _ in range(2):  # The first has headers too.
            case.step(pipeline)
        least, most = bounds.get(schedule, (0, 6))
        assert least <= pipeline._exchange.most_in_flight <= most, schedule


@on_ranks(2, timeout=100)
def test_what_ran_when_is_recorded_and_drawn(rank: int, world_size: int, folder: Path) -> None:
    for schedule in ("1F1B", "ZBV", "Varuna"):
        case = plain(NUMBER)
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        case.step(pipeline)
        assert pipeline.timeline().rows == [[], []]  # Nothing is recorded unless asked for.
        pipeline.record = True
        case.step(pipeline)
        timeline = pipeline.timeline()
        known = make_schedule(schedule, world_size, NUMBER)
        assert [tuple(item.action for item in row) for row in timeline.rows] == list(known.orders)
        for row in timeline.rows:
            assert all(one.end <= other.start for one, other in itertools.pairwise(row))
            assert all(0 < item.start < item.end for item in row)
        costs = MeasuredCosts.from_timeline(timeline)
        assert costs.mean(ActionKind.FORWARD) * known.placement.stages * NUMBER == pytest.approx(
            sum(t.end - t.start for row in timeline.rows for t in row if t.action.kind is ActionKind.FORWARD)
        )
        theory = simulate_ideal(timeline, known)
        assert theory.busy == pytest.approx(timeline.busy)
        assert timeline.makespan >= theory.makespan > max(theory.busy)
        if rank == 0:
            draw_comparison(timeline, known).savefig(folder / f"{schedule}.png")
            assert (folder / f"{schedule}.png").stat().st_size > 5000


class Growing(nn.Module):
    """Its hidden state's shape depends on values: what a pipeline cannot know before it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[: int(x[0, 0])]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _growing(rank: int, world_size: int) -> None:
    model = Growing()
    pipeline = Pipeline(model, ParallelPlan(blocks=("blocks.*",)), dist.group.WORLD)
    batches = [torch.full((4, 4), rows) for rows in (2.0, 3.0)]
    pipeline.train_step(batches, model, lambda outputs, _: outputs.sum())


def test_a_hidden_state_of_another_shape_is_refused() -> None:
    message = r"got \[2, 4\] in torch.float32, then \[3, 4\] in torch.float32 for stage 1"
    with pytest.raises(RankFailed, match=message) as failed:
        run_distributed(_growing, 2, timeout=60)
    assert failed.value.user_error is not None


@on_ranks(2)
def test_losses_are_told_before_their_backward_where_they_are_computed(rank: int, world_size: int) -> None:
    case, seen = plain(NUMBER), list[str]()

    class Told(Pipeline):
        def _run_backward(self, result: Tensor, gradient: Tensor | None) -> None:
            seen.append("backward")
            super()._run_backward(result, gradient)

    with mock.patch.object(Transport, "connect", autospec=True, side_effect=Transport.connect) as connect:
        pipeline = Told(case.model, case.plan, dist.group.WORLD, schedule="1F1B")
    assert {tuple(sorted(pair)) for pair in connect.call_args.args[1]} == {(0, 1)}  # Not with the first message.
    pipeline.loss_ready = lambda loss: seen.append(f"loss {loss.ndim}")
    case.step(pipeline)
    assert seen == (["loss 0", "backward"] if rank else ["backward"]) * NUMBER

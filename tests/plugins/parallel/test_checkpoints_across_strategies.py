"""One checkpoint for all strategies: what any has saved, on any number of ranks, any other takes up."""

from pathlib import Path
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from support.checkpoints import check_same
from support.deepspeed_nets import SAVED, runs

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp")


def check(world_size: int, jobs: list[tuple[Any, ...]], expected: list[float], timeout: float = 280) -> None:
    """Runs the jobs, whose losses must be the expected ones, and whose checkpoints those that they resume."""
    found = run_distributed(runs, world_size, jobs, backend=None, timeout=timeout)[0]
    for (name, save, resume, *_), losses in zip(jobs, found, strict=True):
        assert losses == pytest.approx(expected if resume is None else expected[SAVED:], rel=1e-6), (name, resume)
        if resume is not None:
            check_same(resume, save)


def test_each_strategy_goes_on_from_another_and_from_one_process(tmp_path: Path) -> None:
    """Full, owned and divided parameters; the slow test has each pair."""
    names = ("zero1", "zero3_offload", "fsdp")
    ((alone,),) = run_distributed(runs, 1, [("ddp", tmp_path / "one", None)], backend=None)
    jobs = [(name, tmp_path / name, None) for name in names]
    jobs += [(name, tmp_path / f"{name}2", tmp_path / names[n - 1]) for n, name in enumerate(names)]
    jobs.append(("zero3", tmp_path / "zero3", tmp_path / "one"))
    check(2, jobs, alone)
    check(1, [("ddp", tmp_path / f"{name}-back", tmp_path / name) for name in ("zero3_offload", "fsdp")], alone)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_any_to_any_from_four_over_two_and_eight_to_one(tmp_path: Path, optimizer: str) -> None:
    options = {"optimizer": optimizer}
    first = [(name, tmp_path / f"4-{name}", None, options) for name in STRATEGIES]
    reference = run_distributed(runs, 4, first, backend=None, timeout=900)[0][0]
    before = {name: tmp_path / f"4-{name}" for name in STRATEGIES}
    for world_size in (2, 8, 1):
        jobs = [
            (name, tmp_path / f"{world_size}-{source}-{name}", path, options)
            for source, path in before.items()
            for name in (STRATEGIES if world_size > 1 else ("ddp",))
        ]
        check(world_size, jobs, reference, timeout=3000)
        # Each strategy's file was read by each other; the next size starts from those that others have written.
        count = len(STRATEGIES)
        before = {name: jobs[(number * count + number + 1) % len(jobs)][1] for number, name in enumerate(STRATEGIES)}

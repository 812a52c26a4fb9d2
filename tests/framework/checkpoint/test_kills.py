"""A process that is killed during a save leaves a complete checkpoint, at whichever moment."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_framework.checkpoint import load, newest_valid, recover, remove, save
from dlo_framework.shards import FlatShard
from dlo_framework.testing import run_distributed

LEFTOVERS = {".dlo-partial", ".dlo-old", ".dlo-removed"}


def a_step(step: int, rank: int = 0, world_size: int = 1, count: int = 1000) -> dict:
    """A checkpoint in which every number is the step."""
    part = count // world_size
    weights = FlatShard(torch.full((part,), float(step)), torch.Size([part * world_size]), part * rank)
    return {
        "global_step": step,
        "epoch": 0,
        "state_dict": {"w": weights},
        "optimizer_states": [{"state": {"w": {"exp_avg": weights}}, "param_groups": [{"params": ["w"]}]}],
        "loops": {"step": step},
    }


def step_of(path: Path) -> int:
    """Step of a complete checkpoint; raises if any part of it has another."""
    run = load(path)
    step = run["global_step"]
    assert run["loops"] == {"step": step}
    assert run["state_dict"]["w"].unique().tolist() == [step]
    assert run["optimizer_states"][0]["state"]["w"]["exp_avg"].unique().tolist() == [step]
    return step


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in LEFTOVERS)


def check_after_a_kill(folder: Path) -> int:
    """Step that a run would resume from: the same before and after its start has removed the leftovers."""
    found = newest_valid(folder)
    assert found is not None
    step = step_of(found)
    recover(folder)
    assert leftovers(folder) == []
    again = newest_valid(folder)
    assert again is not None
    assert step_of(again) == step
    assert step_of(folder / "last.ckpt") in (step, step - 1)
    return step


def forked(work: Callable[[], object], seconds: float = 60.0) -> int:
    """Runs ``work`` in a forked process; returns its exit status, negative for a signal."""
    child = fork(work)
    return ended(child, seconds)


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return child


def ended(child: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"process {child} did not end within {seconds} s")


def kill_at(event_number: int, folder: Path) -> None:
    """Kills this process before its n-th operation: a file in ``folder`` opened, any created, renamed or removed."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        opened = event == "open" and str(folder) in str(arguments[0])
        if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_each_step(folder: Path, single_file: bool) -> list[int]:
    """Overwrites ``last.ckpt`` and purges, killed before each operation; returns the steps resumed from."""
    resumed = []
    for number in range(1, 1000):
        here = folder / str(number)
        save(a_step(1), here / "step-1.ckpt")
        if single_file:
            plain = {**a_step(1), "state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.6.6"}
            plain["optimizer_states"] = [{"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": []}]
            torch.save(plain, here / "last.ckpt")
        else:
            save(a_step(1), here / "last.ckpt")

        def work(number: int = number, here: Path = here) -> None:
            kill_at(number, here)
            save(a_step(2), here / "last.ckpt")
            remove(here / "step-1.ckpt")

        status = forked(work)
        resumed.append(check_after_a_kill(here))
        if status == 0:
            return resumed
        assert status == -signal.SIGKILL
    raise AssertionError("the save never ended")


def kill_at_each_step_of_both(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    return [kill_at_each_step(folder / str(single_file), single_file) for single_file in (False, True)]


def kill_ranks(rank: int, world_size: int, folder: Path, trials: int, ranks: int, seed: int) -> list[int]:
    """Kills one of several saving ranks, or all of them, at random moments; returns the steps resumed from."""
    dice = random.Random(seed)
    resumed = []
    for trial in range(trials):
        here = folder / f"trial-{trial}"
        save(a_step(1), here / "step-1.ckpt")
        save(a_step(1), here / "last.ckpt")

        def work(rank: int, here: Path = here) -> None:
            dist.init_process_group("gloo", init_method=f"file://{here}.store", rank=rank, world_size=ranks)
            for step in range(2, 1000):
                state = a_step(step, rank, ranks, count=400_000)
                save(state, here / f"step-{step}.ckpt", group=dist.group.WORLD)
                save(state, here / "last.ckpt", group=dist.group.WORLD)
                if rank == 0:
                    remove(here / f"step-{step - 1}.ckpt")

        children = [fork(lambda number=number: work(number)) for number in range(ranks)]
        until = time.monotonic() + 60
        while not (here / "step-2.ckpt").exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.random() * 0.3)
        victims = children if dice.random() < 0.3 else [dice.choice(children)]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        statuses = [ended(child, 30) for child in children]
        assert 0 not in statuses
        resumed.append(check_after_a_kill(here))
    return resumed


def test_a_kill_before_each_operation_leaves_a_whole_checkpoint(tmp_path):
    """Forked, because each kill takes a process; over an older checkpoint's folder, and its single file."""
    for resumed in run_distributed(kill_at_each_step_of_both, 1, tmp_path, backend=None)[0]:
        # A save and a removal have at least this many operations; from some moment on the new step exists, and stays.
        assert len(resumed) > 12
        assert resumed == sorted(resumed)
        assert set(resumed) == {1, 2}


def test_a_killed_rank_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path):
    (resumed,) = run_distributed(kill_ranks, 1, tmp_path, 3, 2, 0, backend=None)
    assert all(step >= 2 for step in resumed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_of_one_of_four_ranks_or_of_all(tmp_path):
    (resumed,) = run_distributed(kill_ranks, 1, tmp_path, 50, 4, 1, backend=None, timeout=1700)
    assert len(resumed) == 50
    assert all(step >= 2 for step in resumed)

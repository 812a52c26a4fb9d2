"""Odd modules under every strategy: each equals one process, or is refused in a line before its first wrong step."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor

from dlo_framework.checkpoint.loading import single_file
from dlo_framework.distributed.strategy import DataParallelStrategy, use_canonical_checkpoints
from dlo_framework.errors import dlo_error_in
from dlo_framework.testing import RankFailed, run_distributed
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import trainer
from support.odd_modules import DATA, MODULES, PIPELINES, ROWS, Odd, batches
from support.runs import Watch

#: Micro-batches and precision of a run.
Run = tuple[int, str]
MINUTES, PARTS = 0.5, 4
PP = partial(MeshStrategy, pp=2, dp_shard=1)
STRATEGIES: dict[str, Any] = {
    "ddp": partial(DataParallelStrategy, timeout_minutes=MINUTES),
    **{f"zero{stage}": partial(ZeroStrategy, stage, timeout_minutes=MINUTES) for stage in (1, 2, 3)},
    "fsdp": partial(FSDPStrategy, timeout_minutes=MINUTES),
    "tp": partial(MeshStrategy, tp=2, dp_shard=1, timeout_minutes=MINUTES),
    **{name: partial(PP, schedule=name, micro_batches=PARTS, timeout_minutes=MINUTES) for name in PIPELINES},
    **{f"deepspeed{stage}": partial(DeepSpeedBridge, stage) for stage in (1, 2, 3)},
}


def train(kind: type[Odd], strategy: Any, share: tuple[int, int], run: Run, path: Path, losses: Any) -> None:
    """Trains a module, and saves its checkpoint; `losses` gets a :class:`Watch`'s.

    Args:
        kind: Module's class.
        strategy: Strategy of the trainer.
        share: Number of this rank among those with other samples, and their number.
        run: Number of micro-batches of which each batch consists, and the precision.
        path: Checkpoint.
        losses: List for the losses.
    """
    seed_everything(7, verbose=False)
    parts, precision = run
    data: list[Any] = [
        tuple(rows.chunk(share[1])[share[0]] for rows in part)
        for batch in batches()
        for part in zip(*(rows.split(ROWS // parts) for rows in batch), strict=True)
    ]
    if precision == "32-true":
        data = [(x.float(), y) for x, y in data]
    watch = Watch()
    watch.losses = losses
    options = {"precision": precision, **(kind.trainer_options or {})}
    options["accumulate_grad_batches"] = parts * options.get("accumulate_grad_batches", 1)
    world = dist.get_world_size() if strategy != "auto" else 1
    fit = trainer(world, strategy, callbacks=[watch], **options)
    use_canonical_checkpoints(fit)
    fit.fit(kind(), torch.utils.data.DataLoader(data, batch_size=None))
    fit.save_checkpoint(path)


def run_like(name: str, strategy: str) -> Run:
    """Returns the run of one process that a strategy's must equal.

    Lightning's DeepSpeed has no double precision. Where each forward changes something, one process sees the same
    micro-batches as a pipeline.
    """
    parts = PARTS if strategy in PIPELINES and MODULES[name].per_forward else 1
    return parts, "32-true" if strategy.startswith("deepspeed") else "64-true"


def alone(rank: int, world: int, runs: set[tuple[str, Run]], folder: Path) -> dict[tuple[str, Run], list[float]]:
    """Trains modules in one process; returns their losses."""
    silence_lightning()
    found = {}
    for name, run in sorted(runs):
        losses: list[float] = []
        try:
            train(MODULES[name], "auto", (0, 1), run, folder / f"{name}-{run}", losses)
        except Exception as error:
            raise AssertionError(f"{name} does not train in one process") from error
        found[name, run] = [sum(losses[first : first + run[0]]) for first in range(0, len(losses), run[0])]
    return found


def together(rank: int, world: int, cells: list[tuple[str, str]], folder: Path) -> None:
    """Trains modules by strategies on two ranks; an outcome goes to a file at once: a module may end the process."""
    silence_lightning()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for name, strategy in cells:
        cell = f"{strategy}-{name}"
        dist.init_process_group("gloo", store=dist.PrefixStore(cell, store), rank=rank, world_size=world)
        losses: list[float] = []
        error = ""
        with open(folder / f"{cell}.{rank}", "w") as file:
            try:
                share, run = (rank, world) if strategy in DATA else (0, 1), (1, run_like(name, strategy)[1])
                train(MODULES[name], STRATEGIES[strategy](), share, run, folder / cell, losses)
            except BaseException as raised:
                known = dlo_error_in(raised)
                message = str(raised if known is None else known).strip()
                error = f"{'refused' if known else type(raised).__name__}: {message}"
            file.write(repr((losses, error)))
        with contextlib.suppress(Exception):
            leave_group()
        store.set(f"done/{cell}/{rank}", "1")
        store.wait([f"done/{cell}/{other}" for other in range(world)])


def judge(name: str, strategy: str, folder: Path, expected: dict[tuple[str, Run], list[float]]) -> str:
    """Returns the outcome of a module under a strategy: "equal", a refusal, or what is wrong."""
    files = [folder / f"{strategy}-{name}.{rank}" for rank in range(2)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    outcomes = [eval(text, {"nan": float("nan")}) for text in texts if text]
    if len(outcomes) < 2 and not any(error for _, error in outcomes):  # A rank's error ends the other.
        return "CRASH: the process ended"
    run = run_like(name, strategy)
    steps = expected[name, run]
    errors = [error for _, error in outcomes if error]
    limit = 1e-9 if run[1] == "64-true" else 1e-4
    for losses, _ in outcomes:
        apart = [abs(a - b) for a, b in zip(losses, steps, strict=False)]
        if not all(difference < limit for difference in apart):
            return f"LOSS: {losses} for {steps}{'; then ' + errors[0] if errors else ''}"
    refused = [error for error in errors if error.startswith("refused")]
    if refused:
        return refused[0] if "\n" not in refused[0] else f"LINES: {refused[0]}"
    if errors:
        return f"RAISED: {errors[0]}"
    if any(len(losses) != len(steps) for losses, _ in outcomes):
        return f"STEPS: {[losses for losses, _ in outcomes]} for {steps}"
    ours, theirs = (weights(folder / at) for at in (f"{strategy}-{name}", f"{name}-{run}"))
    if shapes(ours) != shapes(theirs):
        return f"NAMES: {sorted(shapes(ours).items() ^ shapes(theirs).items())}"
    pairs = ((key, (mine.to(torch.cdouble), theirs[key].to(torch.cdouble))) for key, mine in ours.items())
    apart = {key: float((mine - other).abs().max()) for key, (mine, other) in pairs if mine.numel()}
    worst = max(apart, key=lambda key: apart[key])
    return "equal" if apart[worst] < limit else f"WEIGHTS: {worst} differs by {apart[worst]:.1e}"


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


def weights(path: Path) -> dict[str, Tensor]:
    return torch.load(single_file(path), weights_only=False)["state_dict"]


#: Ways in which user code reads and writes weights and gradients outside of layers; the slow test has all.
SOME: dict[str, tuple[str, ...]] = {
    "ddp": ("sparse gradients", "adversarial"),
    "tp": ("L2", "hook that clips by norm", "held weights"),
    "ZBV": ("checkpointed by the net", "hook on weights"),
    "zero3": ("gradient penalty", "hook on weights", "momentum encoder"),
    "fsdp": ("sharpness", "swapped for validation", "prototypes of data", "integer"),
    "deepspeed3": ("assigned between steps",),
    # The last one's refusal ends the other rank: cells behind it would have new ranks.
    "Varuna": ("one batch norm object", "writes to its input", "loss of what hooks collect"),
}


@pytest.mark.parametrize(
    "chosen",
    [SOME, pytest.param(dict.fromkeys(STRATEGIES, MODULES), marks=[pytest.mark.slow, pytest.mark.timeout(5400)])],
    ids=["some", "all"],
)
def test_each_odd_module_equals_one_process_or_is_refused(tmp_path: Path, chosen: Any) -> None:
    """Trains all; `DLO_ODD_ONLY="L2,tp"` selects some."""
    only = os.environ.get("DLO_ODD_ONLY", "").split(",")
    strategies, names = ([one for one in every if one in only] or [*every] for every in (chosen, MODULES))
    cells = [(n, one) for one in strategies for n in chosen[one] if n in names and one in MODULES[n].strategies]
    runs = {(name, run_like(name, one)) for name, one in cells}
    (expected,) = run_distributed(alone, 1, runs, tmp_path, timeout=3000, backend=None)
    found: dict[str, str] = {}
    left = cells
    while left:
        with contextlib.suppress(RankFailed):  # The files tell.
            run_distributed(together, 2, left, tmp_path, timeout=3000, backend=None)
        done = 1 + max(n for n, (name, one) in enumerate(left) if (tmp_path / f"{one}-{name}.0").exists())
        found |= {f"{name} | {one}": judge(name, one, tmp_path, expected) for name, one in left[:done]}
        left = left[done:]
    counts = Counter(outcome.partition(":")[0] for outcome in found.values())
    wrong = {cell: outcome for cell, outcome in found.items() if outcome != "equal" and not outcome.startswith("refus")}
    assert not wrong, f"{counts}\n" + "\n".join(f"{cell}: {outcome[:300]}" for cell, outcome in wrong.items())
    assert counts["equal"] > len(found) / 2

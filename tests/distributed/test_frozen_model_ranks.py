"""Second models on two ranks: their outputs equal one process's under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import run_distributed
from dlo_plugins.strategies.zero import ZeroStrategy
from tests.support import frozen_runs as runs

#: Strategies by name, with the number of data-parallel ranks on two ranks.
STRATEGIES: dict[str, tuple[Any, int]] = {
    "ddp": (DataParallelStrategy, 2),
    "zero1": (lambda: ZeroStrategy(1), 2),
    "zero2": (lambda: ZeroStrategy(2), 2),
}


def _outputs(rank: int, world: int, folders: dict[str, str], names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, shares = STRATEGIES[name]
        for kind, folder in folders.items():
            torch.manual_seed(1)
            callback = runs.Teacher(FrozenModel(folder))
            trainer = runs.make_trainer(make(), world, [callback])
            trainer.fit(runs.TASKS[kind](lr=1e-2), runs.loader(kind, rank * shares // world, shares))
            found[f"{name} {kind}"] = callback.found
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, str]:
    made = tmp_path_factory.mktemp("teachers")
    return {kind: str(runs.make_teacher(kind, made / kind / "version_0")) for kind in runs.TASKS}


def test_outputs_equal_one_process_under_each_strategy(folders: dict[str, str]) -> None:
    ranks = run_distributed(_outputs, 2, folders, list(STRATEGIES))
    for name, (_, shares) in STRATEGIES.items():
        for kind, folder in folders.items():
            for step, batch in enumerate(runs.batches(kind)):
                whole = runs.expected_outputs(kind, Path(folder), batch)
                for rank in range(2):
                    found = ranks[rank][f"{name} {kind}"][step]
                    expected = whole.chunk(shares)[rank * shares // 2]
                    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"{name} {kind} rank {rank}")

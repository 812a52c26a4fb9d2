"""The time that is left of a run, in the bar and in log lines."""

from types import SimpleNamespace
from typing import Any

import pytest

from dlo_framework.watch import bar
from dlo_framework.watch.bar import RunBar


def trainer(done: int, **options: Any) -> Any:
    loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(completed=done)))
    given = {
        "num_training_batches": 10,
        "max_epochs": 4,
        "max_steps": -1,
        "global_step": done,
        "optimizers": [],
        "progress_bar_metrics": {},
    }
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), **{**given, **options})


def left(done: int, **options: Any) -> float | None:
    """Returns the seconds left where 8 batches since the first have taken 16 seconds."""
    shown = RunBar()
    shown._first = (-16.0, done - 8)
    return shown._seconds_left(trainer(done, **options))


def test_the_end_is_that_of_epochs_or_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar.time, "perf_counter", lambda: 0.0)
    assert left(10) == 60, "30 of 40 batches, at 2 s each"
    assert left(10, max_steps=15) == 10
    assert left(10, max_steps=15, global_step=5) == 40, "two batches a step"
    assert left(10, max_epochs=None, max_steps=12) == 4
    assert left(40) == 0
    assert left(10, max_epochs=-1) is None
    assert left(10, num_training_batches=float("inf")) is None

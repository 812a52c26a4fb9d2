"""Tests whose body runs on several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlo_framework.testing import run_distributed


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[[Path], None]]:
    """Returns a decorator of a test ``(rank, world_size)`` or ``(rank, world_size, folder)``, which ranks run.

    Args:
        world_size: Number of ranks.
        **options: Options of ``run_distributed``.
    """

    def decorate(check: Any) -> Any:
        def test(tmp_path: Path) -> None:
            run_distributed(_run, world_size, test, tmp_path, **options)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(check, name))
        test.check = check  # type: ignore[attr-defined]
        return test

    return decorate


def _run(rank: int, world_size: int, test: Any, folder: Path) -> None:
    given = (rank, world_size, folder)
    test.check(*given[: len(inspect.signature(test.check).parameters)])

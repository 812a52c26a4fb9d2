"""Reads and relocates what a run's ModelCheckpoints have recorded in a checkpoint: its best ones and their paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dlo_framework.checkpoint.loading import load

#: Key of a checkpoint for the folder of the run that saved it, with links resolved.
RUN_FOLDER = "run_folder"
_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path")
_SCORES = "best_k_models"


class Best(NamedTuple):
    """Best checkpoint of a run.

    Attributes:
        path: Path of the checkpoint.
        score: Value of its monitored metric; None if it is not known.
    """

    path: Path
    score: float | None


def best_kept(path: str | Path, folder: str | Path) -> Best | None:
    """Returns the best checkpoint of a run, as recorded when the run saved ``path``.

    Args:
        path: Verified checkpoint of the run.
        folder: Current folder of the run.
    """
    checkpoint = load(path, level=None)
    relocate_paths(checkpoint, folder)
    for state in _states(checkpoint):
        if state.get("monitor") and state["best_model_path"]:
            score = state.get("best_model_score")
            return Best(Path(state["best_model_path"]), None if score is None else float(score))
    return None


def relocate_paths(checkpoint: dict[str, Any], folder: str | Path) -> None:
    """Relocates the paths in a checkpoint's ModelCheckpoint states to a run that has been moved or copied.

    Lightning restores the scores of a ModelCheckpoint only if its folder is the one that was saved; otherwise a worse
    checkpoint would become the best. Paths outside the run's folder stay.

    Args:
        checkpoint: Loaded checkpoint, whose states are changed in place.
        folder: Current folder of the run, with links resolved.
    """
    was, now = checkpoint.get(RUN_FOLDER), Path(folder)
    if not was or Path(was) == now:
        return

    def moved(path: Any) -> Any:
        inside = bool(path) and Path(path).is_relative_to(was)
        return str(now / Path(path).relative_to(was)) if inside else path

    for state in _states(checkpoint):
        state.update({name: moved(state[name]) for name in _PATHS if name in state})
        if _SCORES in state:
            state[_SCORES] = {moved(path): score for path, score in state[_SCORES].items()}


def _states(checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and "best_model_path" in state:
            yield state

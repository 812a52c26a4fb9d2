"""What Lightning's ModelCheckpoints of a run have kept, as a checkpoint's state tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dlo_framework.checkpoint.reading import load

#: Under which a checkpoint has the folder of the run that saved it, without links.
RUN_FOLDER = "run_folder"
_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path")
_SCORES = "best_k_models"


class Best(NamedTuple):
    """The best checkpoint of a run.

    Attributes:
        path: its own.
        score: what its metric was; None where that is not known.
    """

    path: Path
    score: float | None


def best_kept(path: str | Path, folder: str | Path) -> Best | None:
    """Returns what was the best checkpoint of a run when it saved another.

    Args:
        path: that other one, which has been verified.
        folder: where the run is now.
    """
    checkpoint = load(path, level=None)
    follow(checkpoint, folder)
    for state in _states(checkpoint):
        if state.get("monitor") and state["best_model_path"]:
            score = state.get("best_model_score")
            return Best(Path(state["best_model_path"]), None if score is None else float(score))
    return None


def follow(checkpoint: dict[str, Any], folder: str | Path) -> None:
    """Makes the paths that a checkpoint's ModelCheckpoints kept those of a run that has been moved or copied.

    Lightning takes up the scores of a ModelCheckpoint only if its folder is the one that was saved; elsewhere a worse
    checkpoint would become the best. Paths outside of the run's folder stay.

    Args:
        checkpoint: as it was loaded; its states are changed.
        folder: where the run is now, without links.
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

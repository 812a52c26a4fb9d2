"""Check of the metrics that callbacks and schedules monitor, against those that the sanity validation has logged."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from lightning.pytorch import Trainer

from dlo_framework.errors import DloError, mark_agreed

#: Least similarity of two names of which one is a misspelling of the other; `train_loss` and `val_loss` have 0.67.
_MISSPELT = 0.85
#: Values that ModelCheckpoint may monitor and nobody logs.
_ALWAYS = {"epoch", "step"}


def check_monitored(trainer: Trainer) -> None:
    """Checks that no monitored name is a misspelling of a metric that the sanity validation has logged.

    Another unknown name may be one that training logs, which shows later.

    Raises:
        DloError: On all ranks, with the nearest name.
    """
    logged = sorted(trainer.callback_metrics)
    for owner, name in _monitored(trainer):
        near = find_misspelt(name, logged)
        if near is not None:
            raise mark_agreed(
                DloError(
                    f"monitor of {owner} must be a logged metric, got '{name}'; did you mean '{near}'? validation logs:"
                    f" {', '.join(logged)}"
                )
            )


def find_misspelt(name: str, logged: Iterable[str]) -> str | None:
    """Returns the logged metric of which a name is a misspelling; None if it is logged, or like none."""
    known = list(logged)
    if name in known or name in _ALWAYS:
        return None
    found = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    return found[0] if found else None


def _monitored(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yields the names that must be logged, with their owners."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and getattr(callback, "strict", True) and not hasattr(callback, "monitor_is_optional"):
            yield type(callback).__name__, name
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.monitor, str) and config.strict:
            yield type(config.scheduler).__name__, config.monitor

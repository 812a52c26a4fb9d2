"""Check of the metrics that callbacks and schedules monitor, against those that the sanity validation has logged."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from dlo_framework.errors import DloError, did_you_mean, mark_agreed

#: Least similarity of two names of which one is a misspelling of the other; `train_loss` and `val_loss` have 0.67.
_MISSPELT = 0.85
#: Values that ModelCheckpoint may monitor and nobody logs.
_ALWAYS = {"epoch", "step"}


def check_monitored(trainer: Trainer) -> None:
    """Checks that no monitored name is a misspelling of a metric that the sanity validation has logged.

    Another unknown name may be one that training logs, which shows later. A warning says so of one that begins like the
    names of the validation.

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
        if is_doubtful(name, logged):
            rank_zero_warn(
                f"monitor of {owner} is '{name}', which validation does not log; it logs {', '.join(logged)}. The run"
                " ends at its first use, unless training logs it"
            )


def check_validates(who: str, metric: str, trainer: Trainer) -> None:
    """Checks that a run validates, for a callback that reads a metric of the validation.

    Raises:
        DloError: It does not.
    """
    if not trainer.enable_validation:
        raise DloError(
            f"{who}: the run must validate to log {metric}, got no validation; set validation data, a validation_step,"
            " and trainer.limit_val_batches above 0"
        )


def check_logged(who: str, metric: str, trainer: Trainer) -> None:
    """Checks that a validation has logged a metric that a callback reads.

    Raises:
        DloError: It has not; the message has the nearest.
    """
    logged = trainer.callback_metrics
    if metric not in logged:
        raise DloError(
            f"{who}: unknown metric '{metric}'{did_you_mean(metric, logged) or ';'} validation logs:"
            f" {', '.join(sorted(logged)) or 'none'}"
        )


def is_doubtful(name: str, logged: Iterable[str]) -> bool:
    """Returns whether a name is not logged, and begins with the word with which all logged names begin."""
    known = set(logged)
    words = {re.split(r"[_/]", other)[0] for other in known}
    return name not in known | _ALWAYS and words == {re.split(r"[_/]", name)[0]}


def explain_missing_metric(message: str) -> str | None:
    """Returns one line for Lightning's (2.6) error of an EarlyStopping whose metric nobody logs; None for others."""
    found = re.search(
        r"Early stopping conditioned on metric `(.*?)` which is not available.*following: `(.*)`", message
    )
    if found is None:
        return None
    name, logged = found[1], found[2].split("`, `")
    hint = did_you_mean(name, logged) or ";"
    return f"monitor of EarlyStopping must be a logged metric, got '{name}'{hint} logged: {', '.join(sorted(logged))}"


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

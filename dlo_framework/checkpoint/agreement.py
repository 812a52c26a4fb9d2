"""Ranks that do a thing together: all of them succeed, or all of them raise the first error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dlo_framework.errors import DloError, agree

T = TypeVar("T")
U = TypeVar("U")


def rank_of(group: ProcessGroup | None) -> int:
    """Returns this process's rank in the group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: ProcessGroup | None) -> int:
    """Returns the number of ranks in the group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def together(group: ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Does ``work`` on every rank and returns all results, by rank.

    A rank whose work fails says so instead of leaving the others waiting for it.

    Args:
        group: the ranks; None for this process alone.
        work: returns something small that can be pickled.

    Raises:
        DloError: on every rank, the first failing rank's, where that is one; it names the rank.
        RuntimeError: likewise, for any other error.
    """
    if size_of(group) == 1:
        return [work()]
    outcome, caught = _tried(work)
    outcomes: list[Any] = [None] * size_of(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    _raise(_first_failure(outcomes), caught)
    return [outcome.value for outcome in outcomes]


def through_first(group: ProcessGroup | None, work: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
    """Does ``work`` on every rank, ``decide`` on the first with all results, and returns each rank's own answer.

    No rank but the first holds more than its own. A failure of either is everybody's, as with :func:`together`.

    Args:
        group: the ranks; None for this process alone.
        work: returns something that can be pickled.
        decide: returns an answer for each rank, by rank, likewise.

    Raises:
        DloError: see :func:`together`.
        RuntimeError: likewise.
    """
    if size_of(group) == 1:
        return decide([work()])[0]
    outcome, caught = _tried(work)
    first = rank_of(group) == 0
    outcomes: list[Any] | None = [None] * size_of(group) if first else None
    dist.gather_object(outcome, outcomes, group=group, group_dst=0)
    answers: list[tuple[int, _Outcome]] | None = None
    if outcomes is not None:
        failed = _first_failure(outcomes)
        if failed is None:
            made, caught = _tried(lambda: decide([other.value for other in outcomes]))
            failed = (0, made) if made.text is not None else None
        answers = [failed] * len(outcomes) if failed is not None else [(0, _Outcome(own)) for own in made.value]
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, group=group, group_src=0)
    rank, answer = received[0]
    _raise((rank, answer) if answer.text is not None else None, caught)
    return answer.value


class _Outcome(NamedTuple):
    """What came of a rank's work: its result, or the text of its error."""

    value: Any = None
    text: str | None = None
    of_user: bool = False


def _tried(work: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
    try:
        return _Outcome(work()), None
    except BaseException as error:  # Also Ctrl-C: the others must not wait for a rank that is leaving.
        of_user = isinstance(error, DloError)
        return _Outcome(None, str(error) if of_user else f"{type(error).__name__}: {error}", of_user), error


def _first_failure(outcomes: Sequence[_Outcome]) -> tuple[int, _Outcome] | None:
    return next(((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.text is not None), None)


def _raise(failed: tuple[int, _Outcome] | None, caught: BaseException | None) -> None:
    """Raises a rank's failure on all ranks, where there is one; on a rank that is leaving, why it leaves."""
    if caught is not None and not isinstance(caught, Exception):
        raise caught
    if failed is not None:
        rank, (_, text, of_user) = failed
        raise agree((DloError if of_user else RuntimeError)(f"rank {rank}: {text}")) from caught

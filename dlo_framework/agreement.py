"""Collective calls that succeed on all ranks, or raise the first failing rank's error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dlo_framework.errors import DloError, mark_agreed

T = TypeVar("T")
U = TypeVar("U")


def rank_of(group: ProcessGroup | None) -> int:
    """Returns this process's rank in the group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: ProcessGroup | None) -> int:
    """Returns the number of ranks in the group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def run_on_all_ranks(group: ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank and returns all results, by rank.

    A rank whose work fails sends its error, so that the others do not wait for it.

    Args:
        group: Process group of the ranks; None for this process alone.
        work: Function that returns a small value that can be pickled.

    Raises:
        DloError: on every rank, if the first failing rank raised one; it names the rank.
        RuntimeError: on every rank, if the first failing rank raised any other error; it names the rank.
    """
    if size_of(group) == 1:
        return [work()]
    outcome, caught = _run_and_catch(work)
    outcomes: list[Any] = [None] * size_of(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    _raise_failure(_first_failure(outcomes), caught)
    return [outcome.value for outcome in outcomes]


def gather_then_scatter(
    group: ProcessGroup | None, work: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]
) -> U:
    """Runs ``work`` on every rank, ``decide`` on the first rank with all results, and returns each rank's answer.

    Only the first rank holds the results of all. A failure of either raises on all ranks, as in
    :func:`run_on_all_ranks`.

    Args:
        group: Process group of the ranks; None for this process alone.
        work: Function that returns a value that can be pickled.
        decide: Function of all results that returns one answer for each rank, by rank; each can be pickled.

    Raises:
        DloError: see :func:`run_on_all_ranks`.
        RuntimeError: see :func:`run_on_all_ranks`.
    """
    if size_of(group) == 1:
        return decide([work()])[0]
    outcome, caught = _run_and_catch(work)
    first = rank_of(group) == 0
    outcomes: list[Any] | None = [None] * size_of(group) if first else None
    dist.gather_object(outcome, outcomes, group=group, group_dst=0)
    answers: list[tuple[int, _Outcome]] | None = None
    if outcomes is not None:
        failed = _first_failure(outcomes)
        if failed is None:
            made, caught = _run_and_catch(lambda: decide([other.value for other in outcomes]))
            failed = (0, made) if made.text is not None else None
        answers = [failed] * len(outcomes) if failed is not None else [(0, _Outcome(own)) for own in made.value]
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, group=group, group_src=0)
    rank, answer = received[0]
    _raise_failure((rank, answer) if answer.text is not None else None, caught)
    return answer.value


class _Outcome(NamedTuple):
    """Outcome of a rank's work: its result, or the text of its error."""

    value: Any = None
    text: str | None = None
    of_user: bool = False


def _run_and_catch(work: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
    try:
        return _Outcome(work()), None
    except BaseException as error:  # Also Ctrl-C: a rank that exits must not leave the others waiting.
        of_user = isinstance(error, DloError)
        return _Outcome(None, str(error) if of_user else f"{type(error).__name__}: {error}", of_user), error


def _first_failure(outcomes: Sequence[_Outcome]) -> tuple[int, _Outcome] | None:
    return next(((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.text is not None), None)


def _raise_failure(failed: tuple[int, _Outcome] | None, caught: BaseException | None) -> None:
    """Raises a rank's failure, if there is one, on all ranks; a rank that was interrupted raises its own interrupt."""
    if caught is not None and not isinstance(caught, Exception):
        raise caught
    if failed is not None:
        rank, (_, text, of_user) = failed
        raise mark_agreed((DloError if of_user else RuntimeError)(f"rank {rank}: {text}")) from caught

"""Ranks that do a thing together: all of them succeed, or all of them raise the first error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dlo_framework.errors import DloError, agree

T = TypeVar("T")


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
    if group is None or dist.get_world_size(group) == 1:
        return [work()]
    caught: BaseException | None = None
    outcome: tuple[T | None, str | None, bool]
    try:
        outcome = (work(), None, False)
    except BaseException as error:  # Also Ctrl-C: the others must not wait for a rank that is leaving.
        caught = error
        text = str(error) if isinstance(error, DloError) else f"{type(error).__name__}: {error}"
        outcome = (None, text, isinstance(error, DloError))
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    if caught is not None and not isinstance(caught, Exception):
        raise caught
    for rank, (_, text, of_user) in enumerate(outcomes):
        if text is not None:
            raise agree((DloError if of_user else RuntimeError)(f"rank {rank}: {text}")) from caught
    return [value for value, _, _ in outcomes]

"""Ranks of tensor parallelism that are threads of one process, for proofs on a CPU without a process group.

Backward runs in the thread that calls it, as all tensors are on the CPU, so that its collectives meet too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator

T = TypeVar("T")
#: Seconds that a rank waits for the others.
_SECONDS = 300.0


class _Joint:
    """Shared state of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=_SECONDS)
        self.slots: list[Tensor | None] = [None] * ranks


class _ThreadCommunicator:
    """Communicator of ranks that are threads of one process.

    Args:
        joint: State that all ranks share.
        rank: Number of this rank.
    """

    def __init__(self, joint: _Joint, rank: int) -> None:
        self._joint, self.rank, self.size = joint, rank, len(joint.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ThreadCommunicator:
        return self

    def _exchange(self, tensor: Tensor) -> Tensor:
        """Returns the ranks' tensors, `[size, ...]`."""
        self._joint.slots[self.rank] = tensor.detach()
        self._joint.barrier.wait()
        found = torch.stack(cast("list[Tensor]", self._joint.slots))
        self._joint.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks as a new tensor."""
        return self._exchange(tensor).sum(dim=0)

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the sum over the ranks."""
        found = self.all_reduce(tensor)
        return lambda: found

    def start_all_gather_parts(self, part: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the ranks' tensors, `[size, ...]`."""
        found = self._exchange(part)
        return lambda: found

    def start_reduce_scatter_parts(self, parts: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns this rank's entry of the sum of `[size, ...]`."""
        found = self.all_reduce(parts)[self.rank]
        return lambda: found


def run_on_threads(ranks: int, run: Callable[[Communicator], T]) -> list[T]:
    """Returns the result of a function on each rank.

    Args:
        ranks: Number of ranks.
        run: Function of a rank, which gets the rank's communicator.

    Raises:
        Exception: The first error that a rank raised.
    """
    joint, results, errors = _Joint(ranks), dict[int, T](), list[Exception]()

    def run_rank(rank: int) -> None:
        try:
            results[rank] = run(cast("Communicator", _ThreadCommunicator(joint, rank)))
        except Exception as error:  # The other ranks wait for this one.
            errors.append(error)
            joint.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(ranks)]

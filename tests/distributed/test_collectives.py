"""Reduce-scatter and all-gather in pairs: their sums, their memory, and how long they wait for a rank that is late."""

import time
from datetime import timedelta

import pytest
import torch

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.launcher import set_collective_timeout
from dlo_framework.testing import run_distributed

LENGTHS = (0, 1, 7, 1000)  # of a segment


def _all(rank: int, world_size: int) -> None:
    communicator = Communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for length in (*LENGTHS, *reversed(LENGTHS)):
            values = torch.arange(length * world_size) % 50
            reduced = communicator.reduce_scatter((values * (rank + 1)).to(dtype)).wait()
            total = values * sum(range(1, world_size + 1))
            assert torch.equal(reduced, communicator.segment(total).to(dtype)), (dtype, length)
            buffer = torch.full((length * world_size,), -1, dtype=dtype)
            communicator.segment(buffer).copy_(communicator.segment(values))
            assert torch.equal(communicator.all_gather(buffer).wait(), values.to(dtype)), (dtype, length)
    first, second = (torch.full((8 * world_size,), float(n + rank)) for n in (1, 10))
    under_way = [communicator.reduce_scatter(first), communicator.reduce_scatter(second)]
    found = [float(pending.wait()[0]) for pending in reversed(under_way)]
    ranks = sum(range(world_size))
    assert found == [10 * world_size + ranks, world_size + ranks]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_they_are_what_torch_computes_at_any_length_and_several_at_once(world_size):
    run_distributed(_all, world_size)


def _late(rank: int, world_size: int) -> None:
    set_collective_timeout(timedelta(seconds=2))
    communicator = Communicator()
    communicator.all_gather(torch.zeros(world_size)).wait()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            communicator.reduce_scatter(torch.zeros(world_size)).wait()
    else:
        time.sleep(5)


def test_a_rank_is_waited_for_as_long_as_was_set_last():
    """The group was made for 30 s."""
    run_distributed(_late, 2)

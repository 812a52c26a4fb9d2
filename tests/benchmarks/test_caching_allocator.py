"""The replay of torch's allocator on CUDA, and of a step on it: benchmarks/measuring/caching_allocator.py."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20


@pytest.fixture
def allocator(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("measuring.caching_allocator").CachingAllocator(1000 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_segments_have_the_sizes_of_torch(allocator, size, reserved):
    allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


def test_a_request_takes_the_smallest_free_block_that_is_large_enough(allocator):
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(28 * MIB) == small
    assert allocator.allocate(36 * MIB) == large
    assert allocator.reserved == 70 * MIB


def test_a_block_is_split_and_its_free_parts_merge_again(allocator):
    allocator.release(allocator.allocate(40 * MIB))
    first, second, third = (allocator.allocate(12 * MIB) for _ in range(3))
    assert allocator.reserved == 40 * MIB
    for address in (first, third, second):
        allocator.release(address)
    assert allocator.allocate(40 * MIB) == first
    assert allocator.reserved == 40 * MIB


def test_free_blocks_of_two_segments_do_not_merge(allocator):
    for address in [allocator.allocate(20 * MIB) for _ in range(2)]:
        allocator.release(address)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_free_segments_are_returned_where_the_device_is_full(allocator):
    kept, freed = allocator.allocate(300 * MIB), allocator.allocate(600 * MIB)
    allocator.release(freed)
    allocator.allocate(650 * MIB)
    assert (allocator.reserved, allocator.peak) == (950 * MIB, 950 * MIB)
    allocator.release(kept)
    assert allocator.allocate(200 * MIB) == kept


def test_a_step_reserves_its_state_and_what_backward_needs(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    step = importlib.import_module("measuring.nanotron_step")
    shape = step.Shape(16, 2048, 8192, 32, True, 131_072)
    run = step.StepLayout(pp=1, dp=8, tp=1, rows=1, micro_batches=4, zero=0, blocks=16, length=4096)
    # Published runs of this layout, with 8 to 128 data-parallel ranks, reserved 36.7 GiB.
    assert step.reserved_bytes(shape, run, 80 * 2**30) / 2**30 == pytest.approx(36.7, abs=0.15)
    state = 20 * (16 * (shape.block_parameters + 2 * 2048) + 131_072 * 2048 + 2048)
    again = step.StepLayout(pp=1, dp=8, tp=1, rows=2, micro_batches=4, zero=0, blocks=16, length=4096)
    rest = [step.reserved_bytes(shape, one, 80 * 2**30) - state for one in (run, again)]
    assert rest[1] / rest[0] == pytest.approx(2.0, rel=0.05)

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_plugins.callbacks.micro_batch_finder import (
    ActivationBudget,
    BatchPool,
    concat_batches,
    count_samples,
    find_largest,
    is_out_of_memory,
    keep_global_batch,
)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 300))
def test_the_largest_is_found_in_few_trials(bound, start, limit):
    tried = []

    def fits(size):
        assert 1 <= size <= limit
        tried.append(size)
        return size <= bound

    assert find_largest(fits, start, limit) == min(bound, limit)
    assert len(tried) == len(set(tried)) <= 2 * math.log2(limit) + 3


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 300))
def test_powers_of_two_only(bound, start, limit):
    tried = []

    def fits(size):
        assert size <= limit
        tried.append(size)
        return size <= bound

    found = find_largest(fits, start, limit, powers=True)
    top = min(bound, limit)
    assert found == (2 ** int(math.log2(top)) if top else 0)
    assert all(size.bit_count() == 1 for size in tried)
    assert len(tried) == len(set(tried))


def test_the_order_of_trials():
    tried = []
    assert find_largest(lambda size: tried.append(size) or size <= 37, 8, 1000) == 37
    assert tried == [8, 16, 32, 64, 48, 40, 36, 38, 37]


@pytest.mark.parametrize(
    ("batch_size", "per_rank", "world_size", "expected"),
    [(512, 100, 2, (128, 4)), (512, 1000, 2, (512, 1)), (96, 7, 1, (6, 16)), (14, 6, 2, (2, 7))],
)
def test_the_same_step_of_the_largest_equal_micro_batches(batch_size, per_rank, world_size, expected):
    assert keep_global_batch(batch_size, per_rank, world_size) == expected


def test_errors_that_mean_that_memory_has_run_out():
    with pytest.raises(RuntimeError) as from_torch:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(from_torch.value)
    with pytest.raises(MemoryError) as from_numpy:
        np.ones(2**60, dtype=np.uint8)
    assert is_out_of_memory(from_numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_an_error_that_memory_has_caused_counts():
    error = RuntimeError("the compiler failed")
    error.__cause__ = ValueError("shapes")
    assert not is_out_of_memory(error)
    error.__cause__.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_the_budget_counts_what_is_kept_for_the_backward_pass():
    """Of x W relu W2: the input and the relu's output, which the second layer shares; not the weights."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    needed = 10 * (4 + 8) * 4

    def keeps(limit):
        with ActivationBudget(limit, module):
            return module(torch.randn(10, 4)).sum()

    keeps(needed).backward()
    keeps(None).backward()
    with pytest.raises(torch.OutOfMemoryError, match="memory_limit_bytes"):
        keeps(needed - 1)
    keeps(needed).backward()  # It begins anew each time.


Pair = namedtuple("Pair", ["x", "y"])


def test_batches_of_any_size_are_made_of_the_loaders():
    def batch(start):
        numbers = torch.arange(start, start + 3)
        return {"x": [numbers, Pair(numbers * 2, numbers * 3)], "names": [f"{n}" for n in numbers], "scale": 0.5}

    count = iter(range(3, 30, 3))
    pool = BatchPool(lambda: batch(next(count)), batch(0))
    assert count_samples(pool.batch(2)) == 2
    made = pool.batch(7)
    assert made["x"][0].tolist() == list(range(7))
    assert made["x"][1].y.tolist() == list(range(0, 21, 3))
    assert made["names"] == list("0123456")
    assert made["scale"] == 0.5
    assert next(count) == 9, "no more is fetched than needed"
    assert pool.batch(9)["x"][0].tolist() == list(range(9))
    assert next(count) == 12


def test_a_batch_has_memory_of_its_own():
    batch = torch.ones(4)
    BatchPool(lambda: batch, batch).batch(2).zero_()
    assert batch.tolist() == [1] * 4


def test_samples_of_different_shapes_are_refused():
    with pytest.raises(DloError, match="must have one shape"):
        concat_batches([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(DloError, match="got a str"):
        count_samples("text")

"""Stochastic rounding keeps the value in the mean, and its bits depend on the element's place alone."""

from __future__ import annotations

import math

import torch

from dlo_framework.shards import FlatShard, SlicedShard, TensorSlice
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps, element_indices, hash_bits, round_stochastically


def test_the_mean_over_all_bits_is_the_value_and_both_neighbours_are_adjacent() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    for value in (1.0 + 2**-9, -3.14159, 1e-30, 0.0, 2.0**-133 + 2.0**-140):
        found = round_stochastically(torch.full((1 << 16,), value), bits).double()
        assert float(found.mean()) == float(torch.tensor(value).double())
        exact = float(torch.tensor(value).bfloat16()) == float(torch.tensor(value))
        assert len(found.unique()) == (1 if exact else 2)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    found = round_stochastically(special, torch.full((3,), -1, dtype=torch.int32))
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert bool(found[2].isnan())


def test_bits_are_uniform_and_independent_between_elements_and_keys() -> None:
    index = torch.arange(1 << 16, dtype=torch.int32)
    low = [(hash_bits(index, key) & 0xFFFF).double() / 65536 - 0.5 for key in ((1, 2), (2, 2), (1, 3))]
    bound = 5 / math.sqrt(index.numel())
    for one in low:
        assert abs(float(one.mean())) < bound / math.sqrt(12)
        assert abs(float(one.var()) - 1 / 12) < bound / 12
        assert abs(float((one[1:] * one[:-1]).mean())) < bound / 12
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((low[one] * low[other]).mean())) < bound / 12


def test_an_element_has_the_index_of_its_place_in_the_full_tensor() -> None:
    full = torch.arange(6 * 8, dtype=torch.int32).view(6, 8)
    flat = torch.empty(11, dtype=torch.int32)
    element_indices(FlatShard(flat, torch.Size([6, 8]), 13))
    assert torch.equal(flat, full.flatten()[13:24])
    for cut in (TensorSlice(1, 8, ((1, 2), (5, 2))), TensorSlice(0, 6, ((2, 3),))):
        part = cut.slice_tensor(full)
        found = torch.empty(7, dtype=torch.int32)
        element_indices(SlicedShard(FlatShard(found, part.shape, 3), cut))
        assert torch.equal(found, part.flatten()[3:10])
    scalar = torch.empty((), dtype=torch.int32)
    element_indices(scalar)
    assert int(scalar) == 0


def test_a_step_that_raised_leaves_the_bf16_value() -> None:
    rounding = StochasticSteps(lambda: 0)
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    rounding.attach(optimizer, {"weight": weight}, lambda _, value: value)
    memory = weight.data_ptr()
    weight.grad = torch.ones(4)
    rounding.widen([weight])
    weight.data.fill_(7)  # As of a step that raised half way.
    weight.grad = torch.ones(4)
    optimizer.step()
    assert (weight.dtype, weight.data_ptr(), weight.tolist()) == (torch.bfloat16, memory, [0.75] * 4)

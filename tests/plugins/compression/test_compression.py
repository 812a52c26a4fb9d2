"""Signs, blocks and the errors that are left over, without ranks; what PowerSGD keeps, and its buckets under way."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.testing import run_distributed
from dlo_plugins.compression.compressed_all_reduce import (
    BlockLayout,
    block_scales,
    decompress,
    pack_signs,
    subtract_compressed_,
    unpack_signs,
)
from dlo_plugins.compression.ddp_hooks import PowerSGD, PowerSGDHook
from support.compression_by_definition import average_in_one_process, compress
from support.on_ranks import on_ranks

#: Zeros of both signs are among them.
floats = st.floats(-1e6, 1e6, width=32)
values = st.integers(1, 12).flatmap(lambda n: st.lists(floats, min_size=8 * n, max_size=8 * n))
lengths = st.lists(st.integers(0, 70), min_size=1, max_size=6).map(tuple)
layouts = st.builds(BlockLayout, lengths, st.sampled_from([8, 16, 64]), st.integers(1, 5))


def full(count: int, block: int) -> torch.Tensor:
    return torch.full((count // block,), float(block))


# --- signs -------------------------------------------------------------------------------------------------


@given(values)
def test_signs_are_packed_as_numpy_packs_them_and_come_back(numbers):
    tensor = torch.tensor(numbers)
    positive = ~np.signbit(tensor.numpy())
    packed = pack_signs(tensor)
    assert packed.numpy().tolist() == np.packbits(positive, bitorder="little").tolist()
    assert unpack_signs(packed).tolist() == np.where(positive, 1.0, -1.0).tolist()


@given(values, st.sampled_from([1, 2, 4]))
def test_the_error_is_what_was_not_sent_and_never_more_than_there_was(numbers, per_block):
    tensor = torch.tensor(numbers)
    block = tensor.numel() // per_block if tensor.numel() % (8 * per_block) == 0 else tensor.numel()
    counts = full(tensor.numel(), block)
    packed, scales = compress(tensor, counts)
    sent = decompress(packed, scales)
    for row, of_sent, scale in zip(tensor.view(-1, block), sent.view(-1, block), scales, strict=True):
        assert float(scale) == pytest.approx(float(row.abs().mean()), rel=1e-5)
        assert set(of_sent.abs().tolist()) == {float(scale)}
    error = subtract_compressed_(tensor.clone(), scales, torch.empty_like(tensor))
    assert torch.equal(error, tensor - sent)
    assert error.double().norm() <= tensor.double().norm() * (1 + 1e-6)


# --- the mean, by its definition ---------------------------------------------------------------------------


@given(layouts, st.integers(1, 12), st.integers(0, 1000))
def test_what_was_received_and_is_left_over_is_what_was_to_be_sent(layout, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    padding = layout.padding()
    workers = [torch.zeros(layout.numel)] * layout.ranks
    servers = [torch.zeros(layout.chunk)] * layout.ranks
    wanted, got = torch.zeros(layout.numel), torch.zeros(layout.numel)
    for _ in range(steps):
        drawn = torch.randn(layout.ranks, layout.numel, generator=generator).index_fill(1, padding, 0.0)
        inputs = list(drawn)
        mean, workers, servers = average_in_one_process(inputs, workers, servers, layout)
        wanted += drawn.mean(0)
        got += mean
    left = torch.stack(workers).mean(0) + torch.cat(servers)
    torch.testing.assert_close(got + left, wanted, rtol=1e-4, atol=1e-4)
    assert not left[padding].any()


# --- PowerSGD's memory -------------------------------------------------------------------------------------


class Bucket:
    """What PowerSGD asks of DDP's."""

    def __init__(self, index: int, of: list[nn.Parameter]) -> None:
        self._index, self._of = index, of

    def index(self):
        return self._index

    def parameters(self):
        return self._of

    def buffer(self):
        return torch.zeros(sum(p.numel() for p in self._of))


def test_what_powersgd_keeps_goes_with_the_parameters_when_buckets_change(monkeypatch):
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 8), (5,), (9, 8), (8, 8))]
    names = "abcd"
    powersgd = PowerSGD({id(p): name for p, name in zip(made, names, strict=True)}, 1, 2)
    monkeypatch.setattr(torch_powersgd, "powerSGD_hook", lambda state, bucket: None)
    one = Bucket(0, made)
    powersgd(one, 5)
    assert powersgd.share(one, 1) == 1.0
    assert powersgd.share(one, 5) == pytest.approx((16 + 5 + 17 + 16) / (64 + 5 + 72 + 64))
    powersgd.state.error_dict[0] = torch.cat([torch.full((p.numel(),), float(n)) for n, p in enumerate(made)])
    # As torch lays them out: matrices of one shape together.
    powersgd.state.q_memory_dict[0] = torch.cat([torch.full((8,), float(number)) for number in (0, 3, 2)])
    errors, factors = powersgd.by_parameter()
    assert {name: set(error.tolist()) for name, error in errors.items()} == {n: {float(i)} for i, n in enumerate(names)}
    assert {name: set(factor.flatten().tolist()) for name, factor in factors.items()} == {"a": {0}, "d": {3}, "c": {2}}
    powersgd(Bucket(0, [made[3], made[1]]), 6)
    powersgd(Bucket(1, [made[2], made[0]]), 6)
    assert powersgd.state.error_dict[0].tolist() == [3.0] * 64 + [1.0] * 5
    assert powersgd.state.error_dict[1].tolist() == [2.0] * 72 + [0.0] * 64
    assert powersgd.state.q_memory_dict[0].tolist() == [3.0] * 8
    assert powersgd.state.q_memory_dict[1].tolist() == [2.0] * 8 + [0.0] * 8
    assert [powersgd.state.p_memory_dict[number].numel() for number in (0, 1)] == [8, 17]


def test_scales_of_blocks_that_are_not_full_are_of_their_own_elements():
    tensor = torch.zeros(16)
    tensor[:4] = 3.0
    assert block_scales(tensor, torch.tensor([4.0, 1.0])).tolist() == [3.0, 0.0]


class Gradients(Bucket):
    """A bucket with one gradient, the last of its backward."""

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__(0, [nn.Parameter(torch.zeros_like(gradient))])
        self._gradient = gradient

    def buffer(self):
        return self._gradient.view(-1)

    def gradients(self):
        return [self._gradient]

    def is_last(self):
        return True


@on_ranks(1)
def test_powersgd_compresses_in_cpu_memory_of_a_machine_with_a_gpu(rank: int, world_size: int) -> None:
    """torch's hook waits for the bucket's device where there is a CUDA device, and raises if that is the CPU."""
    gradient = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0))
    bucket = Gradients(gradient.clone())
    powersgd = PowerSGD({id(p): "weight" for p in bucket.parameters()}, 1, 2)
    assert powersgd.share(bucket, 5) < 1
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        found = powersgd(bucket, 5).wait().view(8, 8)
    torch.testing.assert_close(found, gradient)  # Which is of rank one.


# --- PowerSGD where several of DDP's buckets are under way at once ---------------------------------------------------


STEPS = 6


def _train(world_size: int, bucket_mb: float) -> torch.Tensor:
    """Returns the weights of a training whose gradients are in buckets of that many megabytes."""
    torch.manual_seed(0)
    widths = [96, 384, 96, 288, 96, 384, 96, 192, 96, 384, 96]
    model = nn.Sequential(*[layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())])
    wrapped, steps = DistributedDataParallel(model, bucket_cap_mb=bucket_mb), [0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hook = PowerSGDHook(PowerSGD(names, 2, 2), lambda: steps[0], torch.device("cpu"))
    hook.register(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(16, 96, generator=generator)).square().mean().backward()
        optimizer.step()
        steps[0] += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _ranks(rank: int, world_size: int) -> Any:
    return [_train(world_size, 0.05) for _ in range(2)]


def test_messages_of_buckets_are_not_mixed() -> None:
    """All ranks come to the same weights, and so does the same training again."""
    found = run_distributed(_ranks, 2, timeout=200)
    for of_rank in found:
        for weights in of_rank:
            assert weights.isfinite().all()
            torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)

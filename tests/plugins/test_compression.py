"""Signs, blocks, errors, and the optimizers that send them, without ranks: exact means stand in for compressed ones."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim import Lamb
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from dlo_framework.errors import DloError
from dlo_plugins.callbacks.gradient_compression import GradientCompression
from dlo_plugins.compression.all_reduce import all_reduce_bytes, average_in_one_process
from dlo_plugins.compression.layout import Layout
from dlo_plugins.compression.one_bit import frozen_denominators, limit_rms_
from dlo_plugins.compression.one_bit_adam import OneBitAdam
from dlo_plugins.compression.one_bit_lamb import OneBitLamb, trust_ratio
from dlo_plugins.compression.powersgd import PowerSGD
from dlo_plugins.compression.sign_compression import (
    block_scales,
    compress,
    decompress,
    pack_signs,
    subtract_compressed_,
    unpack_signs,
)

SHAPES = [(6, 5), (5,), (5, 3), ()]

values = st.integers(1, 12).flatmap(
    lambda bytes_: st.lists(
        st.floats(-1e6, 1e6, width=32), min_size=8 * bytes_, max_size=8 * bytes_
    )  # zeros of both signs among them
)
layouts = st.builds(
    Layout,
    st.lists(st.integers(0, 70), min_size=1, max_size=6).map(tuple),
    st.sampled_from([8, 16, 64]),
    st.integers(1, 5),
)


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


def test_a_large_element_spoils_its_own_block_alone():
    tensor = torch.ones(64)
    tensor[0] = 1e6
    sent = decompress(*compress(tensor, full(64, 8)))
    assert sent[8:].tolist() == [1.0] * 56
    assert sent[0] > 1e5


# --- where tensors stand -----------------------------------------------------------------------------------


@given(layouts)
def test_each_block_is_of_one_tensor_and_padding_is_what_is_left(layout):
    owner = torch.full((layout.numel,), -1)
    for number, (start, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
        assert start % layout.block == 0
        assert (owner[start : start + size] == -1).all()
        owner[start : start + size] = number
    assert layout.padding().tolist() == (owner == -1).nonzero().view(-1).tolist()
    assert layout.chunk * layout.ranks == layout.numel
    assert layout.chunk % layout.block == 0
    blocks = owner.view(-1, layout.block)
    assert all(len(set(block.tolist()) - {-1}) <= 1 for block in blocks)
    assert layout.counts().tolist() == (blocks >= 0).sum(1).clamp(min=1).tolist()


# --- the mean, by its definition ---------------------------------------------------------------------------


@settings(deadline=None)
@given(layouts, st.integers(1, 12), st.integers(0, 1000))
def test_what_was_received_and_is_left_over_is_what_was_to_be_sent(layout, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    padding = layout.padding()
    workers = [torch.zeros(layout.numel)] * layout.ranks
    servers = [torch.zeros(layout.chunk)] * layout.ranks
    wanted, got = torch.zeros(layout.numel), torch.zeros(layout.numel)
    for _ in range(steps):
        inputs = [
            torch.randn(layout.numel, generator=generator).index_fill(0, padding, 0.0) for _ in range(layout.ranks)
        ]
        mean, workers, servers = average_in_one_process(inputs, workers, servers, layout)
        wanted += torch.stack(inputs).mean(0)
        got += mean
    left = torch.stack(workers).mean(0) + torch.cat(servers)
    torch.testing.assert_close(got + left, wanted, rtol=1e-4, atol=1e-4)
    assert not left[padding].any()


def test_errors_stay_bounded_and_the_mean_over_steps_becomes_exact():
    layout = Layout((512,), 64, 4)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(512, generator=generator) for _ in range(4)]
    workers, servers = [torch.zeros(512)] * 4, [torch.zeros(128)] * 4
    total, norms = torch.zeros(512), []
    for _ in range(200):
        mean, workers, servers = average_in_one_process(inputs, workers, servers, layout)
        total += mean
        norms.append(float(torch.stack(workers).norm()))
    exact = torch.stack(inputs).mean(0)
    assert (total / 200 - exact).norm() < 0.05 * exact.norm()
    assert max(norms[100:]) < 1.5 * max(norms[:100])


def test_zeros_are_sent_as_zeros():
    layout = Layout((64, 64), 64, 1)
    inputs = [torch.cat([torch.randn(64), torch.zeros(64)])]
    mean, *_ = average_in_one_process(inputs, [torch.zeros(128)], [torch.zeros(128)], layout)
    assert not mean[64:].any()
    assert mean[:64].all()


def test_a_plain_all_reduce_sends_each_element_nearly_twice():
    assert all_reduce_bytes(400, 2) == 400
    assert all_reduce_bytes(400, 4) == 600


# --- the optimizers ----------------------------------------------------------------------------------------


class Alone:
    """One rank of one: means are what they are of."""

    def __init__(self) -> None:
        self.averaged, self.resets = 0, 0

    def average(self, tensors):
        self.averaged += 1

    def mean(self, value):
        return value

    def reset(self):
        self.resets += 1


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(made: list[nn.Parameter]) -> list[dict]:
    return [{"params": made[:1], "weight_decay": 0.1}, {"params": made[1:], "weight_decay": 0.0, "lr": 3e-3}]


def set_gradients(made: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(optimizer, made, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(made, step)
        for group in optimizer.param_groups:  # As OneCycle does.
            group["lr"] = 1e-3 * (1 + step % 3)
            group["betas"] = (0.85 + 0.02 * (step % 4), 0.99)
        optimizer.step()


def test_the_first_stage_is_adamw_and_either_goes_on_from_the_other():
    ours, torchs = parameters(), parameters()
    one = OneBitAdam(groups(ours), lr=1e-3, betas=(0.9, 0.99), freeze_step=1000)
    other = torch.optim.AdamW(groups(torchs), lr=1e-3, betas=(0.9, 0.99))
    train(one, ours, 5)
    train(other, torchs, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    states = one.state_dict(), other.state_dict()
    one, other = OneBitAdam(groups(ours), freeze_step=1000), torch.optim.AdamW(groups(torchs))
    one.load_state_dict(states[1])
    other.load_state_dict(states[0])
    assert one.steps == 5
    train(one, ours, 5, start=5)
    train(other, torchs, 5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_the_first_stage_is_timms_lamb_and_goes_on_from_its_state():
    ours, timms = parameters(), parameters()
    one = OneBitLamb(groups(ours), freeze_step=1000)
    other = Lamb(groups(timms))
    train(one, ours, 5)
    train(other, timms, 5)
    one = OneBitLamb(groups(ours), freeze_step=1000)
    one.load_state_dict(copy.deepcopy(other.state_dict()))  # torch takes tensors over.
    assert one.steps == 5
    train(one, ours, 5, start=5)
    train(other, timms, 5, start=5)
    for mine, theirs in zip(ours, timms, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_the_second_stage_is_adam_with_a_frozen_second_moment():
    made, expected = parameters(), [p.detach().double() for p in parameters()]
    optimizer = OneBitAdam(made, lr=1e-2, weight_decay=0.1, freeze_step=4, least_root=0.0, max_rms=100.0)
    optimizer.communicator = Alone()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    for step in range(1, 10):
        set_gradients(made, step)
        for parameter, (m, v), mine in zip(expected, moments, made, strict=True):
            gradient = mine.grad.double()
            m.mul_(0.9).add_(gradient, alpha=0.1)
            if step <= 4:
                v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = (v / (1 - 0.999 ** min(step, 4))).sqrt() + 1e-8
            parameter.mul_(1 - 1e-2 * 0.1).sub_(m / (1 - 0.9**step) / root, alpha=1e-2)
        optimizer.step()
    assert optimizer.communicator.averaged == 5
    for mine, parameter, (m, v) in zip(made, expected, moments, strict=True):
        torch.testing.assert_close(mine.double(), parameter, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[mine]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-6)


def test_a_refresh_adds_a_mean_gradient_to_the_second_moment():
    made = parameters()
    optimizer = OneBitAdam(made, betas=(0.9, 0.99), freeze_step=3, refresh_every=4)
    optimizer.communicator = Alone()
    moments = [torch.zeros_like(p) for p in made]
    wanted = []
    for step in range(1, 13):
        set_gradients(made, step)
        wanted.append(optimizer.takes_mean_gradients)
        if step <= 3 or step in (8, 12):
            for moment, parameter in zip(moments, made, strict=True):
                moment.mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
        optimizer.step()
    assert [number for number, mean in enumerate(wanted, start=1) if mean] == [1, 2, 3, 8, 12]
    assert optimizer.param_groups[0]["frozen_at"] == 5
    for moment, parameter in zip(moments, made, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], moment, rtol=1e-5, atol=1e-8)


def lamb_by_the_book(start, steps, freeze, lr=1e-2, decay=0.1, least=0.01):
    """1-bit LAMB of one tensor and one rank: the paper's formulas, in double precision."""
    p, m, v, fresh = start.clone(), torch.zeros_like(start), torch.zeros_like(start), torch.zeros_like(start)
    average, factor = None, 1.0

    def root(variance, step):
        variance = variance / (1 - 0.999**step)
        return variance.sqrt().clamp_min(float(variance.mean()) ** 0.5 * least) + 1e-6

    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(100 + step)
        gradient = torch.randn(start.shape, generator=generator).double()
        gradient /= max(1.0, float(gradient.norm()))
        m = 0.9 * m + 0.1 * gradient
        if step <= freeze:
            v = 0.999 * v + 0.001 * gradient**2
            update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + decay * p
            ratio = float(p.norm() / update.norm())
            average = ratio if average is None else 0.9 * average + 0.1 * ratio
            fresh = v.clone()
        else:
            fresh = 0.999 * fresh + 0.001 * gradient**2
            plain = m / (1 - 0.9**step) / root(v, freeze)
            update = plain + decay * p
            share = min(1.0, float(plain.norm() / update.norm()))
            wanted = float((root(v, freeze) / root(fresh, freeze)).max()) * share + 1 - share
            wanted = min(4.0, max(0.5, wanted))
            factor = min(factor * 1.1, max(factor * 0.9, wanted))
            ratio = average * factor
        p = p - lr * ratio * update
    return p, factor


def test_the_second_stage_of_lamb_scales_frozen_ratios_by_how_the_second_moment_has_changed():
    made = [nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(7)))]
    expected, factor = lamb_by_the_book(made[0].detach().double(), 12, 5)
    optimizer = OneBitLamb(made, lr=1e-2, weight_decay=0.1, freeze_step=5)
    optimizer.communicator = Alone()
    for step in range(1, 13):
        set_gradients(made, step)
        optimizer.step()
    assert factor != 1.0
    assert float(optimizer.state[made[0]]["factor"]) == pytest.approx(factor, rel=1e-3)
    torch.testing.assert_close(made[0].double(), expected, rtol=1e-3, atol=1e-4)
    assert float(trust_ratio(torch.zeros(3), torch.ones(3))) == 1.0


def test_an_element_that_had_no_gradient_takes_no_giant_step():
    made = [nn.Parameter(torch.zeros(4))]
    optimizer = OneBitAdam(made, lr=1e-3, weight_decay=0.0, freeze_step=3)
    optimizer.communicator = Alone()
    for step in range(6):
        made[0].grad = torch.tensor([1.0, -1.0, 1.0, 0.0 if step < 3 else 1.0])
        optimizer.step()
    assert made[0].abs().max() < 1e-3 * 6 * 100  # 1 / least_root; without a floor it would be 1e5.
    roots = list(frozen_denominators([torch.tensor([0.0, 1.0])], 1.0, 0.0, 0.5))
    assert roots[0].tolist() == [pytest.approx(0.5 * math.sqrt(0.5)), 1.0]


def test_a_step_that_is_too_long_is_scaled_to_the_limit():
    tensors = [torch.full((4, 4), 3.0), torch.tensor([0.1, -0.1]), torch.zeros(3), torch.zeros(0)]
    limit_rms_(tensors, 0.5)
    assert tensors[0].tolist() == [[0.5] * 4] * 4
    assert tensors[1].tolist() == pytest.approx([0.1, -0.1])
    assert tensors[2].tolist() == [0.0] * 3
    made = [nn.Parameter(torch.zeros(4))]
    optimizer = OneBitAdam(made, lr=1e-3, weight_decay=0.0, freeze_step=3, max_rms=0.5)
    optimizer.communicator = Alone()
    for step in range(4):
        made[0].grad = torch.full((4,), 1.0 if step < 3 else 1e6)
        before = made[0].detach().clone()
        optimizer.step()
    bias = 1 - 0.9**4
    assert float((made[0].detach() - before).abs().max()) == pytest.approx(1e-3 * 0.5 / bias, rel=1e-4)


def test_a_missing_gradient_counts_as_zero_and_a_skipped_step_as_none():
    made, other = parameters(), parameters()
    optimizers = [OneBitAdam(p, freeze_step=2) for p in (made, other)]
    for optimizer in optimizers:
        optimizer.communicator = Alone()
    for optimizer, own in zip(optimizers, (made, other), strict=True):
        train(optimizer, own, 3)
        set_gradients(own, 9)
    made[1].grad, other[1].grad = None, torch.zeros_like(other[1])
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made, other, strict=True))
    before = [p.detach().clone() for p in made]
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert optimizers[0].steps == 4
    assert all(torch.equal(a, b) for a, b in zip(made, before, strict=True))


def test_errors_start_anew_where_the_second_moment_is_frozen_and_with_a_loaded_state():
    made = parameters()
    optimizer = OneBitAdam(made, freeze_step=2)
    optimizer.communicator = Alone()
    train(optimizer, made, 5)
    assert optimizer.communicator.resets == 1
    assert optimizer.param_groups[0]["frozen_at"] == 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.communicator.resets == 2
    assert optimizer.compressing


def test_what_trains_first_after_the_freeze_is_refused():
    made = parameters()
    optimizer = OneBitAdam(made, freeze_step=2)
    optimizer.communicator = Alone()
    for step in range(3):
        set_gradients(made[:3], step)
        if step == 2:
            set_gradients(made, step)
            with pytest.raises(
                DloError, match="first gradient in step 3, but the second moment is frozen since step 2"
            ):
                optimizer.step()
        else:
            optimizer.step()


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


def test_torchs_batched_powersgd_cannot_run():
    """Where this fails, torch has mended it, and the method can be offered."""
    with pytest.raises(AssertionError):
        torch_powersgd._orthogonalize(torch.randn(4, 2))


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneBitAdam(parameters(), freeze_step=0), "freeze_step is at least 1, given 0"),
        (lambda: OneBitAdam(parameters(), freeze_step=1, refresh_every=1), "refresh_every is at least 2, given 1"),
        (lambda: OneBitAdam(parameters(), betas=(0.9, 1.0), freeze_step=1), r"betas lie in \[0, 1\)"),
        (lambda: OneBitAdam(parameters(), lr=-1.0, freeze_step=1), "lr is at least 0, given -1.0"),
        (lambda: OneBitAdam(parameters(), least_root=2.0, freeze_step=1), "least_root lies in"),
        (lambda: OneBitLamb(parameters(), factor_range=(2.0, 4.0), freeze_step=1), "factor_range holds 1"),
        (lambda: OneBitLamb(parameters(), factor_change=0.0, freeze_step=1), "factor_change and least_root"),
        (lambda: GradientCompression("onebit"), "unknown method 'onebit'; did you mean 'one_bit'"),
        (lambda: GradientCompression("one_bit", block=100), "block is a multiple of 8, given 100; take 96"),
        (lambda: GradientCompression("powersgd", start_step=1), "start_step of powersgd is at least 2, given 1"),
        (lambda: GradientCompression("powersgd", matrix_rank=0), "at least 1, given 0, 8 and 1"),
    ],
)
def test_bad_settings_say_the_rule_and_the_fix(make, message):
    with pytest.raises(DloError, match=message):
        make()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(DloError, match="sparse=False"):
        OneBitAdam(table.parameters(), freeze_step=1).step()


def test_scales_of_blocks_that_are_not_full_are_of_their_own_elements():
    tensor = torch.zeros(16)
    tensor[:4] = 3.0
    assert block_scales(tensor, torch.tensor([4.0, 1.0])).tolist() == [3.0, 0.0]

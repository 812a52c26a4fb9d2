"""The optimizers that communicate their momentum, without ranks: their first stage, their second, what they refuse."""

import copy
import math

import pytest
import torch
from timm.optim import Lamb
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.compression.one_bit import OneBitAdam, OneBitLamb, frozen_denominators, limit_rms_

SHAPES = [(6, 5), (5,), (5, 3), ()]


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


def test_what_trains_first_after_the_freeze_is_refused():
    made = parameters()
    optimizer = OneBitAdam(made, freeze_step=2)
    optimizer.communicator = Alone()
    for step in range(3):
        set_gradients(made[:3], step)
        if step == 2:
            set_gradients(made, step)
            with pytest.raises(DloError, match=r"must get gradients before step 2, .* in step 3"):
                optimizer.step()
        else:
            optimizer.step()


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneBitAdam(parameters(), freeze_step=0), "freeze_step of OneBitAdam must be at least 1, got 0"),
        (lambda: OneBitAdam(parameters(), freeze_step=1, refresh_every=1), "refresh_every of OneBitAdam must be at l"),
        (lambda: OneBitLamb(parameters(), factor_change=0.0, freeze_step=1), "factor_change and least_root"),
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

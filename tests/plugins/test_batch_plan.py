import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.data import Position, Window
from dlo_framework.data.sampler import plan_epoch
from dlo_framework.errors import DloError
from dlo_plugins.callbacks.dynamic_batch_size import (
    LRDecay,
    NoiseEstimate,
    NoiseScale,
    grown_size,
    noise_and_signal,
    window,
)
from dlo_plugins.callbacks.run_position import check_max_epochs, parse_position, value_at


@pytest.mark.parametrize(
    ("text", "epochs"),
    [(3, 3.0), ("3", 3.0), ("1.5 epochs", 1.5), ("50%", 4.0), ("500 samples", 5.0), ("1_000 samples", 10.0), (0, 0.0)],
)
def test_points_in_a_run_of_eight_epochs_of_a_hundred_samples(text, epochs):
    point = parse_position(text, "x")
    assert point.epochs(100, 8) == epochs
    assert point.reached(Position(int(epochs), round(100 * (epochs % 1)), 100), 8)
    if epochs:
        before = round(100 * epochs) - 1
        assert not point.reached(Position(before // 100, before % 100, 100), 8)


@pytest.mark.parametrize("text", ["half", "-1", "50 %%", "3 days", "101%"])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(DloError, match=r"^x: a point"):
        parse_position(text, "x")


def test_a_percentage_of_a_run_without_an_end_is_refused():
    with pytest.raises(DloError, match=r"trainer\.max_epochs must be set"):
        check_max_epochs([parse_position("50%", "x")], -1, "x")
    assert check_max_epochs([parse_position(3, "x")], -1, "x") == math.inf


def test_an_explicit_schedule_holds_from_each_point_on():
    steps = {parse_position(point, "x"): size for point, size in {"50%": 512, "800 samples": 1024}.items()}
    sizes = [value_at(steps, Position(epoch, 0, 100), 10) or 256 for epoch in range(10)]
    assert sizes == [256] * 5 + [512] * 3 + [1024] * 2


def test_the_batch_grows_where_a_step_schedule_would_decay_and_then_the_rate_decays():
    decay = LRDecay(factor=0.2, at=["50%", 8], max_batch_size=160)
    found = [grown_size(decay, 32, Position(epoch, 0, 1000), 10) for epoch in (0, 4, 5, 7, 8)]
    assert found == [(32, 1.0), (32, 1.0), (160, 1.0), (160, 1.0), (160, pytest.approx(0.2))]


def test_the_noise_of_sgd_falls_as_under_the_exponential_schedule_that_is_replaced():
    """lr / batch is what anneals, and is the same to the rounding of the batch to whole samples."""
    decay = LRDecay(factor=0.94, every=0.5, max_batch_size=64)
    for epoch in range(30):
        at = Position(epoch, 250, 500)
        size, left = grown_size(decay, 16, at, 30)
        assert left / size == pytest.approx(0.94 ** (2 * epoch + 1) / 16, rel=0.04)


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (LRDecay(factor=1.5, at=[1]), "above 0 and below 1"),
        (LRDecay(factor=0.1), "got none; set one"),
        (LRDecay(factor=0.1, at=[1], every=1), "leave out the others"),
        (LRDecay(factor=0.1, every=0), "above 0"),
        (LRDecay(factor=0.1, at=["soon"]), "a point must be like"),
    ],
)
def test_decays_out_of_range_are_refused(decay, message):
    with pytest.raises(DloError, match=message):
        decay.check()


@given(st.integers(1, 5000), st.none() | st.integers(1, 600), st.integers(1, 8), st.integers(1, 2))
def test_a_window_obeys_the_limit_and_the_ranks_and_wastes_little(size, limit, world, least):
    found = window(size, limit, world, least)
    assert found.batch_size % world == 0
    assert found.batches >= least
    if limit is not None:
        assert found.batch_size <= max(limit * world, world)
    total = found.batch_size * found.batches
    # Short of a micro-batch of one sample a rank, no step is larger than asked for, nor much smaller.
    if found.batch_size > world:
        assert size - found.batches * world < total <= size


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 5))
def test_an_epochs_plan_visits_each_sample_once_but_for_less_than_a_batch(size, batch, batches):
    spans = plan_epoch(lambda at: Window(batch, batches), 0, size)
    assert [span.start for span in spans] == [number * batch for number in range(size // batch)]
    assert all(span.stop == span.start + batch for span in spans)
    for number, span in enumerate(spans):
        assert span.first <= number < span.first + span.batches
        assert span.batches == min(batches, len(spans) - span.first)


def test_the_two_unknowns_of_the_noise_scale_come_back_from_exact_norms():
    signal, noise = 0.3, 25.0
    found = noise_and_signal(signal + noise / 8, signal + noise / 64, (8, 64))
    assert found == (pytest.approx(noise), pytest.approx(signal))


def test_the_noise_scale_of_random_gradients_is_that_of_their_distribution():
    """Per-sample gradients N(mean, diag(variance)): the scale is sum(variance) / |mean|^2."""
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.linspace(0.1, 0.5, 20), torch.linspace(1, 4, 20)
    estimate = NoiseEstimate()
    for _ in range(60):
        samples = mean + variance.sqrt() * torch.randn(50, 64, 20, generator=generator)
        small = samples[:, :8].mean(1).square().sum(1).mean()
        large = samples.mean(1).square().sum(1).mean()
        estimate.add(*noise_and_signal(float(small), float(large), (8, 64)), 0.9)
    assert estimate.scale == pytest.approx(float(variance.sum() / mean.square().sum()), rel=0.1)
    assert estimate.weight == pytest.approx(1, abs=0.01)


def test_noise_scale_arguments_out_of_range_are_refused():
    with pytest.raises(DloError, match="at least the batch size of 64"):
        NoiseScale(max_batch_size=32).check(64)
    with pytest.raises(DloError, match="every must be at least 1"):
        NoiseScale(max_batch_size=64, every=0).check(64)

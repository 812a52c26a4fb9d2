import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlo_plugins.callbacks.lr_finder import (
    SUGGESTIONS,
    Sweep,
    slide,
    steep,
    suggest,
    sweep_rates,
    valley,
)
from support.named_sets import isolate_named_sets


def test_rates_grow_by_equal_factors_from_end_to_end():
    rates = sweep_rates(1e-7, 10, 9)
    assert rates == pytest.approx([10.0**power for power in range(-7, 2)])
    assert len(sweep_rates(1e-3, 1, 100)) == 100


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.floats(0, 0.99))
def test_the_smoothed_loss_is_the_weighted_mean_of_the_losses_so_far(losses, beta):
    """Corrected for its start at zero, an exponential average is a mean with weights beta^age that add up to 1."""
    sweep = Sweep(1000, beta, stop_factor=math.inf)
    for loss in losses:
        sweep.add(1.0, loss)
    for count in range(1, len(losses) + 1):
        weights = np.array([beta**age for age in reversed(range(count))])
        assert sweep.smoothed[count - 1] == pytest.approx(float(weights @ losses[:count] / weights.sum()))


def fed(losses, **options):
    sweep = Sweep(**{"steps": 100, "beta": 0.0, **options})
    for number, loss in enumerate(losses):
        if not sweep.add(10.0**number, loss):
            break
    return sweep


def test_it_stops_above_four_times_the_best():
    assert fed([2.0, 1.0, 4.0, 4.001, 1.0]).losses == [2.0, 1.0, 4.0, 4.001]
    assert "above 4 x 1" in fed([2.0, 1.0, 4.001]).stopped
    assert fed([2.0, 1.0, 3.0, 3.1, 1.0], stop_factor=3.0).losses[-1] == 3.1


def test_it_stops_at_nan_and_infinity_and_at_its_last_step():
    assert fed([1.0, math.nan, 1.0]).stopped == "the loss became nan"
    assert fed([1.0, math.inf, 1.0]).stopped == "the loss became inf"
    whole = fed([1.0] * 10, steps=4)
    assert (len(whole.losses), whole.stopped) == (4, None)


def test_a_negative_loss_does_not_stop_it():
    assert fed([-1.0, -2.0, -3.0, 5.9]).stopped is None
    assert fed([-1.0, -2.0, -3.0, 6.1]).stopped is not None


def test_the_first_tenth_the_last_five_and_what_follows_a_nan_are_cut():
    sweep = fed([1.0] * 100)
    assert sweep.trimmed()[0] == sweep.rates[10:95]
    early = fed([*[1.0] * 30, 9.0], steps=100)
    assert early.trimmed()[0] == early.rates[10:26]
    early.smoothed[20] = math.nan
    assert early.trimmed() == (early.rates[10:20], [1.0] * 10)


RATES = sweep_rates(1e-6, 1, 61)  # ten a decade


def published_valley(losses):
    """fastai's definition in other words: the index that its two nested loops arrive at."""
    count = len(losses)
    length, end, start = [1] * count, 0, 0
    for i in range(count):
        length[i] = 1 + max([length[j] for j in range(i) if losses[i] < losses[j]], default=0)
        if length[i] > length[end]:
            end, start = i, i - length[i]
    return start + int((end - start) / 3) + int((end - start) / 6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_valley_is_the_published_one(losses):
    found = valley(RATES[: len(losses)], losses)
    if found is None:
        assert losses == sorted(losses)
    else:
        assert found == RATES[max(0, published_valley(losses))]


def test_steep_is_where_the_logistic_curve_falls_fastest():
    losses = [1 / (1 + math.exp(2 * (math.log10(rate) + 3.04))) for rate in RATES]
    assert steep(RATES, losses) == pytest.approx(1e-3, rel=0.3)
    assert steep(RATES, losses) == RATES[29]


def published_slide(rates, losses):
    """fastai's definition in other words, with indices from the end."""
    slopes, edge = np.gradient(np.array(losses)), 1
    found = rates[-16]
    while edge + 15 <= len(losses) and abs(slopes[-edge] - slopes[-edge - 15]) > 0.005:
        found = rates[-edge - 15]
        edge += 1
    return found


@given(st.lists(st.floats(0, 1), min_size=16, max_size=40))
def test_slide_is_the_published_one(losses):
    rates = RATES[: len(losses)]
    assert slide(rates, losses) == published_slide(rates, losses)


def test_all_suggestions_of_a_typical_curve_lie_before_its_lowest_point():
    losses = [2.3 - 1.5 / (1 + (0.003 / rate) ** 1.2) + (rate / 0.3) ** 2 for rate in RATES]
    lowest = RATES[int(np.argmin(losses))]
    found, errors = suggest(RATES, losses)
    assert errors == {}
    assert all(rate is not None and rate <= lowest for rate in found.values())
    assert suggest([1.0], [1.0]) == (dict.fromkeys(found), {})


@pytest.mark.parametrize("found", [ValueError("boom"), math.nan, -1.0, "fast"])
def test_a_wrong_suggestion_leaves_the_others(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_named_sets(monkeypatch)

    @SUGGESTIONS.register("mine")
    def mine(rates: Any, losses: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    suggested, errors = suggest([1e-3, 1e-2, 1e-1, 1.0], [3.0, 2.0, 1.0, 4.0])
    assert suggested["mine"] is None
    assert any(rate for rate in suggested.values())
    assert list(errors) == ["mine"]
    assert str(errors["mine"]).startswith("suggestion mine must return a positive rate or None, got")

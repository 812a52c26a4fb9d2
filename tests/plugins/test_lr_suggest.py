import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlo_plugins.callbacks.lr_finder import (
    SUGGESTIONS,
    Sweep,
    minimum,
    rescale_rates,
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


def test_it_looks_at_the_smoothed_loss_and_not_at_one_bad_batch():
    assert fed([1.0] * 20 + [20.0] + [1.0] * 5, beta=0.98).stopped is None
    assert fed([1.0] * 20 + [90.0], beta=0.98).stopped is not None


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


def test_valley_lies_in_the_middle_of_the_longest_fall():
    falling = [61.0 - number for number in range(61)]
    assert valley(RATES, falling) == RATES[-1 + 20 + 10]
    # Flat, then 30 points down from index 21 to 50, then up: the fall with the flat's last point has 31 points.
    curve = [40.0] * 21 + [39.0 - number for number in range(30)] + [50.0 + number for number in range(10)]
    assert valley(RATES, curve) == RATES[50 - 31 + 10 + 5]
    assert valley(RATES, [1.0 + number for number in range(61)]) is None


def test_valley_is_not_misled_by_a_bump_in_the_fall():
    fall = [40.0] * 21 + [39.0 - number for number in range(30)] + [50.0 + number for number in range(10)]
    bumped = list(fall)
    bumped[35] += 0.5
    assert valley(RATES, bumped) == valley(RATES, fall)
    bumped[35] += 3
    assert abs(RATES.index(valley(RATES, bumped)) - RATES.index(valley(RATES, fall))) <= 1


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


def test_minimum_is_a_tenth_of_the_lowest_points_rate():
    losses = [(math.log10(rate) + 2) ** 2 for rate in RATES]
    assert minimum(RATES, losses) == pytest.approx(1e-3)


def published_slide(rates, losses):
    """fastai's definition in other words, with indices from the end."""
    slopes, edge = np.gradient(np.array(losses)), 1
    found = rates[-16]
    while edge + 15 <= len(losses) and abs(slopes[-edge] - slopes[-edge - 15]) > 0.005:
        found = rates[-edge - 15]
        edge += 1
    return found


def test_slide_stops_where_the_slopes_at_its_edges_agree():
    # Falls by 0.1 a point up to index 39, then rises ever faster: no edges agree before both lie in the fall.
    losses = [5 - 0.1 * number for number in range(40)] + [1.1 + 0.3 * number**2 for number in range(21)]
    found = RATES.index(slide(RATES, losses))
    assert found == 24  # 15 points below the first whose slope differs from the fall's
    assert slide(RATES, [1.0] * 61) == RATES[-16]  # Flat: the edges agree at once.
    assert slide(RATES[:15], [1.0] * 15) is None


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


def test_rescaled_rates_keep_their_ratios():
    assert rescale_rates([0.1, 0.01], 1.0) == pytest.approx([1.0, 0.1])
    assert rescale_rates([0.0, 0.0], 2.0) == [2.0, 2.0]


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

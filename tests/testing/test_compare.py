"""Two records side by side: the pure arithmetic of differences, limits and verdicts."""

import json
import math

import pytest
import torch

from dlo_framework.testing.compare import compare, default_rtol, weight_differences
from dlo_framework.testing.comparison import relative, to_json
from dlo_framework.testing.record import Record, Step, merge
from dlo_framework.testing.report import report


def run(losses, norms=None, weights=None, **more) -> Record:
    norms = norms or [(1.0,)] * len(losses)
    steps = [Step(loss, norm, 8, 100 + i) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))]
    return Record(steps, weights=weights or {"w": torch.ones(2)}, initial={"w": 1}, **more)


def test_relative_differences():
    assert relative(2.0, 2.0, 0.0) == 0.0
    assert relative(0.0, 0.0, 0.0) == 0.0
    assert relative(2.0, 1.0, 0.0) == 0.5
    assert relative(-2.0, -1.0, 0.0) == 0.5
    assert relative(1e-9, 2e-9, 1e-3) == pytest.approx(1e-6)
    assert relative(0.0, 1.0, 0.0) == math.inf
    assert relative(math.nan, math.nan, 1.0) == math.inf
    assert relative(1.0, math.inf, 1.0) == math.inf


def test_tolerances_of_the_precisions():
    assert [default_rtol(name) for name in ("32-true", None, "64", 32)] == [1e-5] * 4
    assert default_rtol("bf16-mixed") == 2**-7
    assert default_rtol("16-mixed") == 2**-10


def test_weight_differences_are_relative_to_a_tensors_largest_element():
    one = {"a": torch.tensor([4.0, 1.0]), "zero": torch.zeros(2), "gone": torch.ones(1), "n": torch.tensor(5)}
    other = {"a": torch.tensor([4.0, 0.0]), "zero": torch.zeros(2), "new": torch.ones(1), "n": torch.tensor(4)}
    found = weight_differences(one, other)
    assert found == {"a": 0.25, "zero": 0.0, "gone": math.inf, "new": math.inf, "n": 0.2}
    assert weight_differences({"a": torch.zeros(1)}, {"a": torch.ones(1)}) == {"a": math.inf}
    assert weight_differences({"a": torch.ones(1)}, {"a": torch.full((1,), math.nan)}) == {"a": math.inf}


def test_a_verdict_takes_losses_norms_of_every_rank_and_weights():
    same = compare("same", run([1.0, 2.0]), run([1.0, 2.0 + 1e-5]))
    assert same.ok
    assert same.hints == []
    assert "PARITY: same: 2 steps within 1e-05" in report(same)
    loss = compare("x", run([1.0, 2.0]), run([1.0, 2.0001]))
    assert [row.ok for row in loss.rows] == [True, False]
    assert "NO PARITY: x: differs from step 1 on" in report(loss)
    norm = compare("x", run([1.0]), run([1.0], [(1.0, 1.1)]))
    assert not norm.ok
    assert norm.rows[0].norm.ranks == 1.1, "the rank that is farthest off"
    weights = compare("x", run([1.0]), run([1.0], weights={"w": torch.tensor([1.0, 1.1])}))
    assert weights.broken_weights == ["w"]
    assert "differs in the final weights" in report(weights)
    assert not compare("x", run([1.0]), run([1.0, 1.0])).ok, "one run is longer"
    assert not compare("x", run([]), run([])).ok, "nothing was compared"
    assert not compare("x", run([None], [()]), run([None], [()])).ok, "nothing was measured"
    assert not compare("x", run([math.nan]), run([math.nan])).ok
    assert compare("x", run([1.0], [(math.inf,)]), run([1.0], [(math.inf, math.inf)])).ok, "a loss scale that overflows"
    assert not compare("x", run([1.0], [(math.inf,)]), run([1.0], [(math.inf, 1.0)])).ok


def test_a_control_widens_limits_and_never_narrows_them():
    one = run([1.0, 1.0, 1.0], weights={"bias": torch.ones(1), "w": torch.ones(1)})
    turned = run([1.0, 1.001, 1.0], weights={"bias": torch.full((1,), 1.01), "w": torch.ones(1)})
    ranks = run([1.0, 1.009, 0.991], weights={"bias": torch.full((1,), 1.05), "w": torch.ones(1)})
    assert not compare("x", one, ranks).ok
    found = compare("x", one, ranks, control=turned)
    assert [row.loss.limit for row in found.rows] == pytest.approx([1e-5, 1e-2, 1e-2])
    assert found.weight_limits == pytest.approx({"bias": 0.1, "w": 1e-5})
    assert not found.ok, "the weights' spread is beyond rounding"
    assert found.spread == pytest.approx(0.05 / 2**0.5)
    nearer = run([1.0, 1.009, 0.991], weights={"bias": torch.full((1,), 1.01), "w": torch.ones(1)})
    found = compare("x", one, nearer, control=turned)
    assert found.ok
    assert "PARITY: x: 3 steps within rounding" in report(found)
    early = run([1.009, 1.0, 1.0], weights=one.weights)
    assert not compare("x", one, early, control=turned).ok, "rounding comes up at step 1 only"
    one.drew = 0
    assert compare("x", one, nearer, control=turned).control is None, "it draws for other samples then"


@pytest.mark.parametrize(
    ("ranks", "hint"),
    [
        (run([2.0], batch_norms=3), "BatchNorm statistics are per rank (3 layers)"),
        (run([0.5], place=(0, 2)), "2 times that of 2 ranks: a sum over the batch"),
        (run([2.0], drew=0), "draws random numbers (first at step 0)"),
        (Record([Step(2.0, (1.0,), 9, 7)], initial={"w": 1}), "the batches of step 0 are not the same (8 samples"),
        (Record([Step(2.0, (1.0,), 8, 100)], initial={"w": 2}), "the weights differ before the first step, 1 tensors"),
        (run([math.nan]), "the first step differs already"),
        (run([1.0], weights={"w": torch.zeros(2)}), "what comes after them differs"),
        (run([1.0, 1.0]), "one process took 1 steps and the ranks 2"),
    ],
)
def test_hints(ranks, hint):
    assert hint in " ".join(compare("x", run([1.0]), ranks).hints)


def test_the_record_of_all_ranks():
    """Ranks 0 and 1 share a replica, whose loss rank 1 has; 2 and 3 have other data, each a part of its sequences."""
    ranks = [
        Record([Step(loss, (3.0 + rank,), samples, samples)], place=(place, 2), drew=drew)
        for rank, (loss, place, samples, drew) in enumerate(
            [(None, 0, 4, None), (1.0, 0, 4, 5), (2.0, 1, 4, 3), (9.0, 1, 4, None)]
        )
    ]
    whole = merge(ranks)
    assert whole.steps == [Step((1.0 + (2.0 + 9.0) / 2) / 2, (3.0, 4.0, 5.0, 6.0), 8, 8)]
    assert (whole.place, whole.drew) == ((0, 2), 3)


def test_json_holds_what_is_not_finite():
    found = compare("x", run([1.0]), run([math.nan], weights={"v": torch.ones(1)}))
    told = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert told["parity"] is False
    assert told["steps"][0]["loss"]["difference"] == "inf"
    assert told["weights"] == {name: {"difference": "inf", "limit": 1e-5} for name in "wv"}

"""Routers, their losses and their bias, against the papers' formulas computed token by token."""

import math

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_framework.models.experts.mixture_options import MixtureOptions, read_options
from dlo_framework.models.experts.routers import (
    Router,
    choose_tokens,
    is_within_capacity,
    load_balancing_loss,
    moved_bias,
    router_z_loss,
)


def router(dim: int = 6, **options: object) -> Router:
    torch.manual_seed(0)
    found = Router(dim, MixtureOptions(**{"count": 5, "top_k": 2, **options}))  # type: ignore[arg-type]
    torch.nn.init.normal_(found.weight)
    return found


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_token_gets_its_best_experts_with_their_scores(kind: str, normalize: bool) -> None:
    gate, x = router(router=kind, normalize=normalize), torch.randn(3, 4, 6)
    logits, weights, indices = gate(x)
    assert (logits.shape, weights.shape, indices.shape) == ((12, 5), (12, 2), (12, 2))
    for token, row in enumerate(x.flatten(0, 1)):
        own = gate.weight @ row
        scores = own.softmax(0) if kind == "softmax" else own.sigmoid()
        best = sorted(range(5), key=lambda expert: -float(scores[expert]))[:2]
        assert indices[token].tolist() == best
        expected = scores[best] / (scores[best].sum() if normalize else 1)
        torch.testing.assert_close(weights[token], expected)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    gate, x = router(router="sigmoid", normalize=False, bias_rate=0.001), torch.randn(1, 50, 6)
    gate.e_score_correction_bias[3] = 10.0  # type: ignore[index]
    logits, weights, indices = gate(x)
    assert (indices == 3).any(dim=1).all()
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, indices))
    counts = torch.tensor([50.0, 10.0, 20.0, 20.0, 0.0])
    moved = moved_bias(torch.zeros(5), counts, 0.001)
    torch.testing.assert_close(moved, torch.tensor([-0.001, 0.001, 0.0, 0.0, 0.001]))


def test_losses_are_the_papers() -> None:
    scores = torch.randn(20, 4).softmax(1)
    counts = torch.tensor([10.0, 20.0, 6.0, 4.0])
    expected = 4 * sum(float(counts[i]) / 40 * float(scores[:, i].mean()) for i in range(4))
    assert load_balancing_loss(scores, counts).item() == pytest.approx(expected)
    assert load_balancing_loss(torch.full((8, 4), 0.25), torch.ones(4)).item() == pytest.approx(1)
    logits = torch.randn(7, 3)
    expected = sum(math.log(sum(math.exp(float(value)) for value in row)) ** 2 for row in logits) / 7
    assert router_z_loss(logits).item() == pytest.approx(expected, rel=1e-5)


def test_first_choices_come_before_second_ones_and_rows_do_not_compete() -> None:
    indices = torch.tensor([[[0, 1], [0, 1], [1, 0], [0, 2]], [[2, 0], [2, 0], [1, 0], [1, 0]]])
    kept = is_within_capacity(indices, 2)
    assert kept[0].tolist() == [[True, True], [True, False], [True, False], [False, True]]
    assert kept[1].tolist() == [[True, True], [True, True], [True, False], [True, False]]


def test_dropped_choices_have_no_weight_and_no_expert() -> None:
    gate, x = router(capacity_factor=0.5), torch.randn(4, 10, 6)
    _, weights, indices = gate(x)
    dropped = indices == 5
    assert dropped.any()
    assert (weights[dropped] == 0).all()
    assert (weights[~dropped] > 0).all()
    for row in indices.view(4, 20):
        assert row.bincount(minlength=6)[:5].max() <= math.ceil(0.5 * 10 * 2 / 5)


def test_experts_choose_tokens_of_each_row() -> None:
    scores = torch.rand(2, 6, 3)
    weights, chosen = choose_tokens(scores, 2)
    assert chosen.shape == (3, 2 * 4)  # 6 tokens * 2 / 3 experts, in two rows.
    for expert in range(3):
        for row in range(2):
            own = chosen[expert].view(2, 4)[row] - 6 * row
            assert sorted(own.tolist()) == sorted(scores[row, :, expert].topk(4).indices.tolist())
            torch.testing.assert_close(weights[expert].view(2, 4)[row], scores[row, own, expert])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "softmx"}, "did you mean 'softmax'"),
        ({"top_k": 9}, "experts.top_k must be in 1 to count=8, got 9"),
        ({"capacity_factor": 0.0}, "experts.capacity_factor must be above 0"),
        ({"top_k": 1}, "set normalize: false"),
        ({"router": "expert_choice", "bias_rate": 0.1}, "experts.bias_rate must be unset"),
        ({"count": None, "shared": True}, "experts.count must be set with shared"),
        ({"tops": 2}, "did you mean 'top_k'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DloError, match=message):
        read_options({"count": 8, **options})

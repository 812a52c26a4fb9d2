"""The losses of preference tuning equal TRL's, and log-probabilities in chunks equal those of all logits at once."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_tasks.llm import preference_losses, vocabulary_loss
from dlo_tasks.llm.batches import IGNORE_INDEX
from dlo_tasks.llm.preference_losses import OBJECTIVES, token_log_probs
from dlo_tasks.llm.vocabulary_head import VocabularyHead

ROOT = Path(__file__).parents[2]
TRL = json.loads((ROOT / "tests" / "support" / "trl_losses.json").read_text())
TOKENS, WIDTH, VOCABULARY = 23, 8, 37


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that compares with TRL, and that has stored TRL's figures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("preference")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_that_trl_has_computed(objective: str, compared: Any) -> None:
    expected, found = TRL["objectives"][objective], compared.stored(compared.by_dlo(objective))
    assert TRL["provenance"]["trl"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norms"].keys() == expected["norms"].keys()
    largest = max(expected["norms"].values())
    assert largest > 1e-3
    for kind in ("norms", "sums"):
        for name, value in expected[kind].items():
            assert found[kind][name] == pytest.approx(value, rel=1e-5, abs=1e-5 * largest), (kind, name)


def test_losses_at_points_that_can_be_computed_by_hand() -> None:
    one, none = torch.tensor([1.0]), torch.tensor([0.0])
    assert preference_losses.dpo_losses(none, none, 0.1).item() == pytest.approx(0.693147, abs=1e-6)
    assert preference_losses.ipo_losses(one, none, 0.5).item() == 0
    assert preference_losses.hinge_losses(one, none, 0.25).item() == 0.75
    assert preference_losses.hinge_losses(one, none, 2.0).item() == 0
    assert preference_losses.simpo_losses(one, none, 2.0, 2.0).item() == pytest.approx(0.693147, abs=1e-6)
    half = torch.tensor([0.5]).log()
    assert preference_losses.orpo_losses(half, half, 1.0).item() == pytest.approx(0.693147, abs=1e-6)
    third = torch.tensor([1 / 3]).log()  # odds 1 and 1/2
    assert preference_losses.orpo_losses(half, third, 1.0).item() == pytest.approx(
        -F.logsigmoid(torch.tensor(2.0).log())
    )
    ratios, desirable = torch.tensor([2.0, 2.0]), torch.tensor([True, False])
    found = preference_losses.kto_losses(ratios, desirable, torch.tensor(2.0), 0.1, (1.0, 3.0))
    assert found.tolist() == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize("value", [-1e-7, -0.3, -0.6931, -0.6932, -60.0])
def test_gradients_of_odds_are_finite_at_every_probability(value: float) -> None:
    chosen = torch.tensor([value], requires_grad=True)
    preference_losses.orpo_losses(chosen, torch.tensor([-1.0]), 0.1).sum().backward()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()


class Adapted(nn.Module):
    """A projection with something beside it, as LoRA has."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection, self.beside = projection, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden) + self.beside(hidden)


@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["plain", "bias", "adapted", "gathered"])
def test_log_probs_in_chunks_are_those_of_all_logits(kind: str, softcap: float | None, chunk: int | None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=kind == "bias")
    module = Adapted(linear) if kind == "adapted" else linear
    if kind == "gathered":
        linear.register_forward_pre_hook(lambda module, args: None)
    head = VocabularyHead(module, softcap=softcap)
    assert head.fuses == (kind in ("plain", "bias"))
    hidden = (3 * torch.randn(TOKENS, WIDTH)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    weights = torch.randn(TOKENS)
    leaves = [hidden, *module.parameters()]
    expected = -F.cross_entropy(head.logits(hidden), targets, ignore_index=IGNORE_INDEX, reduction="none")
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    found = token_log_probs(head, hidden, targets, chunk)
    torch.testing.assert_close(found, expected)
    assert (found[::4] == 0).all()
    for one, other in zip(torch.autograd.grad((found * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_chunk_of_logits_is_the_most_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = vocabulary_loss.losses_and_slope

    def counted(logits: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(logits))
        return original(logits, *rest, **options)

    monkeypatch.setattr(vocabulary_loss, "losses_and_slope", counted)
    head, hidden = VocabularyHead(nn.Linear(WIDTH, VOCABULARY)), torch.randn(TOKENS, WIDTH, requires_grad=True)
    token_log_probs(head, hidden, torch.zeros(TOKENS, dtype=torch.long), chunk=10).sum().backward()
    assert seen == [10, 10, 3] * 2  # forward, and again in backward

"""Z-loss, label smoothing and soft-capping are their formulas, in each kernel, on one rank and on two."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.token_loss import TokenLoss
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.installation import install_vocabulary
from dlo_plugins.parallel.tensor.tp_plan import local_range
from dlo_tasks.language import vocabulary_loss
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, SoftcappedLogits, complete_ids
from dlo_tasks.language.preference_lm import PreferenceLM
from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import summed_loss, token_losses_and_hits
from support.token_batches import FAMILIES, Tokens

WIDTH, VOCABULARY, TOKENS = 16, 50, 23
TERMS = [TokenLoss(z_loss=0.03), TokenLoss(label_smoothing=0.2), TokenLoss(0.03, 0.2), TokenLoss()]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the compiled kernel's Python without torch.compile; a slow test compiles it (test_llm_loss.py)."""
    monkeypatch.setattr(vocabulary_loss, "_compiled", lambda function: function)


def make(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    projection = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = (3 * torch.randn(TOKENS, WIDTH, dtype=dtype)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    return projection, hidden, targets


def gathered(projection: nn.Linear) -> None:
    """Makes a projection look like one of DeepSpeed's stage 3, which gathers in hooks."""
    projection.register_forward_pre_hook(lambda module, args: None)
    for number, parameter in enumerate(projection.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]


def by_definition(
    projection: nn.Module, hidden: Tensor, targets: Tensor, terms: TokenLoss, softcap: float | None, scale: float = 1.0
) -> Tensor:
    """The sum over tokens, from probabilities as written in the papers."""
    logits = scale * projection(hidden[targets != IGNORE_INDEX])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    smooth = torch.full_like(logits, terms.label_smoothing / VOCABULARY)
    wanted = smooth + (1 - terms.label_smoothing) * F.one_hot(targets[targets != IGNORE_INDEX], VOCABULARY).double()
    total = logits.exp().sum(dim=1)
    return -(wanted * (logits.exp() / total[:, None]).log()).sum() + terms.z_loss * total.log().square().sum()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("kernel", ["columns", "rows", "compiled", "gathered", "gathered, compiled", "scaled"])
def test_a_kernel_is_the_formula_in_float64(kernel: Any, terms: TokenLoss, softcap: float | None) -> None:
    projection, hidden, targets = make()
    head = VocabularyHead(projection, 0.5 if kernel == "scaled" else 1.0, softcap)
    expected = by_definition(projection, hidden, targets, terms, softcap, head.scale)
    wanted = torch.autograd.grad(3 * expected, [hidden, *projection.parameters()])
    chosen = kernel.split(", ")[-1] if kernel not in ("gathered", "scaled") else None
    if kernel.startswith("gathered"):
        gathered(projection)
    count = int((targets != IGNORE_INDEX).sum())
    for chunk, counted in ((1, None), (5, None), (100, None), (None, count)):
        found = summed_loss(head, hidden, targets, chunk, counted, kernel=chosen, terms=terms)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        got = torch.autograd.grad(3 * found, [hidden, *projection.parameters()])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kernel", ["columns", "rows", "compiled"])
def test_half_precision_logits_have_the_terms_in_single_precision(kernel: Any) -> None:
    projection, hidden, targets = make(dtype=torch.bfloat16)
    terms = TokenLoss(0.03, 0.2)
    exact = [tensor.detach().double() for tensor in (hidden, projection.weight, projection.bias)]
    logits = (exact[0] @ exact[1].t() + exact[2]).bfloat16().double()  # as the product rounds them
    shares = by_definition(nn.Identity(), logits, targets, terms, None)
    found = summed_loss(VocabularyHead(projection), hidden, targets, 5, kernel=kernel, terms=terms)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(shares.item(), rel=2e-3)


def split(whole: nn.Linear, communicator: Communicator) -> nn.Linear:
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    part = nn.Linear(WIDTH, count, dtype=torch.float64)
    part.load_state_dict({name: tensor[first : first + count] for name, tensor in whole.state_dict().items()})
    install_vocabulary(part, VOCABULARY, communicator)
    return part


def _split(rank: int, world_size: int) -> None:
    communicator = Communicator()
    vocabulary_loss._compiled = lambda function: function
    for terms in TERMS:
        for softcap, scale, hooked, kernel in (
            (None, 1.0, False, "columns"),
            (2.0, 1.0, False, "columns"),
            (2.0, 1.0, False, "rows"),
            (2.0, 1.0, False, "compiled"),
            (None, 1.0, True, "compiled"),
            (2.0, 0.5, False, None),
            (None, 1.0, True, None),
        ):
            whole, hidden, targets = make()
            first, count = local_range(VOCABULARY, world_size, rank)
            part = split(whole, communicator)
            if hooked:
                gathered(part)
            expected = by_definition(whole, hidden, targets, terms, softcap, scale)
            wanted = torch.autograd.grad(3 * expected, [hidden, *whole.parameters()])
            given = hidden.detach().clone().requires_grad_()
            head = VocabularyHead(part, scale, softcap)
            found = summed_loss(head, given, targets, 5, kernel=kernel, terms=terms)  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            got = torch.autograd.grad(3 * found, [given, *part.parameters()])
            torch.testing.assert_close(got[0], wanted[0], rtol=1e-11, atol=1e-12)
            for one, other in zip(got[1:], wanted[1:], strict=True):
                torch.testing.assert_close(one, other[first : first + count], rtol=1e-11, atol=1e-12)
    _measures(communicator)
    _whole_logits(communicator)
    _volume(communicator)


def _measures(communicator: Communicator) -> None:
    whole, hidden, targets = make()
    with torch.no_grad():  # Some targets are hit, on each rank.
        hidden[1::2] = 5 * whole.weight[targets[1::2].clamp(min=0)]
    expected = token_losses_and_hits(VocabularyHead(whole), hidden, targets)
    found = token_losses_and_hits(VocabularyHead(split(whole, communicator)), hidden, targets)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert 5 < int(found[1].sum()) < TOKENS


def _whole_logits(communicator: Communicator) -> None:
    """Called as any other module, as generation does, the head makes all logits; and gradients pass through them."""
    whole, hidden, targets = make()
    part = split(whole, communicator)
    first, count = local_range(VOCABULARY, communicator.size, communicator.rank)
    inputs = [hidden.view(1, TOKENS, WIDTH).clone().requires_grad_() for _ in range(2)]
    expected, found = whole(inputs[0]), part(inputs[1])
    torch.testing.assert_close(found, expected)
    wanted, got = (
        torch.autograd.grad(
            F.cross_entropy(logits[0], targets, ignore_index=IGNORE_INDEX), [given, *module.parameters()]
        )
        for module, logits, given in zip((whole, part), (expected, found), inputs, strict=True)
    )
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1][first : first + count])


def _volume(communicator: Communicator) -> None:
    """Whatever the chunks, the hidden states' gradient passes once, and no rank gathers logits."""
    whole, hidden, targets = make()
    for scale in (1.0, 0.5):
        with communicator.counted() as passed:
            given = hidden.clone().requires_grad_()
            summed_loss(VocabularyHead(split(whole, communicator), scale), given, targets, 5).backward()
        assert passed == {"all_reduce": TOKENS * WIDTH}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_vocabulary_that_ranks_share_has_the_formula_in_float64(ranks: int) -> None:
    """Three ranks do not divide it."""
    run_distributed(_split, ranks)


def build(family: str = "llama", **options: Any) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "z_loss": 1e-2, "label_smoothing": 0.1}
    return CausalLM(config=config, **more, **options), Tokens(1)


def test_training_is_that_of_one_process_under_tp_and_pp() -> None:
    """The composition of options and strategies has the others."""
    cases = [
        Case(partial(MeshStrategy, dp_shard=1, **{axis: 2}), {"logit_softcap": 3.0}, {"precision": "64-true"}, axis)
        for axis in ("tp", "pp")
    ]
    assert_parity(build, cases, steps=3, rtol=1e-7)  # A pipeline reports losses in single precision.


def test_metrics_are_of_the_cross_entropy_alone_and_of_the_bounded_logits() -> None:
    task, _ = build(logit_softcap=2.0)
    task.configure_model()
    batch = {
        "input_ids": torch.arange(8)[None],
        "labels": torch.arange(1, 9)[None],
        "position_ids": torch.arange(8)[None],
    }
    hidden = 30 * task(**task.inputs(batch)[1])
    assert task.head.softcap == 2.0
    losses, _ = token_losses_and_hits(task.head, hidden.flatten(0, 1), batch["labels"].flatten())
    logits = 2 * torch.tanh(task.head.module(hidden) / 2)
    torch.testing.assert_close(losses, F.cross_entropy(logits[0], batch["labels"][0], reduction="none"))
    smoothed = F.cross_entropy(logits[0], batch["labels"][0], label_smoothing=0.1)
    expected = smoothed + 1e-2 * torch.logsumexp(logits[0], dim=1).square().mean()
    torch.testing.assert_close(task.loss(hidden, batch), expected)


def test_generation_samples_from_the_bounded_logits() -> None:
    scores = torch.tensor([[0.0, 100.0]])
    assert SoftcappedLogits(2.0)(torch.zeros(1, 1), scores).tolist() == [[0.0, 2.0]]
    task, _ = build(logit_softcap=0.01)  # nearly uniform
    task.configure_model()
    with torch.no_grad():
        task.model.lm_head.weight.mul_(1000)  # type: ignore[union-attr, operator]
    written = {}
    for softcap in (0.01, None):
        ids = torch.arange(4)[None]
        written[softcap] = complete_ids(
            task.model,
            ids,
            torch.ones_like(ids),
            Sampling(40, 1.0),
            None,
            False,
            softcap=softcap,  # type: ignore[arg-type]
        )
    assert len(written[0.01].unique()) > len(written[None].unique())


LIGER = """
import torch
from torch import nn
from dlo_framework.token_loss import TokenLoss
from dlo_tasks.language import vocabulary_loss
from dlo_tasks.language.vocabulary_head import VocabularyHead
torch.manual_seed(0)
linear, hidden = nn.Linear(16, 50), (3 * torch.randn(23, 16)).requires_grad_()
targets = torch.randint(50, (23,))
targets[::4] = -100
for terms in (TokenLoss(), TokenLoss(z_loss=0.03), TokenLoss(label_smoothing=0.2), TokenLoss(0.03, 0.2)):
    plain = VocabularyHead(linear).losses(hidden, targets, terms)
    found = vocabulary_loss._by_liger(linear, hidden, targets, None, terms)
    torch.testing.assert_close(found, plain)
    inputs = [hidden, *linear.parameters()]
    wanted, got = torch.autograd.grad(3 * plain, inputs), torch.autograd.grad(3 * found, inputs)
    torch.testing.assert_close(got, wanted)
print("alike")
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_ligers_terms_are_ours_in_tritons_interpreter() -> None:
    """The interpreter lacks tanh: soft-capping of Liger is compared on a GPU (tests/gpu)."""
    found = subprocess.run(
        [sys.executable, "-c", LIGER], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert found.stdout.strip().endswith("alike"), found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z_loss": -1e-4}, "z_loss must be at least 0, got -0.0001; PaLM uses 1e-4"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"logit_softcap": 0.0}, "logit_softcap must be above 0, got 0.0"),
        (
            {"logit_softcap": 5.0, "config": {"model_type": "gemma2", "final_logit_softcapping": 30.0}},
            "whose config has one, got 5.0 and 30.0 of gemma2; set it under config: {final_logit_softcapping: 5.0}",
        ),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError) as raised:
        CausalLM(**{"config": {"model_type": "llama"}, **options})
    assert message in str(raised.value)


@pytest.mark.parametrize("option", ["z_loss", "label_smoothing"])
def test_preferences_have_no_terms(option: str) -> None:
    with pytest.raises(DloError, match=f"{option} must be 0 for PreferenceLM, got 0.1"):
        PreferenceLM(config={"model_type": "llama"}, **{option: 0.1})

"""Routers, their losses, biases and capacities, against the papers' formulas computed token by token."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.auxiliary_loss import follow_gradient, in_micro_batch, set_scale
from dlo_framework.models.experts.balance import (
    check_routers,
    describe_balance,
    find_routers,
    limit_capacity,
    sum_loads,
    watch_loads,
    watch_losses,
)
from dlo_framework.models.experts.layer import Experts, MixtureLayer
from dlo_framework.models.experts.mixture_options import MixtureOptions, read_options
from dlo_framework.models.experts.routers import (
    Router,
    choose_tokens,
    expert_scores,
    is_within_capacity,
    load_balancing_loss,
    moved_bias,
    router_z_loss,
)
from support.causal_types import TYPES, tiny


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


# --- losses and loads of routers: gradients against autograd's own, sums against counts by hand ----------------------


CPU = torch.device("cpu")


def layer_of(**options: Any) -> MixtureLayer:
    torch.manual_seed(0)
    made = MixtureOptions(**{"count": 4, "aux_loss": 0.5, "z_loss": 0.1, **options})
    layer = MixtureLayer(8, Experts(4, 8, 6, torch.relu), made)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def explicit_loss(layer: MixtureLayer, x: torch.Tensor) -> torch.Tensor:
    logits, _, indices = layer.gate(x)
    counts = torch.stack([(indices == expert).sum() for expert in range(4)]).float()
    balance = load_balancing_loss(expert_scores(logits, layer.gate.kind), counts)
    return layer(x).square().mean() + 0.5 * balance + 0.1 * router_z_loss(logits)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_attached_losses_have_the_gradients_of_added_ones_at_any_scale(scale: float, recomputed: bool) -> None:
    layer, x = layer_of(capacity_factor=1.0), torch.randn(2, 9, 8)
    (explicit_loss(layer, x) * scale).backward()
    expected = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}  # type: ignore[union-attr]
    layer.zero_grad()
    _, handles = watch_losses(layer, MixtureOptions(aux_loss=0.5, z_loss=0.1), None)
    output = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    (follow_gradient(output.square().mean()) * scale).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    layer(x).square().mean().backward()
    assert not torch.allclose(layer.gate.weight.grad, expected["gate.weight"] / scale)  # type: ignore[arg-type]


def gate_gradient_with_counts_so_far(layer: MixtureLayer, parts: list[torch.Tensor]) -> torch.Tensor:
    """Gradient of the router's weight, whose fractions are those of the micro-batches so far."""
    layer.zero_grad()
    total = torch.zeros(4)
    for x in parts:
        logits, _, indices = layer.gate(x)
        total = total + torch.stack([(indices == expert).sum() for expert in range(4)])
        balance = load_balancing_loss(expert_scores(logits, layer.gate.kind), total)
        (layer(x).square().mean() + 0.5 * balance).backward()
    assert layer.gate.weight.grad is not None
    return layer.gate.weight.grad.clone()


@pytest.mark.parametrize("recomputed", [False, True])
def test_fractions_are_of_the_micro_batches_of_the_step_so_far(recomputed: bool) -> None:
    layer, parts = layer_of(), [torch.randn(2, 9, 8, requires_grad=True) for _ in range(3)]
    expected = gate_gradient_with_counts_so_far(layer, parts)
    layer.zero_grad()
    set_scale(1.0)
    loads, handles = watch_losses(layer, MixtureOptions(aux_loss=0.5), None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)  # type: ignore[return-value]

    for _ in range(2):  # The second step begins with new counts.
        for x in parts:
            forward(x).square().mean().backward()
        torch.testing.assert_close(layer.gate.weight.grad, expected)
        layer.zero_grad()
        for load in loads:
            load.step.end_step()
    # A schedule runs all forwards before the first backward; each recomputation has the counts of its own forward.
    outputs = []
    for number, x in enumerate(parts):
        with in_micro_batch(number):
            outputs.append(forward(x))
    for load in loads:
        load.step.end_step()
    for number, output in enumerate(outputs):
        with in_micro_batch(number):
            output.square().mean().backward()
    torch.testing.assert_close(layer.gate.weight.grad, expected)
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    one_by_one = sum(gate_gradient_with_counts_so_far(layer, [x]) for x in parts)
    assert not torch.allclose(one_by_one, expected)  # type: ignore[arg-type]


def test_a_forward_that_is_marked_as_repeated_counts_no_token_again() -> None:
    layer, x = layer_of(), torch.randn(2, 9, 8, requires_grad=True)
    loads, _ = watch_losses(layer, MixtureOptions(aux_loss=0.5, bias_rate=0.1), None)
    gradients = []
    for recomputes in (False, True):
        layer.zero_grad()
        with in_micro_batch("one", recomputes):
            layer(x).square().mean().backward()
        gradients.append(layer.gate.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert sum_loads(loads, None, CPU)[0][:4].sum() == 36


@pytest.mark.parametrize("recomputed", [False, True])
def test_loads_are_counted_once(recomputed: bool) -> None:
    layer, x = layer_of(capacity_factor=0.5), torch.randn(2, 9, 8, requires_grad=True)
    loads, _ = watch_loads(layer)
    for _ in range(2):
        output = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        output.sum().backward()
    logits, _, indices = layer.gate(x.detach())
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    (sums,) = sum_loads(loads, None, CPU)
    counts = torch.stack([(indices == expert).sum() for expert in range(4)]).double()
    # The call of the router alone was in training too.
    torch.testing.assert_close(sums[:4], 3 * counts)
    found = describe_balance(sums)
    assert found is not None
    torch.testing.assert_close(found.load, counts / counts.sum())
    assert found.dropped == pytest.approx(float((indices == 4).double().mean()))
    assert found.dropped > 0
    share = logits.softmax(1)
    entropy = -(share * share.log()).sum(1).mean() / torch.tensor(4.0).log()
    assert found.entropy == pytest.approx(float(entropy.detach()), rel=1e-5)
    assert found.peak == pytest.approx(float(counts.max() / counts.mean()))
    assert found.variation == pytest.approx(float(counts.std(correction=0) / counts.mean()))
    assert describe_balance(sum_loads(loads, None, CPU)[0]) is None


def test_a_model_without_routers_or_without_biases_is_refused() -> None:
    with pytest.raises(DloError, match="must have a mixture of experts, got Linear"):
        check_routers(nn.Linear(2, 2), MixtureOptions())
    with pytest.raises(DloError, match="bias_rate must be 0 for routers without e_score_correction_bias"):
        check_routers(layer_of(), MixtureOptions(bias_rate=0.1))
    assert list(find_routers(nn.ModuleDict({"a": layer_of(bias_rate=0.1)}))) == ["a.gate"]


# --- capacities of transformers' routers: dropped choices by a count by hand, and the results without them -----------


ROWS, LENGTH, FACTOR = 2, 12, 0.75


def build(family: str, implementation: str | None = None) -> Any:
    torch.manual_seed(0)
    config = tiny(family, dropout=False)
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    more = {} if implementation is None else {"experts_implementation": implementation}
    return AutoModelForCausalLM.from_config(settings, **more).train()


def kept_by_hand(indices: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Which choices find a place: a row's first choices before its second ones, each in the order of the tokens."""
    kept = torch.zeros_like(indices, dtype=torch.bool)
    capacity = math.ceil(FACTOR * LENGTH * indices.shape[1] / experts)
    for row in range(ROWS):
        places = [0] * experts
        for choice in range(indices.shape[1]):
            for token in range(row * LENGTH, (row + 1) * LENGTH):
                at = int(weights[token].sort(descending=True, stable=True).indices[choice])
                expert = int(indices[token, at])
                kept[token, at] = places[expert] < capacity
                places[expert] += 1
    return kept


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_choices_beyond_the_capacity_of_a_row_add_nothing(family: str, implementation: str) -> None:
    model = build(family, implementation)
    mixture = find_mixtures(model)[-1]
    plain, limited = copy.deepcopy(model), model
    limit_capacity(limited, FACTOR)
    holder, twin = (found.get_submodule(mixture.name) for found in (limited, plain))
    assert mixture.router is not None
    router = mixture.router.removeprefix(f"{mixture.name}.")
    x = torch.randn(ROWS, LENGTH, 32)
    _, weights, indices = twin.get_submodule(router)(x.view(-1, 32))
    kept = kept_by_hand(indices, weights, 4)
    assert 0 < kept.sum() < kept.numel()

    def without_dropped(module: Any, args: Any, output: Any) -> Any:
        return (output[0], output[1] * kept, *output[2:])

    twin.get_submodule(router).register_forward_hook(without_dropped)
    loads, _ = watch_loads(limited)
    found, expected = (module(x) for module in (holder, twin))
    found, expected = (output[0] if isinstance(output, tuple) else output for output in (found, expected))
    torch.testing.assert_close(found, expected)
    for output in (found, expected):
        output.square().sum().backward()
    for one, other in zip(holder.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    balance = describe_balance(sum_loads(loads, None, torch.device("cpu"))[-1])
    assert balance is not None
    assert balance.dropped == pytest.approx(1 - float(kept.double().mean()))
    twin.get_submodule(router)._forward_hooks.clear()
    for output, other in zip(holder.eval()(x), twin.eval()(x), strict=True):  # Nothing is dropped in evaluation.
        torch.testing.assert_close(output, other)


def test_a_mixture_in_a_form_of_its_own_is_refused() -> None:
    for family in ("llama4_text", "jetmoe"):
        with pytest.raises(
            DloError, match=r"experts.capacity_factor must be unset for mixtures other than .* got 0.75"
        ):
            limit_capacity(build(family), FACTOR)
    model = build("mixtral")
    limit_capacity(model, FACTOR)
    with pytest.raises(DloError, match=r"not called with hidden states \[rows, tokens, features\], got \[4, 32\]"):
        model.get_submodule(find_mixtures(model)[0].name)(torch.randn(4, 32))


@pytest.mark.slow
def test_every_family_with_mixtures_drops_choices_or_is_refused() -> None:
    torch.manual_seed(0)
    refused, dropped = set(), set()
    for family in TYPES:
        config = tiny(family)
        settings = AutoConfig.for_model(config.pop("model_type"), **config)
        with torch.device("meta"):
            mixtures = find_mixtures(AutoModelForCausalLM.from_config(settings))
        if not mixtures:
            continue
        model = AutoModelForCausalLM.from_config(settings).train()
        try:
            limit_capacity(model, FACTOR)
            loads, _ = watch_loads(model)
            loss = model(input_ids=torch.randint(3, 60, (ROWS, LENGTH)), use_cache=False).logits.float().sum()
        except DloError:
            refused.add(family)
            continue
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None), family
        found = [describe_balance(sums) for sums in sum_loads(loads, None, torch.device("cpu"))]
        assert any(balance is not None and balance.dropped > 0 for balance in found), family
        dropped.add(family)
    # Llama 4's experts get all tokens, and one choice of the router of ZAYA skips all of them.
    assert refused == {"llama4", "llama4_text", "zaya"}
    assert len(dropped) >= 50

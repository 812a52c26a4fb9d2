"""Routers, their losses, biases and capacities, against the papers' formulas, token by token; the mixture layer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
from dlo_framework.models.experts.layer import DenseMLP, Experts, MixtureLayer, grouped_linear, mixture_of
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
from dlo_framework.plan import ParallelPlan
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
    settings = AutoConfig.for_model(**tiny(family, dropout=False))
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
        settings = AutoConfig.for_model(**tiny(family))
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


# --- the mixture layer and its grouped product against plain loops, and mixtures that are found in models -----------


def experts_of(gated: bool, bias: bool = True, count: int = 4) -> Experts:
    found = Experts(count, 8, 6, F.silu, gated=gated, bias=bias).double()
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return found


def compute_alone(experts: Experts, number: int, x: Tensor) -> Tensor:
    tensors = dict(experts.named_parameters())
    first = experts.first_name
    hidden = F.linear(x, tensors[first][number], tensors[f"{first}_bias"][number])
    if experts.gated:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.silu(hidden)
    return F.linear(hidden, tensors["down_proj"][number], tensors["down_proj_bias"][number])


@pytest.mark.parametrize("gated", [False, True])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(gated: bool) -> None:
    experts = experts_of(gated)
    x = torch.randn(10, 8, dtype=torch.double, requires_grad=True)
    weights = torch.rand(10, 2, dtype=torch.double, requires_grad=True)
    index = torch.randint(0, 5, (10, 2))  # 4 is no expert.
    index[index == 2] = 3  # An expert without tokens.
    rows = []
    for token in range(10):
        row = torch.zeros(8, dtype=torch.double)
        for choice in range(2):
            if index[token, choice] < 4:
                row = row + weights[token, choice] * compute_alone(experts, int(index[token, choice]), x[token])
        rows.append(row)
    expected, found = torch.stack(rows), experts(x, index, weights)
    torch.testing.assert_close(found, expected)
    inputs = [x, weights, *experts.parameters()]
    pull = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_rows_after_the_last_expert_give_zero() -> None:
    rows, weight = torch.randn(7, 3, requires_grad=True), torch.randn(2, 4, 3)
    found = grouped_linear(rows, weight, torch.tensor([2, 3]))
    assert (found[5:] == 0).all()
    assert (found[:5] != 0).any()
    found.sum().backward()
    assert rows.grad is not None
    assert (rows.grad[5:] == 0).all()


def test_the_product_is_one_operator_for_compile_and_fake_tensors() -> None:
    rows, weight, counts = torch.randn(5, 8), torch.randn(2, 8, 8), torch.tensor([2, 3])
    arguments = (rows.requires_grad_(), weight.requires_grad_(), counts, torch.randn(2, 8, requires_grad=True))
    torch.library.opcheck(torch.ops.dlo.grouped_linear.default, arguments)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, counts).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 8 * 8


def test_autocast_multiplies_in_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_linear(torch.randn(5, 8), torch.randn(2, 8, 8), torch.tensor([2, 3]))
    assert found.dtype == torch.bfloat16


def mlp_of(gated: bool) -> tuple[nn.Module, DenseMLP]:
    up, down, gate = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
    dense = DenseMLP(up, down, F.silu, gate if gated else None)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.gate = up, down, gate

        def forward(self, x: Tensor) -> Tensor:
            return down(F.silu(gate(x)) * up(x) if gated else F.silu(up(x)))

    return Plain(), dense


@pytest.mark.parametrize("options", [{}, {"router": "sigmoid"}, {"shared": True, "aux_loss": 0.0}])
@pytest.mark.parametrize("gated", [False, True])
def test_an_upcycled_mixture_computes_what_the_mlp_does(gated: bool, options: dict[str, Any]) -> None:
    mlp, dense = mlp_of(gated)
    layer = mixture_of(mlp, dense, MixtureOptions(count=4, top_k=2, **options))
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer(x), mlp(x))
    before = layer.experts.down_proj.clone()
    layer(x).square().sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert (layer.experts.down_proj.grad != 0).any()
    assert torch.equal(before, layer.experts.down_proj)


def test_expert_choice_adds_each_experts_tokens() -> None:
    torch.manual_seed(0)
    experts = experts_of(gated=False)
    layer = MixtureLayer(8, experts, MixtureOptions(count=4, top_k=2, router="expert_choice")).double()
    nn.init.normal_(layer.gate.weight)
    x = torch.randn(2, 6, 8, dtype=torch.double, requires_grad=True)
    _, weights, tokens = layer.gate(x)
    expected = torch.zeros(12, 8, dtype=torch.double)
    for expert in range(4):
        for weight, token in zip(weights[expert], tokens[expert].tolist(), strict=True):
            expected[token] += weight * compute_alone(experts, expert, x.view(12, 8)[token])
    found = layer(x)
    torch.testing.assert_close(found, expected.view(2, 6, 8))
    wanted = [x, *layer.parameters()]
    alone = torch.autograd.grad(expected.square().sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), wanted), alone)


def test_a_layer_without_its_weights_has_a_text_form() -> None:
    """DeepSpeed prints models whose partitioned parameters are empty."""
    layer = MixtureLayer(8, experts_of(gated=True), MixtureOptions(count=4))
    before = repr(layer)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0)
    assert repr(layer) == before
    assert "8 -> 6 -> 8" in before


class Stacked(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(count, 4, 4))
        self.bias = nn.Parameter(torch.zeros(count, 4))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return tokens


class Dense(Stacked):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tokens


class Gate(nn.Linear):
    def __init__(self, count: int, top_k: int) -> None:
        super().__init__(4, count, bias=False)
        self.top_k = top_k


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module, count: int, router: str = "gate") -> None:
        super().__init__()
        self.add_module(router, Gate(count, 2))
        self.experts = experts
        self.shared_expert = nn.Linear(4, 4)
        self.shared_expert_gate = nn.Linear(4, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mlps = [
            nn.Linear(4, 4),
            Mixture(Stacked(6), 6),
            Mixture(Dense(4), 4, "router"),
            Mixture(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 3, "scores"),
        ]
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for mlp in mlps)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))  # Without a router: a list of other modules.


def test_three_forms_are_found() -> None:
    stacked, dense, listed = find_mixtures(Net())
    assert (stacked.name, stacked.router, stacked.experts) == (
        "layers.1.mlp",
        "layers.1.mlp.gate",
        "layers.1.mlp.experts",
    )
    assert (stacked.form, stacked.count, stacked.top_k) == ("routed", 6, 2)
    assert stacked.stacked == {
        "layers.1.mlp.experts.gate_up_proj": 0,
        "layers.1.mlp.experts.down_proj": 0,
        "layers.1.mlp.experts.bias": 0,
    }
    assert stacked.shared == ("layers.1.mlp.shared_expert",)
    assert stacked.active_fraction() == pytest.approx(1 / 3)
    assert (dense.form, dense.count, dense.router) == ("dense", 4, "layers.2.mlp.router")
    assert (listed.form, listed.count, listed.router, listed.is_stacked) == ("list", 3, "layers.3.mlp.scores", False)


def test_patterns_choose_mixtures_and_skip_dense_layers_between() -> None:
    net = Net()
    assert len(find_mixtures(net, ParallelPlan(experts=("layers.*.mlp",)))) == 3
    assert [m.name for m in find_mixtures(net, ParallelPlan(experts="layers.2.mlp"))] == ["layers.2.mlp"]  # type: ignore[arg-type]
    with pytest.raises(DloError, match=r"experts must match modules with a router and experts, got 'layers\.0\.mlp'"):
        find_mixtures(net, ParallelPlan(experts=("layers.0.mlp",)))


def test_a_plan_checks_its_patterns() -> None:
    plan = ParallelPlan(stem=("layers", "experts"), experts=("layers.*.mlps",))
    with pytest.raises(DloError, match=r"experts pattern 'layers\.\*\.mlps' matches nothing"):
        plan.validate(Net())


def test_a_model_without_experts_has_no_mixture() -> None:
    assert find_mixtures(nn.TransformerEncoderLayer(4, 2)) == []

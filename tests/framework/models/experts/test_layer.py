"""The mixture layer and its grouped product against plain loops, and mixtures that are found in models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.layer import DenseMLP, Experts, MixtureLayer, grouped_linear, mixture_of
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.plan import ParallelPlan


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


class Router(nn.Linear):
    def __init__(self, count: int, top_k: int) -> None:
        super().__init__(4, count, bias=False)
        self.top_k = top_k


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module, count: int, router: str = "gate") -> None:
        super().__init__()
        self.add_module(router, Router(count, 2))
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

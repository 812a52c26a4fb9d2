import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.plan import ParallelPlan


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

"""Experts of which each tp rank has a slice have the outputs and gradients of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.models.experts.layer import Experts
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.tensor.expert_slices import divide_stacked_experts, install_slices
from dlo_plugins.parallel.tensor.installation import shard_parameters
from dlo_plugins.parallel.tensor.tp_plan import TPPlan
from support.on_ranks import on_ranks

COUNT, WIDTH, HIDDEN, TOKENS, TOP_K = 4, 6, 8, 10, 2
GPT_OSS = {"num_local_experts": COUNT, "hidden_size": WIDTH, "intermediate_size": HIDDEN}


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.gate.top_k = TOP_K  # type: ignore[assignment]
        self.experts = experts


def make(kind: str, hidden: int = HIDDEN) -> nn.ModuleDict:
    """A mixture whose last projection has a bias, with weights from one seed."""
    if kind == "gpt_oss":  # Transposed, with gates and values in turn.
        experts: nn.Module = GptOssExperts(GptOssConfig(**{**GPT_OSS, "intermediate_size": hidden}))
    else:
        experts = Experts(COUNT, WIDTH, hidden, F.silu, gated=kind == "gated", bias=True)
    draw = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.double)
    return nn.ModuleDict({"mlp": Mixture(experts)})


def run(experts: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.double).requires_grad_()
    index = torch.stack([torch.randperm(COUNT, generator=draw)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, generator=draw, dtype=torch.double).requires_grad_()
    out = experts(tokens, index, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in experts.named_parameters()}  # type: ignore[return-value]


@on_ranks(2)
def test_sliced_experts_have_the_outputs_and_gradients_of_one_process(rank: int, world_size: int) -> None:
    ranks = Communicator(dist.group.WORLD)
    for kind in ("gpt_oss", "gated", "plain"):
        alone = run(make(kind).mlp.experts)  # type: ignore[union-attr]
        model, plan = make(kind), TPPlan()
        divide_stacked_experts(plan, model, ParallelPlan())
        shard_parameters(model, plan, ranks)
        experts: Any = model.mlp.experts  # type: ignore[union-attr]
        install_slices(experts, ranks)
        mine = run(experts)
        assert plan.partial == {"mlp.experts.down_proj_bias"}
        for name, division in plan.divisions.items():
            key = name.removeprefix("mlp.experts.")
            assert mine[key].shape[division.dim] * world_size == alone[key].shape[division.dim]
            alone[key] = division.slice_for(world_size, rank).slice_tensor(alone[key])
        mine["down_proj_bias"] = ranks.all_reduce(mine["down_proj_bias"])
        torch.testing.assert_close(mine, alone)


class Other(Experts):
    """Experts with a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__(COUNT, WIDTH, HIDDEN, F.silu)
        self.scale = nn.Parameter(torch.ones(COUNT, WIDTH))


def test_experts_that_cannot_be_divided_are_refused() -> None:
    dropping = Experts(COUNT, WIDTH, HIDDEN, F.silu, dropout=(0.1, 0.0))
    for experts, message in (
        (Other(), r"must be stacked in .* and down_proj, or have tensor rules, got Other 'mlp.exp"),
        (dropping, r"must have no dropout, got Experts 'mlp.experts'"),
    ):
        with pytest.raises(DloError, match=message):
            divide_stacked_experts(TPPlan(), nn.ModuleDict({"mlp": Mixture(experts)}), ParallelPlan())
    plan = TPPlan()
    divide_stacked_experts(plan, make("plain", hidden=WIDTH), ParallelPlan())  # Square: the class decides.
    assert plan.divisions["mlp.experts.up_proj"].dim == 1

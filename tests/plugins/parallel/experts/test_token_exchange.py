"""Tokens that travel to the ranks with their experts have the outputs and gradients of one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.models.experts import find_mixtures
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.experts.expert_parallel import DividedExperts, divide_experts

EXPERTS, TOP_K, WIDTH, TOKENS = 4, 2, 6, 10


class Experts(nn.Module):
    """Experts with a bias, in the form of transformers."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=draw, dtype=torch.double))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=draw, dtype=torch.double))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, choice = torch.where(index == expert)
            made = torch.tanh(tokens[rows] @ self.up[expert] + self.bias[expert]) * weights[rows, choice, None]
            out = out.index_add(0, rows, made)
        return out


class DenseExperts(Experts):
    """Experts in the form of Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(self.up.detach() + 1)
        del self.bias

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        by_expert = tokens.view(self.up.shape[0], -1, WIDTH)
        return torch.bmm(torch.tanh(torch.bmm(by_expert, self.up)), self.down).view(-1, WIDTH)


class MatrixExperts(Experts):
    """Experts in single precision, of two products, perhaps with a bias after them."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.float()
        self.down = nn.Parameter(self.up.detach() + 1)
        if not has_bias:
            del self.bias

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, choice = torch.where(index == expert)
            made = torch.tanh(tokens[rows] @ self.up[expert]) @ self.down[expert]
            made = (made + self.bias[expert] if hasattr(self, "bias") else made) * weights[rows, choice, None]
            out = out.index_add(0, rows, made.to(out.dtype))
        return out


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.double)
        self.gate.top_k = TOP_K  # type: ignore[assignment]
        self.experts = experts


def routed(only: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights of all ranks; one choice is of no expert, and all may be of the same experts."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randn(2 * TOKENS, WIDTH, generator=draw, dtype=torch.double)
    index = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(2 * TOKENS)])
    index = index if only is None else index % 2 + only
    index[3, 1] = EXPERTS
    return tokens, index, torch.rand(2 * TOKENS, TOP_K, generator=draw, dtype=torch.double)


def run(module: nn.Module, part: slice, only: int | None) -> dict[str, Tensor]:
    tokens, index, weights = (tensor[part] for tensor in routed(only))
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    if isinstance(module, DenseExperts):
        scores = torch.zeros(len(tokens), EXPERTS + 1, dtype=torch.double).scatter(1, index, weights)[:, :EXPERTS]
        out = module(tokens.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)).view(EXPERTS, -1, WIDTH).sum(0)
    else:
        out = module(tokens, index, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}  # type: ignore[return-value]


def both(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for kind, only in ((Experts, None), (Experts, 2), (DenseExperts, None), (DenseExperts, 2)):
        # The last experts alone: the first rank gets no token.
        whole = run(kind(), slice(None), only)
        model = nn.ModuleDict({"mlp": Mixture(kind())})
        (mixture,) = find_mixtures(model)
        ranks = divide_experts(model, mixture, dist.group.WORLD)
        experts: Any = model.mlp.experts  # type: ignore[union-attr]
        assert experts.num_experts == EXPERTS // world_size
        mine = run(experts, slice(rank * TOKENS, (rank + 1) * TOKENS), only)
        routed_away = int((routed(only)[1][rank * TOKENS : (rank + 1) * TOKENS] // 2 == 1 - rank).sum())
        found.append((whole, mine, ranks.sent, routed_away))
    return found


class Wide(DividedExperts):
    @staticmethod
    def sent_dtype(tokens: Tensor) -> torch.dtype:
        return tokens.dtype


def in_autocast(has_bias: bool, only: int, kind: type[DividedExperts], rank: int) -> tuple[dict[str, Tensor], int]:
    """Outputs and gradients under bf16 autocast, and bytes sent."""
    model = nn.ModuleDict({"mlp": Mixture(MatrixExperts(has_bias))})
    (mixture,) = find_mixtures(model)
    ranks = divide_experts(model, mixture, dist.group.WORLD)
    experts: Any = model.mlp.experts  # type: ignore[union-attr]
    forward = kind(experts, type(experts).forward.__get__(experts), ranks, mixture)
    tokens, index, weights = (tensor[rank * TOKENS : (rank + 1) * TOKENS] for tensor in routed(only))
    tokens, weights = tokens.float().requires_grad_(), weights.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = forward(tokens, index, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return found, ranks.sent_bytes  # type: ignore[return-value]


def narrow_and_wide(rank: int, world_size: int) -> list[tuple[bool, Any, Any]]:
    # The last experts alone: the first rank gets no token.
    return [
        (has_bias, in_autocast(has_bias, only, DividedExperts, rank), in_autocast(has_bias, only, Wide, rank))
        for has_bias in (False, True)
        for only in (1, 2)
    ]


def test_tokens_under_autocast_are_sent_in_half_the_bytes_with_the_same_values() -> None:
    for found in run_distributed(narrow_and_wide, 2):
        for has_bias, (narrow, few), (wide, many) in found:
            for name, value in wide.items():
                assert value.dtype == torch.float32
                assert torch.equal(narrow[name], value), name
            assert few == many * (0.75 if has_bias else 0.5)


def test_outputs_and_gradients_are_those_of_one_process() -> None:
    for rank, found in enumerate(run_distributed(both, 2)):
        for whole, mine, sent, routed_away in found:
            part = slice(rank * TOKENS, (rank + 1) * TOKENS)
            for name in ("out", "tokens", "weights"):
                torch.testing.assert_close(mine[name], whole[name][part])
            for name in {"up", "bias", "down"} & whole.keys():
                # A strategy averages over all ranks, and so halves the gradient of one process too.
                torch.testing.assert_close(mine[name], whole[name][rank * 2 : rank * 2 + 2] / 2)
            assert sent >= routed_away * WIDTH

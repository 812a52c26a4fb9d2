"""Routers of mixtures of experts: which experts compute a token, with which weights, and the losses of that choice.

- Outrageously Large Neural Networks. Shazeer et al., 2017, arXiv 1701.06538: top k of a softmax.
- Switch Transformers. Fedus et al., 2021, arXiv 2101.03961: the load-balancing loss, equations 4 to 6.
- ST-MoE. Zoph et al., 2022, arXiv 2202.08906: the z-loss, equation 5.
- Mixture-of-Experts with Expert Choice Routing. Zhou et al., 2022, arXiv 2202.09368.
- Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts. Wang et al., 2024, arXiv 2408.15664.

Departures: capacities and expert choice are within a row (an image, a sequence), not within the rank's batch, so that a
row's outputs do not depend on the other rows, on ranks or on micro-batches. The load-balancing loss is 1 for equal
loads for any k: its fractions are of the T k choices.

Shapes: G rows (groups) of N tokens, T = G N, E experts, D features, k choices of a token.
"""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.models.experts.mixture_options import MixtureOptions, RouterKind

#: Name of the loss-free bias, that of transformers' DeepSeek-V3 and of its checkpoints.
BIAS = "e_score_correction_bias"


class Routing(NamedTuple):
    """Choices of a router, in the order of transformers' routers.

    Attributes:
        logits: Logits, `[T, E]`, in at least single precision.
        weights: Weights, `[T, k]`; with expert choice `[E, G * capacity]`.
        indices: Experts, `[T, k]`, E where a choice is dropped; with expert choice the tokens, `[E, G * capacity]`.
    """

    logits: Tensor
    weights: Tensor
    indices: Tensor


def expert_scores(logits: Tensor, kind: RouterKind) -> Tensor:
    """Returns the scores of the experts, `[T, E]`: softmax, or independent sigmoids."""
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=-1)


def choose_experts(scores: Tensor, top_k: int, normalize: bool, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the weights and the indices of each token's top k experts, `[T, k]` each.

    Args:
        scores: Scores, `[T, E]`.
        top_k: Number of experts of a token.
        normalize: Whether weights are divided by their sum.
        bias: Bias of the choice, `[E]`, without influence on the weights.
    """
    indices = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, indices)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if normalize else weights), indices


def is_within_capacity(indices: Tensor, capacity: int) -> Tensor:
    """Returns which choices find a place at their expert, `[G, N, k]` booleans.

    All first choices of a row come before its second choices, each in the order of the tokens (GShard).

    Args:
        indices: Chosen experts, `[G, N, k]`.
        capacity: Number of places of an expert in a row.
    """
    rows, tokens, k = indices.shape
    queue = indices.mT.reshape(rows, k * tokens)
    in_order, order = queue.sort(dim=-1, stable=True)
    first = torch.searchsorted(in_order, in_order)  # Place of each expert's first choice.
    position = torch.arange(k * tokens, device=indices.device) - first
    kept = torch.empty_like(position, dtype=torch.bool).scatter_(-1, order, position < capacity)
    return kept.view(rows, k, tokens).mT


def choose_tokens(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the weights and the numbers of the tokens that each expert chooses, `[E, G * capacity]` each.

    Args:
        scores: Scores, `[G, N, E]`.
        top_k: Mean number of experts of a token; the capacity is `N * top_k / E`, rounded up, and at most N.
    """
    rows, tokens, experts = scores.shape
    capacity = min(tokens, math.ceil(tokens * top_k / experts))
    weights, chosen = scores.mT.topk(capacity, dim=-1)  # [G, E, capacity]
    chosen = chosen + tokens * torch.arange(rows, device=scores.device)[:, None, None]
    return weights.transpose(0, 1).flatten(1), chosen.transpose(0, 1).flatten(1)


def load_balancing_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """Returns `E * sum_i f_i P_i`, a scalar: 1 for equal loads.

    Args:
        scores: Scores, `[T, E]`; each token's are divided by their sum, and P is their mean.
        counts: Number of choices of each expert, `[E]`, whose fractions are f; of all ranks, where tokens are divided.
    """
    fractions = counts / counts.sum().clamp(min=1)
    shares = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(0)
    return scores.shape[-1] * (fractions.to(shares.dtype) * shares).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Returns the mean squared logarithm of the softmax's normaliser, a scalar."""
    return logits.logsumexp(-1).square().mean()


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Returns the loss-free bias after an optimizer step: `rate` more for experts below the mean load, less above."""
    load = counts.to(bias.dtype)
    return bias + rate * (load.mean() - load).sign()


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context without autocast; the meta device has none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


class Router(nn.Module):
    """Selects the experts of each token; its tensors have transformers' names.

    With `bias_rate` it has a loss-free bias, the buffer `e_score_correction_bias`, `[E]`, in single precision.

    Args:
        dim: Number of features of a token.
        options: Options of the mixture.

    Attributes:
        weight: Projection, `[E, D]`.
    """

    def __init__(self, dim: int, options: MixtureOptions) -> None:
        super().__init__()
        assert options.count is not None
        self.num_experts, self.top_k, self.kind = options.count, options.top_k, options.router
        self.dim = dim  # A strategy may have freed the weight.
        self.normalize, self.capacity_factor = options.normalize, options.capacity_factor
        self.weight = nn.Parameter(torch.empty(options.count, dim))
        if options.bias_rate:
            self.register_buffer(BIAS, torch.zeros(options.count, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights with a standard deviation of 0.02, and the bias to 0."""
        nn.init.normal_(self.weight, std=0.02)
        bias = getattr(self, BIAS, None)
        if bias is not None:
            nn.init.zeros_(bias)

    def forward(self, hidden: Tensor) -> Routing:
        """Returns the choices of tokens `[..., N, D]`; capacities and expert choice are within each row of N.

        Logits and scores are computed in at least single precision, as Switch and DeepSeek do.
        """
        rows = hidden.reshape(-1, *hidden.shape[-2:])  # [G, N, D]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with _without_autocast(hidden.device.type):
            logits = F.linear(rows.to(wide), self.weight.to(wide))  # [G, N, E]
            scores = expert_scores(logits, self.kind)
            if self.kind == "expert_choice":
                weights, indices = choose_tokens(scores, self.top_k)
            else:
                weights, indices = choose_experts(scores, self.top_k, self.normalize, getattr(self, BIAS, None))
                weights, indices = self._drop(weights, indices)
        return Routing(logits.flatten(0, 1), weights.to(hidden.dtype), indices)

    def _drop(self, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the choices, `[T, k]` each, without those beyond the capacity."""
        if self.capacity_factor is not None:
            tokens, k = indices.shape[1:]
            capacity = math.ceil(self.capacity_factor * tokens * k / self.num_experts)
            kept = is_within_capacity(indices, capacity)
            weights, indices = weights * kept, indices.masked_fill(~kept, self.num_experts)
        return weights.flatten(0, 1), indices.flatten(0, 1)

    def extra_repr(self) -> str:
        """Returns the sizes that the module's text form shows."""
        return f"{self.dim} -> {self.num_experts}, top_k={self.top_k}, kind={self.kind}"

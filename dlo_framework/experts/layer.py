"""Layer of a mixture of experts, in the form of transformers 5: a router, and stacked experts.

`Experts.compute_sorted` takes rows that are sorted by expert, with counts: what a dispatch to other ranks delivers.

Shapes: T tokens, S rows of an expert each, E experts, D features, H hidden features, k choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.experts.grouped_linear import grouped_linear
from dlo_framework.experts.mixture_options import MixtureOptions
from dlo_framework.experts.routers import Router, Routing


class Experts(nn.Module):
    """MLPs whose weights are stacked along dim 0.

    Args:
        count: Number of experts.
        dim: Number of features of a token.
        hidden: Number of hidden features of an expert.
        activation: Activation.
        gated: Whether the activation of one half of the first projection multiplies the other half (SwiGLU).
        bias: Whether the projections have biases.
        dropout: Dropout probabilities after the activation and after the output.
        starts_at_zero: Whether the initial output is 0, for experts beside a shared one.

    Attributes:
        first_name: Name of the first projection: `up_proj`, weights `[E, H, D]`, or, where experts are gated,
            `gate_up_proj`, `[E, 2 H, D]`. Its biases are `..._bias`.
        down_proj: Weights `[E, D, H]`. `down_proj_bias`: biases, `[E, D]`.
    """

    up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        activation: Callable[[Tensor], Tensor],
        *,
        gated: bool = False,
        bias: bool = False,
        dropout: tuple[float, float] = (0.0, 0.0),
        starts_at_zero: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.gated, self.starts_at_zero = count, gated, starts_at_zero
        self.act_fn = activation
        self.dim, self.hidden = dim, hidden  # A strategy may have freed the weights.
        self.first_name, width = ("gate_up_proj", 2 * hidden) if gated else ("up_proj", hidden)
        self.register_parameter(self.first_name, nn.Parameter(torch.empty(count, width, dim)))
        self.down_proj = nn.Parameter(torch.empty(count, dim, hidden))
        for name, size in ((self.first_name, width), ("down_proj", dim)):
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(count, size)) if bias else None)
        self.hidden_dropout, self.output_dropout = nn.Dropout(dropout[0]), nn.Dropout(dropout[1])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises all experts to the same random MLP; their routers draw them apart."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias") or (self.starts_at_zero and name == "down_proj"):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter[0], std=0.02)
                with torch.no_grad():
                    parameter[1:] = parameter[:1]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sums of the experts' outputs, `[T, D]`.

        Sums have a fixed order on any device: no two rows are added by atomic operations.

        Args:
            hidden_states: Tokens, `[T, D]`.
            top_k_index: Experts of each token, `[T, k]`; `num_experts` for no expert.
            top_k_weights: Their weights, `[T, k]`.
        """
        tokens, k = top_k_index.shape
        in_order, order = top_k_index.flatten().sort(stable=True)
        edges = torch.searchsorted(in_order, torch.arange(self.num_experts + 1, device=in_order.device))
        repeated = hidden_states[:, None].expand(-1, k, -1).reshape(tokens * k, -1)
        outputs = self.compute_sorted(repeated.index_select(0, order), edges.diff())
        outputs = outputs * top_k_weights.flatten()[order, None].to(outputs.dtype)
        unsorted = torch.zeros_like(outputs).index_copy(0, order, outputs)
        return unsorted.view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def compute_sorted(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' outputs of rows, `[S, D]`; rows after the last expert's give 0.

        Args:
            rows: Rows in the order of experts, `[S, D]`.
            counts: Number of rows of each expert, `[E]`.
        """
        hidden = grouped_linear(rows, getattr(self, self.first_name), counts, getattr(self, f"{self.first_name}_bias"))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.act_fn(gate) * up
        else:
            hidden = self.act_fn(hidden)
        outputs = grouped_linear(self.hidden_dropout(hidden), self.down_proj, counts, self.down_proj_bias)
        return self.output_dropout(outputs)

    def extra_repr(self) -> str:
        """Returns the sizes that the module's text form shows."""
        return f"{self.num_experts} x ({self.dim} -> {self.hidden} -> {self.dim}), gated={self.gated}"


class MixtureLayer(nn.Module):
    """Mixture of experts in the place of a block's MLP.

    Args:
        dim: Number of features of a token.
        experts: Experts.
        options: Options of the mixture.
        shared: Expert that computes all tokens; its output is added.

    Attributes:
        gate: Router.
        experts: Experts.
        shared_experts: Shared expert; not there without one.
    """

    def __init__(self, dim: int, experts: Experts, options: MixtureOptions, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts = Router(dim, options), experts
        if shared is not None:
            self.shared_experts = shared

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the outputs of tokens `[..., N, D]`, in their shape."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.gate(hidden_states)
        if self.gate.kind == "expert_choice":
            output = self._combine_choices(tokens, routing)
        else:
            output = self.experts(tokens, routing.indices, routing.weights)
        output = output.view_as(hidden_states)
        shared = self._modules.get("shared_experts")
        return output if shared is None else output + shared(hidden_states)

    def _combine_choices(self, tokens: Tensor, routing: Routing) -> Tensor:
        experts, places = routing.indices.shape
        counts = torch.full((experts,), places, device=tokens.device)
        chosen = _TakeByExpert.apply(tokens, routing.indices)
        outputs = self.experts.compute_sorted(chosen, counts)
        outputs = outputs * routing.weights.flatten()[:, None].to(outputs.dtype)
        combined: Tensor = _AddByExpert.apply(outputs.to(tokens.dtype), routing.indices, len(tokens))
        return combined


def _add_by_expert(rows: Tensor, indices: Tensor, tokens: int) -> Tensor:
    """Adds rows `[E * places, D]` to their tokens, expert by expert; returns `[T, D]`.

    An expert chooses a token once, so no addition meets another, and the order of a token's sum is fixed on any device.
    """
    total = rows.new_zeros(tokens, rows.shape[-1])
    for chosen, part in zip(indices, rows.view(*indices.shape, -1), strict=True):
        total.index_add_(0, chosen, part)
    return total


class _TakeByExpert(torch.autograd.Function):
    """Tokens of each expert's choices, `[E * places, D]`, with a backward of fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, indices.flatten())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return _add_by_expert(gradient, indices, ctx.tokens), None


class _AddByExpert(torch.autograd.Function):
    """Sums of the rows of each token, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(indices)
        return _add_by_expert(rows, indices, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return gradient.index_select(0, indices.flatten()), None, None

"""Layer of a mixture of experts, in the form of transformers 5: a router, and stacked experts.

`Experts.compute_sorted` takes rows that are sorted by expert, with counts: what a dispatch to other ranks delivers.
:func:`grouped_linear` computes the linear layers of many experts in one call: `F.grouped_mm` on an accelerator in bf16,
elsewhere one matrix product per expert, which writes its slice of the output. It is one operator to autograd and
torch.compile: indexing the stacked weights expert by expert, as transformers' eager loop does, makes backward write a
full gradient of the stack for each expert.

:func:`upcycle` replaces MLPs of a model by mixtures whose experts start as copies of the MLP. Sparse Upcycling:
Training Mixture-of-Experts from Dense Checkpoints. Komatsuzaki et al., 2022, arXiv 2212.05055; the blocks are those of
V-MoE, Scaling Vision with Sparse Mixture of Experts. Riquelme et al., 2021, arXiv 2106.05974.

Shapes: T tokens, S rows of an expert each, E experts, D features, H hidden features, k choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from dlo_framework.errors import DloError
from dlo_framework.models.autocast import autocast_dtype
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.models.experts.routers import Router, Routing


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns each row times the weight of its expert, `[S, H]`; rows after the last expert's give 0.

    Args:
        rows: Rows in the order of experts, `[S, D]`.
        weight: Weights, `[E, H, D]`.
        counts: Number of rows of each expert, `[E]`, integers; their sum is at most S.
        bias: Biases, `[E, H]`.
    """
    dtype = autocast_dtype(rows.device.type)
    if dtype is not None:
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if has_grouped_kernel(rows, weight):
        return _by_grouped_mm(rows, weight, counts, bias)
    projected: Tensor = _product(rows, weight, counts, bias)
    return projected


def has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Returns whether `F.grouped_mm` computes these: in bf16 on CUDA, with rows of multiples of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
    )


def _by_grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the product without a wait for the device; `F.grouped_mm` does not write rows after the last expert."""
    ends = counts.cumsum(0)
    place = torch.arange(len(rows), device=rows.device)
    inside = (place < ends[-1])[:, None]
    output = F.grouped_mm(rows.masked_fill(~inside, 0), weight.mT, offs=ends.to(torch.int32))
    if bias is not None:
        output = output + bias[torch.searchsorted(ends, place, right=True).clamp(max=len(bias) - 1)]
    return output.masked_fill(~inside, 0)


@torch.library.custom_op("dlo::grouped_linear", mutates_args=())
def _product(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    output = rows.new_empty(len(rows), weight.shape[1])
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            part, into = rows[first : first + count], output[first : first + count]
            if bias is None:
                torch.mm(part, weight[expert].T, out=into)
            else:
                torch.addmm(bias[expert], part, weight[expert].T, out=into)
            first += count
    output[first:] = 0
    return output


@torch.library.custom_op("dlo::grouped_linear_backward", mutates_args=())
def _gradients(
    gradient: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    of_bias = weight.new_zeros(weight.shape[:2] if bias else (0,))
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            of_weight[expert] = 0
            continue
        span = slice(first, first + count)
        torch.mm(gradient[span], weight[expert], out=of_rows[span])
        torch.mm(gradient[span].T, rows[span], out=of_weight[expert])
        if bias:
            torch.sum(gradient[span], 0, out=of_bias[expert])
        first += count
    of_rows[first:] = 0
    return of_rows, of_weight, of_bias


@_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_gradients.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight.new_empty(weight.shape[:2] if bias else (0,))
    return torch.empty_like(rows), torch.empty_like(weight), of_bias


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    rows, weight, counts, bias = inputs
    ctx.save_for_backward(rows, weight, counts)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
    rows, weight, counts = ctx.saved_tensors
    has_bias = ctx.has_bias
    of_rows, of_weight, of_bias = _gradients(gradient.contiguous(), rows, weight, counts, has_bias)
    return of_rows, of_weight, None, of_bias if has_bias else None


_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.dlo.grouped_linear)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.dlo.grouped_linear_backward)
def _backward_flops(
    _: tuple[int, ...], rows: tuple[int, ...], weight: tuple[int, ...], *__: object, **___: object
) -> int:
    return 4 * rows[0] * weight[1] * weight[2]


#: Operators of the products in forward and in backward, as dispatch modes see them.
OPERATORS = (torch.ops.dlo.grouped_linear, torch.ops.dlo.grouped_linear_backward)


# --- the layer ----------------------------------------------------------------------------------------------------


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
        chosen = _ByExpert.apply(tokens, routing.indices, len(tokens), False)
        outputs = self.experts.compute_sorted(chosen, counts)
        outputs = outputs * routing.weights.flatten()[:, None].to(outputs.dtype)
        combined: Tensor = _ByExpert.apply(outputs.to(tokens.dtype), routing.indices, len(tokens), True)
        return combined


def _add_by_expert(rows: Tensor, indices: Tensor, tokens: int) -> Tensor:
    """Adds rows `[E * places, D]` to their tokens, expert by expert; returns `[T, D]`.

    An expert chooses a token once, so no addition meets another, and the order of a token's sum is fixed on any device.
    """
    total = rows.new_zeros(tokens, rows.shape[-1])
    for chosen, part in zip(indices, rows.view(*indices.shape, -1), strict=True):
        total.index_add_(0, chosen, part)
    return total


class _ByExpert(torch.autograd.Function):
    """Tokens of each expert's choices, `[E * places, D]`, or sums of each token's rows, in the order of the experts.

    Each is the backward of the other, with a fixed order of sums.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, tokens: int, adds: bool) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.tokens, ctx.adds = tokens, adds
        return _add_by_expert(rows, indices, tokens) if adds else rows.index_select(0, indices.flatten())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,), adds = ctx.saved_tensors, ctx.adds
        taken = gradient.index_select(0, indices.flatten()) if adds else _add_by_expert(gradient, indices, ctx.tokens)
        return taken, None, None, None


# --- sparse upcycling ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseMLP:
    """Linear layers of an MLP, as its library holds them.

    Attributes:
        up: First projection; with `gate`, what the activated gate multiplies.
        down: Last projection.
        activation: Activation.
        gate: Projection of the gate; None without one.
        dropout: Dropout probabilities after the activation and after the output.
    """

    up: nn.Linear
    down: nn.Linear
    activation: Callable[[Tensor], Tensor]
    gate: nn.Linear | None = None
    dropout: tuple[float, float] = (0.0, 0.0)


def upcycle(
    model: nn.Module, mlps: Sequence[str], read: Callable[[nn.Module], DenseMLP | None], options: MixtureOptions
) -> None:
    """Replaces MLPs by mixtures, in place.

    With `normalize`, the model computes at first what it did before. With `shared`, the experts' outputs are 0 at
    first, and the MLP stays as the shared expert.

    Args:
        model: Model, also on the meta device.
        mlps: Names of the MLPs of all blocks, in order, of which each `every`-th is replaced.
        read: Function that returns the linear layers of an MLP; None for other modules.
        options: Options of the mixtures.

    Raises:
        DloError: If no block is replaced, or its MLP cannot be read.
    """
    chosen = mlps[options.every - 1 :: options.every]  # The last of each `every`, as in V-MoE.
    if not mlps:
        raise DloError(
            f"experts.count must have a model whose blocks have MLPs, got {type(model).__name__}; leave experts out"
        )
    if not chosen:
        raise DloError(f"experts.every must be at most {len(mlps)}, the number of MLPs, got {options.every}; set 2")
    for name in chosen:
        mlp = model.get_submodule(name)
        dense = read(mlp)
        if dense is None:
            raise DloError(
                f"experts.count must have blocks with an MLP of two linear layers, or three with a gate, got"
                f" {type(mlp).__name__} at '{name}'; use another model, or leave experts out"
            )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, mixture_of(mlp, dense, options))


def mixture_of(mlp: nn.Module, dense: DenseMLP, options: MixtureOptions) -> MixtureLayer:
    """Returns the mixture whose experts are copies of an MLP."""
    assert options.count is not None
    with torch.device(dense.up.weight.device):
        experts = Experts(
            options.count,
            dense.up.in_features,
            dense.up.out_features,
            dense.activation,
            gated=dense.gate is not None,
            bias=dense.up.bias is not None,
            dropout=dense.dropout,
            starts_at_zero=options.shared,
        )
        layer = MixtureLayer(dense.up.in_features, experts, options, mlp if options.shared else None)
    layer.to(dense.up.weight.dtype)
    layer.train(mlp.training)
    if not dense.up.weight.is_meta:
        _copy(experts, dense, options)
    return layer


@torch.no_grad()
def _copy(experts: Experts, dense: DenseMLP, options: MixtureOptions) -> None:
    first = [dense.up] if dense.gate is None else [dense.gate, dense.up]
    values = {
        experts.first_name: torch.cat([layer.weight for layer in first]),
        "down_proj": dense.down.weight * (not options.shared),
    }
    if dense.up.bias is not None:
        values[f"{experts.first_name}_bias"] = torch.cat([layer.bias for layer in first])
        values["down_proj_bias"] = dense.down.bias * (not options.shared)
    for name, value in values.items():
        experts.get_parameter(name).copy_(value.expand_as(experts.get_parameter(name)))

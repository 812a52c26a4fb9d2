"""Overlap of the collectives of tensor parallelism with matrix products.

Backward: Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198, section 4.2.2. Their code overlaps layer by layer. Departure: projections that share an input, such as
queries, keys and values, also share its collectives, so the input gradient is sent after the last of them.

Without sequence parallelism, the all-reduce of the input gradient overlaps with the weight gradients. With it, forward
saves only this rank's tokens, and backward has two collectives: an all-gather of the input overlaps with the input
gradient, and the reduce-scatter of the input gradient overlaps with the weight gradients. The activations enter
together with the projections' weights (:func:`enter`). A projection's backward computes only the input gradient, and
defers the weight gradient to the backward of the entry, which autograd calls after all of them. All products and dtypes
are those of autograd. torch.compile gets the plain form, as it schedules the operations itself.

Forward, with asynchronous tensor parallelism: products overlap the collective before or after them, chunk by chunk.
Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models. Wang et al., 2022,
ASPLOS 2023. On the Road to Asynchronous Tensor Parallelism (torch's symmetric memory). Departure: chunks are slices of
each rank's tokens instead of the ranks' shards, and plain collectives of the process group send them, so that it runs
on any backend. Two chunks are in flight. With C chunks, a product waits for the first chunk of its all-gather, and
nothing hides the last chunk of a reduce-scatter: 1 / C of the bytes are exposed, if a product takes as long as its
chunk's collective. On CUDA devices that reach each other's memory, torch's fused operators replace the chunks where the
ranks divide the tokens.

Shapes: B samples, L tokens, D width, T ranks, l = ceil(L / T) tokens of a rank, c tokens of a chunk.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.models.autocast import autocast_dtype
from dlo_plugins.parallel.tensor.collectives import (
    check_first_derivative,
    owned,
    split_sequence,
    start_gather,
    start_scatter,
)


class _Entry:
    """Entry of activations into a region, to whose backward projections defer their weight gradients.

    Args:
        communicator: Ranks that share the region.
        length: Number of tokens of all ranks, L, where each rank brings some; None where each brings all.

    Attributes:
        products: Functions that compute weight gradients, each with the projection's number.
        wait_for_input: Function that waits for the all-gather of the input in backward; None before its start.
    """

    def __init__(self, communicator: Communicator, length: int | None) -> None:
        self.communicator, self.length = communicator, length
        self.reset()

    def reset(self) -> None:
        """Clears the state of a backward pass."""
        self.products: list[tuple[int, Callable[[], Tensor]]] = []
        self.wait_for_input: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class EnteredWeight:
    """Weight of a projection that has entered with the activations.

    Attributes:
        view: View of the weight, after the entry in the graph.
        number: Number of the projection in its region.
        entry: Entry of the region.
        part: Tokens of this rank, [B, l, D], which forward saves instead of the input; None if it saves the input.
    """

    view: Tensor
    number: int
    entry: _Entry
    part: Tensor | None

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, in autocast's dtype where it is on."""
        x = x.to(product_dtype(x))
        projected: Tensor = _Project.apply(x, self.part, self.view, bias, self.number, self.entry)
        return projected


def can_defer(column: nn.Linear, x: Tensor) -> bool:
    """Returns whether a projection's weight gradient can wait: it has one, and nobody else computes the layer."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad:
        return False
    return column.weight.requires_grad and "forward" not in column.__dict__


def enter(
    x: Tensor, columns: Sequence[nn.Linear], communicator: Communicator, length: int | None = None
) -> tuple[Tensor, dict[nn.Module, EnteredWeight]]:
    """Takes activations in with the weights of the projections that they are for.

    Args:
        x: Activations, the same on all ranks; with a length, this rank's tokens, [B, l, D], which are gathered.
        columns: Projections.
        communicator: Ranks that share the region.
        length: Number of tokens of all ranks, L; None for activations of all tokens.

    Returns:
        Activations of all tokens, [B, L, D], and each projection's weight.
    """
    entry, part = _Entry(communicator, length), None if length is None else x.detach()
    entered, *views = _Enter.apply(x, entry, *(column.weight for column in columns))
    pairs = enumerate(zip(columns, views, strict=True))
    return entered, {column: EnteredWeight(view, number, entry, part) for number, (column, view) in pairs}


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: _Entry, *weights: Tensor) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        full = x.view_as(x) if entry.length is None else start_gather(x, entry.length, entry.communicator)()
        return full, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (of_input, *of_weights), entry, wait = grads, ctx.entry, None
        if of_input is not None and entry.length is None:
            wait = entry.communicator.start_all_reduce(of_input)
        elif of_input is not None:
            wait = start_scatter(of_input, entry.communicator)
        try:
            for number, product in entry.products:  # Beside the gradients from other uses of the weights.
                gradient, known = product(), of_weights[number]
                of_weights[number] = gradient if known is None else known + gradient
        finally:
            entry.reset()
        return None if wait is None else wait(), None, *of_weights


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor | None, weight: Tensor, bias: Tensor | None, number: int, entry: _Entry
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.number, ctx.entry, ctx.dtype = number, entry, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)  # Autocast casts weight and bias if it is on.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        entry, grad, get_input = ctx.entry, grads[0], lambda: saved
        if entry.length is not None:
            if entry.wait_for_input is None:
                wait = start_gather(saved.to(ctx.dtype), entry.length, entry.communicator)
                entry.wait_for_input = functools.cache(wait)
            get_input = entry.wait_for_input
        rows, dtype = grad.reshape(-1, grad.shape[-1]), weight.dtype

        def product() -> Tensor:
            x = get_input()
            return (rows.t() @ x.reshape(-1, x.shape[-1])).to(dtype)

        entry.products.append((ctx.number, product))
        with_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[3]
        of_bias = rows.sum(0).to(ctx.bias_dtype) if with_bias else None
        return grad @ weight.to(grad.dtype), None, None, of_bias, None, None


# --- asynchronous tensor parallelism ---------------------------------------------------------------------------------

#: Default number of chunks.
CHUNKS = 4


@dataclass(frozen=True, eq=False)  # torch.compile of torch 2.11 asks for a hash.
class Factor:
    """Right factor of a product.

    Attributes:
        weight: Matrix `[out, in]`.
        bias: Vector `[out]`; None for none.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `x @ weight.T + bias`."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class AsyncProducts:
    """Products of the ranks of a tp axis that overlap with their collectives.

    Attributes:
        communicator: Communicator of the axis.
        chunks: Largest number of chunks of a product.
        symmetric: Whether to use torch's fused operators on symmetric memory.
    """

    communicator: Communicator
    chunks: int
    symmetric: bool = False

    def gather(self, part: Tensor, length: int, factors: Sequence[Factor]) -> tuple[Tensor, list[Tensor]]:
        """Gathers the ranks' tokens, and multiplies each chunk while the next is on its way.

        Args:
            part: Tokens of this rank, `[B, l, D]`.
            length: Number of tokens of all ranks, L.
            factors: Factors in the dtype in which to multiply.

        Returns:
            All tokens `[B, L, D]`, and their product with each factor.
        """
        samples, local, width = part.shape
        if self._fuses(part, length, factors):
            group, matrices = _enabled_group(self.communicator), [factor.weight.t() for factor in factors]
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(part.contiguous(), matrices, 1, group)
            return full, [out if f.bias is None else out + f.bias for out, f in zip(products, factors, strict=True)]
        shape = samples, self.communicator.size, local
        full = part.new_empty(*shape, width)
        outputs = [part.new_empty(*shape, f.weight.shape[0], dtype=f.weight.dtype) for f in factors]
        pieces = list(self._pieces(local))
        start = self.communicator.start_all_gather_parts
        wait = start(part[:, pieces[0]])
        for number, piece in enumerate(pieces):
            following = start(part[:, pieces[number + 1]]) if number + 1 < len(pieces) else None
            gathered = wait()  # [T, B, c, D]
            full[:, :, piece] = gathered.transpose(0, 1)
            for output, factor in zip(outputs, factors, strict=True):
                output[:, :, piece] = factor(gathered.to(factor.weight.dtype)).transpose(0, 1)
            if following is not None:
                wait = following
        return _join(full, length), [_join(output, length) for output in outputs]

    def scatter(self, terms: Sequence[tuple[Tensor, Factor | None]]) -> Callable[[], Tensor]:
        """Multiplies chunk by chunk, and sums each chunk over the ranks while the next is multiplied.

        Args:
            terms: Terms of this rank's partial sum: tokens `[B, L, in]` with their factor, or without one.

        Returns:
            Function that waits for this rank's tokens of the ranks' sum, `[B, l, D]`.
        """
        (first, factor), ranks = terms[0], self.communicator.size
        if len(terms) == 1 and factor is not None and self._fuses(first, first.shape[1], [factor], ranks):
            matrix, group = factor.weight.t(), _enabled_group(self.communicator)
            fused = torch.ops.symm_mem.fused_matmul_reduce_scatter(first, matrix, "sum", 1, group)
            return lambda: fused
        local = -(-first.shape[1] // ranks)
        padded = [(split_sequence(x, ranks), factor) for x, factor in terms]  # [T, B, l, in]
        waits = []
        for piece in self._pieces(local):
            partial: Any = None
            for x, factor in padded:
                term = x[:, :, piece] if factor is None else factor(x[:, :, piece])
                partial = term if partial is None else partial + term
            waits.append(self.communicator.start_reduce_scatter_parts(partial))
        return lambda: torch.cat([wait() for wait in waits], dim=1)

    def reduce(self, x: Tensor, factor: Factor) -> Tensor:
        """Multiplies chunk by chunk, and sums each chunk over the ranks while the next is multiplied.

        Args:
            x: Tensor of any shape `[..., in]`.
            factor: Factor of this rank's partial sum.

        Returns:
            The ranks' sum, `[..., out]`.
        """
        rows = x.flatten(0, -2)
        pieces = [rows[piece] for piece in self._pieces(rows.shape[0])]
        waits = [self.communicator.start_all_reduce(factor(piece)) for piece in pieces]
        return torch.cat([wait() for wait in waits]).view(*x.shape[:-1], -1)

    def _pieces(self, count: int) -> Iterator[slice]:
        """Yields the chunks of a number of tokens; one empty chunk for none."""
        size = max(1, -(-count // self.chunks))
        yield from (slice(at, min(at + size, count)) for at in range(0, max(count, 1), size))

    def _fuses(self, x: Tensor, length: int, factors: Sequence[Factor], split: int = 1) -> bool:
        """Returns whether torch's fused operators on symmetric memory (2.11 to 2.15) can do it.

        Compiled code has the chunks: the operators' group is set up by Python.

        Args:
            x: Left factor.
            length: Number of tokens of all ranks.
            factors: Right factors.
            split: Number of ranks that divide ``x``.
        """
        if torch.compiler.is_compiling() or not self.symmetric or not factors or not length:
            return False
        even = x.shape[1] % split == 0 and (split > 1 or x.shape[1] * self.communicator.size == length)
        return even and all(x.dtype == factor.weight.dtype for factor in factors)


def reaches_peers(communicator: Communicator, device: torch.device) -> bool:
    """Returns whether the ranks are CUDA devices of one host that reach each other's memory; all ranks must call it."""
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    places: list[Any] = [None] * communicator.size
    dist.all_gather_object(places, (socket.gethostname(), index), group=communicator.group)
    host = {name for name, _ in places}
    others = [other for _, other in places if other != index]
    reached = len(host) == 1 and len(others) == communicator.size - 1
    reached = reached and all(torch.cuda.can_device_access_peer(index, other) for other in others)
    answers: list[Any] = [None] * communicator.size
    dist.all_gather_object(answers, reached, group=communicator.group)
    return all(answers)


def _enabled_group(communicator: Communicator) -> str:
    """Returns a group's name after enabling symmetric memory for it, which torch up to 2.11 does not do by itself."""
    from torch.distributed import _symmetric_memory

    name = (communicator.group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    if not _symmetric_memory.is_symm_mem_enabled_for_group(name):
        _symmetric_memory.enable_symm_mem_for_group(name)
    return name


def _join(parts: Tensor, length: int) -> Tensor:
    """Returns `[B, L, D]` of `[B, T, l, D]`."""
    return owned(parts.flatten(1, 2).narrow(1, 0, length).contiguous())


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a projection multiplies: autocast's, where it is on."""
    dtype = autocast_dtype(x.device.type)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype  # Autocast leaves float64.


def gather_columns(
    part: Tensor, length: int, projections: Sequence[Any], products: AsyncProducts
) -> tuple[Tensor, list[Tensor]]:
    """Gathers activations and computes column projections.

    Backward gathers the input again while the input gradient is computed, and sums the input gradient over the ranks,
    chunk by chunk, while the rest of it and the weight gradients are computed.

    Args:
        part: Tokens of this rank, `[B, l, D]`.
        length: Number of tokens of all ranks, L.
        projections: Linear layers.
        products: Products of the axis.

    Returns:
        All tokens `[B, L, D]`, and each projection's output.
    """
    tensors = [tensor for layer in projections for tensor in (layer.weight, layer.bias)]
    full, *outputs = _GatherColumns.apply(part, length, products, product_dtype(part), *tensors)
    return full, outputs


def project_row(x: Tensor, weight: Tensor, products: AsyncProducts, *, scatters: bool) -> Tensor:
    """Computes a row projection of `[..., in]` and returns the ranks' sum, `[..., out]`.

    Args:
        x: Activations; `[B, L, in]` if the sum is scattered.
        weight: Weight of the projection.
        products: Products of the axis.
        scatters: Whether to return this rank's tokens of the sum, `[B, l, out]`. Backward then computes the input
            gradient chunk by chunk while the output gradient is gathered.
    """
    summed: Tensor = _ProjectRow.apply(x, weight, products, product_dtype(x), scatters)
    return summed


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, length: int, products: AsyncProducts, dtype: torch.dtype, *tensors: Tensor | None
    ) -> Any:
        weights, biases = tensors[::2], tensors[1::2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(part, *weights)
        ctx.length, ctx.products, ctx.dtype = length, products, dtype
        cast = [None if bias is None else bias.to(dtype) for bias in biases]
        factors = [Factor(weight.to(dtype), bias) for weight, bias in zip(weights, cast, strict=True)]  # type: ignore[union-attr]
        full, outputs = products.gather(part, length, factors)
        return full, *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_full, *of_outputs = grads
        part, *weights = (tensor.detach() for tensor in ctx.saved_tensors)
        needs_part, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        trained = [grad is not None and needed for grad, needed in zip(of_outputs, needs[::2], strict=True)]
        communicator = ctx.products.communicator
        wait_for_input = start_gather(part.to(ctx.dtype), ctx.length, communicator) if any(trained) else None
        terms: list[tuple[Tensor, Factor | None]] = [
            (grad, Factor(weight.to(grad.dtype).t()))
            for grad, weight in zip(of_outputs, weights, strict=True)
            if grad is not None
        ]
        if of_full is not None:
            terms.append((of_full, None))
        wait = ctx.products.scatter(terms) if needs_part and terms else None
        of_parameters: list[Tensor | None] = []
        x = None if wait_for_input is None else wait_for_input().flatten(0, -2)
        for number, (grad, weight) in enumerate(zip(of_outputs, weights, strict=True)):
            rows = None if grad is None else grad.flatten(0, -2)
            of_parameters.append((rows.t() @ x).to(weight.dtype) if trained[number] and rows is not None else None)
            with_bias = rows is not None and needs[2 * number + 1]
            of_parameters.append(rows.sum(0).to(weight.dtype) if with_bias else None)  # type: ignore[union-attr]
        return None if wait is None else wait().to(part.dtype), None, None, None, *of_parameters


class _ProjectRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, products: AsyncProducts, dtype: torch.dtype, scatters: bool
    ) -> Tensor:
        cast, factor = x.to(dtype), Factor(weight.to(dtype))
        ctx.save_for_backward(cast, weight)
        ctx.products, ctx.dtype, ctx.scatters = products, x.dtype, scatters
        return products.scatter([(cast, factor)])() if scatters else products.reduce(cast, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad = check_first_derivative(grads[0])
        factors = [Factor(weight.to(grad.dtype).t())] if ctx.needs_input_grad[0] else []
        if ctx.scatters:
            grad, outputs = ctx.products.gather(grad, x.shape[1], factors)
        else:
            outputs = [factor(grad) for factor in factors]
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)
        return outputs[0].to(ctx.dtype) if outputs else None, of_weight, None, None, None

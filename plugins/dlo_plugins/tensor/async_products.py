"""Asynchronous tensor parallelism: matrix products that overlap the collective before or after them, chunk by chunk.

Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models. Wang et al., 2022,
ASPLOS 2023. On the Road to Asynchronous Tensor Parallelism (torch's symmetric memory). Departure: chunks are slices of
each rank's tokens instead of the ranks' shards, and plain collectives of the process group send them, so that it runs
on any backend. Two chunks are in flight.

With C chunks, a product waits for the first chunk of its all-gather, and nothing hides the last chunk of a
reduce-scatter: 1 / C of the bytes are exposed, if a product takes as long as its chunk's collective. On CUDA devices
that reach each other's memory, torch's fused operators replace the chunks where the ranks divide the tokens.

Shapes: B samples, L tokens, D width, T ranks, l = ceil(L / T) tokens of a rank, c tokens of a chunk.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.collectives import check_first_derivative, owned, start_gather

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
            return _fused_gather(part, factors, self.communicator)
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
            fused = _fused_scatter(first, factor, self.communicator)
            return lambda: fused
        local = -(-first.shape[1] // ranks)
        padded = [(_split(x, ranks), factor) for x, factor in terms]  # [T, B, l, in]
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
        """Returns whether the fused operators can do it; ``split`` is the number of ranks that divide ``x``.

        Compiled code has the chunks: the operators' group is set up by Python.
        """
        if torch.compiler.is_compiling():
            return False
        even = x.shape[1] % split == 0 and (split > 1 or x.shape[1] * self.communicator.size == length)
        return (
            self.symmetric and even and length > 0 and bool(factors) and all(x.dtype == f.weight.dtype for f in factors)
        )


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


def _fused_gather(part: Tensor, factors: Sequence[Factor], communicator: Communicator) -> tuple[Tensor, list[Tensor]]:
    """Returns :meth:`AsyncProducts.gather` by torch's operator on symmetric memory (torch 2.11 to 2.15)."""
    name = _enabled_group(communicator)
    matrices = [factor.weight.t() for factor in factors]
    full, found = torch.ops.symm_mem.fused_all_gather_matmul(part.contiguous(), matrices, 1, name)
    outputs = [out if f.bias is None else out + f.bias for out, f in zip(found, factors, strict=True)]
    return full, outputs


def _fused_scatter(x: Tensor, factor: Factor, communicator: Communicator) -> Tensor:
    """Returns the result of :meth:`AsyncProducts.scatter` by torch's operator on symmetric memory."""
    name = _enabled_group(communicator)
    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor.weight.t(), "sum", 1, name)
    return found


def _enabled_group(communicator: Communicator) -> str:
    """Returns a group's name after enabling symmetric memory for it, which torch up to 2.11 does not do by itself."""
    from torch.distributed import _symmetric_memory

    name = (communicator.group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    if not _symmetric_memory.is_symm_mem_enabled_for_group(name):
        _symmetric_memory.enable_symm_mem_for_group(name)
    return name


def _split(x: Tensor, ranks: int) -> Tensor:
    """Returns `[T, B, l, D]` of `[B, L, D]`, with zeros behind the last token."""
    local = -(-x.shape[1] // ranks)
    padded = F.pad(x, (0, 0, 0, local * ranks - x.shape[1])) if local * ranks > x.shape[1] else x
    return padded.unflatten(1, (ranks, local)).transpose(0, 1)


def _join(parts: Tensor, length: int) -> Tensor:
    """Returns `[B, L, D]` of `[B, T, l, D]`."""
    return owned(parts.flatten(1, 2).narrow(1, 0, length).contiguous())


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a projection multiplies: autocast's, where it is on."""
    device = x.device.type
    is_on = _has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on and x.dtype != torch.float64 else x.dtype  # It leaves float64.


@torch.compiler.assume_constant_result
def _has_autocast(device: str) -> bool:
    """Returns whether a kind of device has autocast; torch.compile of torch 2.11 does not trace the question."""
    return torch.amp.is_autocast_available(device)


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


def scatter_row(x: Tensor, weight: Tensor, products: AsyncProducts) -> Tensor:
    """Computes a row projection `[B, L, in]` and returns this rank's tokens of the ranks' sum, `[B, l, out]`.

    Backward computes the input gradient chunk by chunk while the output gradient is gathered.
    """
    found: Tensor = _ScatterRow.apply(x, weight, products, product_dtype(x))
    return found


def reduce_row(x: Tensor, weight: Tensor, products: AsyncProducts) -> Tensor:
    """Computes a row projection `[..., in]` and returns the ranks' sum, `[..., out]`."""
    found: Tensor = _ReduceRow.apply(x, weight, products, product_dtype(x))
    return found


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
        found: list[Tensor | None] = []
        x = None if wait_for_input is None else wait_for_input().flatten(0, -2)
        for number, (grad, weight) in enumerate(zip(of_outputs, weights, strict=True)):
            rows = None if grad is None else grad.flatten(0, -2)
            found.append((rows.t() @ x).to(weight.dtype) if trained[number] and rows is not None else None)
            with_bias = rows is not None and needs[2 * number + 1]
            found.append(rows.sum(0).to(weight.dtype) if with_bias else None)  # type: ignore[union-attr]
        return None if wait is None else wait().to(part.dtype), None, None, None, *found


class _ScatterRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: AsyncProducts, dtype: torch.dtype) -> Tensor:
        cast = x.to(dtype)
        ctx.save_for_backward(cast, weight)
        ctx.products, ctx.dtype = products, x.dtype
        return products.scatter([(cast, Factor(weight.to(dtype)))])()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_first_derivative()
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        factors = [Factor(weight.to(grads[0].dtype).t())] if ctx.needs_input_grad[0] else []
        full, outputs = ctx.products.gather(grads[0], x.shape[1], factors)
        of_weight = full.flatten(0, -2).t() @ x.to(full.dtype).flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_x = outputs[0].to(ctx.dtype) if outputs else None
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), None, None


class _ReduceRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: AsyncProducts, dtype: torch.dtype) -> Tensor:
        cast = x.to(dtype)
        ctx.save_for_backward(cast, weight)
        ctx.dtype = x.dtype
        return products.reduce(cast, Factor(weight.to(dtype)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_first_derivative()
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad = grads[0]
        of_x = (grad @ weight.to(grad.dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)
        return of_x, of_weight, None, None

"""The collectives of tensor and sequence parallelism, each with the one that its backward needs.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053: `f` is :func:`copy_in`, `g` is :func:`reduce_from_region`.
Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198: `g` is
:func:`gather_to_region`, its conjugate :func:`reduce_scatter_from_region`. Departure: lengths that the ranks do not
divide are padded.

Shapes: B samples, L tokens, D width, d features of a rank, T ranks, l = ceil(L / T) tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import copy_in
from dlo_framework.errors import DloError

__all__ = [
    "all_reduce_both",
    "check_first_derivative",
    "copy_in",
    "copy_last_in",
    "gather_features",
    "gather_sequence",
    "gather_to_region",
    "local_shard",
    "owned",
    "reduce_from_region",
    "reduce_scatter_from_region",
    "scatter_sequence",
    "start_gather",
    "start_scatter",
]


def reduce_from_region(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the sum of the ranks' tensors; backward passes the gradient to each rank unchanged."""
    found: Tensor = _SumOut.apply(tensor, communicator)
    return found


def all_reduce_both(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the sum of the ranks' tensors, of which each makes something else; backward sums too."""
    return copy_in(reduce_from_region(tensor, communicator), communicator)


def copy_last_in(tensor: Tensor, features: int, communicator: Communicator) -> Tensor:
    """Returns the tensor; backward sums the gradients of its last features over the ranks."""
    found: Tensor = _CopyLastIn.apply(tensor, features, communicator)
    return found


def gather_features(part: Tensor, communicator: Communicator) -> Tensor:
    """Returns `[..., T * d]` from the ranks' `[..., d]`; backward sums the wholes' gradients and scatters the sum."""
    found: Tensor = _GatherFeatures.apply(part, communicator)
    return found


def scatter_sequence(whole: Tensor, communicator: Communicator) -> Tensor:
    """Returns this rank's `[B, l, D]` of `[B, L, D]`; backward gathers the parts' gradients."""
    found: Tensor = _SplitIn.apply(whole, communicator)
    return found


def gather_sequence(part: Tensor, length: int, communicator: Communicator) -> Tensor:
    """Returns `[B, L, D]` from the ranks' `[B, l, D]`; backward takes this rank's part, as all have the same whole."""
    found: Tensor = _GatherOut.apply(part, length, communicator)
    return found


def gather_to_region(part: Tensor, length: int, communicator: Communicator) -> Tensor:
    """Returns `[B, L, D]` from the ranks' `[B, l, D]`; backward sums the wholes' gradients and scatters the sum."""
    found: Tensor = _GatherIn.apply(part, length, communicator)
    return found


def reduce_scatter_from_region(partial: Tensor, communicator: Communicator) -> Tensor:
    """Sums the ranks' `[B, L, D]` and returns this rank's `[B, l, D]`; backward gathers the parts' gradients."""
    found: Tensor = _ScatterOut.apply(partial, communicator)
    return found


def local_shard(whole: Tensor, communicator: Communicator) -> Tensor:
    """Returns this rank's `[B, l, D]` of `[B, L, D]`, zeros where there are no more tokens."""
    return _parts(whole, communicator.size)[communicator.rank].contiguous()


def _parts(whole: Tensor, ranks: int) -> Tensor:
    """Returns `[T, B, l, D]` of `[B, L, D]`."""
    length = whole.shape[1]
    part = -(-length // ranks)
    padded = F.pad(whole, (0, 0, 0, part * ranks - length)) if part * ranks > length else whole
    return padded.unflatten(1, (ranks, part)).transpose(0, 1)


def start_gather(part: Tensor, length: int, communicator: Communicator) -> Callable[[], Tensor]:
    """Starts to gather the ranks' `[B, l, D]`; returns a function that waits for `[B, L, D]` and returns it."""
    wait = communicator.start_all_gather_parts(part)
    return lambda: wait().transpose(0, 1).flatten(1, 2).narrow(1, 0, length).contiguous()


def start_scatter(partial: Tensor, communicator: Communicator) -> Callable[[], Tensor]:
    """Starts to sum the ranks' `[B, L, D]`; returns a function that waits for this rank's `[B, l, D]` of the sum."""
    return communicator.start_reduce_scatter_parts(_parts(partial, communicator.size))


_DROPS_VIEWS = torch.__version__ < "2.12"


def owned(result: Tensor) -> Tensor:
    """Returns the result of a function with a backward of its own, as no view of another tensor.

    The code that torch.compile of torch 2.11 makes drops the gradients of a function whose result is a view.
    """
    return result.clone() if _DROPS_VIEWS and torch.compiler.is_compiling() else result


def _gathered(part: Tensor, length: int, communicator: Communicator) -> Tensor:
    return start_gather(part, length, communicator)()


def _scattered(partial: Tensor, communicator: Communicator) -> Tensor:
    return start_scatter(partial, communicator)()


def check_first_derivative() -> None:
    """Checks that a backward is not differentiated itself, as in a gradient penalty: its collectives are not.

    Raises:
        DloError: It is.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DloError(
            "tensor parallelism does not support create_graph=True: the collectives of its backward have no derivative;"
            " train a gradient penalty with tp: 1"
        )


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        return communicator.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_first_derivative()
        return grads[0], None


class _CopyLastIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, features: int, communicator: Communicator) -> Tensor:
        ctx.features, ctx.communicator = features, communicator
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = grads[0].shape[-1] - ctx.features
        first, last = grads[0].split((own, ctx.features), dim=-1)
        return torch.cat((first, ctx.communicator.all_reduce(last.contiguous())), dim=-1), None, None


class _SplitIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, communicator: Communicator) -> Tensor:
        ctx.length, ctx.communicator = whole.shape[1], communicator
        return local_shard(whole, communicator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.length, ctx.communicator), None


class _GatherOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return owned(_gathered(part, length, communicator))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return local_shard(grads[0], ctx.communicator), None, None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return owned(_gathered(part, length, communicator))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scattered(grads[0], ctx.communicator), None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.start_all_gather_parts(part)().movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = grads[0].unflatten(-1, (ctx.communicator.size, -1)).movedim(-2, 0)
        return ctx.communicator.start_reduce_scatter_parts(parts)(), None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, communicator: Communicator) -> Tensor:
        ctx.length, ctx.communicator = partial.shape[1], communicator
        return _scattered(partial, communicator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_first_derivative()
        return _gathered(grads[0], ctx.length, ctx.communicator), None

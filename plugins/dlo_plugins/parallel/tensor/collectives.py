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

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator, with_backward
from dlo_framework.distributed.vocab_parallel import copy_in
from dlo_framework.errors import DloError


def reduce_from_region(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the sum of the ranks' tensors; backward passes the gradient to each rank unchanged."""
    return with_backward(tensor, communicator.all_reduce, check_first_derivative)


def all_reduce_both(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the sum of the ranks' tensors, of which each makes something else; backward sums too."""
    return copy_in(reduce_from_region(tensor, communicator), communicator)


def copy_last_in(tensor: Tensor, features: int, communicator: Communicator) -> Tensor:
    """Returns the tensor; backward sums the gradients of its last features over the ranks."""

    def back(grad: Tensor) -> Tensor:
        first, last = grad.split((grad.shape[-1] - features, features), dim=-1)
        return torch.cat((first, communicator.all_reduce(last.contiguous())), dim=-1)

    return with_backward(tensor, lambda given: given.view_as(given), back)


def gather_features(part: Tensor, communicator: Communicator) -> Tensor:
    """Returns `[..., T * d]` from the ranks' `[..., d]`; backward sums the wholes' gradients and scatters the sum."""

    def run(part: Tensor) -> Tensor:
        return communicator.all_gather_parts(part).movedim(0, -2).flatten(-2)

    def back(grad: Tensor) -> Tensor:
        return communicator.reduce_scatter_parts(grad.unflatten(-1, (communicator.size, -1)).movedim(-2, 0))

    return with_backward(part, run, back)


def scatter_sequence(whole: Tensor, communicator: Communicator) -> Tensor:
    """Returns this rank's `[B, l, D]` of `[B, L, D]`; backward gathers the parts' gradients."""
    length = whole.shape[1]
    return with_backward(
        whole,
        lambda whole: local_shard(whole, communicator),
        lambda grad: start_gather(grad, length, communicator)(),
    )


def gather_sequence(part: Tensor, length: int, communicator: Communicator) -> Tensor:
    """Returns `[B, L, D]` from the ranks' `[B, l, D]`; backward takes this rank's part, as all have the same whole."""
    return with_backward(
        part,
        lambda part: owned(start_gather(part, length, communicator)()),
        lambda grad: local_shard(grad, communicator),
    )


def gather_to_region(part: Tensor, length: int, communicator: Communicator) -> Tensor:
    """Returns `[B, L, D]` from the ranks' `[B, l, D]`; backward sums the wholes' gradients and scatters the sum."""
    return with_backward(
        part,
        lambda part: owned(start_gather(part, length, communicator)()),
        lambda grad: start_scatter(grad, communicator)(),
    )


def reduce_scatter_from_region(partial: Tensor, communicator: Communicator) -> Tensor:
    """Sums the ranks' `[B, L, D]` and returns this rank's `[B, l, D]`; backward gathers the parts' gradients."""
    length = partial.shape[1]
    return with_backward(
        partial,
        lambda partial: start_scatter(partial, communicator)(),
        lambda grad: start_gather(check_first_derivative(grad), length, communicator)(),
    )


def local_shard(whole: Tensor, communicator: Communicator) -> Tensor:
    """Returns this rank's `[B, l, D]` of `[B, L, D]`, zeros where there are no more tokens."""
    return split_sequence(whole, communicator.size)[communicator.rank].contiguous()


def split_sequence(whole: Tensor, ranks: int) -> Tensor:
    """Returns `[T, B, l, D]` of `[B, L, D]`, with zeros behind the last token."""
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
    return communicator.start_reduce_scatter_parts(split_sequence(partial, communicator.size))


_DROPS_VIEWS = torch.__version__ < "2.12"


def owned(result: Tensor) -> Tensor:
    """Returns the result of a function with a backward of its own, as no view of another tensor.

    The code that torch.compile of torch 2.11 makes drops the gradients of a function whose result is a view.
    """
    return result.clone() if _DROPS_VIEWS and torch.compiler.is_compiling() else result


def check_first_derivative(grad: Tensor) -> Tensor:
    """Returns a backward's gradient; checks that it is not differentiated itself, as in a gradient penalty.

    Raises:
        DloError: It is.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DloError(
            "tensor parallelism does not support create_graph=True: the collectives of its backward have no derivative;"
            " train a gradient penalty with tp: 1"
        )
    return grad

"""A vocabulary that is split over ranks: each makes the logits of some tokens, and the loss needs no rank to have all.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, section 3: the cross-entropy is computed from each rank's logits, and per token three numbers pass:
the highest logit, the sum of exponentials and the target's logit. Departure: the last two pass together.

A strategy that splits an output projection leaves a :class:`VocabularyShard` on it; a task that computes its loss from
hidden states asks :func:`shard_of` for it.

Shapes: N tokens, D width, V vocabulary, v of it on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator

_SHARD = "vocabulary_shard"


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """Which part of the vocabulary a rank has.

    Attributes:
        communicator: the ranks that share the vocabulary.
        first: the first token id of this rank.
        count: how many it has, v.
        size: of the whole vocabulary, V.

    The projection itself, called as usual, returns the logits of the whole vocabulary. Called with `split=True`, it
    returns this rank's, `[..., v]`, and leaves it to the caller to pass its input through :meth:`enter` once.
    """

    communicator: Communicator
    first: int
    count: int
    size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShard:
        return self  # A process group cannot be copied, and a copy of the module is split in the same way.

    def enter(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states as they are; backward sums the gradients that the ranks' logits give them."""
        return copy_in(hidden, self.communicator)

    def gather(self, logits: Tensor) -> Tensor:
        """Returns `[..., V]` from the ranks' `[..., v]`; backward takes this rank's part."""
        found: Tensor = _Gather.apply(logits, self)
        return found

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the targets' columns in this rank's logits, 0 for those of others, and which are this rank's."""
        own = (targets >= self.first) & (targets < self.first + self.count)
        return torch.where(own, targets - self.first, 0), own

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns each token's cross-entropy, `[N]`; backward gives the slope in this rank's logits.

        Args:
            logits: `[N, v]`, in float32 at least.
            targets: `[N]`, ids of the whole vocabulary.
        """
        found: Tensor = _CrossEntropy.apply(logits, targets, self)
        return found

    def highest(self, logits: Tensor) -> Tensor:
        """Returns the ids of the highest logits, `[N]`; the lowest id where several are."""
        values, columns = logits.max(dim=1)
        best = self.communicator.maximum(values.clone())
        ids = torch.where(values == best, columns + self.first, self.size)
        return -self.communicator.maximum(-ids)


def set_shard(module: nn.Module, shard: VocabularyShard) -> None:
    """Says that an output projection has a part of the vocabulary."""
    module.__dict__[_SHARD] = shard


def shard_of(module: nn.Module) -> VocabularyShard | None:
    """Returns which part of the vocabulary an output projection has; None if all of it."""
    found: VocabularyShard | None = module.__dict__.get(_SHARD)
    return found


def copy_in(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the tensor as it is; backward sums its gradients over the ranks."""
    found: Tensor = _CopyIn.apply(tensor, communicator)
    return found


def exp_and_losses(values: Tensor, columns: Tensor, own: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropies `[N, 1]` and the sum of exponentials `[N, 1]`, over the whole vocabulary.

    Args:
        values: logits `[N, v]`, overwritten by their exponentials, less the highest's.
        columns: `[N, 1]`, where the target is, if it is this rank's.
        own: `[N, 1]`, whether it is.
        communicator: the ranks that share the vocabulary.
    """
    highest = communicator.maximum(values.amax(dim=1, keepdim=True))
    values.sub_(highest)
    at_target = torch.where(own, values.gather(1, columns), 0)
    values.exp_()
    both = communicator.sum(torch.cat([values.sum(dim=1, keepdim=True), at_target], dim=1))
    total, at_target = both.split(1, dim=1)
    return total.log() - at_target, total


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.communicator.all_reduce(grads[0]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.shard = shard
        ranks = shard.communicator.size
        widest = -(-shard.size // ranks)
        parts = shard.communicator.all_gather_parts(F.pad(logits, (0, widest - shard.count)))
        short = shard.size % ranks  # From this rank on, parts are one shorter.
        wide = parts[: short or ranks].movedim(0, -2).flatten(-2)
        if not short:
            return wide
        return torch.cat([wide, parts[short:, ..., : widest - 1].movedim(0, -2).flatten(-2)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].narrow(-1, ctx.shard.first, ctx.shard.count).contiguous(), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
        columns, own = (part[:, None] for part in shard.place(targets))
        values = logits.clone()
        losses, total = exp_and_losses(values, columns, own, shard.communicator)
        ctx.save_for_backward(values.div_(total), columns, own)
        return losses[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shares, columns, own = ctx.saved_tensors
        slope = shares.scatter_add(1, columns, -own.to(shares.dtype))
        return slope * grads[0][:, None], None, None

"""Vocabulary parallelism: each rank computes the logits of a slice of the vocabulary, and the loss without a gather.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, section 3: the cross-entropy is computed from each rank's logits, and the ranks reduce three numbers
per token: the highest logit, the sum of exponentials and the target's logit. Departure: one all-reduce for the last
two.

A strategy that splits an output projection sets a :class:`VocabularyShard` on it; a task that computes its loss from
hidden states gets it by :func:`shard_of`.

Shapes: N tokens, D width, V vocabulary size, v size of this rank's slice of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator, with_backward
from dlo_framework.token_loss import PLAIN, TokenLoss

_SHARD = "vocabulary_shard"


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """Slice of the vocabulary on this rank.

    Attributes:
        communicator: Collectives of the ranks that share the vocabulary.
        first: First token id of this rank.
        count: Number of token ids of this rank, v.
        size: Size of the full vocabulary, V.

    The projection, called as usual, returns the logits of the full vocabulary. Called with `split=True`, it returns
    this rank's logits, `[..., v]`; the caller must then pass the projection's input through :meth:`enter` once.
    """

    communicator: Communicator
    first: int
    count: int
    size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShard:
        return self  # A process group cannot be copied, and a copy of the module has the same slice.

    def enter(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states unchanged; backward sums their gradients over the ranks."""
        return copy_in(hidden, self.communicator)

    def gather(self, logits: Tensor) -> Tensor:
        """Gathers the ranks' logits `[..., v]` into `[..., V]`; backward takes this rank's slice."""
        ranks = self.communicator.size
        widest, short = -(-self.size // ranks), self.size % ranks  # From this rank on, slices are one shorter.

        def run(logits: Tensor) -> Tensor:
            parts = self.communicator.all_gather_parts(F.pad(logits, (0, widest - self.count)))
            wide = parts[: short or ranks].movedim(0, -2).flatten(-2)
            if not short:
                return wide
            return torch.cat([wide, parts[short:, ..., : widest - 1].movedim(0, -2).flatten(-2)], dim=-1)

        return with_backward(logits, run, lambda grad: grad.narrow(-1, self.first, self.count).contiguous())

    def locate_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the targets' columns in this rank's logits, 0 for other ranks' targets, and a mask of its own."""
        own = (targets >= self.first) & (targets < self.first + self.count)
        return torch.where(own, targets - self.first, 0), own

    def cross_entropy(self, logits: Tensor, targets: Tensor, terms: TokenLoss = PLAIN) -> Tensor:
        """Returns each token's loss, `[N]`; backward returns the gradient of this rank's logits.

        Args:
            logits: Logits of this rank, `[N, v]`, in float32 at least.
            targets: Token ids in the full vocabulary, `[N]`.
            terms: Terms beside the cross-entropy.
        """
        losses: Tensor = _CrossEntropy.apply(logits, targets, self, terms)
        return losses

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns the ids of the highest logits, `[N]`; of equal ones, the lowest id."""
        values, columns = logits.max(dim=1)
        best = self.communicator.maximum(values.clone())
        ids = torch.where(values == best, columns + self.first, self.size)
        return -self.communicator.maximum(-ids)


def set_shard(module: nn.Module, shard: VocabularyShard) -> None:
    """Sets the slice of the vocabulary that an output projection has."""
    module.__dict__[_SHARD] = shard


def shard_of(module: nn.Module) -> VocabularyShard | None:
    """Returns the slice of the vocabulary that an output projection has; None for the full vocabulary."""
    shard: VocabularyShard | None = module.__dict__.get(_SHARD)
    return shard


def copy_in(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Returns the tensor unchanged; backward sums its gradient over the ranks."""
    return with_backward(tensor, lambda given: given.view_as(given), communicator.all_reduce)


def exp_and_losses(
    values: Tensor, columns: Tensor, own: Tensor, shard: VocabularyShard, terms: TokenLoss = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses, the sums of exponentials and their logarithms, each `[N, 1]`, over the full vocabulary.

    Args:
        values: Logits `[N, v]`, overwritten by the exponentials of their difference to the highest logit.
        columns: Column of each target, `[N, 1]`, where the target is on this rank.
        own: Mask of the targets on this rank, `[N, 1]`.
        shard: Slice of the vocabulary.
        terms: Terms beside the cross-entropy; label smoothing reduces one more number per token.
    """
    highest = shard.communicator.maximum(values.amax(dim=1, keepdim=True))
    values.sub_(highest)
    parts = [torch.where(own, values.gather(1, columns), 0)]
    if terms.label_smoothing:
        parts.append(values.sum(dim=1, keepdim=True) / shard.size)
    values.exp_()
    total, at_target, *mean = shard.communicator.sum(torch.cat([values.sum(dim=1, keepdim=True), *parts], dim=1)).split(
        1, dim=1
    )
    above = total.log()  # logsumexp, relative to the highest logit as the others are
    return terms.losses(above, highest, at_target, mean[0] if mean else None), total, above + highest


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard, terms: TokenLoss) -> Tensor:
        columns, own = (part[:, None] for part in shard.locate_targets(targets))
        values = logits.clone()
        losses, total, log_total = exp_and_losses(values, columns, own, shard, terms)
        ctx.save_for_backward(values.div_(total), log_total, columns, own)
        ctx.terms, ctx.size = terms, shard.size
        return losses[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shares, log_total, columns, own = ctx.saved_tensors
        slope = ctx.terms.slope(shares.clone(), log_total, columns, own, ctx.size)
        return slope * grads[0][:, None], None, None, None

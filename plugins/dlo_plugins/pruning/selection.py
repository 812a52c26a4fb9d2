"""Exact choice of the weights with the smallest scores, over all ranks, without gathering them.

The k-th smallest score is found by a radix search: scores are mapped to integers of the same order, and each pass
counts the values of the next 11 bits in a histogram that is summed over the ranks. Three passes find the threshold of
32-bit scores exactly. Scores equal to the threshold are pruned in the order of their index in the model, which a second
search finds, so that the result does not depend on the number of ranks. Each pass sends 16 KB per threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Bits of a key that one pass decides.
_PASS_BITS = 11
_BINS = 1 << _PASS_BITS
#: Bits of the key of a score, and of an index.
SCORE_BITS, INDEX_BITS = 33, 55

Sum = Callable[[Tensor], Tensor]


def order_keys(scores: Tensor, pruned: Tensor | None = None) -> Tensor:
    """Returns integers that have the order of scores; those of pruned elements come first.

    Args:
        scores: Scores in float32, of any shape; others are rounded to it. NaN counts as larger than all numbers.
        pruned: Whether each element is pruned already, so that it stays so; bool, in the shape of the scores.

    Returns:
        int64 keys in ``[0, 2^33)``, in the shape of the scores; 0 for pruned elements.
    """
    # Adding zero turns -0.0 into 0.0, which has other bits.
    bits = (scores.detach().float() + 0.0).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    keys = torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000) + 1
    return keys if pruned is None else keys.masked_fill(pruned, 0)


@dataclass(frozen=True)
class Keys:
    """Keys of this rank's elements of one tensor, each element on one rank only.

    Attributes:
        compute: Function that returns the keys, int64, in one dim; called once a pass, so that they need not be kept.
        group: Number of the threshold that applies to the tensor.
    """

    compute: Callable[[], Tensor]
    group: int


@dataclass(frozen=True)
class Threshold:
    """Thresholds of the groups, int64 tensors ``[groups]``.

    Attributes:
        value: Key of the k-th smallest element; -1 if k is 0.
        below: Number of elements with a smaller key, on all ranks.
        equal: Number of elements with this key, on all ranks.
    """

    value: Tensor
    below: Tensor
    equal: Tensor


def find_threshold(parts: Sequence[Keys], counts: Tensor, bits: int, sum_ranks: Sum) -> Threshold:
    """Returns the key of the k-th smallest element of each group.

    Args:
        parts: Keys of this rank's elements.
        counts: Number k of each group, int64 ``[groups]`` on the device; at most the group's number of elements.
        bits: Number of bits of the keys; a multiple of 11.
        sum_ranks: Function that returns the sum of a tensor over all ranks; called on all of them.
    """
    prefix, below, equal = torch.zeros_like(counts), torch.zeros_like(counts), torch.zeros_like(counts)
    rows = torch.arange(len(counts), device=counts.device)
    for shift in range(bits - _PASS_BITS, -1, -_PASS_BITS):
        histogram = counts.new_zeros(len(counts), _BINS)
        for part in parts:
            keys = part.compute()
            keys = keys[keys >> (shift + _PASS_BITS) == prefix[part.group].to(keys.device)]
            found = torch.bincount((keys >> shift) & (_BINS - 1), minlength=_BINS)
            histogram[part.group] += found.to(counts.device)
        histogram = sum_ranks(histogram)
        upto = histogram.cumsum(1)
        digit = (upto < (counts - below).clamp(min=1)[:, None]).sum(1).clamp(max=_BINS - 1)
        equal = histogram[rows, digit]
        below = below + upto[rows, digit] - equal
        prefix = prefix << _PASS_BITS | digit
    none = counts == 0
    return Threshold(prefix.masked_fill(none, -1), below.masked_fill(none, 0), equal.masked_fill(none, 0))


@dataclass(frozen=True)
class Cut:
    """Boundary between pruned and kept elements of each group, int64 tensors ``[groups]``.

    Attributes:
        key: Elements with a smaller key are pruned.
        last_index: Index of the last element with this key that is pruned; -1 if none is.
    """

    key: Tensor
    last_index: Tensor

    def is_pruned(self, keys: Tensor, indices: Callable[[], Tensor], group: int) -> Tensor:
        """Returns whether elements are pruned, bool in the shape of their keys.

        Args:
            keys: Keys of elements of one tensor.
            indices: Function that returns the elements' indices in the model; called if there are ties.
            group: Number of the tensor's group.
        """
        threshold, last = int(self.key[group]), int(self.last_index[group])
        below = keys < threshold
        ties = keys == threshold
        if last < 0 or not bool(ties.any()):
            return below
        return below | (ties & (indices().to(keys.device) <= last))


def find_cut(parts: Sequence[Keys], indices: Sequence[Callable[[], Tensor]], counts: Tensor, sum_ranks: Sum) -> Cut:
    """Returns the boundary that prunes exactly k elements of each group: those with the smallest keys.

    Of elements with equal keys, those with smaller indices are pruned first.

    Args:
        parts: Keys of this rank's elements, each element on one rank only.
        indices: Functions that return these elements' indices in the model, int64 below ``2^55``, for each part.
        counts: Number k of each group, int64 ``[groups]``.
        sum_ranks: Function that returns the sum of a tensor over all ranks; called on all of them.
    """
    found = find_threshold(parts, counts, SCORE_BITS, sum_ranks)
    wanted = counts - found.below  # Number of pruned elements among those equal to the threshold.

    def tied(part: Keys, where: Callable[[], Tensor]) -> Keys:
        def compute() -> Tensor:
            keys = part.compute()
            equal = keys == found.value[part.group].to(keys.device)
            return where().to(keys.device)[equal] if bool(equal.any()) else keys[:0]

        return Keys(compute, part.group)

    every = torch.full_like(counts, (1 << INDEX_BITS) - 1)
    if bool((wanted < found.equal).any()):
        ties = [tied(part, where) for part, where in zip(parts, indices, strict=True)]
        last = find_threshold(ties, wanted, INDEX_BITS, sum_ranks).value
    else:
        last = every
    return Cut(found.value, torch.where(wanted < found.equal, last, every).masked_fill(counts == 0, -1))

"""Masks of N:M patterns on shards: groups that a rank holds in full are its own, others are exchanged.

A flat piece of ZeRO may begin or end inside a group. The scores of such elements, a few for each weight and rank, are
gathered on all ranks, and each finds the masks of its own. Which elements they are is known from the layout, so that a
step sends only their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.shards import Box
from dlo_plugins.pruning.nm_pattern import NMPattern, keep_largest, nm_mask
from dlo_plugins.pruning.pruned_weight import PrunedShard


class GroupExchange:
    """Masks of one pattern for this rank's shards.

    Args:
        items: This rank's shards.
        pattern: Pattern, whose M divides each weight's input dim.
        gather: Function that returns a value of each rank, by rank; called on all of them.

    Attributes:
        exchanged: Number of elements of all ranks in groups that several of them hold.
    """

    def __init__(self, items: Sequence[PrunedShard], pattern: NMPattern, gather: Callable[[Any], list[Any]]) -> None:
        self.items, self.pattern = items, pattern
        ids = [(self._ids(item, *part), own) for item, part, own in self._incomplete()]
        self._mine = np.concatenate([found for found, _ in ids]) if ids else np.zeros(0, np.int64)
        counted = [found for found, own in ids if own]
        self._counted = np.concatenate([np.full(len(found), own) for found, own in ids]) if ids else np.zeros(0, bool)
        everyone = gather(np.concatenate(counted) if counted else np.zeros(0, np.int64))
        self._lengths = [len(found) for found in everyone]
        merged = np.concatenate(everyone)
        self.exchanged = len(merged)
        self._order = torch.from_numpy(np.argsort(merged, kind="stable"))
        self._places = torch.from_numpy(np.searchsorted(np.sort(merged), self._mine))

    def _incomplete(self) -> Iterator[tuple[PrunedShard, tuple[Box, int, int], bool]]:
        """Yields the ranges along the input dim of boxes in whose groups elements are missing."""
        m = self.pattern.m
        for item in self.items:
            for box, own in zip(item.boxes, item.owned, strict=True):
                if not box.numel:
                    continue
                begin, end = box.offsets[item.input_dim], box.offsets[item.input_dim] + box.sizes[item.input_dim]
                first, last = -(-begin // m) * m, end // m * m
                if first >= last:
                    yield item, (box, begin, end), own
                    continue
                if begin < first:
                    yield item, (box, begin, first), own
                if last < end:
                    yield item, (box, last, end), own

    def _ids(self, item: PrunedShard, box: Box, begin: int, end: int) -> np.ndarray:
        """Returns the numbers of elements, in which those of a group are consecutive."""
        dim, m = item.input_dim, self.pattern.m
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = begin, end - begin
        stride = int(np.prod(item.shape[dim + 1 :]))
        flat = item.indices(Box(tuple(offsets), tuple(sizes)))
        along = torch.arange(begin, end).view(-1, *(1,) * (len(item.shape) - 1 - dim)) % m
        return ((flat - along * stride) * m + along).flatten().numpy()

    @torch.no_grad()
    def masks(self, scores: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Returns the masks of this rank's shards, bool in the local layouts; True for kept elements.

        Args:
            scores: Scores of the shards' elements in the local layouts, float32.
            device: Device of communication.
        """
        kept = [torch.zeros_like(item.pruned) for item in self.items]
        m = self.pattern.m
        for item, score, mask in zip(self.items, scores, kept, strict=True):
            for (box, view), (_, target) in zip(item.views(score), item.views(mask), strict=True):
                if not box.numel:
                    continue
                begin, end = box.offsets[item.input_dim], box.offsets[item.input_dim] + box.sizes[item.input_dim]
                first, last = -(-begin // m) * m, end // m * m
                if first < last:
                    inner = (item.input_dim, first - begin, last - first)
                    target.narrow(*inner).copy_(nm_mask(view.narrow(*inner), self.pattern, item.input_dim))
        if self.exchanged:
            self._exchange(scores, kept, device)
        return kept

    def _slices(self, values: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the views of the incomplete ranges in tensors of the local layouts."""
        by_box = {
            (id(item), box): view
            for item, value in zip(self.items, values, strict=True)
            for box, view in item.views(value)
        }
        for item, (box, begin, end), _ in self._incomplete():
            yield by_box[id(item), box].narrow(item.input_dim, begin - box.offsets[item.input_dim], end - begin)

    def _exchange(self, scores: Sequence[Tensor], kept: Sequence[Tensor], device: torch.device) -> None:
        found = [view.flatten().to(device) for view in self._slices(scores)]
        mine = torch.cat(found) if found else torch.empty(0, device=device)
        sent = torch.zeros(max(self._lengths), device=device)
        counted = torch.from_numpy(self._counted).to(device)
        sent[: int(counted.sum())] = mine[counted]
        if len(self._lengths) > 1:
            received = [torch.empty_like(sent) for _ in self._lengths]
            dist.all_gather(received, sent)
        else:
            received = [sent]
        merged = torch.cat([part[:length] for part, length in zip(received, self._lengths, strict=True)])
        groups = merged[self._order.to(device)].view(-1, self.pattern.m)
        mask = keep_largest(groups, self.pattern.n).flatten()[self._places.to(device)]
        at = 0
        for target in self._slices(kept):
            target.copy_(mask[at : at + target.numel()].view(target.shape))
            at += target.numel()

"""Pruned weights on one rank: masks in the layout of the tensors that the optimizer steps, and their choice over ranks.

A weight is pruned where its mask is zero. Masks have the layout of the optimizer's tensors, of which every element is
on at least one rank, whatever the strategy: a flat piece under ZeRO, rows under FSDP, a slice under tensor parallelism,
the weights of one stage under a pipeline. A step then needs no communication to keep pruned weights at zero. A choice
over all ranks counts each element once: the first rank that holds a box of a tensor counts it.

Of N:M patterns, a rank chooses the masks of the groups that it holds in full. A flat piece of ZeRO may begin or end
inside a group. The scores of such elements, a few for each weight and rank, are gathered on all ranks, and each finds
the masks of its own. Which elements they are is known from the layout, so that a step sends only their scores.

Without a pattern, the weights with the smallest scores are chosen exactly, without gathering them. The k-th smallest
score is found by a radix search: scores are mapped to integers of the same order, and each pass counts the values of
the next 11 bits in a histogram that is summed over the ranks. Three passes find the threshold of 32-bit scores exactly.
Scores equal to the threshold are pruned in the order of their index in the model, which a second search finds, so that
the result does not depend on the number of ranks. Each pass sends 16 KB per threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.errors import DloError
from dlo_framework.shards import Box, Shard, held_boxes, is_tiling, local_data, shard_maker
from dlo_framework.strategy_contract import StrategyContract
from dlo_plugins.prune.layers import NMPattern, PrunableLayer, keep_largest, nm_mask


@dataclass
class PrunedShard:
    """This rank's shard of a pruned weight.

    Attributes:
        name: Name of the weight.
        tensor: Tensor that the optimizer steps.
        shape: Shape of the full weight.
        input_dim: Dimension of the input features.
        offset: Index in the model of the weight's first element.
        number: Number of the weight among all pruned ones.
        make: Function that returns elements in this layout as a shard.
        boxes: Boxes of the full weight that this rank holds.
        owned: Whether this rank counts each of the boxes.
        pruned: Whether each element is pruned, bool in the local layout.
        dense: Values of pruned elements that can return, zero elsewhere; None where pruned elements stay zero.
        scores: Accumulated scores of movement pruning; None for other methods.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    input_dim: int
    offset: int
    number: int
    make: Callable[[Tensor], Shard]
    boxes: list[Box]
    owned: list[bool]
    pruned: Tensor
    dense: Tensor | None = None
    scores: Tensor | None = None

    def views(self, values: Tensor, *, owned: bool = False) -> list[tuple[Box, Tensor]]:
        """Returns the boxes with their elements of a tensor in the local layout; with ``owned``, those counted here."""
        views = held_boxes(self.make(values))
        return [pair for pair, own in zip(views, self.owned, strict=True) if own] if owned else views

    def indices(self, box: Box) -> Tensor:
        """Returns the indices in the model of a box's elements, int64 in its shape."""
        indices, stride = torch.tensor(self.offset), 1
        for dim in range(len(self.shape) - 1, -1, -1):
            along = (torch.arange(box.sizes[dim]) + box.offsets[dim]) * stride
            indices = indices + along.view(-1, *(1,) * (len(self.shape) - 1 - dim))
            stride *= self.shape[dim]
        return indices


#: Keys in a checkpoint's ``pruning``.
MASKS, DENSE, SCORES = "masks", "dense", "scores"


class PrunedShards:
    """Masks of this rank's shards of the pruned weights.

    Built on all ranks at the same time, when the optimizer's tensors hold values: before its step.

    Args:
        contract: Strategy of the run.
        optimizer: Optimizer that steps the weights.
        layers: Layers to prune, of all ranks.
        device: Device of communication.
        keeps_dense: Whether pruned weights keep their values aside, so that they can return.
        accumulates: Whether scores are accumulated from gradients.

    Attributes:
        items: Shards of this rank.
        names: Names of all ranks' pruned weights, sorted.
        sizes: Number of elements of each, in the order of ``names``.
        target: Fraction of the weights that the last choice pruned.

    Raises:
        DloError: If the ranks' tensors do not make up each weight.
    """

    def __init__(
        self,
        contract: StrategyContract,
        optimizer: Optimizer,
        layers: Iterable[PrunableLayer],
        device: torch.device,
        *,
        keeps_dense: bool,
        accumulates: bool,
    ) -> None:
        self.contract, self.optimizer, self.device = contract, optimizer, device
        self.keeps_dense = keeps_dense
        self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        dims = {layer.name: layer.input_dim for layer in layers}
        tensors = {n: t for n, t in contract.optimizer_tensors(optimizer).items() if n in dims}
        shards = {name: contract.as_shard(name, tensor, tensor.detach()) for name, tensor in tensors.items()}
        mine = {
            name: (tuple(shard.shape), [box for box, _ in held_boxes(shard) if box.numel])
            for name, shard in shards.items()
        }
        shapes: dict[str, tuple[int, ...]] = {}
        owners: dict[str, dict[Box, int]] = {}  # First rank that holds each box of each weight.
        for rank, held in enumerate(self._gather(mine)):
            for name, (shape, boxes) in held.items():
                shapes[name] = tuple(shape)
                for box in boxes:
                    owners.setdefault(name, {}).setdefault(box, rank)
        self.names = sorted(shapes)
        self.shapes = {name: shapes[name] for name in self.names}
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.target = 0.0
        self.items: list[PrunedShard] = []
        for number, name in enumerate(self.names):
            if not is_tiling(self.shapes[name], list(owners.get(name, {}))):
                raise DloError(
                    f"Prune: the ranks' tensors must make up each weight under {type(contract).__name__}, got"
                    f" {name} with gaps or overlaps; use ddp, zero1 to zero3, fsdp or MeshStrategy"
                )
            if name not in shards:
                continue
            values = local_data(shards[name])
            pairs = held_boxes(shards[name])
            self.items.append(
                PrunedShard(
                    name=name,
                    tensor=tensors[name],
                    shape=self.shapes[name],
                    input_dim=dims[name],
                    offset=sum(self.sizes[:number]),
                    number=number,
                    make=shard_maker(shards[name]),
                    boxes=[box for box, _ in pairs],
                    owned=[bool(box.numel) and owners[name][box] == self.rank for box, _ in pairs],
                    pruned=torch.zeros_like(values, dtype=torch.bool),
                    dense=torch.zeros_like(values) if keeps_dense else None,
                    scores=torch.zeros_like(values, dtype=torch.float32) if accumulates else None,
                )
            )
        self._exchange: GroupExchange | None = None

    def _gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def sum_ranks(self, values: Tensor) -> Tensor:
        """Returns the sum of a tensor over all ranks; the tensor itself in one process."""
        if self.world_size > 1:
            values = values.contiguous()
            dist.all_reduce(values)
        return values

    # --- this rank's elements ------------------------------------------------------------------------------

    def values(self, item: PrunedShard, of: Tensor | None = None) -> Tensor:
        """Returns the memory of this rank's elements of a weight, or of a tensor in the layout of the stepped one."""
        return local_data(self.contract.as_shard(item.name, item.tensor, (item.tensor if of is None else of).detach()))

    @torch.no_grad()
    def apply(self) -> None:
        """Sets the pruned weights to zero."""
        for item in self.items:
            self.values(item).masked_fill_(item.pruned, 0)

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Sets the gradients of the pruned weights to zero."""
        for item in self.items:
            if item.tensor.grad is not None:
                self.values(item, item.tensor.grad).masked_fill_(item.pruned, 0)

    @torch.no_grad()
    def mask_optimizer_state(self) -> None:
        """Sets the optimizer's state of the pruned weights, such as momentum, to zero."""
        for item in self.items:
            for value in self.optimizer.state.get(item.tensor, {}).values():
                if isinstance(value, Tensor) and value.shape == item.tensor.shape and value.is_floating_point():
                    self.values(item, value).masked_fill_(item.pruned, 0)

    @torch.no_grad()
    def restore_dense(self, decay: float) -> None:
        """Puts the values of pruned weights back for a step, and adds their decay to the gradients (SR-STE).

        Args:
            decay: Factor of the pruned weights in their gradient.
        """
        for item in self.items:
            assert item.dense is not None
            self.values(item).add_(item.dense)
            if decay and item.tensor.grad is not None:
                self.values(item, item.tensor.grad).add_(item.dense, alpha=decay)
            item.dense.zero_()

    @torch.no_grad()
    def reapply(self) -> None:
        """Moves the values of pruned weights aside again, with the same masks."""
        for item in self.items:
            self._set_pruned(item, item.pruned)

    @torch.no_grad()
    def accumulate_movement(self) -> None:
        """Adds a step's movement towards zero, with the sign of the paper: the scores fall by gradient times weight."""
        for item in self.items:
            if item.tensor.grad is None:
                continue
            assert item.dense is not None
            assert item.scores is not None
            weight = self.values(item) + item.dense
            item.scores.addcmul_(self.values(item, item.tensor.grad).float(), weight.float(), value=-1)

    # --- the choice ----------------------------------------------------------------------------------------

    def _score(self, item: PrunedShard) -> Tensor:
        if item.scores is not None:
            return item.scores
        values = self.values(item)
        return (values if item.dense is None else values + item.dense).abs()

    @torch.no_grad()
    def choose(self, sparsity: float, scope: str) -> None:
        """Chooses the pruned weights: the fraction with the smallest scores, of all weights or of each.

        Called on all ranks. Without values aside, weights that are pruned stay so.

        Args:
            sparsity: Fraction to prune.
            scope: ``global`` or ``layer``.
        """
        per_layer = scope == "layer"
        sizes = self.sizes if per_layer else [sum(self.sizes)]
        counts = torch.tensor([round(sparsity * size) for size in sizes], dtype=torch.int64, device=self.device)
        if not self.keeps_dense:
            already = self.count_pruned()
            counts = counts.maximum(already if per_layer else already.sum().view(1))

        def keys(item: PrunedShard, *, owned: bool) -> list[tuple[Box, Tensor]]:
            ordered_keys = order_keys(self._score(item), item.pruned if item.dense is None else None)
            return item.views(ordered_keys, owned=owned)

        def flat(item: PrunedShard) -> Tensor:
            return _concat([view.flatten() for _, view in keys(item, owned=True)], item)

        def where(item: PrunedShard) -> Tensor:
            own = zip(item.boxes, item.owned, strict=True)
            return _concat([item.indices(box).flatten() for box, counted in own if counted], item)

        parts = [Keys(partial(flat, item), item.number if per_layer else 0) for item in self.items]
        cut = find_cut(parts, [partial(where, item) for item in self.items], counts, self.sum_ranks)
        for item, part in zip(self.items, parts, strict=True):
            chosen = torch.empty_like(item.pruned)
            for (box, view), (_, target) in zip(keys(item, owned=False), item.views(chosen), strict=True):
                target.copy_(cut.is_pruned(view, partial(item.indices, box), part.group))
            self._set_pruned(item, chosen)
        self.target = sparsity

    @torch.no_grad()
    def choose_pattern(self, pattern: NMPattern) -> None:
        """Chooses the pruned weights by an N:M pattern: the smallest M - N of each group; called on all ranks."""
        if self._exchange is None:
            self._exchange = GroupExchange(self.items, pattern, self._gather)
        scores = [self._score(item).float() for item in self.items]
        for item, kept in zip(self.items, self._exchange.masks(scores, self.device), strict=True):
            self._set_pruned(item, ~kept)
        self.target = pattern.sparsity

    def _set_pruned(self, item: PrunedShard, chosen: Tensor) -> None:
        """Sets a weight's pruned elements, and moves values aside and back."""
        values = self.values(item)
        if item.dense is not None:
            values.add_(item.dense)
            item.dense.copy_(values).masked_fill_(~chosen, 0)
        item.pruned = chosen
        values.masked_fill_(chosen, 0)

    def freeze(self) -> None:
        """Makes the masks final: pruned weights no longer keep their values, nor scores."""
        self.keeps_dense = False
        for item in self.items:
            item.dense = item.scores = None

    def count_pruned(self) -> Tensor:
        """Returns the number of pruned elements of each weight, over all ranks; called on all of them."""
        counts = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)
        for item in self.items:
            for _, view in item.views(item.pruned, owned=True):
                counts[item.number] += view.sum().to(self.device)
        return self.sum_ranks(counts)

    def layer_sparsity(self) -> dict[str, float]:
        """Returns the fraction of each weight that is pruned, over all ranks; called on all of them."""
        counts = self.count_pruned().tolist()
        return {name: count / size for name, size, count in zip(self.names, self.sizes, counts, strict=True)}

    # --- checkpoints and other layouts ---------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Shard]]:
        """Returns the masks (true for kept weights), values aside and scores, as shards by name."""
        shards: dict[str, dict[str, Shard]] = {MASKS: {item.name: item.make(~item.pruned) for item in self.items}}
        for key in (DENSE, SCORES):
            named = {i.name: i.make(getattr(i, key)) for i in self.items if getattr(i, key) is not None}
            if named:
                shards[key] = named
        return shards

    @torch.no_grad()
    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads this rank's part of a checkpoint's ``pruning``, or of the masks alone; called on all ranks.

        Raises:
            DloError: If a mask is missing or has another shape.
        """
        masks = as_lazy_state_dict(saved[MASKS])
        for item in self.items:
            kept = torch.empty_like(item.pruned)
            masks.read_into(item.name, item.make(kept))
            item.pruned = ~kept
            for key in (DENSE, SCORES):
                own, theirs = getattr(item, key), as_lazy_state_dict(saved.get(key, {}))
                if own is not None and item.name in theirs:
                    theirs.read_into(item.name, item.make(own))
        self.target = float(self.count_pruned().sum()) / sum(self.sizes)

    @torch.no_grad()
    def masks_in(self, held: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's elements of each weight in another layout, with their mask; called on all ranks.

        A weight whose boxes are others in that layout on any rank is assembled from all ranks' masks, one at a time.

        Args:
            held: Shards of the module's state, by name.

        Yields:
            Elements, the memory itself, and whether each is pruned.
        """
        known = {item.name: item for item in self.items}

        def is_same(name: str) -> bool:
            shard, item = held.get(name), known.get(name)
            theirs = [box for box, _ in held_boxes(shard) if box.numel] if isinstance(shard, Shard) else []
            return theirs == [box for box in (item.boxes if item is not None else ()) if box.numel]

        same = torch.tensor([int(is_same(name)) for name in self.names], dtype=torch.int64, device=self.device)
        agreed = (self.sum_ranks(same) == self.world_size).tolist()
        for name, has_own_mask in zip(self.names, agreed, strict=True):
            item, shard = known.get(name), held.get(name)
            if has_own_mask:
                if item is not None and shard is not None:
                    yield local_data(shard), item.pruned.view_as(local_data(shard))
                continue
            full = torch.zeros(self.shapes[name], dtype=torch.uint8, device=self.device)
            for box, view in item.views(item.pruned, owned=True) if item is not None else ():
                full[box_slices(box)] = view.to(full)
            full = self.sum_ranks(full)
            if shard is not None:
                target = torch.zeros_like(local_data(shard), dtype=torch.bool)
                for box, view in held_boxes(shard_maker(shard)(target)):
                    view.copy_(full[box_slices(box)])
                yield local_data(shard), target


def _concat(parts: list[Tensor], item: PrunedShard) -> Tensor:
    device = item.pruned.device
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=torch.int64, device=device)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Returns the index of a box in its full tensor."""
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


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
        self._mine = np.concatenate([np.zeros(0, np.int64), *(numbers for numbers, _ in ids)])
        self._counted = np.concatenate([np.zeros(0, bool), *(np.full(len(numbers), own) for numbers, own in ids)])
        everyone = gather(self._mine[self._counted])
        self._lengths = [len(numbers) for numbers in everyone]
        merged = np.concatenate(everyone)
        self.exchanged = len(merged)
        self._order = torch.from_numpy(np.argsort(merged, kind="stable"))
        self._places = torch.from_numpy(np.searchsorted(np.sort(merged), self._mine))

    def _incomplete(self) -> Iterator[tuple[PrunedShard, tuple[Box, int, int], bool]]:
        """Yields the ranges along the input dim of boxes in whose groups elements are missing."""
        for item in self.items:
            for box, own in zip(item.boxes, item.owned, strict=True):
                if not box.numel:
                    continue
                begin, end, first, last = self._bounds(item, box)
                parts = ((begin, first), (last, end)) if first < last else ((begin, end),)
                yield from ((item, (box, start, stop), own) for start, stop in parts if start < stop)

    def _bounds(self, item: PrunedShard, box: Box) -> tuple[int, int, int, int]:
        """Returns begin and end of a box along the input dim, and of the full groups in it."""
        begin, m = box.offsets[item.input_dim], self.pattern.m
        end = begin + box.sizes[item.input_dim]
        return begin, end, -(-begin // m) * m, end // m * m

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
        for item, score, mask in zip(self.items, scores, kept, strict=True):
            for (box, view), (_, target) in zip(item.views(score), item.views(mask), strict=True):
                if not box.numel:
                    continue
                begin, _, first, last = self._bounds(item, box)
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
        slices = [view.flatten().to(device) for view in self._slices(scores)]
        mine = torch.cat(slices) if slices else torch.empty(0, device=device)
        sent = torch.zeros(max(self._lengths), device=device)
        counted = torch.from_numpy(self._counted).to(device)
        sent[: int(counted.sum())] = mine[counted]
        received = [torch.empty_like(sent) for _ in self._lengths] if len(self._lengths) > 1 else [sent]
        if len(received) > 1:
            dist.all_gather(received, sent)
        merged = torch.cat([part[:length] for part, length in zip(received, self._lengths, strict=True)])
        groups = merged[self._order.to(device)].view(-1, self.pattern.m)
        mask = keep_largest(groups, self.pattern.n).flatten()[self._places.to(device)]
        at = 0
        for target in self._slices(kept):
            target.copy_(mask[at : at + target.numel()].view(target.shape))
            at += target.numel()


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


def find_threshold(parts: Sequence[Keys], counts: Tensor, bits: int, sum_ranks: Sum) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the key of the k-th smallest element of each group, and how many keys are smaller and equal on all ranks.

    The results are int64 ``[groups]``; the key is -1 if k is 0.

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
            bins = torch.bincount((keys >> shift) & (_BINS - 1), minlength=_BINS)
            histogram[part.group] += bins.to(counts.device)
        histogram = sum_ranks(histogram)
        upto = histogram.cumsum(1)
        digit = (upto < (counts - below).clamp(min=1)[:, None]).sum(1).clamp(max=_BINS - 1)
        equal = histogram[rows, digit]
        below = below + upto[rows, digit] - equal
        prefix = prefix << _PASS_BITS | digit
    none = counts == 0
    return prefix.masked_fill(none, -1), below.masked_fill(none, 0), equal.masked_fill(none, 0)


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
    value, below, number_equal = find_threshold(parts, counts, SCORE_BITS, sum_ranks)
    wanted = counts - below  # Number of pruned elements among those equal to the threshold.

    def tied(part: Keys, where: Callable[[], Tensor]) -> Keys:
        def compute() -> Tensor:
            keys = part.compute()
            equal = keys == value[part.group].to(keys.device)
            return where().to(keys.device)[equal] if bool(equal.any()) else keys[:0]

        return Keys(compute, part.group)

    every = torch.full_like(counts, (1 << INDEX_BITS) - 1)
    last = every
    if bool((wanted < number_equal).any()):
        ties = [tied(part, where) for part, where in zip(parts, indices, strict=True)]
        last = find_threshold(ties, wanted, INDEX_BITS, sum_ranks)[0]
    return Cut(value, torch.where(wanted < number_equal, last, every).masked_fill(counts == 0, -1))

"""Installs a tensor-parallel plan in a model: this rank's shards, and the communication of regions and vocabularies.

Much code of models writes the full sizes into its reshapes: `x.reshape(B, N, C)` with `C` from the input's shape, or
`qkv.reshape(B, N, 3, heads, C // heads)`. With a slice of the features such a reshape fails. Inside a region with the
rule `local_shapes`, a function mode divides the dim of the requested shape that has the heads or features. Modules keep
their full sizes in their attributes.

The mode also enters the region where code multiplies by a column projection's weight without calling the projection, as
BEiT does to add a bias to queries and values alone.

Modules over features or tokens that ranks divide:

- RMS norms over sharded features, such as OLMo 2's of queries and of keys over all heads: Root Mean Square Layer
  Normalization. Zhang and Sennrich, 2019, arXiv 1910.07467. Departure: the mean square is summed over the ranks, one
  number for each token.
- Multi-query attention: Fast Transformer Decoding: One Write-Head is All You Need. Shazeer, 2019, arXiv 1911.02150. A
  fused projection of many query heads and one key/value head is divided like any other, the key and value by their
  features. Each rank computes its share of them for all tokens and gathers the others' (:func:`install_gather`). So the
  weight has no replicated part: checkpoints, gradient norms and optimizers treat it like other slices. In backward, the
  gradients of the key and value, which come from each rank's query heads, are summed and scattered.
- Latent attention: DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model. DeepSeek-AI,
  2024, arXiv 2405.04434. One projection gives a latent, from which each head's keys and values are projected, and a key
  with a rotary position that all heads have in common (:func:`install_sharing`). Each rank computes both in full. The
  latent enters the region at the column projection of keys and values, whose input gradient is summed over the ranks.
  The common key goes to each rank's heads directly, so backward sums the gradients of these features alone, where the
  projection gives them. So the gradients of the projection and of the latent's norm are complete on each rank. With
  sequence parallelism the region's entry sums all of them.
- Embeddings and output projections over a sharded vocabulary: Megatron-LM. Shoeybi et al., 2019, arXiv 1909.08053,
  section 3. Departure: a vocabulary that is not divisible by the ranks is not padded; the first ranks have one token
  more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import VocabularyShard, set_shard, shard_of
from dlo_framework.models.attention.attention_mask import LocalHeads, bind_heads
from dlo_framework.shards import get_layout
from dlo_plugins.parallel.tensor.collectives import all_reduce_both, copy_last_in, gather_features, reduce_from_region
from dlo_plugins.parallel.tensor.expert_slices import install_slices
from dlo_plugins.parallel.tensor.full_values import give_hooks_full
from dlo_plugins.parallel.tensor.heads import install_operands, set_local_config, set_local_heads
from dlo_plugins.parallel.tensor.overlap import AsyncProducts
from dlo_plugins.parallel.tensor.projections import (
    REGION,
    base_of,
    mix_in,
    set_channel_counts,
    set_feature_counts,
    set_features,
)
from dlo_plugins.parallel.tensor.regions import Region, install_region
from dlo_plugins.parallel.tensor.sequence_parallel import LocalRandom, ShardedSequence
from dlo_plugins.parallel.tensor.tp_plan import TPPlan, distinct, local_range

_FEATURES = "tensor_features"


class ShardedRMSNorm:
    """Mixin for the class of an RMS norm: normalises over the features of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's features `[..., d]`, normalised over the features of all ranks."""
        module: Any = self
        communicator, size = module.__dict__[REGION].communicator, module.__dict__[_FEATURES]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = all_reduce_both(wide.square().sum(dim=-1, keepdim=True), communicator) / size
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
        return (module.weight * (wide * torch.rsqrt(mean_square + eps))).to(x.dtype)


def install_norm(module: nn.Module, size: int, region: Region) -> None:
    """Makes a norm with a sharded weight normalise over the features of all ranks.

    Args:
        module: Norm; its class is replaced by a derived one.
        size: Number of features over all ranks.
        region: Region of the norm.
    """
    module.__dict__[_FEATURES] = size
    mix_in(ShardedRMSNorm, module, region)


def install_sharing(projection: nn.Module, features: int, region: Region) -> None:
    """Makes backward sum the gradients of a projection's last features over the ranks.

    Args:
        projection: Projection that each rank computes in full.
        features: Number of its last output features that all heads use.
        region: Region of the projection.
    """
    if region.sequence is None:
        projection.register_forward_hook(lambda _, args, output: copy_last_in(output, features, region.communicator))


def install_gather(column: nn.Module, features: int, region: Region) -> None:
    """Makes a column projection give the key and value in full.

    Args:
        column: Projection with queries, key and value.
        features: Number of features of key and value, over all ranks.
        region: Region of the projection.
    """

    def gather(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        local = features // region.communicator.size
        own, shared = output.split((output.shape[-1] - local, local), dim=-1)
        gathered = gather_features(shared.unflatten(-1, (2, -1)), region.communicator)  # Key and value, each divided.
        return torch.cat((own, gathered.flatten(-2)), dim=-1)

    column.register_forward_hook(gather)


# --- vocabularies --------------------------------------------------------------------------------------------


class ShardedEmbedding:
    """Mixin for the class of an embedding: each rank looks up its own tokens, and the ranks sum the results."""

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of all tokens, `[..., D]`, of ids `[...]`."""
        shard = shard_of(self)  # type: ignore[arg-type]
        assert shard is not None
        columns, own = shard.locate_targets(ids)
        embeddings: Tensor = super().forward(columns)  # type: ignore[misc]
        return reduce_from_region(embeddings.masked_fill(~own[..., None], 0), shard.communicator)


class ShardedHead:
    """Mixin for the class of an output projection; see :class:`VocabularyShard`."""

    def forward(self, hidden: Tensor, split: bool = False) -> Tensor:
        """Returns the logits of the full vocabulary, or only this rank's."""
        if split:
            return super().forward(hidden)  # type: ignore[misc]
        shard = shard_of(self)  # type: ignore[arg-type]
        assert shard is not None
        return shard.gather(super().forward(shard.enter(hidden)))  # type: ignore[misc]


def install_vocabulary(module: nn.Module, size: int, communicator: Communicator) -> None:
    """Makes an embedding or an output projection with a sharded weight work on its shard of the vocabulary.

    Args:
        module: Embedding or output projection; its class is replaced by a derived one.
        size: Size of the full vocabulary.
        communicator: Communicator of the ranks that share it.
    """
    first, count = local_range(size, communicator.size, communicator.rank)
    shard = VocabularyShard(communicator, first, count, size)
    set_shard(module, shard)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = count
        if module.padding_idx is not None:
            padding = module.padding_idx - first
            module.padding_idx = padding if 0 <= padding < count else None
    else:
        base_of(module).out_features = count
        if base_of(module) is not module:
            set_features(module)
    mix_in(ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedHead, module, shard)


_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)
_EXPANDS = (Tensor.expand,)
_SPLITS = (Tensor.split, torch.split, torch.functional.split)


@dataclass(frozen=True)
class LocalSizes:
    """Full sizes of an attention, of which each rank has a share.

    Attributes:
        ranks: Number of ranks.
        heads: Number of query heads over all ranks.
        kv: Number of key/value heads over all ranks.
        width: Number of features of a head.
    """

    ranks: int
    heads: int
    kv: int
    width: int

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of heads."""
        return self.heads, self.kv

    @property
    def features(self) -> tuple[int, int]:
        """Numbers of features of all query heads, and of all key/value heads."""
        return self.heads * self.width, self.kv * self.width


def local_shape(given: Sequence[int], shape: Sequence[int], sizes: LocalSizes) -> list[int]:
    """Returns the shape to which a tensor is reshaped, with this rank's share of the heads or features.

    Args:
        given: Shape of the tensor, which has a share of them.
        shape: Requested shape, in full sizes; one dim may be -1.
        sizes: Full sizes.
    """
    wanted, numel = list(shape), math.prod(given)
    if -1 in wanted:
        at = wanted.index(-1)
        known = -math.prod(wanted)
        if known == 0 or numel * sizes.ranks % known:
            return wanted
        full = numel * sizes.ranks // known
        of_heads = full == sizes.width and any(size in sizes.counts for size in wanted)
        # A leading -1 that would be a fraction of the same dim before.
        of_same = at < len(given) and full == given[at] and numel // known != given[at]
        of_same = of_same and wanted[at + 1 :] != [sizes.width]  # There it is the rank's heads.
        if not of_heads and not of_same:
            return wanted
        wanted[at] = full
    if sizes.ranks * numel != math.prod(wanted):
        return wanted
    divided = _divided(list(given), wanted, sizes)
    if divided is not None:
        wanted[divided] //= sizes.ranks
    return wanted


def _divided(given: list[int], wanted: list[int], sizes: LocalSizes) -> int | None:
    """Returns the dim of a shape that has the heads or features: among those that differ, heads before features."""
    first, last = 0, len(wanted)
    while first < min(len(given), last) and given[first] == wanted[first]:
        first += 1
    tail = len(given)
    # A size that is the number of heads is not taken for the same dim: it may come from samples times heads.
    while last > first and tail > first and given[tail - 1] == wanted[last - 1] not in sizes.counts:
        last, tail = last - 1, tail - 1
    among = [dim for dim in range(first, last) if wanted[dim] % sizes.ranks == 0]
    from_features = last == len(wanted)
    heads = [dim for dim in among if wanted[dim] in sizes.counts]
    if len(heads) > 1:  # The width of a head, or the batch, has the same size as the heads.
        heads = heads[:1] if from_features else heads[-1:]
    features = [dim for dim in among if any(size and wanted[dim] % size == 0 for size in sizes.features)]
    dims = heads or features[-1:] or (among if len(among) == 1 else [])
    return dims[0] if dims else None


def local_expansion(given: Sequence[int], shape: Sequence[int], sizes: LocalSizes) -> list[int]:
    """Returns the shape to which the one key or value of multi-query attention is repeated: for this rank's heads.

    Args:
        given: Shape of the tensor.
        shape: Requested shape, in full sizes.
        sizes: Full sizes.
    """
    wanted = list(shape)
    if sizes.kv != 1 or len(given) != len(wanted) or not given or given[-1] != sizes.width:
        return wanted
    of_heads = [dim for dim, size in enumerate(wanted[:-1]) if size == sizes.heads and given[dim] == 1]
    if of_heads:
        wanted[of_heads[-1]] //= sizes.ranks
    return wanted


class LocalShapes(TorchFunctionMode):
    """Function mode that divides requested shapes; see this module.

    Args:
        sizes: Full sizes.
        region: Region of the module.
    """

    def __init__(self, sizes: LocalSizes, region: Any) -> None:
        super().__init__()
        self._sizes, self._region = sizes, region

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShapes:
        return self  # A process group cannot be copied.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        change = local_shape if func in _RESHAPES else local_expansion if func in _EXPANDS else None
        if change is not None and not kwargs and len(args) > 1:
            shape = args[1] if isinstance(args[1], Sequence) else args[1:]
            if all(isinstance(size, int) for size in shape):  # Not a dtype, as `view` takes.
                return func(args[0], change(args[0].shape, shape, self._sizes))
        elif func in _SPLITS and len(args) > 1:
            return func(args[0], self._split_sizes(args, kwargs), *args[2:], **kwargs)
        elif func is F.linear and self._region.needs_entry(args[0], kwargs.get("weight", args[1:] and args[1])):
            return func(self._region.enter(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _split_sizes(self, args: Any, kwargs: Any) -> Any:
        wanted, dim = args[1], kwargs.get("dim", args[2] if len(args) > 2 else 0)
        own, ranks = args[0].shape[dim], self._sizes.ranks
        if isinstance(wanted, int):
            features = self._sizes.features[: 1 if self._sizes.kv == 1 else 2]
            is_full = wanted in features and own * ranks % wanted == 0
            return wanted // ranks if is_full else wanted
        is_full = sum(wanted) == own * ranks and all(size % ranks == 0 for size in wanted)
        if is_full:
            return [size // ranks for size in wanted]
        of_queries = self._sizes.features[0]  # Beside the one key and value of multi-query attention.
        divided = [size // ranks if size == of_queries else size for size in wanted]
        return divided if sum(divided) == own else wanted


class LocallyShaped:
    """Mixin for the class of a region's module: its forward runs with divided shapes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with self.__dict__[REGION]:
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def install_local_shapes(module: nn.Module, sizes: LocalSizes, region: Any) -> None:
    """Makes a region's module run with divided shapes.

    Args:
        module: Module of the region; its class is replaced by a derived one.
        sizes: Full sizes.
        region: State of the region.
    """
    mix_in(LocallyShaped, module, LocalShapes(sizes, region))


def install_plan(
    module: nn.Module,
    tp_plan: TPPlan,
    communicator: Communicator,
    stream: ShardedSequence | None = None,
    products: AsyncProducts | None = None,
    random: LocalRandom | None = None,
) -> None:
    """Cuts a model in place.

    Args:
        module: Full model, the same on each rank.
        tp_plan: Tensor-parallel plan of the model for this number of ranks.
        communicator: Communicator of the ranks.
        stream: Sequence that is split between regions; None without sequence parallelism.
        products: Products that overlap with collectives; None without asynchronous tensor parallelism.
        random: This rank's random numbers; by default new ones.
    """
    shard_parameters(module, tp_plan, communicator)
    random = LocalRandom(communicator.rank) if random is None else random
    for name in distinct(module, tp_plan.regions):
        region = tp_plan.regions[name]
        around = module.get_submodule(name)
        columns = [module.get_submodule(column) for column in region.columns]
        rows = [module.get_submodule(row) for row in region.rows]
        made = Region(name, around, communicator, random, stream, products)
        install_region(around, columns, rows, made)
        if region.operands:
            install_operands(around, region.operands, region.heads, made)
        for column, features in region.gathered.items():
            install_gather(module.get_submodule(column), features, made)
        for projection, features in region.shared_features.items():
            install_sharing(module.get_submodule(projection), features, made)
        if region.local_shapes:
            sizes = LocalSizes(communicator.size, region.heads, region.kv or region.heads, region.width)
            install_local_shapes(around, sizes, made)
        for norm in region.norms:
            size = tp_plan.divisions[f"{norm}.weight"].pieces[0]
            install_norm(module.get_submodule(norm), size, made)
    for name in distinct(module, tp_plan.experts):
        install_slices(module.get_submodule(name), communicator)
    for name in distinct(module, tp_plan.vocabulary):
        install_vocabulary(module.get_submodule(name), tp_plan.vocabulary[name], communicator)


@torch.no_grad()
def shard_parameters(module: nn.Module, tp_plan: TPPlan, communicator: Communicator) -> None:
    """Replaces a model's parameters by this rank's shards; tied ones stay one parameter.

    Args:
        module: Model, on any device; the meta device will do.
        tp_plan: Tensor-parallel plan.
        communicator: Communicator of the axis.
    """
    ranks, rank = communicator.size, communicator.rank
    layout = get_layout(module)
    shards: dict[int, nn.Parameter] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, division in tp_plan.divisions.items():
        if name not in parameters:
            owner, _, key = name.rpartition(".")
            part, made = module.get_submodule(owner), division.slice_for(ranks, rank)
            part._buffers[key] = made.slice_tensor(cast("Tensor", part._buffers[key]))
            if key not in part._non_persistent_buffers_set:
                layout.slices[name] = made
            continue
        full, made = parameters[name], division.slice_for(ranks, rank)
        layout.slices[name] = made
        if id(full) not in shards:
            shards[id(full)] = nn.Parameter(made.slice_tensor(full), requires_grad=full.requires_grad)
            shards[id(full)].__dict__.update(full.__dict__)
            give_hooks_full(name, full, shards[id(full)], made, communicator)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, shards[id(full)])
    for partial, name in {
        parameters[name]: name for name in sorted(tp_plan.partial - tp_plan.divisions.keys())
    }.items():
        give_hooks_full(name, partial, partial, None, communicator)
    layout.partial |= tp_plan.partial
    for around in distinct(module, tp_plan.regions):
        region = tp_plan.regions[around]
        for name in (*region.columns, *region.rows):
            projection = module.get_submodule(name)
            set_feature_counts(name, base_of(projection))
            if projection is not base_of(projection):
                set_features(projection)
        for name in region.channelwise:
            set_channel_counts(module.get_submodule(name), ranks)
        if region.heads:
            attention = module.get_submodule(around)
            if region.local_counts:
                set_local_heads(attention, region.heads, region.kv, region.width, ranks)
            count = region.heads // ranks
            bind_heads(attention, LocalHeads(rank * count, count))
            if region.counts_by_config:
                set_local_config(attention, ranks)

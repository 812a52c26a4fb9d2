"""Tensor-parallel plan of a model: its regions, the divisions of its parameters, and the replicated ones.

A *region* begins with projections that are sharded by their outputs (columns) and ends with one that is sharded by its
inputs (row): inside it, each rank computes its own heads or hidden features. A region's module is the innermost one
that contains both a row projection and a column projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from dlo_plugins.tensor.division import Divisibility, Division


@dataclass
class RegionPlan:
    """Region of a model.

    Attributes:
        columns: Names of its column projections.
        rows: Names of its row projections.
        shared: Names of its replicated column projections: those of the one key/value head of multi-query attention.
        gathered: Numbers of output features, over all ranks, of the last parts of column projections that all ranks
            need in full, by the projection's name: the one key and value of multi-query attention.
        operands: Arguments of its module's forward with an entry for each head, and the dim of it.
        shared_features: Numbers of last output features that all heads use as they are, by the name of a projection
            that each rank computes in full: the rotary key of multi-head latent attention.
        norms: Names of its norms over all features of a column projection.
        channelwise: Names of its batch norms and convolutions of each channel alone, whose channels are divided.
        inputs: Numbers of input features of its column projections.
        outputs: Numbers of output features of its column projections, over all ranks.
        heads: Number of query heads over all ranks; 0 without attention.
        kv: Number of key/value heads over all ranks, if known.
        width: Number of features of a head.
        counts_by_config: Whether the module reads its number of heads from the model's config.
        local_shapes: Whether its code reshapes to full sizes; see :mod:`dlo_plugins.tensor.local_shapes`.
        local_counts: Whether its attributes with numbers of heads are set to the rank's.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    operands: dict[str, int] = field(default_factory=dict)
    shared_features: dict[str, int] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)
    channelwise: list[str] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    heads: int = 0
    kv: int | None = None
    width: int = 0
    counts_by_config: bool = False
    local_shapes: bool = False
    local_counts: bool = True


@dataclass
class TPPlan:
    """Tensor-parallel plan of a model.

    Attributes:
        divisions: Divisions of parameters and buffers, by name; a tied parameter has one under each of its names.
        regions: Regions by the name of their module.
        vocabulary: Names of embeddings and output projections that are split over the vocabulary.
        partial: Names of replicated parameters whose gradient is a partial sum on each rank.
        divisibilities: Counts that must be divisible by the number of ranks.
        experts: Names of the modules of stacked experts that are divided.
    """

    divisions: dict[str, Division] = field(default_factory=dict)
    regions: dict[str, RegionPlan] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)
    divisibilities: list[Divisibility] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)


def region_of(found: TPPlan, name: str) -> str | None:
    """Returns the innermost region that contains a module or parameter."""
    while name:
        if name in found.regions:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in found.regions else None


def distinct(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the names of different submodules: the first name of one that is registered several times."""
    found: dict[int, str] = {}
    for name in names:
        found.setdefault(id(module.get_submodule(name)), name)
    return list(found.values())


def vocabulary_size(found: TPPlan, name: str) -> int:
    """Returns the number of tokens of an embedding or output projection, over all ranks."""
    inner = name if f"{name}.weight" in found.divisions else f"{name}.base_layer"
    return sum(found.divisions[f"{inner}.weight"].pieces)

"""What tensor parallelism finds in a model: its regions, how its parameters are divided, and what is left whole.

A *region* is what lies between projections that are cut by their outputs (columns) and the one that is cut by its
inputs (row): in it, each rank works on its own heads or hidden features. Its module is the nearest one around a row
projection that also holds a column projection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlo_plugins.tensor.division import Demand, Division


@dataclass
class RegionPlan:
    """A region of a model.

    Attributes:
        columns: names of its column projections.
        rows: names of its row projections.
        shared: names of those that each rank has whole: of the one key/value head of multi-query attention.
        norms: names of its norms over all features of a column projection.
        inputs: features that go into its column projections.
        outputs: features that come out of them on all ranks together.
        heads: query heads of all ranks; 0 where there is no attention.
        kv: key/value heads of all ranks, where they are known.
        width: features of a head.
        counts_by_config: whether the module reads its number of heads from the model's config.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    heads: int = 0
    kv: int | None = None
    width: int = 0
    counts_by_config: bool = False


@dataclass
class Survey:
    """What is to be done to a model.

    Attributes:
        divisions: of parameters, by name; a tied one under each of its names.
        regions: by the name of their module.
        vocabulary: names of embeddings and output projections that are split over the vocabulary.
        partial: parameters that stay whole and get a part of their gradient on each rank.
        demands: what the ranks have to divide.
    """

    divisions: dict[str, Division] = field(default_factory=dict)
    regions: dict[str, RegionPlan] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)
    demands: list[Demand] = field(default_factory=list)


def region_of(found: Survey, name: str) -> str | None:
    """Returns the nearest region around a module or parameter."""
    while name:
        if name in found.regions:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in found.regions else None

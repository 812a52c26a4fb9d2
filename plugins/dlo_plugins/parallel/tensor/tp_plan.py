"""Tensor-parallel plan of a model: its regions, the divisions of its parameters, and the replicated ones.

A *region* begins with projections that are sharded by their outputs (columns) and ends with one that is sharded by its
inputs (row): inside it, each rank computes its own heads or hidden features. A region's module is the innermost one
that contains both a row projection and a column projection. A division is pure arithmetic, without a process group.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.shards import TensorSlice


@dataclass(frozen=True)
class Division:
    """Division of a tensor among ranks along one dim.

    Attributes:
        dim: Dimension that is divided.
        pieces: Sizes of the consecutive slices along it, such as queries, keys and values; each slice is divided among
            the ranks.
    """

    dim: int
    pieces: tuple[int, ...]

    def slice_for(self, ranks: int, rank: int) -> TensorSlice:
        """Returns a rank's slice."""
        runs, at = [], 0
        for size in self.pieces:
            first, count = local_range(size, ranks, rank)
            runs.append((at + first, count))
            at += size
        return TensorSlice(self.dim, at, tuple(runs))


def local_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns a rank's range of a size, `(first, count)`; if it is not divisible, the first ranks have one more."""
    least, more = divmod(size, ranks)
    return rank * least + min(rank, more), least + (rank < more)


@dataclass(frozen=True)
class Divisibility:
    """Count that must be divisible by the number of ranks.

    Attributes:
        owner: Name of the module with the counted items.
        count: Number of items.
        what: Kind of the items, in the plural.
    """

    owner: str
    count: int
    what: str


def check_divisibility(demands: Iterable[Divisibility], tp: int) -> None:
    """Checks that all counts are divisible by the number of ranks.

    Raises:
        DloError: If one is not; the message has the sizes of the axis that divide all of them.
    """
    demands = list(demands)
    common = math.gcd(*(demand.count for demand in demands))
    for demand in demands:
        if demand.count % tp == 0:
            continue
        fits = [n for n in range(1, common + 1) if common % n == 0]
        others = ", ".join(map(str, fits))
        fix = min(fits, key=lambda n: (abs(n - tp), n))
        raise DloError(
            f"tp must divide the {demand.count} {demand.what} of '{demand.owner}', got {tp}; set tp={fix} (sizes that"
            f" fit all of the model: {others})"
        )


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
        local_shapes: Whether its code reshapes to full sizes; see :mod:`dlo_plugins.parallel.tensor.installation`.
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
        vocabulary: Numbers of tokens, over all ranks, of embeddings and output projections that are split over the
            vocabulary, by name.
        partial: Names of replicated parameters whose gradient is a partial sum on each rank.
        divisibilities: Counts that must be divisible by the number of ranks.
        experts: Names of the modules of stacked experts that are divided.
    """

    divisions: dict[str, Division] = field(default_factory=dict)
    regions: dict[str, RegionPlan] = field(default_factory=dict)
    vocabulary: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    divisibilities: list[Divisibility] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    def divide(self, name: str, dim: int, *pieces: int) -> None:
        """Divides a parameter or buffer."""
        self.divisions[name] = Division(dim, pieces)

    def demand(self, owner: str, count: int, what: str) -> None:
        """Adds a count that must be divisible by the number of ranks."""
        self.divisibilities.append(Divisibility(owner, count, what))


def region_of(tp_plan: TPPlan, name: str) -> str | None:
    """Returns the innermost region that contains a module or parameter."""
    while name:
        if name in tp_plan.regions:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in tp_plan.regions else None


def distinct(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the names of different submodules: the first name of one that is registered several times."""
    by_id: dict[int, str] = {}
    for name in names:
        by_id.setdefault(id(module.get_submodule(name)), name)
    return list(by_id.values())


#: Number of replicated modules that a sentence names: the largest ones.
_NAMED = 3
#: Fraction of the parameters above which a model counts as fully sharded; norms are never sharded.
NEARLY_ALL = 0.99


@dataclass(frozen=True)
class Coverage:
    """Numbers of sharded and replicated parameters of a model.

    Attributes:
        total: Number of parameters.
        sharded: Number of parameters that are sharded over the ranks.
        replicated: Number of parameters that each rank holds in full, by module; numbers in its name are `*`. A
            parameter of the model itself, such as `pos_embed`, is under its own name.
    """

    total: int
    sharded: int
    replicated: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharded_fraction(self) -> float:
        """Fraction of the parameters that is sharded."""
        return self.sharded / max(self.total, 1)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as plain data, under the keys of ``dlo mesh --json``."""
        return {"total": self.total, "divided": self.sharded, "full": dict(self.replicated)}

    def describe(self) -> str:
        """Returns one line with the sharded fraction, and the modules without a rule."""
        text = f"divides {_percent(self.sharded_fraction)} of {self.total:,} parameters"
        if self.sharded_fraction >= NEARLY_ALL:
            return text
        largest = sorted(self.replicated.items(), key=lambda item: -item[1])
        named = [f"{name} ({_percent(count / self.total)})" for name, count in largest[:_NAMED]]
        more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
        return f"{text}; in full on every rank, since the plan has no rule for them: {', '.join(named)}{more}"


def measure_coverage(module: nn.Module, divisions: Mapping[str, Division]) -> Coverage:
    """Returns the numbers of sharded and replicated parameters of a model.

    Args:
        module: Full model, on any device or the meta device.
        divisions: Divisions of the sharded parameters, by name.
    """
    total = divided = 0
    full: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        total += parameter.numel()
        if name in divisions:
            divided += parameter.numel()
        else:
            full[re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0] or name)] += parameter.numel()
    return Coverage(total, divided, dict(full))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.9995 else "100%"

"""Regions of a model in which each rank has its own heads or hidden features: entry and exit of the activations.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198.

Without sequence parallelism, activations enter at the column projections: the first one enters its input, and the
others that get the same tensor share it. So a residual branch around them in the same module does not change. With
sequence parallelism, activations enter at the beginning of the region's module, since modules read the sequence length
from their input. They leave in the row projection, whose bias is added once, to the sum.

In backward, the collectives of the input and of its gradient overlap with the products of the column projections
(:mod:`dlo_plugins.parallel.tensor.overlap`). With asynchronous tensor parallelism, those of forward overlap too:
entry computes all column projections, and their forward returns the results.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import copy_in
from dlo_framework.errors import DloError
from dlo_plugins.parallel.tensor import overlap
from dlo_plugins.parallel.tensor.collectives import gather_to_region, reduce_from_region, reduce_scatter_from_region
from dlo_plugins.parallel.tensor.overlap import AsyncProducts
from dlo_plugins.parallel.tensor.projections import (
    REGION,
    RowProduct,
    add_bias,
    install_row_adapters,
    is_adapted,
    mix_in,
)
from dlo_plugins.parallel.tensor.sequence_parallel import Dropouts, LocalRandom, ShardedSequence, change_first_input


class Region:
    """State of a region in a forward.

    Args:
        name: Name of the region's module.
        module: Module of the region.
        communicator: Communicator of the ranks that share it.
        random: This rank's random numbers, for the dropout inside.
        sequence: Sequence that is split between regions; None without sequence parallelism.
        products: Products that overlap with collectives in forward; None without asynchronous tensor parallelism.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        communicator: Communicator,
        random: LocalRandom,
        sequence: ShardedSequence | None,
        products: AsyncProducts | None = None,
    ) -> None:
        self.name = name
        self.communicator, self.random, self.sequence, self.products = communicator, random, sequence, products
        self._dropouts = Dropouts(module)
        self._input: Tensor | None = None
        self._entered: Tensor | None = None
        #: Column projections whose weight gradients are computed while the input gradient is summed.
        self.columns: list[nn.Linear] = []
        #: Whether these are all column projections of the region, so that forward need not save the gathered input.
        self.gathers_again = False
        #: Weights of these projections, while activations are in the region.
        self._weights: dict[nn.Module, overlap.EnteredWeight] = {}
        #: Outputs of column projections that entry has computed.
        self._outputs: dict[nn.Module, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # A process group cannot be copied; the state of a forward is gone after it.

    def enter(self, x: Tensor, caller: nn.Module | None = None) -> Tensor:
        """Enters the region with the input of column projections.

        Args:
            x: Activations.
            caller: Column projection that enters; None for the region's module.
        """
        if self._dropouts.active:
            self.random.enter(self, x.device)
        if self.sequence is not None:
            return self._gather(x, self.sequence.length(x))
        if self._input is not x or self._entered is None:
            self._input, self._weights = x, {}
            columns = [column for column in self.columns if overlap.can_defer(column, x)]
            if caller in columns:
                self._entered, self._weights = overlap.enter(x, columns, self.communicator)
            else:
                self._entered = copy_in(x, self.communicator)
        return self._entered

    def needs_entry(self, x: Tensor, weight: Tensor) -> bool:
        """Returns whether code multiplies a full input by a column projection's weight without the projection."""
        if self.sequence is not None or x is self._entered:
            return False
        return any(column.weight is weight for column in self.columns)

    def _gather(self, part: Tensor, length: int) -> Tensor:
        """Returns all ranks' tokens; forward saves them where a column projection of another kind needs them."""
        self._weights, columns = {}, self.columns
        if self.products is not None and self.gathers_again and all(map(_is_plain, columns)):
            self._entered, outputs = overlap.gather_columns(part, length, columns, self.products)
            self._outputs = dict(zip(columns, outputs, strict=True))
            return self._entered
        if self.gathers_again and all(overlap.can_defer(column, part) for column in columns):
            self._entered, self._weights = overlap.enter(part, columns, self.communicator, length)
            return self._entered
        return gather_to_region(part, length, self.communicator)

    def project(self, column: nn.Module, x: Tensor) -> Tensor | None:
        """Returns the output of a column projection; None if neither its product nor its weight has entered.

        Args:
            column: Column projection.
            x: Input of the projection. With sequence parallelism it may be another tensor than the gathered one.
        """
        if x is self._entered and column in self._outputs:
            return self._outputs.pop(column)
        weight = self._weights.get(column) if self.sequence is None or x is self._entered else None
        return None if weight is None else weight.project(x, column.bias)  # type: ignore[arg-type]

    def leave(self, x: Tensor, row: nn.Module | None = None) -> Tensor:
        """Leaves the region; returns the sum over the ranks, without a bias.

        Args:
            x: Partial sum of this rank, or, with `row`, the input of the row projection.
            row: Row projection, whose product overlaps with the sum where it can; None after it.

        Raises:
            DloError: Projections that entry has computed were not used, as they got another input than the region's.
        """
        scatters = self.sequence is not None
        overlaps = row is not None and self.products is not None and _is_plain(row) and not (scatters and x.ndim != 3)
        if row is not None and not overlaps:
            x = row.product(x)  # type: ignore[operator]
        if self._outputs:
            raise DloError(
                f"column projections of '{self.name}' must get its input for async_tp, got another tensor; leave"
                " async_tp out"
            )
        self.end()
        if overlaps:
            return overlap.project_row(x, row.weight, self.products, scatters=scatters)  # type: ignore[union-attr, arg-type]
        return (reduce_scatter_from_region if scatters else reduce_from_region)(x, self.communicator)

    def end(self) -> None:
        """Clears the state of a forward."""
        self._input = self._entered = None
        self._weights, self._outputs = {}, {}
        self.random.leave(self)


class ColumnProjection:
    """Mixin for the class of a column projection: computes with the weight that has entered its region."""

    #: Class whose computation it has, for code that replaces the forward.
    computes_as = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Returns the projection of `x`."""
        region: Region = self.__dict__[REGION]
        output = region.project(self, x)  # type: ignore[arg-type]
        return super().forward(x) if output is None else output  # type: ignore[misc]


class RowProjection(RowProduct):
    """Mixin for the class of a row projection: its output leaves the region, and its bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' products, plus the bias."""
        region: Region = self.__dict__[REGION]
        return add_bias(self, region.leave(x, self))  # type: ignore[arg-type]


class AdaptedRowProjection:
    """Mixin for the class of a row projection's wrapper with adapters; see :mod:`~.tensor.projections`."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' products and adapters, plus the bias."""
        region: Region = self.__dict__[REGION]
        partial: Tensor = super().forward(x)  # type: ignore[misc]
        return add_bias(self.base_layer, region.leave(partial))  # type: ignore[attr-defined]


def install_region(module: nn.Module, columns: list[nn.Module], rows: list[nn.Module], region: Region) -> None:
    """Makes a region of a module with sharded projections, whose classes are replaced by derived ones."""
    for column in columns:
        if region.sequence is None:
            column.register_forward_pre_hook(lambda column, args: (region.enter(args[0], column), *args[1:]))
        if type(column) is nn.Linear:
            mix_in(ColumnProjection, column, region)
            region.columns.append(column)
    region.gathers_again = len(region.columns) == len(columns) > 0
    if region.sequence is not None:
        change_first_input(module, region.enter)
    for row in rows:
        if is_adapted(row):
            install_row_adapters(row, region)
        mix_in(AdaptedRowProjection if is_adapted(row) else RowProjection, row, region)
    # After an error too: the search for the largest micro-batch continues after an error.
    module.register_forward_hook(lambda *_: region.end(), always_call=True)


def _is_plain(layer: nn.Module) -> bool:
    """Returns whether a projection is a linear layer that nobody else computes, with a weight of ordinary values."""
    if not isinstance(layer, nn.Linear) or "forward" in layer.__dict__ or "product" in layer.__dict__:
        return False
    return type(layer.weight) in (Tensor, nn.Parameter)

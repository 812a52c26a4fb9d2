"""Where activations enter and leave the parts of a model in which each rank has its own heads or hidden features.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198.

Without sequence parallelism activations enter where column projections are called: the first takes its input in, the
others that get the same tensor share what it took. So a residual branch around them, in the same module, is left
alone. With it, they enter where the region's module begins, since modules read the sequence's length off their input.
They leave in the row projection, whose bias is added once, to the sum.

Without sequence parallelism, the all-reduce of the input's gradient runs while the weights' gradients of the column
projections are computed (:mod:`dlo_plugins.tensor.overlap`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor import overlap
from dlo_plugins.tensor.collectives import copy_in, gather_in, scatter_out, sum_out
from dlo_plugins.tensor.local_random import Dropouts, LocalRandom
from dlo_plugins.tensor.projections import add_bias, product
from dlo_plugins.tensor.sequence import Sequence, change_first_input

_REGION = "tensor_region"


class Region:
    """A region at work.

    Args:
        module: of the region.
        communicator: the ranks that share it.
        random: this rank's numbers, for the dropout within.
        sequence: that is split between regions; None without sequence parallelism.
    """

    def __init__(
        self, module: nn.Module, communicator: Communicator, random: LocalRandom, sequence: Sequence | None
    ) -> None:
        self.communicator, self.random, self.sequence = communicator, random, sequence
        self._dropouts = Dropouts(module)
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        #: Column projections whose weights' gradients are computed while the input's is summed.
        self.columns: list[nn.Linear] = []
        #: What each of them computes with, as long as activations have entered.
        self._weights: dict[nn.Module, overlap.EnteredWeight] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # A process group cannot be copied; what is at hand in a forward is gone after it.

    def enter(self, x: Tensor, caller: nn.Module | None = None) -> Tensor:
        """Takes the activations in that column projections are given.

        Args:
            x: the activations.
            caller: the column projection that takes them in; None where the region's module does.
        """
        if self._dropouts.active:
            self.random.enter(self, x.device)
        if self.sequence is not None:
            return gather_in(x, self.sequence.length(x), self.communicator)
        if self._given is not x or self._entered is None:
            self._given, self._weights = x, {}
            columns = [column for column in self.columns if overlap.suits(column, x)]
            if caller in columns:
                self._entered, self._weights = overlap.enter(x, columns, self.communicator)
            else:
                self._entered = copy_in(x, self.communicator)
        return self._entered

    def weight_of(self, column: nn.Module) -> overlap.EnteredWeight | None:
        """Returns what a column projection computes with, if its weight's gradient is to wait for the input's."""
        return self._weights.get(column)

    def leave(self, partial: Tensor) -> Tensor:
        """Lets go of a row projection's output: the ranks' parts of a sum."""
        self.end()
        if self.sequence is not None:
            return scatter_out(partial, self.communicator)
        return sum_out(partial, self.communicator)

    def end(self) -> None:
        """Forgets what was at hand."""
        self._given = self._entered = None
        self._weights = {}
        self.random.leave(self)


class ColumnProjection:
    """What a column projection's class is mixed with: it computes with the weight that its region has taken in."""

    #: Whose computation its is, where somebody else computes it.
    computes_as = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Returns the projection."""
        region: Region = self.__dict__[_REGION]
        weight = region.weight_of(self)  # type: ignore[arg-type]
        if weight is None:
            return super().forward(x)  # type: ignore[misc]
        return overlap.project(x, weight, self.bias)  # type: ignore[attr-defined]


class RowProjection:
    """What a row projection's class is mixed with: its output leaves the region, and its bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' products, plus the bias."""
        region: Region = self.__dict__[_REGION]
        return add_bias(self, region.leave(self.product(x)))

    def product(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum, without the bias: the work of the layer."""
        return product(self, x)


def install(module: nn.Module, columns: list[nn.Module], rows: list[nn.Module], region: Region) -> None:
    """Makes a region of a module whose projections have been cut.

    Projections change their class for one derived from it, as torch's `fully_shard` does, so that names, hooks and
    `isinstance` hold.
    """
    if region.sequence is None:
        for column in columns:
            column.register_forward_pre_hook(functools.partial(_enter_column, region))
            if type(column) is nn.Linear:
                column.__dict__[_REGION] = region
                column.__class__ = _column_class(nn.Linear)  # type: ignore[assignment]
                region.columns.append(column)
    else:
        change_first_input(module, region.enter)
    for row in rows:
        row.__dict__[_REGION] = region
        row.__class__ = _row_class(type(row))  # type: ignore[arg-type]
    # After an error too: a search for the largest batch that fits goes on after one.
    module.register_forward_hook(functools.partial(_end, region), always_call=True)


@functools.cache
def _row_class(cls: Any) -> type[nn.Module]:
    return type(f"Row{cls.__name__}", (RowProjection, cls), {})


@functools.cache
def _column_class(cls: Any) -> type[nn.Module]:
    return type(f"Column{cls.__name__}", (ColumnProjection, cls), {})


def _enter_column(region: Region, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (region.enter(args[0], module), *args[1:])


def _end(region: Region, module: nn.Module, args: Any, output: Any) -> None:
    region.end()

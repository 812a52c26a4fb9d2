"""Computes the bytes of a model's state on each rank of a mesh, from shapes alone and without a process group."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_plugins.fsdp.row_shards import row_range, shard_dim
from dlo_plugins.pipeline.actions import Placement
from dlo_plugins.pipeline.model_stages import Stages
from dlo_plugins.sharding.bf16_weights import find_exact_parameters
from dlo_plugins.tensor.division import Division


@dataclass(frozen=True)
class RankStateBytes:
    """Bytes of a model's state on one rank.

    Attributes:
        parameters: Bytes of parameters, trained and frozen.
        gradients: Bytes of the trained parameters' gradients, as they are sharded at a step's end.
        optimizer: Bytes of Adam's two moments of the trained parameters.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


class _Kind(NamedTuple):
    """Parameters with the same shape, division and stages."""

    shape: tuple[int, ...]
    division: Division | None
    element_size: int
    state_size: int
    is_trained: bool
    stages: tuple[int, ...]
    is_expert: bool = False


class StateBytesPerRank:
    """Bytes of a module's state on each rank of a mesh.

    Args:
        module: Full module, on any device, also on the meta device.
        spec: Mesh, without -1.
        divisions: Divisions of parameters over the axis `tp`, by name.
        stages: Stages of the pipeline that need each parameter, by name; None without a pipeline.
        placement: Placement of the stages on the ranks of `pp`.
        element_size: Bytes of a floating-point element; None for each parameter's own.
        delays: Whether gradients have a delay of one step: two versions of parameters and gradients, which `dp_shard`
            does not shard.
        experts: Names of the parameters that `ep` divides along their first dim.
        computed: Bytes of a floating-point element of both versions of the parameters, where `delays`, beside master
            weights that `dp_shard` shards; None without master weights.
        rounded: Whether weights and gradients are bf16 and the optimizer's state is in single precision, as under
            `bf16_weights: stochastic`.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: MeshSpec,
        divisions: dict[str, Division] | None = None,
        stages: dict[str, tuple[int, ...]] | None = None,
        placement: Placement | None = None,
        element_size: int | None = None,
        delays: bool = False,
        experts: Collection[str] = (),
        rounded: bool = False,
        computed: int | None = None,
    ) -> None:
        self.spec, self._placement, self._delays, self._computed = spec, placement, delays, computed
        divisions, everywhere = divisions or {}, tuple(range(placement.stages)) if placement else (0,)
        exact = find_exact_parameters(module) if rounded else set()
        self._kinds: Counter[_Kind] = Counter()
        for name, parameter in module.named_parameters():
            size = element_size if element_size and parameter.is_floating_point() else parameter.element_size()
            if rounded and parameter.dtype == torch.float32 and id(parameter) not in exact:
                size = 2
            state = max(size, 4) if rounded else size
            held_by = everywhere if stages is None else stages.get(name, everywhere)
            shape, trained = tuple(parameter.shape), parameter.requires_grad
            kind = _Kind(shape, divisions.get(name), size, state, trained, held_by, name in experts and spec.ep > 1)
            self._kinds[kind] += 1

    @property
    def unsharded(self) -> RankStateBytes:
        """Bytes in a single process."""
        counted = [(kind, count * math.prod(kind.shape)) for kind, count in self._kinds.items()]
        parameters = sum(kind.element_size * elements for kind, elements in counted)
        trained = [(kind, elements) for kind, elements in counted if kind.is_trained]
        gradients = sum(kind.element_size * elements for kind, elements in trained)
        return RankStateBytes(parameters, gradients, 2 * sum(kind.state_size * elements for kind, elements in trained))

    def at(self, place: Coordinates) -> RankStateBytes:
        """Returns the bytes on the rank at these coordinates."""
        own = set(self._placement.stages_of(place.pp)) if self._placement else {0}
        parameters = trained = state = full = full_trained = version = 0
        for kind, count in self._kinds.items():
            if own.isdisjoint(kind.stages):
                continue
            elements = count * self._local_elements(kind, place)
            parameters += elements * kind.element_size
            trained += elements * kind.element_size * kind.is_trained
            state += elements * kind.state_size * kind.is_trained
            size = count * kind.element_size * math.prod(self._cut_shape(kind, place))
            full_trained += size * kind.is_trained
            computed = self._computed or kind.element_size
            full += size // kind.element_size * computed
            version += size // kind.element_size * computed * kind.is_trained
        if self._delays:
            assert self._placement is not None
            copies = version * (self._placement.stages - 1 not in own)  # It has no micro-batch in flight.
            masters = parameters if self._computed else 0
            return RankStateBytes(full + copies + masters, 2 * full_trained, 2 * state)
        return RankStateBytes(parameters, trained, 2 * state)

    def largest(self) -> tuple[Coordinates, RankStateBytes]:
        """Returns the coordinates and bytes of the rank with the most, the first of several."""
        found = {place: self.at(place) for place in self.places()}
        place = max(found, key=lambda place: found[place].total)
        return place, found[place]

    def places(self) -> Iterator[Coordinates]:
        """Yields the coordinates of the ranks of one copy of the model."""
        sizes = self.spec.sizes | {"dp_replicate": 1}
        for place in itertools.product(*(range(size) for size in sizes.values())):
            yield Coordinates(*place)

    def _cut_shape(self, kind: _Kind, place: Coordinates) -> list[int]:
        """Returns the shape of the slice over `tp` and `ep` that a rank has, before it is sharded."""
        shape = list(kind.shape)
        if kind.is_expert:
            shape[0] //= self.spec.ep
        if kind.division is not None and self.spec.tp > 1:
            shape[kind.division.dim] = kind.division.slice_for(self.spec.tp, place.tp).length
        return shape

    def _local_elements(self, kind: _Kind, place: Coordinates) -> int:
        shape = self._cut_shape(kind, place)
        if shape:
            sharers, number = self.spec.dp_shard * self.spec.cp, place.dp_shard * self.spec.cp + place.cp
            if kind.is_expert:
                sharers, number = self.spec.expert_shards, number // self.spec.ep
            dim = shard_dim(torch.Size(shape), sharers, kind.is_expert)
            if dim:
                return math.prod(shape) // sharers
            return row_range(torch.Size(shape), sharers, number)[1]
        return 1


def stages_by_name(stages: Stages, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the stages that need each parameter of a model, by name."""
    return {name: stages.stages_of(name) for name, _ in model.named_parameters()}

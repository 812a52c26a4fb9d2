"""Planning of a save by all ranks: rank 0 makes the global plan, and each rank gets its own part.

A run's saves are mostly identical. So the plan is cached, and as long as each rank's inventory is the same, the ranks
exchange only the plan's name.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from dlo_framework.checkpoint.agreement import gather_then_scatter, rank_of, size_of
from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.global_plan import FilePlan, Plan, make_file_plan, make_global_plan
from dlo_framework.checkpoint.inventory import (
    InventoryEntry,
    PackedInventory,
    local_inventory,
    pack,
    pack_inventory,
    unpack,
)
from dlo_framework.checkpoint.shards import Box, Shard
from dlo_framework.checkpoint.state_file import refuse_unreadable
from dlo_framework.checkpoint.state_tree import TensorLocation, add_marks, merge_extras, optimizer_extras
from dlo_framework.checkpoint.torch_file import free_bytes, tensor_bytes

#: Number of cached plans: one for a run's full checkpoints, one for its weights alone.
_MOST_CACHED = 2


class Part(NamedTuple):
    """One rank's part of a plan.

    Attributes:
        plan: Unique name of the plan.
        mask: Bit mask of the boxes that the rank writes; see :class:`~dlo_framework.checkpoint.global_plan.Plan`.
        size: Size of these boxes, in bytes.
        total: Size of all ranks' files, in bytes.
        supplies: Paths of plain values of the optimizers that only this rank sends to rank 0.
    """

    plan: str
    mask: bytes
    size: int
    total: int
    supplies: list[tuple[str | int, ...]]


@dataclass
class _CachedPlan:
    """Cache entry of a plan; the last two attributes are set on rank 0 alone."""

    part: Part
    plan: Plan | None = None
    groups: Sequence[dict[str, Any]] = ()  # names that other ranks have added to the optimizers' groups


_cached_plans: OrderedDict[str, _CachedPlan] = OrderedDict()


@dataclass(frozen=True)
class AgreedPlan:
    """Result of the planning.

    Attributes:
        file: Plan of this rank's file; None if it writes nothing.
        plan: Global plan on rank 0; None on other ranks.
        need: Bytes needed on the disk.
        free: Smallest number of free bytes that a rank sees.
    """

    file: FilePlan | None
    plan: Plan | None
    need: int
    free: int


class _Report(NamedTuple):
    """Message of a rank to rank 0 at each save."""

    plan: str | None  # cached plan that matches this rank's inventory
    supplied: list[tuple[Any, Any]]
    free: int
    rest: int  # bytes of tensors in the remaining tree, on rank 0


class SavePlanner:
    """Planning of one save, on this rank.

    Args:
        rest: Tree without the tensors of model and optimizer. On rank 0 the other ranks' plain values and marks are
            added to it.
        found: Locations and shards of this rank's tensors.
        path: Path of the checkpoint.
        group: Process group of the ranks; None for a single process.
    """

    def __init__(
        self,
        rest: dict[str, Any],
        found: Iterable[tuple[TensorLocation, Shard]],
        path: Path,
        group: ProcessGroup | None,
    ) -> None:
        self._rest, self._found, self._path, self._group = rest, found, path, group
        self._rank, self._size = rank_of(group), size_of(group)
        self.elements: dict[tuple[Key, Box], Tensor] = {}
        self._holdings: list[InventoryEntry] = []
        self._extras: dict[str, Any] = {}
        self._digest = ""

    def plan(self) -> AgreedPlan:
        """Returns the plan, made together with the other ranks or cached."""
        same, rest_bytes, free = gather_then_scatter(self._group, self._take_inventory, self._match_cached_plan)
        if not same:
            part = gather_then_scatter(self._group, self._pack_inventory, self._make_plan)
            _cached_plans.setdefault(self._digest, _CachedPlan(part)).part = part
        _cached_plans.move_to_end(self._digest)
        while len(_cached_plans) > _MOST_CACHED:
            _cached_plans.popitem(last=False)
        known = _cached_plans[self._digest]
        file = make_file_plan(self._rank, self._holdings, known.part.mask, known.part.size)
        return AgreedPlan(file, known.plan, known.part.total + rest_bytes, free)

    def _take_inventory(self) -> _Report:
        self._holdings, self.elements = local_inventory(self._found)
        self._extras = optimizer_extras(self._rest)
        names = [path for path, _ in self._extras["values"]], self._extras["groups"]
        content = repr((self._size, self._rank, self._holdings, names))
        self._digest = hashlib.sha256(content.encode()).hexdigest()
        if self._rank == 0:
            refuse_unreadable(self._rest)
        part = _cached_plans[self._digest].part if self._digest in _cached_plans else None
        values = dict(self._extras["values"])
        supplied = [(path, values[path]) for path in part.supplies] if part is not None else []
        rest_bytes = tensor_bytes(self._rest) if self._rank == 0 else 0
        return _Report(part.plan if part is not None else None, supplied, free_bytes(self._path.parent), rest_bytes)

    def _match_cached_plan(self, looks: list[_Report]) -> list[tuple[bool, int, int]]:
        """Returns for each rank, on rank 0, whether the cached plan matches every rank's inventory."""
        same = looks[0].plan is not None and all(look.plan == looks[0].plan for look in looks)
        if same:
            known = _cached_plans[self._digest]
            assert known.plan is not None
            self._add_marks(known.plan)
            for look, groups in zip(looks[1:], known.groups, strict=True):
                merge_extras(self._rest, {"values": look.supplied, "groups": groups})
        return [(same, looks[0].rest, min(look.free for look in looks))] * len(looks)

    def _pack_inventory(self) -> tuple[PackedInventory, bytes]:
        return pack_inventory(self._holdings), pack(self._extras) if self._rank > 0 else b""

    def _make_plan(self, told: list[tuple[PackedInventory, bytes]]) -> list[Part]:
        """Makes a plan, on rank 0."""
        plan = make_global_plan([of_rank for of_rank, _ in told])
        self._add_marks(plan)
        added = [merge_extras(self._rest, unpack(extras)) for _, extras in told[1:]]
        supplies: list[list[tuple[str | int, ...]]] = [
            [],
            *([path for path, _ in of_rank["values"]] for of_rank in added),
        ]
        name = uuid.uuid4().hex
        parts = [
            Part(name, mask, size, plan.bytes, paths)
            for mask, size, paths in zip(plan.masks, plan.sizes, supplies, strict=True)
        ]
        _cached_plans[self._digest] = _CachedPlan(parts[0], plan, [of_rank["groups"] for of_rank in added])
        return parts

    def _add_marks(self, plan: Plan) -> None:
        add_marks(self._rest, (TensorLocation(tensor.path, *key) for key, tensor in plan.tensors.items()))

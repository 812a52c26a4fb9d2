"""How the ranks come to a plan of a save: the first makes it, and each gets its own part.

A run's saves are mostly alike. So the plan is kept, and as long as each rank holds what it held when it was made, they
pass no more than that.
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

from dlo_framework.checkpoint.agreement import rank_of, size_of, through_first
from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.holdings import Holding, Told, hold, pack, tell, unpack
from dlo_framework.checkpoint.nest import Place, add_marks, merge_extras, optimizer_extras
from dlo_framework.checkpoint.plan import FilePlan, Plan, divide, file_plan
from dlo_framework.checkpoint.shards import Box, Shard
from dlo_framework.checkpoint.state_file import refuse_unreadable
from dlo_framework.checkpoint.torch_file import free_bytes, tensor_bytes

#: Plans that are kept: a run's whole checkpoints, and those of its weights alone.
_KEPT = 2


class Part(NamedTuple):
    """A rank's part of a plan.

    Attributes:
        plan: a name that no other plan has.
        mask: which boxes the rank writes; see :class:`~dlo_framework.checkpoint.plan.Plan`.
        size: their bytes.
        total: the bytes of all ranks' files.
        supplies: what beside tensors this rank alone tells rank 0: the paths of its optimizers' plain values.
    """

    plan: str
    mask: bytes
    size: int
    total: int
    supplies: list[tuple[str | int, ...]]


@dataclass
class _Known:
    """What this rank keeps of a plan; the last two on rank 0 alone."""

    part: Part
    plan: Plan | None = None
    groups: Sequence[dict[str, Any]] = ()  # names that other ranks have added to the optimizers' groups


_known: OrderedDict[str, _Known] = OrderedDict()


@dataclass(frozen=True)
class Agreed:
    """What the ranks have agreed on.

    Attributes:
        file: what this rank writes; None if that is nothing.
        plan: all of it, on rank 0; None on the others.
        need: bytes on the disk.
        free: the least free bytes that a rank saw.
    """

    file: FilePlan | None
    plan: Plan | None
    need: int
    free: int


class _Look(NamedTuple):
    """What a rank tells at each save."""

    plan: str | None  # which it has a part of that still fits
    supplied: list[tuple[Any, Any]]
    free: int
    rest: int  # bytes of tensors in what is no tensor of the checkpoint; of rank 0


class Planning:
    """One save's planning, on this rank.

    Args:
        rest: what is no tensor of model or optimizer. On rank 0 it gets what other ranks know and marks for what they
            hold.
        found: this rank's tensors.
        path: where the checkpoint will be.
        group: the ranks; None for a single process.
    """

    def __init__(
        self,
        rest: dict[str, Any],
        found: Iterable[tuple[Place, Shard]],
        path: Path,
        group: ProcessGroup | None,
    ) -> None:
        self._rest, self._found, self._path, self._group = rest, found, path, group
        self._rank, self._size = rank_of(group), size_of(group)
        self.elements: dict[tuple[Key, Box], Tensor] = {}
        self._holdings: list[Holding] = []
        self._extras: dict[str, Any] = {}
        self._digest = ""

    def agree(self) -> Agreed:
        """Comes to a plan, together with the other ranks."""
        same, rest_bytes, free = through_first(self._group, self._look, self._compare)
        if not same:
            part = through_first(self._group, self._tell, self._divide)
            _known.setdefault(self._digest, _Known(part)).part = part
        _known.move_to_end(self._digest)
        while len(_known) > _KEPT:
            _known.popitem(last=False)
        known = _known[self._digest]
        file = file_plan(self._rank, self._holdings, known.part.mask, known.part.size)
        return Agreed(file, known.plan, known.part.total + rest_bytes, free)

    def _look(self) -> _Look:
        self._holdings, self.elements = hold(self._found)
        self._extras = optimizer_extras(self._rest)
        names = [path for path, _ in self._extras["values"]], self._extras["groups"]
        content = repr((self._size, self._rank, self._holdings, names))
        self._digest = hashlib.sha256(content.encode()).hexdigest()
        if self._rank == 0:
            refuse_unreadable(self._rest)
        part = _known[self._digest].part if self._digest in _known else None
        values = dict(self._extras["values"])
        supplied = [(path, values[path]) for path in part.supplies] if part is not None else []
        rest_bytes = tensor_bytes(self._rest) if self._rank == 0 else 0
        return _Look(part.plan if part is not None else None, supplied, free_bytes(self._path.parent), rest_bytes)

    def _compare(self, looks: list[_Look]) -> list[tuple[bool, int, int]]:
        """On rank 0: whether the plan that is kept is still everybody's."""
        same = looks[0].plan is not None and all(look.plan == looks[0].plan for look in looks)
        if same:
            known = _known[self._digest]
            assert known.plan is not None
            self._mark(known.plan)
            for look, groups in zip(looks[1:], known.groups, strict=True):
                merge_extras(self._rest, {"values": look.supplied, "groups": groups})
        return [(same, looks[0].rest, min(look.free for look in looks))] * len(looks)

    def _tell(self) -> tuple[Told, bytes]:
        return tell(self._holdings), pack(self._extras) if self._rank > 0 else b""

    def _divide(self, told: list[tuple[Told, bytes]]) -> list[Part]:
        """On rank 0: makes a plan."""
        plan = divide([of_rank for of_rank, _ in told])
        self._mark(plan)
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
        _known[self._digest] = _Known(parts[0], plan, [of_rank["groups"] for of_rank in added])
        return parts

    def _mark(self, plan: Plan) -> None:
        add_marks(self._rest, (Place(tensor.path, *key) for key, tensor in plan.tensors.items()))

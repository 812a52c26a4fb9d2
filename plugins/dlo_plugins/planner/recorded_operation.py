"""Operation of a forward or a backward, as the recorder adds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlo_plugins.planner.kernel_kind import Kind
from dlo_plugins.planner.work import Product


@dataclass
class Operation:
    """Operation that was recorded.

    Attributes:
        packet: Operator; None for fused attention, which is intercepted.
        reads: Bytes that it reads, by number of the storage.
        writes: Bytes that it writes, by number of the storage.
        is_inside: Whether tensor parallelism divides its results.
        product: Matrix product, if it is one.
        kind: Kind of its kernel, if it is none.
    """

    packet: Any
    reads: dict[int, int]
    writes: dict[int, int]
    is_inside: bool
    product: Product | None = None
    kind: Kind = "pointwise"

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Record:
    """Operations of a forward or a backward, in order."""

    operations: list[Operation] = field(default_factory=list)

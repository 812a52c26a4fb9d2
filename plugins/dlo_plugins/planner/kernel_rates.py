"""Bandwidths of kinds of kernels, relative to that of a copy of a large tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.planner.kernel_kind import KINDS, Kind
from dlo_plugins.planner.work import Kernel, Share

#: Bytes that a kernel moves, and its bandwidth over a large copy's, in ascending order of bytes.
Ratios = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class KernelRates:
    """Bandwidths of kinds of kernels, over that of a copy of a large tensor.

    Attributes:
        ratios: Ratios by kind. A kind that is not there has those of `copy`.
    """

    ratios: Mapping[Kind, Ratios] = field(default_factory=dict)

    def ratio(self, kind: Kind, size: float) -> float:
        """Returns the bandwidth of a kernel over a large copy's.

        Args:
            kind: Kind of the kernel.
            size: Bytes that it moves.
        """
        known = self.ratios.get(kind) or self.ratios.get("copy")
        return _between(known, size) if known else 1.0

    def copied(self, kernel: Kernel, share: Share) -> float:
        """Returns the bytes that a copy of a large tensor moves in the time of a rank's share of a kernel."""
        size = kernel.moved.on(share)
        return size / self.ratio(kernel.kind, size)


def _between(points: Ratios, size: float) -> float:
    """Returns the ratio at a number of bytes, interpolated on logarithmic scales; beyond the ends, that of the end."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    after = next(n for n, (known, _) in enumerate(points) if known >= size)
    (small, low), (large, high) = points[after - 1 : after + 1]
    at = math.log(size / small) / math.log(large / small)
    return low ** (1 - at) * high**at


def read_rates(content: Mapping[str, Any], file: str, sources: dict[str, str]) -> KernelRates:
    """Returns the rates of a machine file.

    Args:
        content: Content of the file.
        file: Name of the file, for messages.
        sources: Sources of constants by key, to which those of the rates are added.

    Raises:
        DloError: A kind is unknown, or a ratio no positive number.
    """
    section = content.get("kinds") or {}
    if not isinstance(section, dict):
        raise DloError(
            f"machine {file}: kinds must be a mapping of kinds of kernels, got {section!r}; set, for example,"
            " kinds: {norm: {value: 0.5, source: ...}}"
        )
    found: dict[Kind, Ratios] = {}
    for kind, entry in section.items():
        if kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS) or "; remove it"
            raise DloError(f"machine {file}: kinds must be of {', '.join(KINDS)}, got {kind}{hint}")
        value = entry
        if isinstance(entry, dict) and "value" in entry:
            value, sources[f"kinds.{kind}"] = entry["value"], str(entry.get("source", ""))
        found[kind] = _ratios(value, f"kinds.{kind}", file)
    return KernelRates(found)


def _ratios(value: Any, key: str, file: str) -> Ratios:
    table = value if isinstance(value, dict) else {1.0: value}
    try:
        found = tuple(sorted((float(size), float(ratio)) for size, ratio in table.items()))
    except (TypeError, ValueError):
        found = ()
    if not found or not all(0 < number < math.inf for row in found for number in row):
        raise DloError(
            f"machine {file}: {key} must be a bandwidth over a large copy's, or a mapping of bytes that a kernel moves"
            f" to it, got {value!r}; correct it, or remove it"
        )
    return found

"""Formats and parses quantities with units; formats tables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from dlo_framework.errors import DloError


def format_bytes(count: float) -> str:
    """Formats a number of bytes: ``3.1 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_duration(seconds: float) -> str:
    """Formats a time to the precision that an estimate has: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def format_table(rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """Returns lines with the rows' cells in columns.

    Args:
        rows: Cells of each row; the last ones of a row may be missing.
        left: Number of columns that are aligned to the left, the others to the right; None for all.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]

    def align(column: int, cell: str) -> str:
        return cell.ljust(widths[column]) if left is None or column < left else cell.rjust(widths[column])

    return ["  ".join(align(*cell) for cell in enumerate(row)).rstrip() for row in rows]


def parse_bytes(text: str | float, key: str) -> int:
    """Returns the number of bytes of a size: ``80GB``, ``79.6 GiB``, ``64k``, or a number of bytes.

    Args:
        text: Size. Units are decimal (kB, MB, GB, TB) or binary (KiB, MiB, GiB, TiB); case and the B do not count.
        key: Name of the option, for the message.

    Raises:
        DloError: It is not a size of at least one byte.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\d+)?\s*(?:([KMGT])(i?))?B?", str(text).strip(), re.IGNORECASE)
    power = " KMGT".index((match.group(3) or " ").upper()) if match else 0
    size = float(match.group(1) + (match.group(2) or "")) * (1024 if match.group(4) else 1000) ** power if match else 0
    if not 1 <= size < 2**63:
        raise DloError(
            f"{key} must be a size of at least one byte, got {text}; give a number with a unit, such as 80GB"
        )
    return round(size)


def parse_fraction(text: str, key: str) -> float:
    """Returns the fraction of a text such as ``25%`` or ``0.25``.

    Args:
        text: Fraction.
        key: Name of the option, for the message.

    Raises:
        DloError: It is not a number in (0, 1).
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise DloError(f"{key} must be a fraction in (0, 1), such as 25% or 0.25, got {text}; write it so")
    return value

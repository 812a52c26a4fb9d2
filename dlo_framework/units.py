"""Formats quantities for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Formats a number of bytes: ``3.1 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

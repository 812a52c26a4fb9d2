"""Holds windows of tokenised shards out for validation, and describes a mixture's sources."""

from __future__ import annotations

import math
from typing import NamedTuple

from dlo_framework.errors import DloError
from dlo_tasks.llm.streams.token_windows import TokenWindows


class SourceStatistics(NamedTuple):
    """Statistics of the windows of all sources.

    Attributes:
        sizes: Number of windows of each source.
        seq_len: Positions per window.
    """

    sizes: dict[str, int]
    seq_len: int

    @property
    def samples(self) -> int:
        """Number of windows of all sources."""
        return sum(self.sizes.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {size:,}" for name, size in self.sizes.items())
        return f"{self.samples:,} windows of {self.seq_len:,} in {len(self.sizes)} sources: {each}"


def hold_out(windows: TokenWindows, val_fraction: float) -> tuple[TokenWindows, TokenWindows]:
    """Returns the windows for training and those for validation: the last of the source, rounded up.

    Contiguous windows share no document with those for training but one. Nothing is read.

    Args:
        windows: All windows of a source.
        val_fraction: Fraction of them to hold out; with 0, both parts are all windows.

    Raises:
        DloError: If no window is left for training.
    """
    if not val_fraction:
        return windows, windows
    held = math.ceil(len(windows) * val_fraction)
    if held >= len(windows):
        raise DloError(
            f"val_fraction must leave windows of sources.{windows.name} for training, got {val_fraction} of"
            f" {len(windows)}; lower it, or set val_files"
        )
    past = len(windows)
    return windows.part(0, past - held), windows.part(past - held, past)

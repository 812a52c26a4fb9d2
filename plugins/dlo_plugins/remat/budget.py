"""Memory budget of activations: a size, a share of what all activations take, or what memory is left."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from dlo_framework.errors import DloError
from dlo_framework.units import parse_bytes

#: Share of the memory that is used; fragmentation takes the rest.
_USED = 0.92


@dataclass(frozen=True)
class Budget:
    """Budget of activations.

    Attributes:
        bytes: Number of bytes; None for the others.
        share: Share of the peak of a step that keeps everything; None for the others.

    With neither, it is the memory that is left.
    """

    bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | float) -> Budget:
        """Returns the budget of a config.

        Args:
            text: `12GB`, `800MiB`, a number of bytes, `60%`, or `auto`.

        Raises:
            DloError: It is none of these.
        """
        given = str(text).strip()
        if given == "auto":
            return cls()
        number, sign, rest = given.partition("%")
        try:
            if not sign:
                return cls(bytes=parse_bytes(given, "budget"))
            if not rest and 0 < float(number) <= 100:
                return cls(share=float(number) / 100)
        except ValueError as error:
            raise _malformed(text) from error
        raise _malformed(text)

    @property
    def is_auto(self) -> bool:
        """Whether it is the memory that is left."""
        return self.bytes is None and self.share is None


def _malformed(text: str | float) -> DloError:
    rule = "a size such as 12GB, a share such as 60%, or auto"
    return DloError(f"budget must be {rule}, got {text}; set one of these")


def free_memory(device: torch.device, activations: int, local_ranks: int) -> int:
    """Returns the bytes that are left for activations beside all else that a step needs.

    Args:
        device: Device of the rank. On an accelerator, its peak of allocated memory since the last reset is that of a
            full step.
        activations: Bytes of activations in that step.
        local_ranks: Number of ranks that share a CPU's memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return max(0, int(total * _USED) - max(0, torch.cuda.max_memory_allocated(device) - activations))
    return max(0, int(_available_host_memory() * _USED / local_ranks))


def _available_host_memory() -> int:
    """Returns the bytes of the host's memory that programs can still allocate."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found.group(1)) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

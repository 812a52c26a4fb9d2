"""Memory in use and peak memory of this rank: the accelerator's, or the process's on a CPU."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

GB = 1e9


def memory_now(device: torch.device) -> dict[str, float]:
    """Returns GB in use and peak GB, by tag."""
    if device.type == "cuda":
        return {
            "memory/allocated_gb": torch.cuda.memory_allocated(device) / GB,
            "memory/reserved_gb": torch.cuda.memory_reserved(device) / GB,
            "memory/peak_gb": memory_peak(device) / GB,
        }
    return {"memory/process_gb": _resident() / GB, "memory/peak_gb": memory_peak(device) / GB}


def memory_peak(device: torch.device) -> int:
    """Returns the peak memory so far, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_peak()


def process_peak() -> int:
    """Returns the peak memory of this process so far, in bytes.

    Linux's ``ru_maxrss`` begins with the peak of the process that has started this one, so it is the last choice.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Linux counts in kB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_memory_peak(device: torch.device) -> None:
    """Resets the peak memory, where the device supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _resident() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return memory_peak(torch.device("cpu"))
    return int(statm.read_text().split()[1]) * resource.getpagesize()

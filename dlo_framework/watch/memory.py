"""Memory in use and peak memory of this rank: the accelerator's, or the process's on a CPU."""

from __future__ import annotations

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
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
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

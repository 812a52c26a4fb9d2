"""Measures this machine: the peak of its products, the bandwidth of its memory, and the link between its ranks.

All ranks work at once, as in a run, so that what they share, such as cores and memory, is shared here too.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.local_memory import process_peak
from dlo_framework.testing import run_distributed

_MOST_RANKS = 8  # Of a CPU.
_CALLS = 9
#: Rows and columns of the products, and bytes of the copy, by type of device.
_PRODUCT, _COPY = {"cpu": (1024, 512), "cuda": (8192, 4096)}, {"cpu": 1 << 26, "cuda": 1 << 29}
#: Bytes of the tensors that ranks sum: the time of the small ones is latency, that of the large ones bandwidth.
_SUMS = (1 << 12, 1 << 23)


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of a rank.

    Attributes:
        peak: Floating-point operations a second of the fastest product.
        bandwidth: Bytes a second that a copy of a large tensor reads and writes.
        launch: Seconds of an operation on a tensor of one element, with gradients.
        sums: Seconds that an all-reduce adds to computation, by bytes; none on one rank.
        process: Bytes of the process before anything is allocated; on a GPU, those outside torch's allocator.
    """

    peak: float
    bandwidth: float
    launch: float
    sums: dict[int, float]
    process: int


def measure_rank(rank: int, world_size: int, device: str, dtype: str) -> RankMeasurement:
    """Returns the measurement of this rank; all ranks must call it.

    Args:
        rank: Rank.
        world_size: Number of ranks.
        device: Type of the device.
        dtype: Name of the dtype of products.
    """
    process = process_peak()
    if device == "cuda" and world_size > 1:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def seconds(run: Callable[[], object], calls: int = 1) -> float:
        """Returns the median time of a function after a first call, while all ranks call it."""
        run()
        if world_size > 1:
            dist.barrier()
        times = []
        for _ in range(_CALLS):
            began = time.perf_counter()
            for _ in range(calls):
                run()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / calls)
        return statistics.median(times)

    peak = 0.0
    for size in _PRODUCT[device]:
        matrix = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
        peak = max(peak, 2.0 * size**3 / seconds(lambda m=matrix: torch.mm(m, m)))  # type: ignore[misc]
    source, one = torch.zeros(_COPY[device] // 4, device=device), torch.ones(1, device=device, requires_grad=True)
    target = torch.zeros_like(source)
    bandwidth = 2.0 * source.nbytes / seconds(lambda: target.copy_(source))
    launch = seconds(lambda: one * 2, 100)
    sums = {}
    if world_size > 1:
        communicator, alone = Communicator(dist.group.WORLD), seconds(lambda: torch.mm(matrix, matrix))
    for length in _SUMS if world_size > 1 else ():
        parts = torch.zeros(world_size, length // 4 // world_size, device=device)

        def between(parts: Tensor = parts) -> None:
            """Sums between computation, as in a run: ranks that share a core wait for each other's turn."""
            torch.mm(matrix, matrix)
            communicator.all_gather_parts(communicator.reduce_scatter_parts(parts))

        sums[length] = max(seconds(between) - alone, 1e-7)
    return RankMeasurement(peak, bandwidth, launch, sums, process if device == "cpu" else memory_outside_allocator())


def memory_outside_allocator() -> int:
    """Returns the bytes of the current GPU that torch's allocator does not have: of the context and of libraries."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def measure_machine(dtype: str, gpus: int, device: str) -> dict[str, Any]:
    """Returns the content of a machine file for the machine that this process runs on.

    Args:
        dtype: Name of the dtype of products.
        gpus: Number of ranks of the plan, of which as many measure as this machine can have.
        device: Type of the device, `cpu` or `cuda`.

    Raises:
        DloError: The ranks cannot run.
    """
    ranks = min(gpus, torch.cuda.device_count() if device == "cuda" else _MOST_RANKS)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        by_rank = run_distributed(
            measure_rank, ranks, device, dtype, timeout=300, group_timeout=60, backend=backend, threads=threads
        )
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise DloError(f"plan: --measure must be able to run {ranks} ranks here, got {last}; use --machine") from error
    return machine_content(by_rank, dtype, device, threads)


def machine_content(ranks: Sequence[RankMeasurement], dtype: str, device: str, threads: int) -> dict[str, Any]:
    """Returns a machine file's content from the measurements of all ranks."""
    name, count = platform.node() or "measured", len(ranks)

    def measured(value: float, what: str) -> dict[str, Any]:
        return {"value": value, "source": f"measured on {name}, {count} ranks, {datetime.date.today()}: {what}"}

    def usual(value: float, why: str = "usual") -> dict[str, Any]:
        return {"value": value, "source": f"not measured: {why}"}

    def median(key: str) -> float:
        return float(statistics.median(getattr(rank, key) for rank in ranks))

    on_cpu = device == "cpu"
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
    link = {"bandwidth": usual(1e10, "one rank"), "latency": usual(1e-6, "one rank")}
    if count > 1:
        small, large = (statistics.median(rank.sums[length] for rank in ranks) for length in _SUMS)
        rate = max(large - small, 0.01 * large) / (_SUMS[1] - _SUMS[0])  # Seconds a byte.
        link = {
            "bandwidth": measured(2 * (count - 1) / count / rate, f"sum of {_SUMS[1]} bytes"),
            "latency": measured(small / 2 / (count - 1), f"sum of {_SUMS[0]} bytes"),
        }
    return {
        "name": name,
        "device": device,
        "memory": measured(float(memory), "memory of the machine over its ranks"),
        "reserved": measured(float(max(rank.process for rank in ranks)), "a rank before it allocates"),
        "fragmentation": usual(0.05, "1 to 5% is usual"),
        "ranks_per_node": count,
        "peak": {dtype: measured(median("peak"), "the fastest product")},
        "efficiency": usual(0.7),
        "bandwidth": measured(median("bandwidth"), "copy of a large tensor"),
        "bandwidth_efficiency": usual(0.8),
        "launch": measured(median("launch"), "operation on one element"),
        "attention": {"forward": usual(0.4), "backward": usual(0.3)},
        "links": {"node": link},
        "overlap_slowdown": (
            usual(2.0, "on gloo a step waits for each collective") if on_cpu else usual(1.15, "1.1 to 1.3 is usual")
        ),
        **({"cores": max(1, (os.cpu_count() or 1) // threads)} if on_cpu else {}),
    }  # fmt: skip


def write_machine(content: dict[str, Any], path: Path) -> None:
    """Writes a machine file.

    Raises:
        DloError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120))
    except OSError as error:
        raise DloError(
            f"plan: --measure must write {path}, got {error.strerror}; set --out to another folder"
        ) from error

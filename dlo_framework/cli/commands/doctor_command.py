"""``dlo doctor``: checks what a run needs of this machine, each with its result and, if it fails, the fix."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.errors import DloError
from dlo_framework.extensions import versions
from dlo_framework.registry import Registry
from dlo_framework.units import format_bytes

DESCRIPTION = """Check versions, devices and their links, disk, ports, optional packages, and a collective of two ranks.

Exit code 1 if a check fails. Send the output with a report of a problem."""


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if a check fails."""
    parser = CommandParser("dlo doctor", description=DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that reduce a tensor; 0 starts none (default: 2)")
    parser.add_argument("--run.dir", dest="runs", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(argv)
    if given.ranks < 0 or given.ranks == 1:
        raise DloError(f"--ranks must be 0 or at least 2, got {given.ranks}; 2 checks that ranks can meet")
    findings = []
    for finding in _find(Path(given.runs), given.ranks):
        findings.append(finding)
        if not given.json:
            print(f"{finding.status:<6} {finding.name:<18} {finding.text}", flush=True)
    if given.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    return int(any(finding.status == "fails" for finding in findings))


def _find(folder: Path, ranks: int) -> Iterator[Finding]:
    for name, version in versions().items():
        yield Finding(name, "ok", version)
    yield from check_packages(Registry())
    yield from check_devices()
    yield from check_storage(folder)
    yield from check_network()
    if ranks:
        yield check_ranks_meet(ranks)


Status = Literal["ok", "note", "fails"]

#: Free bytes below which a run is likely to fill its disk, and shared memory below which workers are likely to fail.
_LITTLE_DISK, _LITTLE_SHARED = 5 * 10**9, 10**9
_SHARED = Path("/dev/shm")
#: Elements of the tensor that ranks reduce, and repetitions.
_ELEMENTS, _ROUNDS = 4 * 2**20, 5


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        name: Subject of the check.
        status: `ok`; `note` for something that a run may do without; `fails` for something that ends runs.
        text: Result, with the fix if it is not `ok`.
    """

    name: str
    status: Status
    text: str


def check_devices() -> Iterator[Finding]:
    """Yields findings on devices, their links and NCCL."""
    import torch

    from dlo_framework.data.module import usable_cores

    cores = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield Finding("cpu", "ok", f"{cores} cores for this process, OMP_NUM_THREADS {threads}")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        driver = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
        if driver and not built:
            fix = "there is a driver, but torch is built for the CPU; install a build for your GPU"
            yield Finding("gpu", "fails", fix)
        else:
            yield Finding("gpu", "note", f"none ({f'torch is built for {built}, ' if built else ''}runs use the CPU)")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        yield Finding(f"gpu {number}", "ok", f"{properties.name}, {format_bytes(properties.total_memory)}, {bf16}")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    yield Finding("nccl", "ok" if nccl else "fails", nccl or "torch has none; install a build of torch with NCCL")
    yield from _check_links()


def _check_links() -> Iterator[Finding]:
    """Yields how GPUs are linked, from the driver's table."""
    import torch

    if torch.cuda.device_count() < 2 or shutil.which("nvidia-smi") is None:
        return
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU") and "\t" in line]
    kinds = sorted({cell for row in rows for cell in row[1:] if re.fullmatch("NV.*|PIX|PXB|PHB|NODE|SYS", cell)})
    slow = " (some GPUs reach each other through the CPUs)" if "SYS" in kinds else ""
    yield Finding("links", "note" if slow else "ok", f"{', '.join(kinds) or 'unknown'}{slow}")


def check_storage(folder: Path) -> Iterator[Finding]:
    """Yields findings on the disk of the runs, and on shared memory.

    Args:
        folder: Folder of the runs, which need not exist.
    """
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    little = free < _LITTLE_DISK
    fix = f"; less than {format_bytes(_LITTLE_DISK)}: choose another with --run.dir" if little else ""
    yield Finding("disk", "note" if little else "ok", f"{format_bytes(free)} free in {place}{fix}")
    yield _check_file_system(place)
    if _SHARED.is_dir():
        size = shutil.disk_usage(_SHARED).free
        scarce = size < _LITTLE_SHARED
        text = f"{format_bytes(size)} free in {_SHARED}"
        fix = "; workers of loaders share batches there: start the container with more (--shm-size), or num_workers: 0"
        yield Finding("shared memory", "note" if scarce else "ok", text + (fix if scarce else ""))


def _check_file_system(place: Path) -> Finding:
    """Tries what run folders need: files, hard links (locks of runs), and renames (checkpoints)."""
    own = place / f".dlo-doctor-{os.getpid()}"
    linked, moved = own.with_suffix(".link"), own.with_suffix(".moved")
    try:
        own.write_bytes(b"dlo")
        os.link(own, linked)
        os.rename(linked, moved)
        return Finding("file system", "ok", f"writes, links and renames in {place}")
    except OSError as error:
        return Finding("file system", "fails", f"{error.strerror} in {place}; choose another folder with --run.dir")
    finally:
        for path in (own, linked, moved):
            path.unlink(missing_ok=True)


def check_network() -> Iterator[Finding]:
    """Yields findings on names and ports that ranks meet at."""
    name = socket.gethostname()
    try:
        yield Finding("host", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        yield Finding("host", "note", f"{name} has no address ({error.strerror}); runs on several machines need one")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("ports", "ok", f"the system gives free ports, such as {server.getsockname()[1]}")
    except OSError as error:
        yield Finding("ports", "fails", f"no port on 127.0.0.1: {error.strerror}; ranks cannot meet")
    names = [key for key in os.environ if key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if names:
        yield Finding("environment", "note", f"{', '.join(names)} set: dlo takes itself for a launcher's rank")


def check_packages(registry: Registry) -> Iterator[Finding]:
    """Yields findings on the optional packages of each extra, and on plug-ins that cannot be used.

    Args:
        registry: Registry of the plug-ins.
    """
    for extra, missing in missing_extras().items():
        fix = f"without {', '.join(missing)}; pip install 'dlo_framework[{extra}]'"
        yield Finding(f"extra {extra}", "note" if missing else "ok", fix if missing else "complete")
    conflicts = dict.fromkeys(text for plugin in registry.plugins() if (text := registry.conflict(plugin)))
    for problem in (*conflicts, *registry.problems):
        yield Finding("plug-ins", "fails", problem)
    yield Finding("plug-ins", "ok", f"{len(registry.plugins())} installed")


#: Extras for users; the others are for work on dlo itself.
_INTERNAL = {"dev", "test"}


def missing_extras() -> dict[str, list[str]]:
    """Returns, for each extra of dlo, its packages that are not installed."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires("dlo_framework") or ()]
    extras = [
        name for name in metadata.metadata("dlo_framework").get_all("Provides-Extra") or () if name not in _INTERNAL
    ]
    missing: dict[str, list[str]] = {}
    for extra in sorted(extras):
        needed = [each for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        needed = [each for each in needed if not each.marker.evaluate({"extra": ""})]  # type: ignore[union-attr]
        missing[extra] = [each.name for each in needed if not _is_installed(each.name)]
    return missing


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_ranks_meet(ranks: int) -> Finding:
    """Starts ranks that reduce a tensor, and measures their bandwidth.

    Args:
        ranks: Number of ranks; on GPUs at most their number.
    """
    import torch

    from dlo_framework.testing.spawn import run_distributed

    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    backend = "nccl" if on_gpus else "gloo"
    name = f"{ranks} ranks"
    try:
        seconds = max(run_distributed(measure_all_reduce, ranks, on_gpus, backend=backend, timeout=120.0))
    except Exception as error:  # Any failure of a rank is the finding.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return Finding(name, "fails", f"cannot reduce over {backend}: {reason}")
    size = 4 * _ELEMENTS
    rate = format_bytes(2 * (ranks - 1) / ranks * size / seconds)
    return Finding(name, "ok", f"all_reduce of {format_bytes(size)} over {backend}: {rate}/s a rank")


def measure_all_reduce(rank: int, world_size: int, on_gpus: bool) -> float:
    """Returns the shortest time of an ``all_reduce``, in seconds; runs on each rank.

    Raises:
        DloError: If the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    times = []
    for _ in range(_ROUNDS):
        values = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        first = float(values[0])  # Waits for the device.
        times.append(time.perf_counter() - began)
        expected = world_size * (world_size + 1) / 2
        if first != expected:
            raise DloError(f"the sum over ranks must be {expected:g}, got {first:g}")
    return min(times)

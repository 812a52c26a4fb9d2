"""GB a second of saving tensors from a device to a disk, and of loading them again."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measuring.record import Table
from measuring.rounds import Clock, SettledClock, all_ratios, take_turns
from torch import Tensor

from dlo_framework.checkpoint import AsyncSaver, load, save

Tensors = dict[str, Tensor]
BASE = "torch.save"


def checkpoint_tables(device: torch.device, size: int, rounds: int, folder: Path | None = None) -> list[Table]:
    """Measures both ways; what is loaded is compared with what was saved.

    Saves end when the bytes are on the disk: torch's are synced for that, as dlo's are. Loads find the files in the
    page cache; they end in tensors on the device that are there already, as in a resume.

    Args:
        device: Device of the tensors.
        size: Approximate size of the tensors, in bytes.
        rounds: Rounds after the warm-up round.
        folder: Folder on the measured disk; a temporary one by default.
    """
    tensors, targets = random_tensors(size, device), random_tensors(size, device)
    clock = SettledClock(device)
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        saves = savers(tensors, root, clock)
        saved = take_turns(saves, rounds)
        for tensor in targets.values():
            tensor.zero_()
        loads = loaders(targets, root)
        loaded = take_turns({key: timed_load(run, tensors, targets, clock) for key, run in loads.items()}, rounds)
    made = [
        rates_table(f"saving {gigabytes:.3g} GB", "the GB a second of torch.save, synced", saved, BASE, gigabytes),
        rates_table(f"loading {gigabytes:.3g} GB", "the GB a second of torch.load", loaded, "torch.load", gigabytes),
    ]
    made[0].notes.append("dlo hashes what it writes; in the background: until training may go on.")
    made[1].notes.append("dlo checks the hash of every byte before it uses any, but where it says so.")
    return made


def random_tensors(size: int, device: torch.device) -> Tensors:
    """Returns float32 tensors of about ``size`` bytes, with the shapes of a transformer's weights."""
    width = 2048 if size >= 1e9 else 128
    count = max(1, size // (4 * width * 4 * width))
    return {f"layers.{number}.weight": torch.randn(4 * width, width, device=device) for number in range(count)}


def savers(tensors: Tensors, root: Path, clock: Clock) -> dict[str, Callable[[], float]]:
    """Returns what saves once and tells the seconds; the last of each stays on the disk."""

    def by_torch() -> float:
        path = root / "torch.pt"
        path.unlink(missing_ok=True)

        def run() -> None:
            with path.open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return clock.seconds(run)

    def by_dcp() -> float:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(root / "dcp", ignore_errors=True)
        # It syncs its files by itself.
        return clock.seconds(lambda: dcp.save(tensors, checkpoint_id=root / "dcp", no_dist=True))

    def by_dlo() -> float:
        path = root / "dlo.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        return clock.seconds(lambda: save({"global_step": 0, "state_dict": tensors}, path))

    def behind() -> float:
        path = root / "behind.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        saver = AsyncSaver()
        seconds = clock.seconds(lambda: saver.save({"global_step": 0, "state_dict": tensors}, path))
        saver.close()
        return seconds

    return {
        BASE: by_torch,
        f"{BASE} again": by_torch,
        "torch DCP": by_dcp,
        "dlo": by_dlo,
        "dlo, in the background": behind,
    }


def loaders(targets: Tensors, root: Path) -> dict[str, Callable[[], None]]:
    """Returns what reads into the targets."""

    def by_torch() -> None:
        read = torch.load(root / "torch.pt", map_location="cpu", weights_only=True, mmap=True)
        for name, target in targets.items():
            target.copy_(read[name])

    def by_dcp() -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(targets, checkpoint_id=root / "dcp", no_dist=True)

    def by_dlo(level: str | None) -> None:
        read = load(root / "dlo.ckpt", level=level)["state_dict"]  # type: ignore[arg-type]
        for name, target in targets.items():
            read.read_into(name, target)

    return {
        "torch.load": by_torch,
        "torch.load again": by_torch,
        "torch DCP": by_dcp,
        "dlo": lambda: by_dlo("hash"),
        "dlo, not checked": lambda: by_dlo(None),
    }


def timed_load(run: Callable[[], None], tensors: Tensors, targets: Tensors, clock: Clock) -> Callable[[], float]:
    """Returns what loads once, checks what was read, and tells the seconds."""

    def timed() -> float:
        for target in targets.values():
            target.zero_()
        seconds = clock.seconds(run)
        assert all(torch.equal(tensor, targets[name]) for name, tensor in tensors.items())
        return seconds

    return timed


def rates_table(title: str, unit: str, seconds: dict[str, list[float]], base: str, gigabytes: float) -> Table:
    """Returns the table of GB a second over the base's."""
    table = Table(title, unit, "elapsed time", better="higher")
    rates = {name: [gigabytes / one for one in taken] for name, taken in seconds.items()}
    for name, values in all_ratios(rates, base).items():
        median = statistics.median(rates[name])
        table.add(name, values, ours=name.startswith("dlo"), control=name.endswith("again"), GB_a_second=median)
    return table

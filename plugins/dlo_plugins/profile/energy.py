"""Callback `Energy`: joules a sample, kWh and CO2 of a run, in its summary.

Counters are NVML's for GPUs, and RAPL's for CPUs and memory; codecarbon estimates where there is neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.agreement import run_on_all_ranks
from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError
from dlo_framework.watch.monitor import RunMonitor

#: Linux's folder of RAPL's counters.
POWERCAP = Path("/sys/class/powercap")
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class EnergyCounter:
    """Counter of the energy of some devices.

    Attributes:
        source: Name of what is read.
        covers: Devices whose energy it counts.
        read: Function that returns the joules since the counter was made.
        close: Function that releases what the counter uses.
        is_estimate: Whether it estimates from models of power, and does not measure.
    """

    source: str
    covers: str
    read: Callable[[], float]
    close: Callable[[], object] = lambda: None
    is_estimate: bool = False


def count_rapl(folder: Path = POWERCAP) -> EnergyCounter:
    """Returns the counter of CPUs and memory by running average power limit (RAPL), through Linux's powercap.

    It counts all processes of the machine. Counters wrap around, on some machines within minutes: read it more often.

    Args:
        folder: Linux's folder of the counters.

    Raises:
        OSError: No counter can be read; most systems let only root read them.
    """

    def name(path: Path) -> str:
        return (path / "name").read_text().strip()

    def microjoules(path: Path) -> int:
        return int((path / "energy_uj").read_text())

    # A package's zone includes its cores; memory (dram) is a zone inside it that it does not include.
    zones = [path for path in sorted(folder.glob("*rapl*:*")) if (path / "energy_uj").exists()]
    zones = [path for path in zones if "mmio" not in path.name]  # The same counters, by another way.
    zones = [path for path in zones if path.name.count(":") == 1 or name(path) == "dram"]
    if any(name(path).startswith("package") for path in zones):  # The platform includes the packages.
        zones = [path for path in zones if name(path) != "psys"]
    if not zones:
        raise FileNotFoundError(2, "no RAPL counter", str(folder))
    ranges = {path: int((path / "max_energy_range_uj").read_text()) for path in zones}
    last, totals = {path: microjoules(path) for path in zones}, [0]

    def read() -> float:
        for path in zones:
            now = microjoules(path)
            totals[0] += (now - last[path]) % (ranges[path] or 1)
            last[path] = now
        return totals[0] * 1e-6

    return EnergyCounter("RAPL", ", ".join(map(name, zones)), read)


def count_nvml(uuid: str, nvml: Any) -> EnergyCounter:
    """Returns the counter of one NVIDIA GPU by NVML's total energy in millijoules, which GPUs have since Volta.

    Args:
        uuid: Id of the GPU, as torch gives it.
        nvml: Module `pynvml` of the package nvidia-ml-py.

    Raises:
        OSError: The GPU has no such counter, or the driver refuses.
    """
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        first = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error

    def read() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first) * 1e-3

    return EnergyCounter("NVML", f"GPU {uuid}", read, nvml.nvmlShutdown)


def count_codecarbon() -> EnergyCounter:
    """Returns codecarbon's estimate of the machine's energy, by the model and load of its CPU, and by its memory.

    Raises:
        OSError: Codecarbon cannot start.
    """
    codecarbon = importlib.import_module("codecarbon")
    totals = [0.0]
    try:  # Offline: it would look the machine's country up in the internet.
        tracker = codecarbon.OfflineEmissionsTracker(
            country_iso_code="USA", save_to_file=False, log_level="error", allow_multiple_runs=True
        )
        tracker.start_task()
    except Exception as error:
        raise OSError(f"codecarbon: {error}") from error

    def read() -> float:
        totals[0] += float(tracker.stop_task().energy_consumed) * JOULES_PER_KWH
        tracker.start_task()
        return totals[0]

    def close() -> None:
        tracker.stop_task()
        tracker.stop()

    return EnergyCounter("codecarbon", "machine", read, close, is_estimate=True)


def find_counters(
    device: torch.device, counts_machine: bool, folder: Path = POWERCAP
) -> tuple[list[EnergyCounter], list[str]]:
    """Returns the counters that can be read, and the reasons why others cannot.

    Args:
        device: Device of this rank.
        counts_machine: Whether this rank counts what the ranks of its machine share: one rank of each machine does.
        folder: Linux's folder of RAPL's counters.
    """
    counters: list[EnergyCounter] = []
    reasons: list[str] = []

    def add(make: Callable[[], EnergyCounter], package: str = "", missing: str = "") -> None:
        if package and importlib.util.find_spec(package) is None:
            reasons.append(missing)
            return
        try:
            counters.append(make())
        except OSError as error:
            named = f"RAPL: {error.strerror} ({error.filename or folder})" if error.strerror else str(error)
            reasons.append(named)

    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        missing = "NVML: nvidia-ml-py is not installed; pip install 'dlo_framework[profile]'"
        add(lambda: count_nvml(uuid, importlib.import_module("pynvml")), "pynvml", missing)
    if counts_machine:
        add(lambda: count_rapl(folder))
        if not counters:
            missing = "codecarbon: not installed; pip install 'dlo_framework[profile]' estimates"
            add(count_codecarbon, "codecarbon", missing)
    return counters, reasons


#: Key of the joules in a checkpoint.
KEY = "dlo_energy"
#: Seconds between two reads: RAPL's counters wrap around.
_EVERY = 30.0


class Energy(PluginCallback):
    """Measures the energy of training, and adds joules a sample, kWh and CO2 to ``summary.json``.

    It reads each rank's NVIDIA GPU (NVML) and each machine's CPUs and memory (RAPL). Where neither can be read it takes
    codecarbon's estimate, if that is installed, and says so; where nothing can be read the summary has null and the
    reasons. Validations between the first and the last step count; other processes on the machine count in RAPL.

    Args:
        grams_per_kwh: Grams of CO2 equivalent for a kWh of the machine's grid; None to give none. National grid
            operators publish it: roughly 55 in France, 370 in Germany and the USA, 580 in China (Ember, 2023).

    Raises:
        DloError: If the grams are negative.
    """

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it reads counters and changes nothing in a run"

    def __init__(self, grams_per_kwh: float | None = None) -> None:
        if grams_per_kwh is not None and not 0 <= grams_per_kwh < float("inf"):
            raise DloError(
                f"Energy: grams_per_kwh must be at least 0, got {grams_per_kwh}; set your grid's, such as 350"
            )
        self.grams_per_kwh = grams_per_kwh
        self._counters: list[EnergyCounter] = []
        self._reasons: list[str] = []
        self._before = 0.0  # joules of the runs that this run resumes, of all ranks
        self._all: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the joules so far of all ranks, and those of earlier runs, to the checkpoint."""
        # The last checkpoint may be saved after the counters were closed.
        joules = sum(run_on_all_ranks(control_group(trainer), self.read)) if self._all is None else self._all["joules"]
        checkpoint[KEY] = {"joules": self._before + joules}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the joules of the run that is resumed."""
        self._before = float(checkpoint.get(KEY, {"joules": 0.0})["joules"])

    def read(self) -> float:
        """Returns this rank's joules since the start of training."""
        with self._lock:
            return sum(counter.read() for counter in self._counters)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the counters, and reads them every half a minute."""
        control_group(trainer)  # Created here, at the same point on all ranks.
        self._all = None
        self._counters, self._reasons = find_counters(trainer.strategy.root_device, trainer.local_rank == 0)
        if self._counters:
            self._stop = stop = threading.Event()
            threading.Thread(target=self._watch, args=(stop,), name="dlo energy", daemon=True).start()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(_EVERY):
            self.read()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sums the energy of all ranks, and closes the counters."""
        by_rank = run_on_all_ranks(control_group(trainer), self._own)
        self._all = {
            "joules": sum(each["joules"] for each in by_rank),
            "sources": sorted({source for each in by_rank for source in each["sources"]}),
            "covers": sorted({device for each in by_rank for device in each["covers"]}),
            "estimated": any(each["estimated"] for each in by_rank),
            "reasons": list(dict.fromkeys(reason for each in by_rank for reason in each["reasons"])),
            "ranks": len(by_rank),
        }
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keeps this rank's energy, and closes the counters."""
        if self._all is None:
            self._all = {**self._own(), "ranks": 1}
        self._close()

    def _own(self) -> dict[str, Any]:
        return {
            "joules": self.read(),
            "sources": [counter.source for counter in self._counters],
            "covers": [counter.covers for counter in self._counters],
            "estimated": any(counter.is_estimate for counter in self._counters),
            "reasons": self._reasons,
        }

    def _close(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        with self._lock:
            counters, self._counters = self._counters, []
        for counter in counters:
            counter.close()

    def summary_facts(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the energy for ``summary.json``; null values where nothing could be read."""
        energy = self._all or {**self._own(), "ranks": 1}
        if not energy["sources"]:
            return {"energy": {"joules": None, "why": "; ".join(energy["reasons"]) or "training has not started"}}
        joules = energy["joules"] + self._before
        monitors = (c for c in trainer.callbacks if isinstance(c, RunMonitor))  # type: ignore[attr-defined]
        samples = next((monitor.totals()[0] for monitor in monitors), 0)
        kwh = joules / JOULES_PER_KWH
        grams = None if self.grams_per_kwh is None else kwh * self.grams_per_kwh
        return {
            "energy": {
                "joules": joules,
                "joules_per_sample": joules / samples if samples else None,
                "kwh": kwh,
                "co2_grams": grams,
                "grams_per_kwh": self.grams_per_kwh,
                "sources": energy["sources"],
                "covers": energy["covers"],
                "estimated": energy["estimated"],
                "ranks": energy["ranks"],
                "not_read": energy["reasons"],
            }
        }

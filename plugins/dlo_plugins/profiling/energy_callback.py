"""Callback `Energy`: joules a sample, kWh and CO2 of a run, in its summary.

Counters are NVML's for GPUs, and RAPL's for CPUs and memory; codecarbon estimates where there is neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.agreement import run_on_all_ranks
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError
from dlo_framework.watch.monitor import RunMonitor

#: Linux's folder of RAPL's counters.
POWERCAP = Path("/sys/class/powercap")
JOULES_PER_KWH = 3.6e6


class EnergyCounter(Protocol):
    """Counter of the energy of some devices.

    Attributes:
        source: Name of what is read.
        covers: Devices whose energy it counts.
        is_estimate: Whether it estimates from models of power, and does not measure.
    """

    source: str
    covers: str
    is_estimate: bool

    def read(self) -> float:
        """Returns the joules since the counter was made."""

    def close(self) -> None:
        """Releases what the counter uses."""


class RaplCounter:
    """Counter of CPUs and memory by Intel's and AMD's running average power limit (RAPL), through Linux's powercap.

    It counts all processes of the machine. Counters wrap around, on some machines within minutes: read it more often.

    Args:
        folder: Linux's folder of the counters.

    Raises:
        OSError: No counter can be read; most systems let only root read them.
    """

    source = "RAPL"
    is_estimate = False

    def __init__(self, folder: Path = POWERCAP) -> None:
        # A package's zone includes its cores; memory (dram) is a zone inside it that it does not include.
        zones = [path for path in sorted(folder.glob("*rapl*:*")) if (path / "energy_uj").exists()]
        zones = [path for path in zones if "mmio" not in path.name]  # The same counters, by another way.
        self._zones = [path for path in zones if path.name.count(":") == 1 or _name(path) == "dram"]
        own = {_name(path) for path in self._zones}
        if "psys" in own and any(name.startswith("package") for name in own):  # The platform includes the packages.
            self._zones = [path for path in self._zones if _name(path) != "psys"]
        if not self._zones:
            raise FileNotFoundError(2, "no RAPL counter", str(folder))
        self.covers = ", ".join(_name(path) for path in self._zones)
        self._ranges = {path: int((path / "max_energy_range_uj").read_text()) for path in self._zones}
        self._last = {path: _microjoules(path) for path in self._zones}
        self._total = 0.0

    def read(self) -> float:
        """Returns the joules since the counter was made."""
        for path in self._zones:
            now = _microjoules(path)
            step = now - self._last[path]
            self._total += (step if step >= 0 else step + self._ranges[path]) * 1e-6
            self._last[path] = now
        return self._total

    def close(self) -> None:
        """Does nothing: files are closed after each read."""


def _name(path: Path) -> str:
    return (path / "name").read_text().strip()


def _microjoules(path: Path) -> int:
    return int((path / "energy_uj").read_text())


class NvmlCounter:
    """Counter of one NVIDIA GPU by NVML's total energy, which GPUs have since Volta.

    Args:
        uuid: Id of the GPU, as torch gives it.
        nvml: Module `pynvml` of the package nvidia-ml-py.

    Raises:
        OSError: The GPU has no such counter, or the driver refuses.
    """

    source = "NVML"
    is_estimate = False

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        self.covers = f"GPU {uuid}"
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._first = nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> float:
        """Returns the joules since the counter was made; NVML counts millijoules."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._first) * 1e-3

    def close(self) -> None:
        """Ends the use of NVML."""
        self._nvml.nvmlShutdown()


class CodecarbonCounter:
    """Codecarbon's estimate of the machine's energy, from the power of its CPU by model and load, and of its memory.

    Raises:
        OSError: Codecarbon cannot start.
    """

    source = "codecarbon"
    covers = "machine"
    is_estimate = True

    def __init__(self) -> None:
        codecarbon = importlib.import_module("codecarbon")
        self._total = 0.0
        try:  # Offline: it would look the machine's country up in the internet.
            self._tracker = codecarbon.OfflineEmissionsTracker(
                country_iso_code="USA", save_to_file=False, log_level="error", allow_multiple_runs=True
            )
            self._tracker.start_task()
        except Exception as error:
            raise OSError(f"codecarbon: {error}") from error

    def read(self) -> float:
        """Returns the joules since the counter was made."""
        self._total += float(self._tracker.stop_task().energy_consumed) * JOULES_PER_KWH
        self._tracker.start_task()
        return self._total

    def close(self) -> None:
        """Stops the tracker."""
        self._tracker.stop_task()
        self._tracker.stop()


def find_counters(
    device: torch.device, counts_machine: bool, folder: Path = POWERCAP
) -> tuple[list[EnergyCounter], list[str]]:
    """Returns the counters that can be read, and the reasons why others cannot.

    Args:
        device: Device of this rank.
        counts_machine: Whether this rank counts what the ranks of its machine share: one rank of each machine does.
        folder: Linux's folder of RAPL's counters.
    """
    found: list[EnergyCounter] = []
    reasons: list[str] = []
    if device.type == "cuda":
        if importlib.util.find_spec("pynvml") is None:
            reasons.append("NVML: nvidia-ml-py is not installed; pip install 'dlo_framework[profile]'")
        else:
            nvml = importlib.import_module("pynvml")
            try:
                found.append(NvmlCounter(str(torch.cuda.get_device_properties(device).uuid), nvml))
            except OSError as error:
                reasons.append(str(error))
    if not counts_machine:
        return found, reasons
    try:
        found.append(RaplCounter(folder))
    except OSError as error:
        reasons.append(f"RAPL: {error.strerror or error} ({error.filename or folder})")
    if not found:
        if importlib.util.find_spec("codecarbon") is None:
            reasons.append("codecarbon: not installed; pip install 'dlo_framework[profile]' estimates")
        else:
            try:
                found.append(CodecarbonCounter())
            except OSError as error:
                reasons.append(str(error))
    return found, reasons


#: Key of the joules in a checkpoint.
KEY = "dlo_energy"
#: Seconds between two reads: RAPL's counters wrap around.
_EVERY = 30.0


class Energy(Callback):
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
        found = run_on_all_ranks(control_group(trainer), self._own)
        self._all = {
            "joules": sum(each["joules"] for each in found),
            "sources": sorted({source for each in found for source in each["sources"]}),
            "covers": sorted({device for each in found for device in each["covers"]}),
            "estimated": any(each["estimated"] for each in found),
            "reasons": list(dict.fromkeys(reason for each in found for reason in each["reasons"])),
            "ranks": len(found),
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
        found = self._all or {**self._own(), "ranks": 1}
        if not found["sources"]:
            return {"energy": {"joules": None, "why": "; ".join(found["reasons"]) or "training has not started"}}
        joules = found["joules"] + self._before
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
                "sources": found["sources"],
                "covers": found["covers"],
                "estimated": found["estimated"],
                "ranks": found["ranks"],
                "not_read": found["reasons"],
            }
        }

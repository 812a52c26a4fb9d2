"""Counters of energy: GPUs by NVML, CPUs and memory by RAPL, and codecarbon's estimate where there is neither."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

import torch

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

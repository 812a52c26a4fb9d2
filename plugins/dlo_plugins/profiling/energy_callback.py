"""Callback `Energy`: joules a sample, kWh and CO2 of a run, in its summary."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.distributed.control_group import control_group
from dlo_framework.errors import DloError
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.profiling.energy_counters import JOULES_PER_KWH, EnergyCounter, find_counters

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
        joules = sum(_gather(trainer, self.read())) if self._all is None else self._all["joules"]
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
        found = _gather(trainer, self._own())
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


def _gather(trainer: Trainer, value: Any) -> list[Any]:
    """Returns every rank's value, by rank; all ranks call it."""
    group = control_group(trainer)
    if group is None:
        return [value]
    found: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(found, value, group=group)
    return found

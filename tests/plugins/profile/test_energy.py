"""Joules of counters that are files and fakes, and a run's energy in its summary; none is null, and says why."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.testing import run_distributed
from dlo_plugins.profile import energy as energy_callback
from dlo_plugins.profile.energy import Energy, count_nvml, count_rapl, find_counters
from support.monitored import Net, fit
from support.trainers import quiet_trainer


def zone(folder: Path, path: str, name: str, energy: int, most: int = 1_000_000) -> Path:
    made = folder / path
    made.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", most)):
        (made / file).write_text(f"{text}\n")
    return made


def test_rapl_adds_packages_and_their_memory_and_survives_a_counter_that_wraps(tmp_path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1)  # inside the package: not counted twice
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    zone(tmp_path, "intel-rapl:1", "psys", 5)  # includes the package
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 7)  # the package again
    counter = count_rapl(tmp_path)
    assert counter.covers == "package-0, dram"
    (package / "energy_uj").write_text("100000\n")  # 1,000,000 is where it wraps
    (memory / "energy_uj").write_text("500010\n")
    assert counter.read() == pytest.approx(0.2 + 0.5)
    (package / "energy_uj").write_text("150000\n")
    assert counter.read() == pytest.approx(0.75)


class Nvml:
    """As much of pynvml as is used."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails: bool = False) -> None:
        self.millijoules, self.fails, self.open = 5_000, fails, False

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")
        self.open = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-ab"
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules

    def nvmlShutdown(self) -> None:
        self.open = False


def test_nvml_counts_millijoules_since_the_start() -> None:
    nvml = Nvml()
    counter = count_nvml("ab", nvml)
    nvml.millijoules += 2_500
    assert counter.read() == 2.5
    counter.close()
    assert not nvml.open
    with pytest.raises(OSError, match="Driver Not Loaded"):
        count_nvml("ab", Nvml(fails=True))


def test_nothing_that_can_be_read_is_null_with_the_reasons(tmp_path, monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "codecarbon" else find_spec(name))
    found, reasons = find_counters(torch.device("cpu"), True, tmp_path / "none")
    assert found == []
    assert [reason.partition(":")[0] for reason in reasons] == ["RAPL", "codecarbon"]
    monkeypatch.setattr(energy_callback, "find_counters", lambda *_: ([], reasons))
    fit(tmp_path / "run", callbacks=[Energy(grams_per_kwh=100)], max_epochs=1)
    energy = json.loads((tmp_path / "run" / "summary.json").read_text())["energy"]
    assert energy == {"joules": None, "why": "; ".join(reasons)}


class Steady:
    """Counter of ten joules a read."""

    source, covers, is_estimate = "made up", "test", False

    def __init__(self) -> None:
        self.joules, self.closed = 0.0, False

    def read(self) -> float:
        self.joules += 10.0
        return self.joules

    def close(self) -> None:
        self.closed = True


def test_a_runs_energy_is_in_its_summary(tmp_path, monkeypatch) -> None:
    counter = Steady()
    monkeypatch.setattr(energy_callback, "find_counters", lambda *_: ([counter], ["RAPL: none"]))
    fit(tmp_path, callbacks=[Energy(grams_per_kwh=360)], max_epochs=1, batches=20)
    summary = json.loads((tmp_path / "summary.json").read_text())
    energy = summary["energy"]
    assert energy["joules"] >= 10
    assert energy["joules_per_sample"] == pytest.approx(energy["joules"] / summary["samples"])
    assert energy["kwh"] == pytest.approx(energy["joules"] / 3.6e6)
    assert energy["co2_grams"] == pytest.approx(energy["kwh"] * 360)
    assert (energy["sources"], energy["estimated"], energy["not_read"]) == (["made up"], False, ["RAPL: none"])
    assert counter.closed


class TenPerStep(Steady):
    """Counter of ten joules a step on rank 0, and a hundred on rank 1."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.first, self.joules_a_step = trainer, trainer.global_step, 100.0 if rank else 10.0

    def read(self) -> float:
        return (self.trainer.global_step - self.first) * self.joules_a_step

    def close(self) -> None:
        pass


class CountedSteps(Energy):
    """Energy of a made-up counter."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._counters = [TenPerStep(trainer, trainer.global_rank)]


def _resumes(rank: int, world_size: int, folder: Path) -> list[float]:
    """Returns the joules of a run, and of another that goes on from its checkpoint."""
    found, checkpoint = [], folder / "some.ckpt"
    for steps in (3, 5):
        energy, module = CountedSteps(), Net()
        trainer = quiet_trainer(
            devices=2, strategy="ddp", max_steps=steps, callbacks=[energy], limit_val_batches=0, default_root_dir=folder
        )
        data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
        trainer.fit(module, data, ckpt_path=checkpoint if checkpoint.exists() else None)
        found.append(energy.summary_facts(trainer)["energy"]["joules"])
        trainer.save_checkpoint(checkpoint)
    return found


def test_a_resumed_run_adds_to_the_joules_of_all_ranks_before(tmp_path) -> None:
    first, _ = run_distributed(_resumes, 2, tmp_path, backend=None)
    assert first == [3 * 110.0, 5 * 110.0]

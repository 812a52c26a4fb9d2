import json
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_plugins.profile.time_to_target import (
    LOG,
    RESULT,
    TimeToTarget,
)
from support.runs import fit_with_defaults
from support.trainers import Squares

SAMPLES, BATCH = 20, 4


class Learns(Squares):
    """Its validation metric is the number of optimizer steps over 100, so that a run's course is known."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 1))

    def validation_step(self, batch, batch_idx):
        self.log("val_score", self.trainer.global_step / 100)
        self.log("val_loss", 1 - self.trainer.global_step / 100)


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=BATCH, num_workers=0)

    def train_dataloader(self):
        return self.train_loader(TensorDataset(torch.randn(SAMPLES, 3)))

    def val_dataloader(self):
        return self.eval_loader(TensorDataset(torch.randn(8, 3)))


def run(folder, *callbacks, module=None, **options):
    return fit_with_defaults(folder, module or Learns(), Data(), callbacks, **{"max_epochs": 6, **options})


def result(folder):
    return json.loads((folder / RESULT).read_text())


def log(folder):
    lines = (folder / LOG).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


# --- a run that gets there ---------------------------------------------------------------------------------


def test_the_run_stops_at_the_target_and_says_what_it_took(tmp_path, capsys):
    """Five steps an epoch: 0.15 is reached after three epochs."""
    logger = CSVLogger(tmp_path)
    trainer = run(tmp_path / "run", TimeToTarget("val_score", 0.15), logger=logger)
    assert (trainer.global_step, trainer.current_epoch) == (15, 3)
    found = result(tmp_path / "run")
    assert {name: found[name] for name in ("metric", "target", "mode", "reached", "steps", "samples", "epochs")} == {
        "metric": "val_score",
        "target": 0.15,
        "mode": "max",
        "reached": True,
        "steps": 15,
        "samples": 60,
        "epochs": 3.0,
    }
    assert found["value"] == found["best"] == pytest.approx(0.15)
    assert [one["samples"] for one in found["evaluations"]] == [20, 40, 60]
    seconds = [one["seconds"] for one in found["evaluations"]]
    assert 0 < seconds[0] < seconds[1] < seconds[2] == found["seconds"]
    assert found["init_seconds"] > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["samples"]) == ("finished", 60)
    assert summary["seconds"] >= found["seconds"]
    assert "target reached: val_score >= 0.15 (0.15) after " in capsys.readouterr().out
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"time_to_target/seconds", "time_to_target/samples", "time_to_target/epochs"} <= set(header)
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 15


def test_the_log_is_mlperfs(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    began = 1000 * time.time()
    run(tmp_path / "run", TimeToTarget("val_score", 0.1), accumulate_grad_batches=2)
    lines = log(tmp_path / "run")
    for line in lines:
        assert list(line) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert began - 1 <= line["time_ms"] <= 1000 * time.time()
        ends = line["key"].rpartition("_")[2]
        assert line["event_type"] == {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(ends, "POINT_IN_TIME")
    keys = [line["key"] for line in lines]
    start = ["init_start", "global_batch_size", "gradient_accumulation_steps", "seed", "init_stop", "run_start"]
    epoch = ["epoch_start", "eval_start", "eval_accuracy", "eval_stop", "epoch_stop"]
    assert keys == [*start, *epoch * 4, "run_stop"]
    values = {line["key"]: line["value"] for line in lines}
    assert (values["global_batch_size"], values["gradient_accumulation_steps"], values["seed"]) == (8, 2, 11)
    assert values["eval_accuracy"] == pytest.approx(0.12)  # three steps an epoch
    assert lines[-1]["metadata"] == {"status": "success", "epoch_num": 4.0, "samples_count": 80}
    assert [line["metadata"]["epoch_num"] for line in lines if line["key"] == "epoch_start"] == [1, 2, 3, 4]


def test_a_target_reached_in_mid_epoch_ends_the_run_there(tmp_path):
    trainer = run(tmp_path / "run", TimeToTarget("val_loss", 0.93, mode="min"), val_check_interval=2)
    assert trainer.global_step == 7
    assert result(tmp_path / "run")["epochs"] == pytest.approx(1.4)
    assert result(tmp_path / "run")["samples"] == 28


# --- a run that does not -----------------------------------------------------------------------------------


def test_a_target_that_is_not_reached_is_told_with_the_best(tmp_path, capsys):
    run(tmp_path / "run", TimeToTarget("val_score", 0.5), max_epochs=2)
    found = result(tmp_path / "run")
    assert (found["reached"], found["best"], found["samples"]) == (False, pytest.approx(0.1), 40)
    assert log(tmp_path / "run")[-1]["metadata"]["status"] == "aborted"
    assert "target not reached: val_score >= 0.5; the best was 0.1 after " in capsys.readouterr().out


class Sleep(Callback):
    """Makes the epochs' time something to see, and ends the run badly in the third."""

    def __init__(self, fail: bool) -> None:
        self.fail = fail

    def on_train_epoch_start(self, trainer, pl_module):
        time.sleep(0.05)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.fail and trainer.global_step == 12:
            raise KeyError("here")


def test_the_clock_and_the_counts_survive_an_interruption(tmp_path):
    with pytest.raises(KeyError):
        run(tmp_path / "run", TimeToTarget("val_score", 0.2), Sleep(fail=True))
    aborted = result(tmp_path / "run")
    assert not aborted["reached"]
    assert log(tmp_path / "run")[-1]["key"] == "run_stop"
    trainer = run(tmp_path / "run", TimeToTarget("val_score", 0.2), Sleep(fail=False), resume=True)
    assert trainer.global_step == 20
    found = result(tmp_path / "run")
    assert (found["reached"], found["samples"], found["epochs"]) == (True, 80, 4.0)
    assert found["evaluations"][:2] == aborted["evaluations"]
    assert found["seconds"] - found["evaluations"][1]["seconds"] > 0.1
    assert found["init_seconds"] > aborted["init_seconds"]
    statuses = [line["metadata"]["status"] for line in log(tmp_path / "run") if line["key"] == "run_stop"]
    assert statuses == ["aborted", "success"]
    epochs = [line["metadata"]["epoch_num"] for line in log(tmp_path / "run") if line["key"] == "epoch_start"]
    assert epochs == [1, 2, 3, 3, 4]


def test_an_epoch_that_is_resumed_in_the_middle_goes_on_in_the_log(tmp_path):
    run(tmp_path / "run", TimeToTarget("val_score", 0.15), max_steps=7)
    assert result(tmp_path / "run")["epochs"] == 1.0  # where it was evaluated last
    assert log(tmp_path / "run")[-1]["metadata"]["samples_count"] == 28
    run(tmp_path / "run", TimeToTarget("val_score", 0.15), resume=True)
    assert (result(tmp_path / "run")["samples"], result(tmp_path / "run")["epochs"]) == (60, 3.0)
    keys = [line["key"] for line in log(tmp_path / "run")]
    resumed = keys[keys.index("run_stop") + 1 :]
    assert resumed.index("epoch_start") < resumed.index("eval_start")
    assert keys.count("epoch_start") == keys.count("epoch_stop") == 4


def test_a_run_that_must_go_on_keeps_its_time_to_target(tmp_path, capsys):
    trainer = run(tmp_path / "run", TimeToTarget("val_score", 0.1), min_epochs=4)
    assert trainer.global_step == 20
    assert result(tmp_path / "run")["samples"] == 40
    assert len(result(tmp_path / "run")["evaluations"]) == 4
    assert capsys.readouterr().out.count("target reached") == 1


# --- what is refused ---------------------------------------------------------------------------------------


def test_an_unknown_metric_is_refused_at_the_first_validation(tmp_path):
    with pytest.raises(DloError, match=r"'val_scores'; did you mean 'val_score'\? validation logs: val_loss"):
        run(tmp_path / "run", TimeToTarget("val_scores", 0.5))


def test_a_direction_that_the_model_denies_is_refused(tmp_path):
    module = Learns()
    module.best_metric = ("val_score", "max")
    with pytest.raises(DloError, match="max for val_score, the best_metric of Learns, got min; set mode: max"):
        run(tmp_path / "run", TimeToTarget("val_score", 0.5, mode="min"), module=module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("val_loss", 0.5), "mode must be min for val_loss, got max; set mode: min"),
        (("val/acc1", 0.5, "min"), "mode must be max for val/acc1, got min; set mode: max"),
        (("val_score", 0.5, "up"), "mode must be one of max, min, got up"),
        (("val_score", float("inf")), "target must be a finite number"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(DloError, match=message):
        TimeToTarget(*arguments)


# --- the command -------------------------------------------------------------------------------------------

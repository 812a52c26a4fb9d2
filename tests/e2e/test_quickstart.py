"""The quick start: what it reaches, what it prints, what it leaves behind. Whole, it is a slow test."""

import json
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlo_framework.checkpoint import load

#: Of the sixty that it has.
EPOCHS = 3


@pytest.fixture(scope="module")
def trained(shared_dlo):
    done = shared_dlo("fit", "--config", "quickstart", "--trainer.max_epochs", str(EPOCHS))
    folder = shared_dlo.folder / "runs" / "quickstart" / "version_0"
    return done, folder, json.loads((folder / "summary.json").read_text())


def test_it_learns(trained):
    _, _, summary = trained
    assert summary["metrics"]["val_acc1"] >= 0.25
    assert summary["status"] == "finished"
    assert summary["epochs"] == EPOCHS
    assert summary["samples"] == summary["steps"] * 64


def test_it_says_how_it_goes_and_where_to_look(trained):
    done, _, summary = trained
    last = [line for line in done.stderr.splitlines() if line.startswith("epoch ")][-1]
    assert re.search(r"epoch (\d+)/\1 batch \d+: loss [\d.]+, lr [\d.e-]+, [\d,]+ samples/s, .*val_acc1 0\.\d+", last)
    assert "tensorboard --logdir runs/quickstart" in done.stdout
    assert summary["best_checkpoint"] in done.stdout
    assert "678,442 parameters, 678,442 of them train, 2.7 MB" in done.stdout
    assert "FLOPs" not in done.stdout
    assert len(done.stdout.partition("\n\n")[2].splitlines()) <= 24, "the end of a run fits a terminal"
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_it_leaves_curves_pictures_config_and_hyperparameters(trained):
    _, folder, summary = trained
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    expected = {
        "train/loss", "train/grad_norm", "val_loss", "val_acc1", "optim/lr", "optim/momentum",
        "speed/samples_per_s", "speed/step_ms", "speed/data_wait", "speed/tflops", "memory/peak_gb",
    }  # fmt: skip
    assert expected <= set(tags["scalars"])
    assert any("confusion" in tag for tag in tags["images"])
    assert len(tags["images"]) >= 2
    assert "config/text_summary" in tags["tensors"]
    assert events.Scalars("val_acc1")[-1].value == pytest.approx(summary["metrics"]["val_acc1"])
    text = (folder / "hparams.yaml").read_text()
    assert "data.init_args.batch_size: 64" in text
    assert {"config.yaml", "summary.json", "checkpoints"} <= {path.name for path in folder.iterdir()}


def test_validate_gives_the_best_checkpoints_accuracy(trained, shared_dlo):
    _, folder, summary = trained
    done = shared_dlo("validate", "--config", "quickstart", "--ckpt_path", "best")
    shown = float(re.search(r"val_acc1\D+(0\.\d+|1\.0)", done.stdout).group(1))
    assert shown == pytest.approx(summary["best_metric"]["val_acc1"], abs=1e-7)
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"], "validating makes no new run"


def test_the_checkpoint_is_data_alone(trained):
    _, folder, _ = trained
    last = folder / "checkpoints" / "last.ckpt"
    assert {"state_dict", "optimizer_states", "loops", "dlo"} <= set(load(last))
    assert {file.suffix for file in last.iterdir()} == {".safetensors", ".json", ".pt"}
    assert isinstance(torch.load(last / "state.pt", weights_only=True), dict)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_it_reaches_97_percent_from_any_seed(dlo, seed):
    dlo("fit", "--config", "quickstart", *([] if seed is None else ["--seed_everything", str(seed)]))
    summary = json.loads((dlo.folder / "runs" / "quickstart" / "version_0" / "summary.json").read_text())
    assert summary["metrics"]["val_acc1"] >= 0.97

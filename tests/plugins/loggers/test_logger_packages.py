"""Loggers of other packages, in their offline modes: values, options, images and texts arrive."""

import importlib.util
import json
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger

from dlo_framework.errors import DloError
from dlo_framework.watch import media
from dlo_plugins.loggers import trackio_logger
from dlo_plugins.loggers.trackio_logger import TrackioLogger

IMAGE = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'dlo_framework[loggers]'")


def log_all(logger, folder: Path) -> None:
    trainer = Trainer(logger=logger, accelerator="cpu", default_root_dir=folder)
    logger.log_hyperparams({"model": {"lr": 0.5}})
    logger.log_metrics({"train/loss": 0.25}, step=3)
    media.log_image(trainer, "val/confusion", lambda: IMAGE)
    media.log_text(trainer, "val/said", lambda: "a *text*")
    logger.finalize("success")


@needs("mlflow")
def test_mlflow_in_a_local_database(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger("digits", tracking_uri=address, artifact_location=str(tmp_path / "files"))
    log_all(logger, tmp_path)
    client = mlflow.MlflowClient(address)
    run = client.get_run(logger.run_id)
    assert run.data.metrics["train/loss"] == 0.25
    assert run.data.params["model/lr"] == "0.5"
    text = Path(client.download_artifacts(logger.run_id, "texts/val/said/0.md"))
    assert text.read_text() == "a *text*"
    images = [item.path for item in client.list_artifacts(logger.run_id, "images")]
    assert any("confusion" in path and path.endswith(".png") for path in images)


@needs("wandb")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="digits", save_dir=tmp_path, offline=True)
    log_all(logger, tmp_path)
    logger.experiment.finish()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (image,) = run.rglob("confusion_*.png")
    from PIL import Image

    assert np.array_equal(np.array(Image.open(image)), IMAGE.permute(1, 2, 0).numpy())
    (table,) = run.rglob("said_*.table.json")
    assert json.loads(table.read_text())["data"] == [["a *text*"]]
    (values,) = run.glob("*.wandb")
    for _ in range(600):  # wandb's own process writes after finish() has returned.
        if b"train/loss" in values.read_bytes():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("train/loss was not written in a minute")


@needs("trackio")
def test_trackio_in_its_local_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # Read when trackio is imported.
    from trackio.sqlite_storage import SQLiteStorage

    logger = TrackioLogger(project="dlo_test_project", run="first")
    log_all(logger, tmp_path)
    found = SQLiteStorage.get_logs("dlo_test_project", "first")
    merged = {key: value for row in found for key, value in row.items()}
    assert merged["train/loss"] == 0.25
    assert "a *text*" in json.dumps(merged["val/said"])
    assert merged["val/confusion"]["_type"] == "trackio.image"
    from trackio.context_vars import current_run

    assert current_run.get() is None, "Trackio's exit handler finishes no run again"


@needs("comet_ml")
def test_comet_offline(tmp_path, monkeypatch):
    # Lightning (2.6) passes disabled=True for `online: false`, so that nothing is recorded.
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    logger = CometLogger(project="digits", offline_directory=str(tmp_path))
    log_all(logger, tmp_path)
    logger.experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        text = b"".join(map(file.read, file.namelist())).decode(errors="replace")
    assert "train/loss" in text
    assert "val/confusion" in text
    assert "a *text*" in text


def test_a_missing_trackio_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr(trackio_logger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DloError, match=r"trackio, which is not installed; pip install 'dlo_framework\[loggers\]'"):
        TrackioLogger()

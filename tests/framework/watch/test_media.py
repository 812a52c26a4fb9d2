"""Images and texts go to TensorBoard, to loggers with WandbLogger's methods, and nowhere else without a word."""

import inspect

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlo_framework.watch import media


class Board(Logger):
    """A logger of a user's own, with WandbLogger's two methods."""

    name, version = "board", 0

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = [], []

    def log_metrics(self, metrics, step=None) -> None: ...

    def log_hyperparams(self, params, *args, **kwargs) -> None: ...

    def log_image(self, *args, **kwargs) -> None:
        self.images.append(inspect.signature(WandbLogger.log_image).bind(self, *args, **kwargs).arguments)

    def log_text(self, *args, **kwargs) -> None:
        self.texts.append(inspect.signature(WandbLogger.log_text).bind(self, *args, **kwargs).arguments)


class Plain(Logger):
    """A logger of numbers alone."""

    name, version = "plain", 0

    def log_metrics(self, metrics, step=None) -> None: ...

    def log_hyperparams(self, params, *args, **kwargs) -> None: ...


@pytest.fixture
def messages(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(media, "rank_zero_info", found.append)
    media._name_missing.cache_clear()
    return found


def test_an_image_and_a_text_reach_the_loggers_that_take_them(tmp_path, messages):
    board, events = Board(), TensorBoardLogger(tmp_path, name="", version="")
    loggers = [events, board, Plain(), CSVLogger(tmp_path, name="", version="csv")]
    trainer = Trainer(logger=loggers, accelerator="cpu", default_root_dir=tmp_path)
    image = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)
    for _ in range(2):
        media.log_image(trainer, "val/seen", lambda: image)
        media.log_text(trainer, "said", lambda: "a *text*")
    assert (board.images[0]["key"], board.images[0]["step"]) == ("val/seen", 0)
    assert np.array_equal(board.images[0]["images"][0], image.permute(1, 2, 0).numpy())
    assert (board.texts[0]["key"], board.texts[0]["data"]) == ("said", [["a *text*"]])
    events.experiment.flush()
    written = EventAccumulator(str(tmp_path)).Reload()
    assert (written.Images("val/seen")[0].width, written.Images("val/seen")[0].height) == (5, 4)
    assert written.Tags()["tensors"] == ["said/text_summary"]
    assert messages == [
        "Plain takes no images, so val/seen is not logged there; it is logged to TensorBoardLogger, Board, CSVLogger",
        "Plain takes no texts, so said is not logged there; it is logged to TensorBoardLogger, Board, CSVLogger",
    ]
    assert np.array_equal(np.array(Image.open(tmp_path / "csv/media/val/seen/0.png")), image.permute(1, 2, 0).numpy())
    assert (tmp_path / "csv/media/said/0.md").read_text() == "a *text*"


def test_an_image_that_no_logger_takes_is_not_made(tmp_path, messages):
    def make() -> torch.Tensor:
        raise AssertionError

    media.log_image(Trainer(logger=Plain(), accelerator="cpu"), "seen", make)
    media.log_image(Trainer(logger=False, accelerator="cpu"), "seen", make)
    (message,) = messages
    assert "Plain takes no images, so seen is not logged there; add a TensorBoardLogger beside it, or" in message


def test_without_matplotlib_no_figure_is_drawn_and_one_message_says_so(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(media, "rank_zero_warn", said.append)
    media._name_missing_matplotlib.cache_clear()
    assert media.draw_figure("LRFinder", Figure) is not None
    monkeypatch.setattr(media.importlib.util, "find_spec", lambda name: None)
    assert media.draw_figure("LRFinder", Figure) is None
    assert media.draw_figure("LRFinder", Figure) is None
    assert said == ["LRFinder draws no figure: matplotlib is not installed; pip install 'dlo_framework[plots]'"]
    media._name_missing_matplotlib.cache_clear()

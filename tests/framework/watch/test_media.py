"""Images, texts and predictions: which loggers and files they go to."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import SingleDeviceStrategy
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.watch import media, predictions
from dlo_framework.watch.predictions import SavePredictions
from support.trainers import quiet_trainer


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


# --- what ``dlo predict`` leaves in a file ---------------------------------------------------------------------------


class Net(LightningModule):
    """Gives each batch back, of each sample as many numbers as the batch's number asks for."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def predict_step(self, batch, batch_idx):
        return batch[:, None].expand(-1, self.lengths[batch_idx])


def predict(path, lengths: list[int]):
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[SavePredictions(path)])
    trainer.predict(Net(lengths), DataLoader(torch.arange(5.0), batch_size=2), return_predictions=False)
    return torch.load(path, weights_only=True)


def test_batches_of_several_shapes_are_a_list(tmp_path):
    found = predict(tmp_path / "found.pt", [3, 1, 2])
    assert [batch.shape for batch in found] == [(2, 3), (2, 1), (1, 2)]
    assert torch.equal(torch.cat([batch[:, 0] for batch in found]), torch.arange(5.0))


def test_where_no_file_can_be_written_is_told_before_the_first_batch(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(Net, "predict_step", lambda *_: pytest.fail("a batch was predicted"))
    with pytest.raises(DloError, match=r"cannot write the predictions .*file/found\.pt: .*--run\.dir"):
        predict(tmp_path / "file" / "found.pt", [1])


def test_ranks_outputs_pass_over_the_group_on_the_cpu(tmp_path, monkeypatch):
    group, passed = object(), []

    def gather_object(found, into, group):
        passed.append((found, group))
        into[:] = [(0, ["first"]), (1, ["second"])]

    monkeypatch.setattr(predictions, "control_group", lambda trainer: group)
    monkeypatch.setattr(dist, "get_world_size", lambda of: 2 if of is group else pytest.fail("another group"))
    monkeypatch.setattr(dist, "get_rank", lambda of: 0 if of is group else pytest.fail("another group"))
    monkeypatch.setattr(dist, "gather_object", gather_object)
    saving = SavePredictions(tmp_path / "found.pt")
    saving._batches = ["mine"]
    strategy = SingleDeviceStrategy()
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=True, global_rank=0, predict_dataloaders=[])
    saving.on_predict_end(trainer, None)
    assert passed == [((0, ["mine"]), group)]
    assert torch.load(saving.path, weights_only=True) == ["first", "second"]


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("width", [1, 2])
def test_what_a_distributed_sampler_has_dealt_comes_in_the_order_of_the_data(tmp_path, monkeypatch, size, width):
    """Lightning's sampler for predictions gives each of three ranks every third sample, and repeats none."""
    dealt = [torch.arange(float(size))[rank::3] for rank in range(3)]
    shares = [[part[:, None].expand(-1, width) for part in samples.split(2)] for samples in dealt]
    monkeypatch.setattr(predictions, "gather_batches", lambda *_: shares)
    loader = DataLoader(range(size), sampler=UnrepeatedDistributedSampler(range(size), num_replicas=3, rank=0))
    trainer = SimpleNamespace(
        predict_dataloaders=loader, is_global_zero=True, strategy=SingleDeviceStrategy(), global_rank=0
    )
    monkeypatch.setattr(predictions, "control_group", lambda _: None)
    SavePredictions(tmp_path / "found.pt").on_predict_end(trainer, None)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert torch.equal(found, torch.arange(float(size))[:, None].expand(-1, width))
    shares[0][0] = shares[0][0][:, :1].expand(-1, width + 1)
    with pytest.warns(UserWarning, match="are not in the order of the data: a DistributedSampler gave 3 ranks"):
        SavePredictions(tmp_path / "found.pt").on_predict_end(trainer, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "found.pt"
    predict(path, [3, 3, 3])
    before, save = path.read_bytes(), torch.save

    def on_a_full_disk(found, partial):
        Path(partial).write_bytes(b"some")
        save(found, "/dev/full")

    monkeypatch.setattr(torch, "save", on_a_full_disk)
    with pytest.raises(DloError, match=r"cannot write the predictions .*found\.pt: .*; free some space, or set"):
        predict(path, [2, 2, 2])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

"""The callback: when it rounds, what it reports and exports, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_plugins.quantise import post_training as reports
from dlo_plugins.quantise import schemes
from dlo_plugins.quantise.callback import Quantise, fitting_period, scheduled_bits
from dlo_plugins.quantise.export import program_device, program_input
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends each measurement of the latency after four rounds: no test asks how fast a model is."""
    monkeypatch.setattr(reports, "MOST_SECONDS", 0.0)


def classifier() -> ImageClassifier:
    seed_everything(2, verbose=False)
    return ImageClassifier("vit_tiny_patch16_224", model_args=dict(VIT), lr=1e-3, schedule="constant")


def digits() -> DigitsData:
    return DigitsData(image_size=16, batch_size=16)


def trainer_of(folder: Path, *callbacks, **options) -> Trainer:
    options = {"max_epochs": 1, "limit_train_batches": 6, "limit_val_batches": 2, **options}
    plugins = [SafeCheckpointIO()]
    trainer = quiet_trainer(callbacks=list(callbacks), default_root_dir=folder, plugins=plugins, **options)
    use_canonical_checkpoints(trainer)
    return trainer


class Bits(Quantise):
    """Records the bits of each step."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, when="aware", report=False, **options)
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.seen.append(self.quantiser.bits if self.quantiser else 32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": "50%"}, [32, 32, 32, 8, 8, 8]),
        ({"start": "20%", "start_bits": 10, "period": 1}, [32, 32, 10, 9, 8, 8]),
        ({"scheme": "int4_weights", "start": 0, "start_bits": 6}, [6, 5, 4, 4, 4, 4]),
    ],
)
def test_it_rounds_from_the_start_on(tmp_path: Path, options: dict, expected: list[int]) -> None:
    callback, task = Bits(**options), classifier()
    trainer_of(tmp_path, callback).fit(task, datamodule=digits())
    assert callback.seen == expected
    assert not any("forward" in module.__dict__ for module in task.model.modules())


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options = {"start": "30%", "start_bits": 11, "period": 1}
    first, second = Bits(**options), Bits(**options)
    saving = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.save_checkpoint(tmp_path / "one.ckpt"))
    trainer_of(tmp_path, first, saving, max_epochs=1, limit_train_batches=3).fit(classifier(), datamodule=digits())
    trainer_of(tmp_path, second, max_epochs=2, limit_train_batches=3).fit(
        classifier(), datamodule=digits(), ckpt_path=tmp_path / "one.ckpt"
    )
    # By a run of one epoch, rounding begins in its second step; the resumed one continues from there.
    assert first.seen == [32, 11, 10]
    assert second.seen == [9, 9, 8]


class MixedBits(Quantise):
    """Records the bits of each layer in each step, and the mean squared gradients of each step."""

    def __init__(self, period: int) -> None:
        options = {"start": 0, "start_bits": 8, "period": period, "mixed_bits": True}
        super().__init__("int4_weights", when="aware", report=False, **options)
        self.seen: list[list[int]] = []
        self.squares: list[list[float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.seen.append([layer.__dict__["rounded_bits"] for layer in self.quantiser.layers])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self.squares.append([float(layer.weight.grad.square().mean()) for layer in self.quantiser.layers])


def test_layers_with_more_curvature_keep_their_bits_for_longer(tmp_path: Path) -> None:
    """Also in a resumed run; bits that are left at the end are named, with a period that would reach the scheme's."""
    callback = MixedBits(2)
    with pytest.warns(UserWarning, match="must have 4 bits at the end of training, got up to 7: .* set period: 1, an"):
        trainer_of(tmp_path, callback, limit_train_batches=16).fit(classifier(), datamodule=digits())
    means = [sum(pair) / 2 for pair in zip(*callback.squares[:2], strict=True)]
    factors = [1 + int(4 * mean / max(means)) for mean in means]
    assert sorted(set(factors))[0] < max(factors) == 5
    for step, bits in enumerate(callback.seen):
        assert bits == [scheduled_bits(8, 4, 2 * factor, step) for factor in factors]
    saving = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.save_checkpoint(tmp_path / "one.ckpt"))
    for stop in (1, 4):  # While curvature is measured, and after the first bits were dropped.
        first, second = MixedBits(2), MixedBits(2)
        trainer_of(tmp_path, first, saving, limit_train_batches=stop).fit(classifier(), datamodule=digits())
        resumed = trainer_of(tmp_path, second, max_epochs=16 // stop, limit_train_batches=stop)
        resumed.fit(classifier(), datamodule=digits(), ckpt_path=tmp_path / "one.ckpt")
        assert [*first.seen, *second.seen][:4] == callback.seen[:4]
        assert first.seen + second.seen == [
            [scheduled_bits(8, 4, 2 * factor, step) for factor in second._factors] for step in range(16)
        ]


def test_validation_shows_the_rounded_model_and_the_report_the_converted_one(tmp_path: Path) -> None:
    callback = Quantise("int4_weights", when="aware", start=0)
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(tmp_path, callback, logger=logger)
    trainer.fit(classifier(), datamodule=DigitsData(image_size=16, batch_size=64))
    report = callback.last_report
    assert report.after["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)
    assert abs(report.before["val_loss"] - report.after["val_loss"]) > 1e-4
    assert report.bytes_before[1] / report.bytes_after[1] > 5
    assert report.bytes_before[0] / report.bytes_after[0] > 3.5
    assert [one.batch_size for one in report.latency] == [1, 32]
    assert all(one.after > 0 and one.control > 0 for one in report.latency)
    saved = json.loads((tmp_path / "quantised" / "report.json").read_text())
    assert saved["after"] == report.after
    assert not (tmp_path / "quantised" / "weights.ckpt").exists()
    logger.save()
    assert "quantised/size_ratio" in (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "val_acc1" in report.table()
    assert "times smaller" in report.table()


@pytest.mark.parametrize(
    "scheme", ["int8", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8_static", "int8_weights"))]
)
def test_conversion_after_training_leaves_the_training_as_it_is(tmp_path: Path, scheme: str) -> None:
    losses = []
    for callbacks in ([], [Quantise(scheme)]):
        trainer = trainer_of(tmp_path, *callbacks)
        trainer.fit(classifier(), datamodule=digits())
        losses.append(float(trainer.callback_metrics["val_loss"]))
    report = callbacks[0].last_report
    assert losses[0] == losses[1] == pytest.approx(report.before["val_loss"], rel=1e-6)
    assert report.after["val_loss"] == pytest.approx(losses[0], rel=1e-2)
    assert report.after["val_loss"] != losses[0]


class Plain(LightningModule):
    """A module that is no task, with loaders of its own or the user's."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs() -> DataLoader:
    seed_everything(0, verbose=False)
    return DataLoader(TensorDataset(torch.randn(40, 64), torch.randint(0, 2, (40,))), batch_size=8)


def test_a_plain_module_with_loaders_of_the_user(tmp_path: Path) -> None:
    loader = pairs()
    callback = Quantise("int8_static", skip=["layers.2"])
    trainer_of(tmp_path, callback).fit(Plain(), loader, loader)
    report = callback.last_report
    assert report.layers == 1
    assert report.before["val_loss"] == pytest.approx(report.after["val_loss"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4_weights", "int8_weights", "int8_static"])
def test_exports_compute_what_the_converted_model_does(tmp_path: Path, scheme: str) -> None:
    """A ViT's are exported by the command."""
    runtime = pytest.importorskip("onnxruntime")
    callback, loader = Quantise(scheme, export=["model.pt2", "model.onnx"], skip=["layers.2"]), pairs()
    trainer_of(tmp_path, callback).fit(Plain(256), loader, loader)
    images = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "quantised" / "model.pt2").module()
    with torch.no_grad():
        exported = program(images)
    session = runtime.InferenceSession(tmp_path / "quantised" / "model.onnx")
    of_onnx = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
    torch.testing.assert_close(of_onnx, exported, rtol=1e-3, atol=2e-3)
    assert exported.std() > 0.1
    report = callback.last_report
    assert report.exported == ["model.pt2", "model.onnx"]
    assert (tmp_path / "quantised" / "model.onnx").stat().st_size < 0.75 * report.bytes_before[0]


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "epochs", "message"),
    [
        ({"scheme": "fp8"}, 1, "scheme fp8 must have a cuda device .* 8.9 or more.*, got cpu, .*; set scheme: int8$"),
        ({"export": ["folder"]}, 1, "ImageClassifier, which has no folder format, got folder; set folder.onnx"),
        ({"when": "aware", "start": 0, "start_bits": 12}, -1, "period must be set for a run without an end"),
    ],
)
def test_runs_that_are_refused(tmp_path: Path, options: dict, epochs: int, message: str) -> None:
    trainer = trainer_of(tmp_path, Quantise(**options), max_epochs=epochs)
    with pytest.raises(DloError, match=message):
        trainer.fit(classifier(), datamodule=DigitsData(image_size=16))


@pytest.mark.parametrize("order", [1, -1])
def test_the_average_is_converted(tmp_path: Path, order: int) -> None:
    callback = Quantise()
    trainer = trainer_of(tmp_path, *[WeightEMA(0.5), callback][::order])
    trainer.fit(classifier(), datamodule=digits())
    report = callback.last_report
    assert report.before["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DloError, match=r"pip install dlo_framework\[quantisation\]"):
        Quantise()


@pytest.mark.parametrize(("scheme", "place"), [("int8", "cpu"), ("int4_weights", "cuda"), ("fp8", "cuda")])
def test_a_program_is_for_the_device_that_its_packed_weights_are_for(scheme, place) -> None:
    """Lightning leaves the evaluated model on the CPU, where weights that are packed for a GPU have no kernel."""
    gpu = torch.device("cuda", 0)
    found = schemes.find_scheme(scheme)
    assert program_device(found, gpu).type == place
    assert program_device(found, torch.device("cpu")).type == "cpu" or scheme == "fp8"
    if place == "cpu":
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = program_input(torch.ones(2, 3), found, gpu)
        assert moved.device == gpu
        assert moved.dtype == torch.bfloat16
        assert program_input(torch.ones(2, dtype=torch.long), found, gpu).dtype == torch.long


def by_definition(start: int, target: int, period: int, steps: int) -> int:
    """DeepSpeed's loop (0.14): a bit less when the step reaches the period, and then a period twice as long."""
    for step in range(steps + 1):
        while start > target and step >= period:
            start -= 1
            period *= 2
    return start


@pytest.mark.parametrize(("start", "target", "period"), [(8, 4, 10), (16, 8, 1)])
def test_it_is_deepspeeds(start: int, target: int, period: int) -> None:
    for steps in range(0, 400, 3):
        assert scheduled_bits(start, target, period, steps) == by_definition(start, target, period, steps)


@pytest.mark.parametrize("steps", [40, 900])
def test_the_fitting_period_reaches_the_target_by_the_middle(steps: int) -> None:
    bits = [scheduled_bits(8, 4, fitting_period(8, 4, steps), at) for at in (0, steps // 2, steps // 5)]
    assert bits[:2] == [8, 4]
    assert bits[2] > 4

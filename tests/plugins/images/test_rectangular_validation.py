"""Rectangular validation: the shapes, the batches, the numbers by hand, and a square validation left as it was."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torchvision.transforms import functional as vision

from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_plugins.images.rectangular_validation import RectangularValidation
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.decode import CorruptImageError
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.imagenet.rectangles import RectangleBatchSampler, read_sizes, rectangle
from support.trainers import quiet_trainer

SHAPES = [(60, 90), (64, 64), (90, 60), (50, 200), (60, 92), (100, 40), (66, 90)]  # height, width; of both classes


@pytest.fixture(scope="session")
def gallery(tmp_path_factory) -> Path:
    """Photographs of many shapes."""
    root = tmp_path_factory.mktemp("gallery")
    for label, (name, photo) in enumerate(zip(("china", "flower"), load_sample_images().images, strict=True)):
        for split in ("train", "val"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number, (height, width) in enumerate(SHAPES):
                top, left = 17 * number + label, 23 * number
                crop = photo[top : top + height, left : left + width]
                Image.fromarray(crop).save(folder / f"{number}.{'png' if number == 1 else 'jpg'}", quality=90)
    return root


def data(root: Path, **options) -> ImageFolderData:
    return ImageFolderData(str(root), **({"image_size": 32, "batch_size": 4, "num_workers": 0} | options))


TINY = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}


def classifier(model="vit_tiny_patch16_224", kind=ImageClassifier, **options) -> ImageClassifier:
    torch.manual_seed(3)
    return kind(model, **{"model_args": TINY, "lr": 0.01, "schedule": "constant", "log_images": 0, **options})


def trainer(*callbacks, **options) -> Trainer:
    return quiet_trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **options}, callbacks=list(callbacks))


# --- shapes and batches ------------------------------------------------------------------------------------


def test_a_rectangle_is_the_images_own_shape_rounded_down():
    assert rectangle(375, 500, 224, 16, 2.0) == (224, 288)
    assert rectangle(500, 375, 224, 16, 2.0) == (288, 224)
    assert rectangle(375, 500, 224, 32, 1.2) == (224, 256)
    assert rectangle(400, 401, 224, 16, 2.0) == (224, 224)
    assert rectangle(100, 1000, 224, 16, 2.0) == (224, 448)


@given(
    st.lists(st.sampled_from([(32, 32), (32, 48), (48, 32), (32, 64)]), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_ranks_share_the_batches_of_each_shape_evenly(shapes, batch_size, world_size):
    ranks = [
        list(RectangleBatchSampler(shapes, batch_size=batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    sampler = RectangleBatchSampler(shapes, batch_size=batch_size, world_size=world_size)
    seen, ratios, left_out = [], [], False
    for batches in zip(*ranks, strict=True):
        for draws in batches:
            assert len(draws) <= batch_size
            assert {draw.size for draw in draws} == {shapes[draws[0].index]}
            assert all(draw.size == shapes[draw.index] for draw in draws)
            left_out |= not draws[0].real
            if draws[0].real:
                ratios.append(draws[0].size[1] / draws[0].size[0])
            seen += [draw.index for draw in draws if draw.real]
    assert len(sampler) == len(ranks[0])
    assert sorted(seen) == list(range(len(shapes)))
    assert ratios == sorted(ratios)
    assert left_out == sampler.leaves_ranks_out
    if left_out:  # Each batch has one sample, so that there are none to share.
        assert {len(batch) for batches in ranks for batch in batches} == {1}


def test_sizes_are_read_from_headers_and_corrupt_files_are_named(gallery, tmp_path):
    source = data(gallery)._source("val")
    assert read_sizes(source, skip_corrupt=False) == SHAPES * 2

    class Broken:
        def __len__(self):
            return 2

        def read(self, index, most=None):
            return b"" if index == 1 else source.read(index, most and 300)  # too little for a header

        def name(self, index):
            return f"picture {index}"

    with pytest.raises(CorruptImageError, match="corrupt image picture 1 "):
        read_sizes(Broken(), skip_corrupt=False)
    assert read_sizes(Broken(), skip_corrupt=True) == [SHAPES[0], (1, 1)]


def test_the_pixels_are_those_of_a_resize_and_a_centre_crop(gallery):
    module = data(gallery)
    loader = module.rectangular_val_dataloader(8, 2.0)
    shown = {}
    for draws, (images, targets) in zip(loader.batch_sampler, loader, strict=True):
        for draw, image, target in zip(draws, images, targets, strict=True):
            assert int(target) == draw.index // len(SHAPES)
            shown[draw.index] = image
    assert sorted(shown) == list(range(14))
    assert [tuple(shown[index].shape) for index in (0, 1, 2, 3)] == [(3, 32, 48), (3, 32, 32), (3, 48, 32), (3, 32, 64)]
    source = module._source("val")
    for index, image in shown.items():
        with Image.open(source.name(index)) as photo:
            resized = vision.resize(photo.convert("RGB"), 36)  # 32 / 0.875
            expected = vision.pil_to_tensor(vision.center_crop(resized, list(image.shape[1:])))
        difference = (image.int() - expected.int()).abs()
        assert difference.max() <= 3, index
        assert difference.float().mean() < 0.3


# --- the second validation ---------------------------------------------------------------------------------


class Curve(Callback):
    """Keeps losses and metrics."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.logged: list[str] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        pl_module.log("mine", float(batch_idx + 1), on_step=False, on_epoch=True)  # in the same hook, beside the other

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def by_hand(task: ImageClassifier, module: ImageFolderData) -> dict[str, float]:
    """Loss and accuracy of the rectangles, image by image."""
    task.eval()
    losses, hits = [], []
    with torch.no_grad():
        for batch in module.rectangular_val_dataloader(8, 2.0):
            images, targets = module.on_after_batch_transfer(batch, 0)
            logits = task(images)
            losses += nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
            hits += (logits.argmax(1) == targets).tolist()
    return {"val_loss_rect": float(np.mean(losses)), "val_acc1_rect": float(np.mean(hits))}


def test_it_logs_the_exact_means_whatever_the_batches(gallery):
    """Of the averaged weights, which a fit leaves in the module."""
    eval_batch_size = 3
    task, module = classifier(), data(gallery, eval_batch_size=eval_batch_size)
    fitted = trainer(WeightEMA(0.9), RectangularValidation())
    fitted.fit(task, module)
    expected = by_hand(task, data(gallery))
    found = {name: float(value) for name, value in fitted.callback_metrics.items() if name.endswith("_rect")}
    assert found == pytest.approx(expected, rel=1e-5)
    assert found["val_loss_rect"] != pytest.approx(float(fitted.callback_metrics["val_loss"]), rel=1e-4)
    again = trainer(Curve(), RectangularValidation())
    again.validate(task, module, verbose=False)
    counts = [min(eval_batch_size, 14 - first) for first in range(0, 14, eval_batch_size)]
    mine = sum(number * count for number, count in enumerate(counts, 1)) / 14  # logged in the same hook, before
    assert float(again.callback_metrics["mine"]) == pytest.approx(mine)
    assert float(again.callback_metrics["val_loss_rect"]) == pytest.approx(found["val_loss_rect"], rel=1e-6)


class Draws(ImageClassifier):
    """Draws random numbers in validation, as a generator of pictures would."""

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        super().validation_step(batch, batch_idx)


def test_training_and_the_square_validation_are_as_without_it(gallery, tmp_path):
    """With dropout in the step's random stream, an average of weights, and the confusion matrix of a validation."""
    curves, confusion, saved = [], [], []
    for extra in ([], [RectangularValidation(every_n_epochs=1)]):
        task = classifier(kind=Draws, model_args={**TINY, "drop_rate": 0.5})
        curve, average = Curve(), WeightEMA(0.5)
        keep = ModelCheckpoint(tmp_path / str(len(extra)), filename="{epoch}", monitor="val_loss", save_top_k=-1)
        torch.manual_seed(7)
        fitted = trainer(average, curve, *extra, keep, max_epochs=3, num_sanity_val_steps=1, enable_checkpointing=True)
        fitted.fit(task, data(gallery, eval_batch_size=4))
        curves.append(curve)
        confusion.append(task.confusion.compute())
        saved.append({path: float(score) for path, score in keep.best_k_models.items()})
    plain, both = curves
    assert both.losses == plain.losses
    assert [{k: v for k, v in each.items() if not k.endswith("_rect")} for each in both.metrics] == plain.metrics
    assert all(set(each) == {*each} and "val_acc1_rect" in each for each in both.metrics)
    assert torch.equal(*confusion)
    assert list(saved[0].values()) == list(saved[1].values())
    assert len(saved[0]) == 3


@pytest.mark.parametrize(
    ("every", "options", "expected"),
    [
        (3, {}, [3, 4]),
        (1, {"val_check_interval": 0.34}, [1, 2, 3, 4]),
        (None, {"check_val_every_n_epoch": 3}, [3]),
        (None, {"max_epochs": -1, "max_steps": 8}, [2]),  # the third epoch ends in its middle, without a validation
    ],
)
def test_when_it_runs(gallery, every, options, expected):
    seen: list[int] = []

    class Seen(Callback):
        def on_validation_batch_end(self, trainer, pl_module, *arguments, **named):
            if "val_acc1_rect" in trainer.fit_loop.epoch_loop.val_loop._results.metrics(False)["callback"]:
                seen.append(trainer.current_epoch + 1)

    fitted = trainer(RectangularValidation(every), Seen(), **{"max_epochs": 4, "num_sanity_val_steps": 1, **options})
    fitted.fit(classifier(), data(gallery))
    assert seen == expected


class Plain(LightningModule):
    """No task: logs a number, whose mean over batches of different sizes is weighted, with a step of one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("ratio", float(batch[0].shape[3] / batch[0].shape[2]))
        self.log("step_only", 1.0, on_step=True, on_epoch=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_any_module_and_any_network_with_global_pooling(gallery):
    fitted = trainer(RectangularValidation())
    fitted.fit(Plain(), data(gallery, eval_batch_size=5))
    assert float(fitted.callback_metrics["ratio"]) == 1
    shapes = [rectangle(*shape, 32, 8, 2.0) for shape in SHAPES]
    expected = np.mean([width / height for height, width in shapes])
    assert float(fitted.callback_metrics["ratio_rect"]) == pytest.approx(expected, rel=1e-6)
    assert "step_only_rect" not in fitted.callback_metrics


def test_a_limit_of_validation_batches_leaves_it_the_images_that_the_square_validation_sees(gallery):
    fitted = trainer(RectangularValidation(), limit_val_batches=1)
    fitted.fit(Plain(), data(gallery))
    seen = [rectangle(*shape, 32, 8, 2.0) for shape in SHAPES[:4]]  # in as many batches as they have shapes
    expected = np.mean([width / height for height, width in seen])
    assert float(fitted.callback_metrics["ratio_rect"]) == pytest.approx(expected, rel=1e-6)


def test_a_step_that_raises_leaves_everything_in_its_place(gallery):
    class Fails(Plain):
        def validation_step(self, batch):
            if batch[0].shape[2] != batch[0].shape[3]:
                raise RuntimeError("not square")
            self.log("fine", 1.0)

    module, fitted = Fails(), trainer(RectangularValidation())
    with pytest.raises(RuntimeError, match="not square"):
        fitted.fit(module, data(gallery))
    assert list(fitted.fit_loop.epoch_loop.val_loop._results) == ["validation_step.fine"]


# --- refusals ----------------------------------------------------------------------------------------------


class Other(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=2, num_workers=0)


def test_what_has_no_rectangles_is_refused_before_training(gallery):
    with pytest.raises(DloError, match="DigitsData, whose images are all square"):
        trainer(RectangularValidation()).fit(classifier(), DigitsData())
    with pytest.raises(DloError, match="got Other without it; use ImageFolderData"):
        trainer(RectangularValidation()).fit(classifier(num_classes=2, image_size=32), Other())
    with pytest.raises(DloError, match="multiple of the model's 8 pixels, got 12"):
        trainer(RectangularValidation(multiple=12)).fit(classifier(), data(gallery))
    mixer = classifier("mixer_s16_224", model_args={})
    with pytest.raises(DloError, match=r"mixer_s16_224: images must have .* 32 x 32 pixels, got 64 x 32"):
        trainer(RectangularValidation()).fit(mixer, data(gallery))

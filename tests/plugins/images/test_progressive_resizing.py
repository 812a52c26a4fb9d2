"""Progressive resizing: the sizes that reach the model, exact resuming at their changes, and what is refused."""

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dlo_framework.data import Position, ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.progress import parse_position
from dlo_framework.run.resume import ExactResume
from dlo_plugins.images.progressive_resizing import (
    GrowingSize,
    ProgressiveResizing,
    images_of,
    resize_images,
)
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData
from support.trainers import quiet_trainer

TINY = {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
BATCHES = 5  # of an epoch


class Recorder(Callback):
    """Keeps the size of each training batch, its loss, and what is logged of it."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.evaluated: set[tuple[int, int]] = set()
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        self.sizes.append(tuple(images.shape[2:]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.evaluated.add(tuple(batch[0].shape[2:]))


def digits(kind: type[DigitsData] = DigitsData, **options) -> DigitsData:
    """180 images to train on: 5 batches of 32."""
    return kind(**({"image_size": 16, "batch_size": 32, "val_fraction": 0.9} | options))


def classifier(model="vit_tiny_patch16_224", **options) -> ImageClassifier:
    torch.manual_seed(5)
    fixed = {"model_args": TINY, "lr": 0.01, "schedule": "constant", "log_images": 0}
    return ImageClassifier(model, **(fixed | options))


def fit(callback, data=None, task=None, ckpt_path=None, **options) -> tuple[Recorder, Trainer]:
    recorder = Recorder()
    options = {"max_epochs": 4, "num_sanity_val_steps": 0, "limit_val_batches": 1, **options}
    fitted = quiet_trainer(callbacks=[ExactResume(), callback, recorder], **options)
    torch.manual_seed(11)
    fitted.fit(task or classifier(), digits() if data is None else data, ckpt_path=ckpt_path, weights_only=True)
    return recorder, fitted


# --- sizes -------------------------------------------------------------------------------------------------


def expected(*runs: tuple[int, int]) -> list[tuple[int, int]]:
    return [(size, size) for size, count in runs for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_come_at_the_size_of_their_place_and_validation_at_its_own(workers):
    """The second epoch is a half of the run; 2.3 epochs are within its third batch, so that the fourth is the first."""
    callback = ProgressiveResizing({0: 8, "25%": 12, 2.3: 16})
    recorder, fitted = fit(callback, digits(num_workers=workers))
    assert recorder.sizes == expected((8, BATCHES), (12, BATCHES + 2), (16, 2 * BATCHES - 2))
    assert recorder.evaluated == {(16, 16)}
    assert fitted.datamodule.image_size_at is None
    assert callback.area_factor(Position(0, 0, 180)) == 4


def test_growth_goes_through_every_multiple():
    recorder, _ = fit(ProgressiveResizing(start_size=8, begin=1, end="75%"))
    # The patch is 4: from 1 epoch to 3, with 180 samples each, 12 begins in the middle, at 2 epochs.
    assert recorder.sizes == expected((8, 2 * BATCHES), (12, BATCHES), (16, BATCHES))
    recorder, _ = fit(ProgressiveResizing(start_size=8, begin=0, end=3, stages=3))
    assert recorder.sizes == expected((8, BATCHES), (12, BATCHES), (16, 2 * BATCHES))
    recorder, _ = fit(ProgressiveResizing(start_size=8, begin="180 samples", end="360 samples", multiple=8))
    assert recorder.sizes == expected((8, 2 * BATCHES), (16, 2 * BATCHES))


def test_accumulation_and_the_size_of_a_batch_move_no_boundary():
    """Sizes go by samples: at 32 of each epoch, within the first step of two micro-batches."""
    sizes = {0: 8, "32 samples": 16, 1: 8, "1.5 epochs": 16}
    recorder, _ = fit(ProgressiveResizing(sizes), max_epochs=2, accumulate_grad_batches=2)
    assert recorder.sizes == expected((8, 1), (16, 4), (8, 3), (16, 2))
    recorder, _ = fit(ProgressiveResizing(sizes), digits(batch_size=16), max_epochs=2)
    assert recorder.sizes == expected((8, 2), (16, 9), (8, 6), (16, 5))


class Unsized(DigitsData):
    """Resumes exactly, but cannot make images of a given size: they are resized on the device."""

    sizes_images = False


@pytest.mark.parametrize("data", [DigitsData, pytest.param(Unsized, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_at_and_around_each_change(data, tmp_path):
    """Sizes change at steps 5 and 7."""

    def run(**options) -> tuple[Recorder, Trainer]:
        return fit(ProgressiveResizing({0: 8, 1: 12, 1.3: 16}), digits(data), max_epochs=3, **options)

    whole, _ = run()
    assert whole.sizes == expected((8, 5), (12, 2), (16, 8))
    for stop in (5, 7):
        first, cut = run(max_steps=stop)
        cut.save_checkpoint(tmp_path / "cut.ckpt")
        rest, _ = run(ckpt_path=tmp_path / "cut.ckpt")
        assert first.sizes + rest.sizes == whole.sizes, stop
        assert first.losses + rest.losses == whole.losses, stop


COATNET = {"embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("model", "args", "sizes"),
    [
        ("vit_small_patch16_224", {**TINY, "patch_size": 16, "class_token": False, "global_pool": "avg"}, (32, 48, 64)),
        pytest.param("coatnet_nano_rw_224", COATNET, (32, 64, 96), marks=pytest.mark.slow),
        pytest.param("resnet10t", {}, (32, 50, 64), marks=pytest.mark.slow),
    ],
)
def test_every_family_of_the_recipes_trains_through_changes_and_validates_larger(model, args, sizes, photos):
    """With sines and cosines that are not trained, too; the checkpoint is that of the plain model."""
    own = (64, 96) if model == "resnet10t" else sizes[1:]
    data = ImageFolderData(str(photos), image_size=own[0], eval_image_size=own[1], batch_size=8, num_workers=0)
    positions = "sincos2d" if args.get("class_token") is False else "learned"
    task = classifier(model, model_args=args, position_embedding=positions)
    schedule = {0: sizes[0], 1: sizes[1], 2: sizes[2]}
    recorder, _ = fit(ProgressiveResizing(schedule), data, task, max_epochs=3)
    assert recorder.sizes == expected(*((size, 3) for size in sizes))
    assert recorder.evaluated == {(data.eval_image_size,) * 2}
    assert all(torch.isfinite(torch.tensor(recorder.losses)))
    more = {"img_size": data.image_size} if "resnet" not in model else {}
    plain = timm.create_model(model, num_classes=2, **args, **more)
    plain.load_state_dict(task.model.state_dict())  # the same names and shapes


# --- any other module and loader ---------------------------------------------------------------------------


class Plain(LightningModule):
    """No task and no dlo data: a network made of timm's parts, in an attribute of any name."""

    def __init__(self, network=None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network = network or nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.seen: list[torch.Tensor] = []

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, batch_idx):
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        self.seen.append(images)
        return self(images).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


IMAGES = torch.randn(180, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def plain_loader(**options) -> DataLoader:
    data = TensorDataset(IMAGES, torch.arange(180) % 10)
    return DataLoader(data, **({"batch_size": 32, "drop_last": True, "shuffle": True} | options))


class Fixed(nn.Linear):
    """A network of one size."""

    def __init__(self) -> None:
        super().__init__(3 * 16 * 16, 2)

    def forward(self, images):
        return super().forward(images.flatten(1))


class Named(Dataset):
    def __len__(self):
        return 180

    def __getitem__(self, index):
        return {"image": IMAGES[index], "id": index}


def test_any_other_loader_is_resized_on_the_device():
    module = Plain()
    loader = plain_loader(shuffle=False)
    recorder, fitted = fit(ProgressiveResizing({0: 8, "50%": 12, "75%": 16}), loader, module)
    assert recorder.sizes == expected((8, 2 * BATCHES), (12, BATCHES), (16, BATCHES))
    for number, size in ((1, 8), (11, 12)):
        given = IMAGES[32 * (number % 5) :][:32]
        assert torch.equal(module.seen[number], F.interpolate(given, (size, size), mode="bilinear", antialias=True))
    assert torch.equal(module.seen[15], IMAGES[:32])
    assert "batch_to_device" not in vars(fitted.strategy)
    recorder, _ = fit(ProgressiveResizing({0: 8, "48 samples": 16}), DataLoader(Named(), 32), Plain(), max_epochs=1)
    assert recorder.sizes == expected((8, 2), (16, 4))


def test_a_module_of_ones_own_holds_a_vit():
    args = {**TINY, "img_size": 16, "num_classes": 3}
    module = Plain(nn.Sequential(timm.create_model("vit_tiny_patch16_224", **args), nn.ReLU()))
    recorder, _ = fit(ProgressiveResizing(start_size=8, end_size=16, begin=0, end=2), plain_loader(), module)
    assert recorder.sizes == expected((8, BATCHES), (12, BATCHES), (16, 2 * BATCHES))
    assert module.network[0].pos_embed.shape == (1, 17, 32)


# --- refusals ----------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(3, 16, 16), 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"sizes": {0: 10, 1: 16}}, {}, "multiples of 4 pixels, got 10; set 8 or 12"),
        ({"start_size": 8, "multiple": 6}, {}, "multiple of the model's 4 pixels, got 6; set 12"),
        ({"start_size": 8, "end_size": 18}, {}, "got 18; set 16 or 20"),
        ({"start_size": 8, "begin": 3, "end": 2}, {}, "begin must be before end, got 3 and 2 epochs"),
        ({"start_size": 8, "begin": 3, "end": 5}, {}, "within the run's 4 epochs, got 5 epochs"),
        ({"start_size": 8, "begin": "3 samples"}, {}, "must have the same unit"),
        ({"sizes": {0: 8, "50%": 16}}, {"max_epochs": -1, "max_steps": 4}, "trainer.max_epochs must be set"),
        ({"sizes": {0: 8}}, {"task": Plain(Fixed())}, "built for, 16 x 16 pixels, got 8 x 8"),
        ({"start_size": 8}, {"data": plain_loader()}, "end_size must be set"),
        ({"sizes": {0: 8, 1: 32}}, {"data": plain_loader()}, "largest size of 32 pixels, got 16; load them at 32"),
        ({"sizes": {0: 8}}, {"data": DataLoader(Endless(), 4)}, "loader must have a length"),
        ({"sizes": {0: 8}, "image_key": "pixels"}, {"data": DataLoader(Named(), 4)}, "with image_key: 'pixels'"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(arguments, options, message):
    data = options["data"] if "data" in options else digits()
    task = None if isinstance(data, ResumableDataModule) else Plain()
    with pytest.raises(DloError, match=message):
        fit(ProgressiveResizing(**arguments), **{"data": data, "task": task, **options})
    if task is None:
        assert data.image_size_at is None


SAMPLES = 1000  # of an epoch


def at(epochs: float) -> Position:
    epoch = int(epochs)
    return Position(epoch, round((epochs - epoch) * SAMPLES), SAMPLES)


def growth(start, end, begin, finish, multiple=32, stages=None) -> GrowingSize:
    return GrowingSize(start, end, parse_position(begin, "test"), parse_position(finish, "test"), multiple, stages)


def test_growth_is_ffcvs_between_its_points():
    """160 up to epoch 65, 192 from 76 of 88; between them linear, and rounded down to 8 here."""
    schedule = growth(160, 192, 65, 76, 8)
    expected = np.interp(np.arange(88), [65, 76], [160, 192]) // 8 * 8
    assert [schedule.size_at(at(epoch), 88) for epoch in range(88)] == expected.tolist()
    assert schedule.all_sizes() == [160, 168, 176, 184, 192]
    coarse = growth(160, 192, "65 epochs", "86.4%", 32)
    assert [coarse.size_at(at(epoch), 88) for epoch in (0, 70, 76, 76.1, 87)] == [160, 160, 160, 192, 192]


# --- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (20, 12), (48, 80)])
def test_images_are_resized_as_pillow_does(size):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (2, 40, 60, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    reference = [Image.fromarray(each).resize(size[::-1], Image.Resampling.BILINEAR) for each in pixels]
    expected = torch.from_numpy(np.stack(reference)).permute(0, 3, 1, 2)
    assert (resize_images(images, *size).int() - expected.int()).abs().max() <= 1
    floats = resize_images(images.float(), *size)
    assert floats.shape == (2, 3, *size)
    torch.testing.assert_close(floats, expected.float(), atol=1.001, rtol=0)


@pytest.mark.parametrize("batch", [{"pixels": torch.zeros(2, 3, 8, 8)}, (torch.zeros(2, 8),), [], torch.zeros(3), None])
def test_a_batch_without_images_is_refused(batch):
    with pytest.raises(DloError, match="got none in"):
        images_of(batch, "image")

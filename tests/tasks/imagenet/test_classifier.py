"""The task ImageClassifier: what it trains, logs and refuses; its losses, metrics and pictures."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.loss import BinaryCrossEntropy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from dlo_framework.data import VOID
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_tasks.imagenet import classifier, classifier_logs
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.classifier_logs import Confusion, SampleMean
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.imagenet.timm_models import sincos_2d
from support.trainers import quiet_trainer

TINY = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


class Images(LightningDataModule):
    """Seven classes of random pictures, 20 of them: with batches of 8 the last one is partial and padded."""

    num_classes = 7
    image_size = 16
    channels = 3
    mean = (0.5, 0.5, 0.5)
    std = (0.25, 0.25, 0.25)

    def __init__(self) -> None:
        super().__init__()
        self.class_names = [f"class {i}" for i in range(7)]
        torch.manual_seed(0)
        self.images, self.targets = torch.randn(20, 3, 16, 16), torch.randint(0, 7, (20,))

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images, self.targets), batch_size=4)

    def val_dataloader(self):
        images = torch.cat([self.images, torch.full((4, 3, 16, 16), 9.0)])
        return DataLoader(TensorDataset(images, torch.cat([self.targets, torch.full((4,), -1)])), batch_size=8)

    test_dataloader = val_dataloader

    def predict_dataloader(self):
        return DataLoader(self.images, batch_size=8)


def tiny(**options) -> ImageClassifier:
    return ImageClassifier("vit_tiny_patch16_224", **{"model_args": TINY, **options})


def trainer(tmp_path, **options) -> Trainer:
    return quiet_trainer(default_root_dir=tmp_path, **{"max_epochs": 2, **options})


def exact(task: ImageClassifier, data: Images) -> dict[str, float]:
    with torch.no_grad():
        logits = task.eval()(data.images)
    top = logits.topk(5).indices == data.targets[:, None]
    return {
        "loss": nn.functional.cross_entropy(logits, data.targets).item(),
        "acc1": top[:, 0].float().mean().item(),
        "acc5": top.any(1).float().mean().item(),
    }


def test_a_fit_learns_and_its_metrics_are_exact_with_padding(tmp_path):
    task, data, run = tiny(lr=3e-3, label_smoothing=0.1), Images(), trainer(tmp_path, max_epochs=12)
    run.fit(task, data)
    found = {name: value.item() for name, value in run.callback_metrics.items()}
    truth = exact(task, data)
    assert found == {f"val_{name}": pytest.approx(value, rel=1e-5) for name, value in truth.items()}
    assert found["val_acc1"] > 0.7
    (tested,) = run.test(task, data, verbose=False)
    assert tested == {f"test_{name}": pytest.approx(value, rel=1e-5) for name, value in truth.items()}
    probabilities = torch.cat(run.predict(task, data))
    assert torch.allclose(probabilities.sum(1), torch.ones(20))


def test_few_classes_have_no_top_5(tmp_path):
    data, run = Images(), trainer(tmp_path, max_epochs=1)
    data.num_classes, data.targets = 3, data.targets % 3
    run.fit(tiny(), data)
    assert set(run.callback_metrics) == {"val_loss", "val_acc1"}


def test_a_checkpoint_loads_safely_and_rebuilds_the_model_without_data(tmp_path):
    """Of weights alone, which are the average, too."""
    savers = [
        ModelCheckpoint(tmp_path / str(weights), save_weights_only=weights, every_n_epochs=1 + weights)
        for weights in (False, True)
    ]
    task, data = tiny(ema_decay=0.5, layer_decay=0.7, lr=1e-2), Images()
    run = trainer(tmp_path, enable_checkpointing=True, callbacks=savers)
    run.fit(task, data)
    assert any(isinstance(callback, WeightEMA) for callback in run.callbacks)
    paths = [saver.best_model_path for saver in savers]
    loaded = ImageClassifier.load_from_checkpoint(paths[0], weights_only=True)
    truth = exact(task, data)
    loaded.configure_model()
    assert loaded.num_classes == 7
    assert exact(loaded, data) == truth
    (found,) = trainer(tmp_path).validate(tiny(), data, ckpt_path=paths[0], verbose=False, weights_only=True)
    assert found["val_loss"] == pytest.approx(truth["loss"], rel=1e-5)
    state = torch.load(paths[1], weights_only=True)["state_dict"]
    assert torch.equal(state["model.head.weight"], task.model.head.weight)  # the fit ends on the average


def test_tensorboard_gets_images_once_and_the_confusion_matrix_at_the_end(tmp_path):
    task, logger = tiny(), TensorBoardLogger(tmp_path, name="tb")
    run = trainer(tmp_path, logger=logger)
    run.fit(task, Images())
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0}).Reload()
    assert sorted(events.Tags()["images"]) == ["train/images", "val/confusion"]
    assert [event.step for event in events.Images("train/images")] == [0]
    assert [event.step for event in events.Images("val/confusion")] == [10]
    assert task.confusion.compute().sum() == 20  # the last validation alone, without padding


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_classes": 10}, "num_classes must be the data's 7, got 10; set model.init_args.num_classes=7"),
        ({"image_size": 225}, "image_size must be divisible by patch 16, got 225; use 224 or 240"),
        ({"image_size": 15}, "image_size must be divisible by patch 16, got 15; use 16$"),
        ({"model": "coatnet_0_rw_224", "image_size": 230}, "the model's stride 32, got 230; use 224 or 256"),
        ({"model": "crossvit_tiny_240", "image_size": 240}, None),  # two branches, whose strides are no pyramid
        ({"model": "crossvit_tiny_240"}, "image_size must be 240 for crossvit_tiny_240, .* got 224; use 240"),
        ({"model_args": {"drop_pth_rate": 0.1}}, r"got 'drop_pth_rate'; did you mean 'drop_path_rate'\?"),
        ({"optimizer": "sgd", "optimizer_args": {"betas": 1}}, None),
        ({"loss_name": "bce", "bce_threshold": 0.01, "label_smoothing": 0.1}, "0.914 for its own of 7 classes"),
        ({"model_args": {"in_chans": 1}}, r"in_chans must be 3, the channels of Images's images, got 1"),
        ({"position_embedding": "sincos2d", "image_size": 224}, "class_token: false"),
        ({"model": "resnet18", "image_size": 225}, None),
    ],
)
def test_check_compares_with_the_data_before_anything_runs(options, words):
    task = ImageClassifier(**{"image_size": 224, **options})
    if words is None:
        task.check(Images())
    else:
        with pytest.raises(DloError, match=words):
            task.check(Images())
    assert not task.has_model


def test_one_class_is_none(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    with pytest.raises(DloError, match=rf"at least 2 classes, got 1 \(cat\) in {tmp_path}; set"):
        tiny().check(ImageFolderData(str(tmp_path), image_size=16))
    data = Images()
    data.num_classes = 1
    with pytest.raises(DloError, match=r"got 1 \(class 0\) in Images"):
        tiny(num_classes=2).check(data)


def test_images_of_another_number_of_channels_are_the_users_own(tmp_path):
    task, data = tiny(model_args={**TINY, "in_chans": 1}), Images()
    data.channels, data.images = 1, data.images[:, :1]
    data.val_dataloader = lambda: DataLoader(TensorDataset(data.images, data.targets), batch_size=8)
    trainer(tmp_path, max_epochs=1).fit(task, data)
    assert task.example_batch(data)[0].shape == (1, 1, 16, 16)


def test_a_model_is_evaluated_at_another_size_if_it_can_be():
    data = Images()
    data.image_size, data.eval_image_size = 224, 256
    for name in ("vit_small_patch16_224", "coatnet_nano_rw_224", "resnet18"):
        ImageClassifier(name).check(data)
    with pytest.raises(DloError, match=r"eval_image_size=256: mixer_s16_224: images must have .* got 256 x 256"):
        ImageClassifier("mixer_s16_224").check(data)
    data.eval_image_size = 250
    with pytest.raises(DloError, match="multiples of 16 pixels, got 250; use 240 or 256"):
        ImageClassifier().check(data)


def test_without_data_the_classes_must_be_given(tmp_path):
    with pytest.raises(DloError, match="num_classes must be set"):
        tiny().check(None)
    with pytest.raises(DloError, match="num_classes must be set"):
        tiny().configure_model()
    task = tiny(num_classes=4, image_size=16)
    task.check(None)
    task.configure_model()
    model = task.model
    task.configure_model()
    assert task.model is model
    assert task(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


def test_sines_and_cosines_are_fixed_and_where_they_should_be():
    args = {**TINY, "class_token": False, "global_pool": "avg", "fc_norm": False}
    task = tiny(model_args=args, num_classes=4, image_size=16, position_embedding="sincos2d")
    task.configure_model()
    assert not task.model.pos_embed.requires_grad
    assert all(
        task.model.pos_embed is not p
        for g in task.configure_optimizers()["optimizer"].param_groups
        for p in g["params"]
    )
    assert torch.equal(task.model.pos_embed, sincos_2d(4, 4, 32))
    grid = sincos_2d(2, 3, 8)[0].view(2, 3, 8)
    assert torch.equal(grid[:, :, :4], grid[:1, :, :4].expand(2, 3, 4))  # the first half tells x alone
    torch.testing.assert_close(grid[1, 2, 0], torch.tensor(2.0).sin())
    torch.testing.assert_close(grid[1, 2, 6], torch.tensor(1.0).cos())
    with pytest.raises(DloError, match="divisible by 4, got 6; use 8"):
        sincos_2d(2, 2, 6)


def test_soft_targets_train_and_channels_last_holds(tmp_path):
    task = ImageClassifier("resnet18", num_classes=4, channels_last=True, loss_name="bce", bce_threshold=0.0)
    task.configure_model()
    (images,), _ = task.inputs((torch.randn(2, 3, 64, 64), None))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert task.model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    soft = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    loss = task.training_step((images, soft), 0)["loss"]
    loss.backward()
    expected = nn.functional.binary_cross_entropy_with_logits(task(images), (soft > 0).float())
    torch.testing.assert_close(loss, expected)


def _mean_of_ranks(rank: int, world_size: int) -> float:
    mean, values = SampleMean(), torch.arange(5.0)
    real = torch.tensor([True, rank == 0, rank == 0, rank == 0])
    mean.update(values[:4] if rank == 0 else values[4:].repeat(4), real)
    return mean.compute().item()


def test_means_are_exact_over_ranks_with_unequal_numbers_of_samples():
    assert run_distributed(_mean_of_ranks, 2) == [2.0, 2.0]


# --- losses, metrics and pictures of a classifier --------------------------------------------------------------------


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(0))


HARD = torch.tensor([0, 3, 6, 1, 1, 2])
SOFT = torch.softmax(torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), 1)


@pytest.mark.parametrize("targets", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(logits, targets, smoothing):
    ours = classifier.mean_of_real(classifier.cross_entropy(logits, targets, smoothing), targets)
    torch.testing.assert_close(ours, F.cross_entropy(logits, targets, label_smoothing=smoothing))


@pytest.mark.parametrize("targets", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
def test_bce_is_timms(logits, targets, threshold):
    theirs = BinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)(logits, targets)
    ours = classifier.mean_of_real(classifier.binary_cross_entropy(logits, targets, 0.0, threshold), targets)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("threshold", "smoothing", "classes", "words"),
    [
        (1.0, 0.0, 10, r"bce_threshold must be at least 0 and below 1, got 1.0"),
        (0.0, 0.1, None, "are above it and become 1; set label_smoothing to 0"),
        (0.005, 0.1, 10, r"0.91 for its own of 10 classes, 0.01 for others\): all targets are above"),
        (0.95, 0.1, 10, "are at or below it and become 0"),
        (0.0, 0.0, 10, None),
        (0.2, 0.1, 1000, None),
        (0.2, 0.1, None, None),
    ],
)
def test_a_threshold_that_tells_no_class_from_another_is_refused(threshold, smoothing, classes, words):
    dense = classifier.dense_targets(torch.arange(3), classes or 1000, smoothing)
    tells = ((dense > threshold).sum(1) == 1).all()
    if words is None:
        assert tells
        classifier.check_threshold(threshold, smoothing, classes)
    else:
        assert not tells or not 0 <= threshold < 1
        with pytest.raises(DloError, match=words):
            classifier.check_threshold(threshold, smoothing, classes)


@pytest.mark.parametrize("loss", [classifier.cross_entropy, classifier.binary_cross_entropy])
def test_void_samples_change_neither_loss_nor_gradient(logits, loss):
    padded = torch.cat([logits, torch.full((2, 7), 9.0)]).requires_grad_()
    targets = torch.cat([HARD, torch.tensor([VOID, VOID])])
    real = logits.clone().requires_grad_()
    ours, theirs = classifier.mean_of_real(loss(padded, targets), targets), loss(real, HARD).mean()
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(padded.grad[:6], real.grad)
    assert not padded.grad[6:].any()
    nothing = torch.full((6,), VOID)
    value = classifier.mean_of_real(loss(real, nothing), nothing)
    assert value.item() == 0.0
    assert not torch.autograd.grad(value, real)[0].any()
    assert loss(logits.bfloat16(), HARD).dtype is torch.float32


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 1000))
def test_metrics_do_not_depend_on_batches_or_padding(sizes, padding, seed):
    torch.manual_seed(seed)
    batches = [(torch.randn(n, 7), torch.randint(0, 7, (n,))) for n in sizes]
    logits, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    acc1, acc5, loss, confusion = SampleMean(), SampleMean(), SampleMean(), Confusion(7)
    for x, y in batches:
        x, y = torch.cat([x, torch.randn(padding, 7)]), torch.cat([y, torch.full((padding,), VOID)])
        real, hits = classifier.is_real(y), classifier.hits_at(x, y, 5)
        acc1.update(hits[:, 0], real)
        acc5.update(hits.any(1), real)
        loss.update(classifier.cross_entropy(x, y), real)
        confusion.update(x.argmax(1), y, real)
    assert acc1.compute() == MulticlassAccuracy(7, average="micro")(logits, targets)
    assert acc5.compute() == MulticlassAccuracy(7, average="micro", top_k=5)(logits, targets)
    torch.testing.assert_close(loss.compute(), F.cross_entropy(logits, targets))
    assert torch.equal(confusion.compute(), MulticlassConfusionMatrix(7)(logits, targets))


def test_labels_of_hard_padding_and_soft_targets():
    names = ["cat", "dog", "owl"]
    assert classifier_logs.target_labels(torch.tensor([2, 0, -1]), names) == ["owl", "cat", "(padding)"]
    soft = torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]])
    assert classifier_logs.target_labels(soft, names) == ["75% dog + 25% cat", "100% dog"]

"""Losses, metrics and pictures of a classifier."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.loss import BinaryCrossEntropy
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from dlo_framework.data import VOID
from dlo_framework.errors import DloError
from dlo_tasks.imagenet import classifier, classifier_logs
from dlo_tasks.imagenet.classifier_logs import Confusion, SampleMean


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
        (-0.1, 0.0, None, r"must be at least 0 and below 1"),
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


@pytest.mark.parametrize("loss", [classifier.cross_entropy, classifier.binary_cross_entropy])
def test_a_batch_of_nothing_but_padding_has_loss_zero_and_no_gradient(logits, loss):
    logits.requires_grad_()
    targets = torch.full((6,), VOID)
    value = classifier.mean_of_real(loss(logits, targets), targets)
    value.backward()
    assert value.item() == 0.0
    assert not logits.grad.any()


def test_losses_are_float32_in_half_precision(logits):
    assert classifier.cross_entropy(logits.bfloat16(), HARD).dtype is torch.float32
    assert classifier.binary_cross_entropy(logits.bfloat16(), HARD).dtype is torch.float32


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


def test_a_small_confusion_matrix_shows_shares_and_counts():
    counts = torch.diag(torch.full((10,), 50))
    counts[3, 7] = 50
    picture = classifier_logs.confusion_picture(counts, [str(i) for i in range(10)])

    def corner(row, column):
        return picture[:, 46 + row * 44 + 2, 110 + column * 44 + 2].tolist()

    assert corner(0, 0) == [20, 72, 140]  # all right: full blue
    assert corner(0, 1) == [255, 255, 255]
    assert corner(3, 7) == [216, 140, 149]  # half of class 3 taken for 7: half red
    cell = picture[:, 46 + 3 * 44 : 46 + 4 * 44, 110 + 7 * 44 : 110 + 8 * 44]
    assert len(torch.unique(cell.flatten(1), dim=1).T) > 2  # the count is written in it

"""The mathematics of MixUp and CutMix, beside timm's and by the properties that it must have."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target, rand_bbox

from dlo_plugins.images.batch_mix import (
    MODES,
    MixPlan,
    MixRecipe,
    draw_plan,
    mix_by_mask,
    mix_pairs_,
    mix_targets,
    soft_targets,
    to_device,
)

CPU = torch.device("cpu")
HEIGHT, WIDTH, CLASSES = 24, 32, 5
MIXUP, CUTMIX = {"mixup_alpha": 1.0, "cutmix_alpha": 0.0}, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}
BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
MINMAX = {"mixup_alpha": 0.0, "cutmix_alpha": 0.0, "cutmix_minmax": (0.2, 0.8)}
RECIPES = {"mixup": MIXUP, "cutmix": CUTMIX, "both": BOTH, "minmax": MINMAX, "seldom": {**BOTH, "prob": 0.4}}


def batch(size: int = 6, layout=torch.contiguous_format, dtype=torch.float32):
    images = torch.randn(size, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(size))
    return images.to(dtype).contiguous(memory_format=layout), torch.arange(size) % CLASSES


def by_pairs(images, plan):
    return mix_pairs_(images.clone(), plan)


def by_mask(images, plan):
    return mix_by_mask(images, to_device(plan, CPU))


def mirrored(lam: list[float], is_cut: list[bool], boxes: list[tuple[int, ...]]) -> MixPlan:
    """A plan from what timm calls its parameters."""
    is_cut, boxes = np.array(is_cut), np.array(boxes)
    boxes = np.where(is_cut[:, None], boxes, [0, HEIGHT, 0, WIDTH])
    lam, weight = np.where(is_cut, 1 - area(boxes), lam), np.where(is_cut, 1.0, 1 - np.array(lam))
    return MixPlan(np.arange(len(lam))[::-1], lam, weight, boxes)


# --- beside timm -------------------------------------------------------------------------------------------------


class Given(Mixup):
    """timm's own, with lambda and the kind of mix given rather than drawn; boxes come from NumPy's stream."""

    given: tuple

    def _params_per_batch(self):
        return self.given

    def _params_per_elem(self, batch_size):
        lam, is_cut = self.given
        return np.array(lam, dtype=np.float32), np.array(is_cut)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("how", [by_pairs, by_mask])
@pytest.mark.parametrize("lam", [0.0, 0.03, 0.4, 0.77, 1.0])
def test_batch_mode_equals_timm_for_a_given_lambda_and_box(lam, how, layout):
    images, targets = batch(layout=layout)
    theirs = Given(mode="batch", label_smoothing=0.1, num_classes=CLASSES)
    for is_cut in (True, False):
        theirs.given = (lam, is_cut)
        np.random.seed(3)
        top, bottom, left, right = rand_bbox(images.shape, lam)
        plan = mirrored([lam] * 6, [is_cut] * 6, [(top, bottom, left, right)] * 6)
        np.random.seed(3)
        expected, expected_targets = theirs(images.clone(), targets)
        found = how(images, plan)
        if is_cut:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # timm rounds three times, lerp once
        found_targets = mix_targets(soft_targets(targets, CLASSES, 0.1), to_device(plan, CPU))
        assert torch.equal(found_targets, expected_targets)


@pytest.mark.parametrize("how", [by_pairs, by_mask])
@pytest.mark.parametrize("mode", ["pair", "elem"])
def test_pair_and_elem_mode_equal_timm_for_given_parameters(mode, how):
    images, targets = batch()
    lam, is_cut = ([0.3, 1.0, 0.6, 0.9, 0.2, 0.5], [True, True, False, False, True, True])
    if mode == "pair":
        lam, is_cut = lam[:3], is_cut[:3]
    theirs = Given(mode=mode, label_smoothing=0.1, num_classes=CLASSES)
    theirs.given = (lam, is_cut)
    np.random.seed(4)
    boxes = [
        cutmix_bbox_and_lam(images[0].shape, np.float32(share))[0] if cut and share != 1 else (0, 0, 0, 0)
        for share, cut in zip(lam, is_cut, strict=True)
    ]
    if mode == "pair":
        lam, is_cut, boxes = lam + lam[::-1], is_cut + is_cut[::-1], boxes + boxes[::-1]
    plan = mirrored(lam, is_cut, boxes)
    np.random.seed(4)
    expected, expected_targets = theirs(images.clone(), targets)
    torch.testing.assert_close(how(images, plan), expected, rtol=0, atol=1e-6)
    found = mix_targets(soft_targets(targets, CLASSES, 0.1), to_device(plan, CPU))
    torch.testing.assert_close(found, expected_targets, rtol=0, atol=1e-6)


DRAWS = 5_000


def timms_parameters(recipe):
    """Lambda, whether it is CutMix, and box of many images, drawn by timm."""
    mixup = Mixup(**recipe, mode="elem")
    np.random.seed(0)
    lam, is_cut = mixup._params_per_elem(DRAWS)
    is_cut &= lam != 1
    boxes = np.zeros((DRAWS, 4), dtype=int)
    for i in np.flatnonzero(is_cut):
        boxes[i], lam[i] = cutmix_bbox_and_lam((HEIGHT, WIDTH), lam[i], mixup.cutmix_minmax)
    return lam, is_cut, boxes


@pytest.mark.parametrize("name", RECIPES)
def test_the_distribution_is_timms(name):
    """Moments within 4.5 standard errors; lambda, areas and edges by the Kolmogorov-Smirnov test."""
    recipe = RECIPES[name]
    lam, is_cut, boxes = timms_parameters(recipe)
    ours = draw_plan(MixRecipe(**recipe, mode="elem"), DRAWS, HEIGHT, WIDTH, np.random.default_rng(0))
    # A box without an area, and one that is all of the image, say nothing of which of the two was drawn.
    cut = np.zeros(DRAWS, bool) if ours.boxes is None else (ours.weight == 1)
    assert abs(cut.mean() - is_cut.mean()) < 4.5 * np.sqrt(2 * 0.25 / DRAWS)
    assert abs((ours.lam == 1).mean() - (lam == 1).mean()) < 4.5 * np.sqrt(2 * 0.25 / DRAWS)
    pairs = [(ours.lam, lam), (ours.lam**2, lam**2)]
    if ours.boxes is not None:
        mine, theirs = ours.boxes[cut].astype(float), boxes[is_cut].astype(float)
        pairs += [(area(mine), area(theirs)), (area(mine) ** 2, area(theirs) ** 2)]
        pairs += list(zip(mine.T, theirs.T, strict=True))
    for found, expected in pairs:
        error = np.sqrt(found.var() / len(found) + expected.var() / len(expected))
        assert abs(found.mean() - expected.mean()) < 4.5 * error
        assert ks_2samp(found.astype(np.float32), expected.astype(np.float32)).pvalue > 1e-4


def area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (HEIGHT * WIDTH)


# --- by its properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("how", [by_pairs, by_mask])
def test_precision_and_memory_format_are_kept(how, layout, dtype):
    images, _ = batch(layout=layout, dtype=dtype)
    for mode in MODES:
        plan = draw_plan(MixRecipe(**BOTH, mode=mode), 6, HEIGHT, WIDTH, np.random.default_rng(5))
        found, exact = how(images, plan), by_pairs(images.double(), plan)
        assert found.dtype == dtype
        assert found.is_contiguous(memory_format=layout)
        assert found.stride() == images.stride()
        # One rounding to the images' precision, of a weight that is not rounded to it.
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_pixels_that_are_not_mixed_are_not_touched_by_infinities():
    images, _ = batch(4)
    images[3] = torch.inf
    plan = MixPlan(np.arange(4)[::-1], np.array([1.0, 0.5, 0.5, 0.5]), np.array([0.0, 0.5, 0.5, 0.5]), None)
    assert torch.equal(by_pairs(images, plan)[0], images[0])


@pytest.mark.parametrize("how", [by_pairs, by_mask])
def test_mixup_takes_inputs_of_any_shape(how):
    plan = draw_plan(MixRecipe(**MIXUP), 4, 1, 1, np.random.default_rng(0))
    rows = torch.eye(4)
    torch.testing.assert_close(how(rows, plan), mix_targets(rows, to_device(plan, CPU)))
    videos = torch.randn(4, 3, 2, HEIGHT, WIDTH)
    plan = draw_plan(MixRecipe(**CUTMIX, mode="elem"), 4, HEIGHT, WIDTH, np.random.default_rng(0))
    frames = torch.stack([how(videos[:, :, frame], plan) for frame in range(2)], dim=2)
    assert torch.equal(how(videos, plan), frames)


def test_soft_targets_are_smoothed_as_in_timm():
    targets = torch.tensor([0, 3, 1, 1])
    plan = mirrored([1.0] * 4, [False] * 4, [(0, 0, 0, 0)] * 4)
    for smoothing in (0.0, 0.1):
        found = mix_targets(soft_targets(targets, CLASSES, smoothing), to_device(plan, CPU))
        assert torch.equal(found, mixup_target(targets, CLASSES, 1.0, smoothing))
    dense = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    for multi_label, off in ((True, 0.05), (False, 0.1 / 3)):
        found = soft_targets(dense, 3, 0.1, multi_label)
        torch.testing.assert_close(found, dense * 0.9 + off)
    for given_as in (dense.half(), dense.long(), dense.bool()):
        found = soft_targets(given_as, 3, 0.0)
        assert found.dtype == torch.float32
        assert torch.equal(found, dense)

"""MixUp and CutMix of training batches on the device: the random plan of a batch, and the mixing of images and targets.

* MixUp: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018 (arXiv 1710.09412).
* CutMix: Yun, Han, Oh, Chun, Choe, Yoo, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
  Features", 2019 (arXiv 1905.04899).

The distribution is that of ``timm.data.mixup.Mixup``: an image's partner is at the mirrored position in the batch
(first with last), and lambda is corrected for the part of a box outside the image. Departures: the middle image of an
odd batch, which is its own partner, is not changed (timm refuses odd batches); targets are float32 whatever the
images' dtype; MixUp rounds once (``lerp``) where timm rounds three times.

Shapes: B images of a batch, N of a group, C classes, H x W pixels. A box is (top, bottom, left, right), the last row
and column not included.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dlo_framework.batch_transform import BatchTransform, batches_are_new
from dlo_framework.batches import replace_entries
from dlo_framework.data import data_parallel_coordinates
from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean
from dlo_framework.progress import epochs_of_run, steps_per_epoch


class BatchMix(BatchTransform):
    """Mixes the images of a training batch with each other by MixUp or CutMix, and mixes their targets accordingly.

    It works on the device, after transfer, for every model and datamodule. Each image is mixed with the image at the
    mirrored position in the batch (first with last), by timm's distribution. Targets become soft, float32 ``[B, C]``,
    in all of training; validation and test do not change.

    ```yaml
    trainer:
      callbacks:
        - class_path: BatchMix
          init_args: {mixup_alpha: 0.8, cutmix_alpha: 1.0, off_epochs: 10}
    ```

    Args:
        mixup_alpha: Alpha of MixUp, which draws lambda from Beta(alpha, alpha); 0 turns MixUp off. Default 0.8, as in
            DeiT.
        cutmix_alpha: Alpha of CutMix, which draws lambda from Beta(alpha, alpha); 0 turns CutMix off. Default 1.0, as
            in its paper: box areas are uniform, except for the parts outside the image.
        cutmix_minmax: Smallest and largest side of CutMix's boxes, as fractions of the image's sides. The boxes are
            inside the image, and ``cutmix_alpha`` is not used.
        prob: Probability that a batch (mode ``batch``), a pair or an image is mixed.
        switch_prob: Probability of CutMix, if MixUp is on too.
        mode: Scope of a draw: the ``batch``, each ``pair``, or each image (``elem``).
        label_smoothing: Fraction of each target that is spread over all classes, before mixing. Default 0; smooth
            either in the model or here, not in both.
        num_classes: Number of classes, C; None uses the datamodule's or the module's ``num_classes``. Dense targets do
            not need it.
        multi_label: Whether targets are dense with a binary target for each class, smoothed towards 0.5 instead of
            1 / C.
        off_epochs: Number of epochs at the end of training without mixing. If ``max_steps`` ends training, later
            epochs are assumed to have as many steps as the current one.
        seed: Seed of the draws; None uses that of ``seed_everything``.
        group_size: Number of images in a group. Images are mixed within their group, and each group has draws of its
            own. None for one group a batch. A run on fewer ranks mixes the same images by the same draws if
            ``group_size`` is the batch size that each rank had.
        image_key: Position of the images in a tuple or list, or their key in a dict.
        target_key: Position or key of the targets.
        in_place: Whether images of a batch on the CPU may be overwritten, which saves a copy. None overwrites them only
            if the batch surely owns them: with torch's default collation, or a datamodule that declares
            ``makes_new_batches``. With a collation or data hooks of your own they are copied.

    Raises:
        DloError: If a value is out of range, the model smooths labels too, images are not floating point, or targets do
            not fit.
    """

    example = "{mode: pair, group_size: 2}"

    order = 20

    def __init__(
        self,
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        cutmix_minmax: tuple[float, float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: Literal["batch", "pair", "elem"] = "batch",
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        multi_label: bool = False,
        off_epochs: int = 0,
        seed: int | None = None,
        group_size: int | None = None,
        image_key: int | str = 0,
        target_key: int | str = 1,
        in_place: bool | None = None,
    ) -> None:
        self.recipe = MixRecipe(mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode)
        self.label_smoothing, self.num_classes, self.multi_label = label_smoothing, num_classes, multi_label
        self.off_epochs, self.seed, self.group_size = off_epochs, seed, group_size
        self.image_key, self.target_key, self.in_place = image_key, target_key, in_place
        check_number("BatchMix: label_smoothing", label_smoothing, "at least 0 and below 1", "0.1 is usual")
        check_number("BatchMix: num_classes", num_classes, "at least 2", "leave it out to use the datamodule's")
        check_number("BatchMix: off_epochs", off_epochs, "at least 0", "leave it out")
        check_number("BatchMix: seed", seed, "at least 0", "leave it out for the run's")
        check_number("BatchMix: group_size", group_size, "at least 2 images", "leave it out for one group a batch")
        self._run_seed = seed or 0
        self._batches = 0  # training batches so far, on each rank
        self._steps = 0  # optimizer steps before the current epoch
        self._classes: int | None = None
        self._checked = False
        self._trainer: Trainer | None = None
        self._shares = 1  # number of ranks' batches in a batch

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the batches so far, which decide all ranks' random numbers, and the epoch's first step.

        A batch whose step is not complete, for example because it raised, is not counted: a resumed run repeats it.
        """
        return {"seed": self._run_seed, "batches": self._batches - self._in_step(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the draws of the resumed run, unless ``seed`` is set."""
        self._batches, self._steps = int(state_dict["batches"]), int(state_dict.get("steps", 0))
        if self.seed is None:
            self._run_seed = int(state_dict["seed"])

    def _in_step(self) -> int:
        if self._trainer is None:
            return 0
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        # After an error it is only started: EndCheckpoint has taken back that the loader has handed it out.
        return int(max(progress.ready, progress.started) > progress.processed)

    def for_parity(self, shares: int) -> str:
        """Splits each batch into equal shares that are mixed separately, as this number of ranks mix their batches."""
        self._shares = shares
        return "each rank's batch is mixed separately, in one process too: equal"

    # --- before training -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the settings before data load, and sets the seed."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        theirs = _setting(pl_module, "label_smoothing")
        if self.label_smoothing and theirs:
            raise DloError(
                "BatchMix: label_smoothing must be set in one place, as the model's smooths soft targets too, got"
                f" {self.label_smoothing} in BatchMix and {theirs} in {type(pl_module).__name__}; set one of them to 0"
            )
        threshold = _setting(pl_module, "bce_threshold")
        if self.label_smoothing and threshold is not None:
            classes = 2 if self.multi_label else self._find_classes(trainer, pl_module)
            share = self.label_smoothing / classes if classes else 0.0
            own = 1 - self.label_smoothing + share
            if not share < threshold < own:
                raise DloError(
                    f"BatchMix: bce_threshold of {type(pl_module).__name__} must be between the smoothed targets"
                    f" {share:.3g} and {own:.3g} (label_smoothing {self.label_smoothing}), got {threshold}; set"
                    " label_smoothing to 0, as a threshold removes it anyway"
                )
        if self.off_epochs and math.isinf(epochs_of_run(trainer)) and trainer.max_steps < 0:
            raise DloError(
                f"BatchMix: trainer.max_epochs or trainer.max_steps must be set for off_epochs {self.off_epochs}, which"
                " counts from the end of training, got neither; set one of them, or off_epochs to 0"
            )
        self._trainer, self._checked, self._classes = trainer, False, None
        if trainer.current_epoch == 0:  # Also after a fit that raised. A resumed state is loaded after this.
            self._batches = self._steps = 0
            # Of seed_everything, or else of torch's generator: equal on all ranks.
            run_seed = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed())
            self._run_seed = run_seed if self.seed is None else self.seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if no batch will be mixed."""
        epochs = self._epochs(trainer)
        if self.off_epochs >= epochs:
            rank_zero_warn(
                f"BatchMix mixes no batch: off_epochs must be below the run's {epochs:g} epochs, got {self.off_epochs}"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the number of optimizer steps before the epoch."""
        self._steps = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops the reference to the trainer."""
        super().teardown(trainer, pl_module, stage)
        self._trainer = None

    # --- in training ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with mixed images and soft targets."""
        images, targets = _get_entry(batch, self.image_key), _get_entry(batch, self.target_key)
        if not self._checked:
            self._check(trainer, pl_module, images, targets)
        number, self._batches = self._batches, self._batches + 1
        assert self._classes is not None
        soft = soft_targets(targets, self._classes, self.label_smoothing, self.multi_label)
        if self.is_on(trainer):
            plan = self.plan(number, data_parallel_coordinates(trainer)[0], images.shape)
            on_device = to_device(plan, images.device)
            in_place = batches_are_new(trainer) if self.in_place is None else self.in_place
            images, soft = mix_images(images, plan, on_device, in_place=in_place), mix_targets(soft, on_device)
        return replace_entries(batch, {self.image_key: images, self.target_key: soft})

    def is_on(self, trainer: Trainer) -> bool:
        """Returns whether the current epoch is before the last ``off_epochs``."""
        return not self.off_epochs or trainer.current_epoch < self._epochs(trainer) - self.off_epochs

    def _epochs(self, trainer: Trainer) -> float:
        """Returns the number of epochs of the run (2.5 if it ends in the middle of the third); infinite if endless."""
        epochs = epochs_of_run(trainer)
        if trainer.max_steps >= 0:
            left = (trainer.max_steps - self._steps) / steps_per_epoch(trainer)
            epochs = min(epochs, trainer.current_epoch + left)
        return epochs

    def plan(self, number: int, rank: int, shape: torch.Size) -> MixPlan:
        """Returns the plan of one batch on one rank.

        It is a pure function of the seed, the arguments and the recipe. The generator of a group is seeded by (seed,
        number of the batch, position of the group among those of all ranks).

        Args:
            number: Number of batches before this one.
            rank: Data-parallel rank; ranks that share a model replica mix in the same way.
            shape: Shape of the images, ``[B, ..., H, W]``.
        """
        size = self.group_size or -(-shape[0] // self._shares)
        starts = range(0, shape[0], size)
        height, width = shape[-2:] if len(shape) > 2 else (1, 1)
        plans = []
        for place, start in enumerate(starts, rank * len(starts)):
            random = np.random.default_rng([self._run_seed, number, place])
            plans.append(draw_plan(self.recipe, min(size, shape[0] - start), height, width, random))
        return join_plans(plans)

    def _check(self, trainer: Trainer, module: LightningModule, images: Any, targets: Any) -> None:
        """Checks the first batch only, so that later ones do not synchronise, and finds the number of classes."""
        least = 3 if self.recipe.cuts else 2
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.ndim < least:
            got = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise DloError(
                f"BatchMix: batch[{self.image_key!r}] must be floating-point images [B, ..., H, W], got {got};"
                " convert images in on_after_batch_transfer, or set image_key to their position or key"
            )
        if not isinstance(targets, Tensor) or targets.ndim not in (1, 2) or len(targets) != len(images):
            got = str(list(targets.shape)) if isinstance(targets, Tensor) else type(targets).__name__
            raise DloError(
                f"BatchMix: batch[{self.target_key!r}] must be class indices [B] or dense targets [B, C] with"
                f" B = {len(images)}, got {got}; set target_key to the position or key of the targets"
            )
        classes = self._find_classes(trainer, module)
        if targets.ndim == 2:
            if classes not in (None, targets.shape[1]):
                raise DloError(
                    f"BatchMix: num_classes must be the {targets.shape[1]} columns of the dense targets, got {classes};"
                    f" set num_classes: {targets.shape[1]}"
                )
            classes = targets.shape[1]
        elif self.multi_label or targets.is_floating_point():
            raise DloError(
                f"BatchMix: {'multi_label' if self.multi_label else 'floating-point'} targets must be dense, [B, C],"
                f" got {targets.dtype} {list(targets.shape)}; set class indices as integers, without multi_label"
            )
        elif classes is None:
            raise DloError(
                "BatchMix: num_classes must be set in BatchMix, the datamodule or the module, got none; set num_classes"
                f" (the first batch has classes up to {int(targets.max())})"
            )
        elif int(targets.min()) < 0 or int(targets.max()) >= classes:
            raise DloError(
                f"BatchMix: class indices must be in 0..{classes - 1}, got {int(targets.min())}..{int(targets.max())}"
                " in the first batch; set num_classes to the data's number of classes"
            )
        self._classes, self._checked = classes, True

    def _find_classes(self, trainer: Trainer, module: LightningModule) -> int | None:
        datamodule = run_datamodule(trainer)
        by_source = {
            "BatchMix": self.num_classes,
            type(datamodule).__name__: DataDescription(datamodule).num_classes,
            type(module).__name__: _setting(module, "num_classes"),
        }
        known = {name: int(value) for name, value in by_source.items() if isinstance(value, int)}
        if len(set(known.values())) > 1:
            values = ", ".join(f"{name} {value}" for name, value in known.items())
            raise DloError(f"BatchMix: num_classes must be the same everywhere, got {values}; leave BatchMix's out")
        return next(iter(known.values()), None)


def _setting(module: LightningModule, name: str) -> Any:
    """Returns a module's attribute or else its hyperparameter of that name; None without either."""
    value = getattr(module, name, None)
    return value if isinstance(value, int | float) else module.hparams.get(name)


def _get_entry(batch: Any, key: int | str) -> Any:
    """Returns an entry of a batch."""
    if isinstance(batch, dict) and key in batch:
        return batch[key]
    if isinstance(batch, tuple | list) and isinstance(key, int) and -len(batch) <= key < len(batch):
        return batch[key]
    if isinstance(batch, dict):
        got, near = f"a dict with {', '.join(map(repr, batch))}", did_you_mean(str(key), map(str, batch))
    else:
        got = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        near = ""
    raise DloError(
        f"BatchMix: image_key and target_key must be entries of a batch, got {got} without {key!r}"
        f"{near or '; set both keys'}"
    )


Mode = Literal["batch", "pair", "elem"]
MODES: tuple[Mode, ...] = ("batch", "pair", "elem")


@dataclasses.dataclass(frozen=True)
class MixRecipe:
    """Distribution of the plans; see :class:`dlo_plugins.images.batch_mix.BatchMix` for the fields.

    Raises:
        DloError: If a value is out of range, or both MixUp and CutMix are off.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    cutmix_minmax: tuple[float, float] | None = None
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Mode = "batch"

    def __post_init__(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            check_number(f"BatchMix: {name}", getattr(self, name), "at least 0", "0 turns it off, 0.8 is usual")
        for name in ("prob", "switch_prob"):
            check_number(f"BatchMix: {name}", getattr(self, name), "at least 0 and at most 1", "leave it out")
        check_choice("BatchMix: mode", self.mode, MODES, "batch is the default")
        minmax = self.cutmix_minmax
        if minmax is not None and not (len(minmax) == 2 and 0 < minmax[0] < minmax[1] <= 1):
            raise DloError(
                "BatchMix: cutmix_minmax must be two fractions of the image's height and width, the smaller one first"
                f" and above 0, the larger one at most 1, got {list(minmax)}; set [0.2, 0.8], for example"
            )
        if not self.mixes and not self.cuts:
            raise DloError(
                "BatchMix: mixup_alpha or cutmix_alpha must be above 0, got 0 for both; leave the callback out"
            )

    @property
    def mixes(self) -> bool:
        """Whether MixUp is on."""
        return self.mixup_alpha > 0

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix_alpha > 0 or self.cutmix_minmax is not None


class MixPlan(NamedTuple):
    """Plan that mixes each image of a batch with its partner.

    Inside its box an image becomes ``(1 - weight) * own + weight * partner``. For CutMix the box is smaller than the
    image and the weight is 1; for MixUp the box is the full image and the weight is ``1 - lam``. A weight of 0 leaves
    the image unchanged.

    Attributes:
        partner: Number of each image's partner, int64 [B].
        lam: Weight of each image's own target, float64 [B].
        weight: Weight of the partner's pixels inside the box, float64 [B].
        boxes: Boxes, int64 [B, 4]; None if each box is the full image.
    """

    partner: np.ndarray
    lam: np.ndarray
    weight: np.ndarray
    boxes: np.ndarray | None


def clipped_boxes(lam: np.ndarray, centre_y: np.ndarray, centre_x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns boxes of the image's aspect ratio and ``1 - lam`` of its area, clipped at its border: int64 [N, 4]."""
    side = np.sqrt(1 - lam)
    box_height, box_width = (height * side).astype(np.int64), (width * side).astype(np.int64)
    top, left = centre_y - box_height // 2, centre_x - box_width // 2
    edges = (
        top.clip(0, height),
        (top + box_height).clip(0, height),
        left.clip(0, width),
        (left + box_width).clip(0, width),
    )
    return np.stack(edges, axis=1)


def minmax_boxes(
    minmax: tuple[float, float], count: int, height: int, width: int, random: np.random.Generator
) -> np.ndarray:
    """Returns boxes inside the image with sides uniform in ``minmax``, fractions of the image's sides: int64 [N, 4].

    As in timm, the larger limit itself is excluded, unless no pixel is between the two.
    """
    sides, starts = [], []
    for length in (height, width):
        least, past = int(length * minmax[0]), int(length * minmax[1])
        side = random.integers(least, max(past, least + 1), size=count)
        sides.append(side)
        starts.append(random.integers(0, length - side + 1))
    return np.stack([starts[0], starts[0] + sides[0], starts[1], starts[1] + sides[1]], axis=1)


def draw_plan(recipe: MixRecipe, size: int, height: int, width: int, random: np.random.Generator) -> MixPlan:
    """Returns the plan of a group of images: each is mixed with the image at the mirrored position in the group.

    Args:
        recipe: Distribution of the plan; its mode says whether to draw for the group, for each pair or for each image.
        size: Number of images in the group.
        height: Height of the images in pixels; only CutMix uses it.
        width: Width of the images in pixels; only CutMix uses it.
        random: Generator of all random numbers.
    """
    places = np.arange(size)
    which = {"batch": np.zeros_like(places), "pair": np.minimum(places, places[::-1]), "elem": places}[recipe.mode]
    count = int(which.max()) + 1
    is_on = random.random(count) < recipe.prob
    is_cut = random.random(count) < (recipe.switch_prob if recipe.mixes and recipe.cuts else float(recipe.cuts))
    cutmix_alpha = 1.0 if recipe.cutmix_minmax is not None else recipe.cutmix_alpha
    alpha = np.where(is_cut, cutmix_alpha, recipe.mixup_alpha)
    lam = np.where(is_on, random.beta(alpha, alpha), 1.0)
    weight, boxes = 1 - lam, None
    if recipe.cuts:
        if recipe.cutmix_minmax is not None:
            drawn = minmax_boxes(recipe.cutmix_minmax, count, height, width, random)
        else:
            centre_y, centre_x = random.integers(0, height, size=count), random.integers(0, width, size=count)
            drawn = clipped_boxes(lam, centre_y, centre_x, height, width)
        boxes = np.where(is_cut[:, None], drawn, np.array([0, height, 0, width]))
        # Of CutMix, lambda is the fraction of the pixels outside the box.
        left = 1 - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / float(height * width)
        lam, weight = np.where(is_cut & is_on, left, lam), np.where(is_cut & is_on, 1.0, weight)
        boxes = boxes[which]
    alone = places == places[::-1]
    return MixPlan(places[::-1], np.where(alone, 1.0, lam[which]), np.where(alone, 0.0, weight[which]), boxes)


def join_plans(plans: Sequence[MixPlan]) -> MixPlan:
    """Returns the plan of a batch from the plans of its groups."""
    if len(plans) == 1:
        return plans[0]
    starts = np.cumsum([0, *(len(plan.lam) for plan in plans[:-1])])
    partner = np.concatenate([plan.partner + start for plan, start in zip(plans, starts, strict=True)])
    lam, weight = (np.concatenate([plan[field] for plan in plans]) for field in (1, 2))
    boxes = [plan.boxes for plan in plans if plan.boxes is not None]
    return MixPlan(partner, lam, weight, np.concatenate(boxes) if boxes else None)


class DevicePlan(NamedTuple):
    """:class:`MixPlan` as tensors [B] on one device, boxes [B, 4]; ``other`` is ``1 - lam``."""

    partner: Tensor
    lam: Tensor
    other: Tensor
    weight: Tensor
    boxes: Tensor | None


def to_device(plan: MixPlan, device: torch.device) -> DevicePlan:
    """Returns the plan on a device, by one asynchronous copy."""
    columns = [plan.partner, plan.lam, 1 - plan.lam, plan.weight]
    columns += [] if plan.boxes is None else list(plan.boxes.T)
    packed = torch.from_numpy(np.stack(columns).astype(np.float32))  # whole numbers are exact up to 2**24
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous; torch keeps it alive until the copy is complete.
        packed = packed.pin_memory().to(device, non_blocking=True)
    else:
        packed = packed.to(device)
    boxes = None if plan.boxes is None else packed[4:].T
    return DevicePlan(packed[0].long(), packed[1], packed[2], packed[3], boxes)


def soft_targets(targets: Tensor, num_classes: int, smoothing: float, multi_label: bool = False) -> Tensor:
    """Returns float32 targets [B, C] with label smoothing (Szegedy et al. 2016, arXiv 1512.00567).

    Args:
        targets: Class indices [B], or dense targets [B, C].
        num_classes: Number of classes, C.
        smoothing: Fraction of each target that is spread evenly over the classes.
        multi_label: Whether each class is a binary target, smoothed towards 0.5; dense targets only.
    """
    if targets.ndim == 1:
        off = smoothing / num_classes
        soft = torch.full((len(targets), num_classes), off, dtype=torch.float32, device=targets.device)
        return soft.scatter_(1, targets.long()[:, None], 1 - smoothing + off)
    return targets.float() * (1 - smoothing) + (0.5 * smoothing if multi_label else smoothing / num_classes)


def mix_targets(soft: Tensor, plan: DevicePlan) -> Tensor:
    """Returns ``lam * own + (1 - lam) * partner`` of float32 targets [B, C]."""
    return soft * plan.lam[:, None] + soft[plan.partner] * plan.other[:, None]


def mix_images(images: Tensor, plan: MixPlan, on_device: DevicePlan, *, in_place: bool) -> Tensor:
    """Returns the mixed images, by the fastest method for their device.

    Args:
        images: Floating-point images [B, ..., H, W], or [B, ...] for a plan without boxes; in any memory format.
        plan: Plan of the batch.
        on_device: Same plan on the images' device.
        in_place: Whether a CPU may write to ``images``; an accelerator never does.
    """
    if images.device.type != "cpu":
        return mix_by_mask(images, on_device)
    return mix_pairs_(images if in_place and _is_dense(images) else images.clone(), plan)


def mix_by_mask(images: Tensor, plan: DevicePlan) -> Tensor:
    """Returns the mixed images by one vectorised expression, without a loop over images or a synchronisation."""
    shape = [len(images), *[1] * (images.ndim - 1)]
    weight = plan.weight.view(shape)
    if plan.boxes is not None:
        rows, columns = (torch.arange(n, device=images.device) for n in images.shape[-2:])
        top, bottom, left, right = (edge[:, None] for edge in plan.boxes.unbind(1))  # each [B, 1]
        in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)  # [B, H], [B, W]
        inside = in_rows[:, :, None] & in_columns[:, None, :]
        weight = weight * inside.view(*shape[:-2], *images.shape[-2:])
    partners = images[plan.partner]
    if images.dtype in (torch.float16, torch.bfloat16):  # a weight in this precision would differ from lambda
        return torch.lerp(images.float(), partners.float(), weight).to(images.dtype)
    return torch.lerp(images, partners, weight.to(images.dtype), out=partners)


def mix_pairs_(images: Tensor, plan: MixPlan) -> Tensor:
    """Mixes images in place, pair by pair, and returns them: a pair fits in the cache of a CPU, a batch does not."""
    boxes, weight = plan.boxes, plan.weight.tolist()
    pairs = [(one, other) for one, other in enumerate(plan.partner.tolist()) if one < other]
    pairs = [(one, other) for one, other in pairs if weight[one] or weight[other]]
    if boxes is None or (boxes == boxes[0]).all():  # as in mode batch: cut once
        top, bottom, left, right = (0, None, 0, None) if boxes is None else boxes[0].tolist()
        rows = (images if boxes is None else images[..., top:bottom, left:right]).unbind(0)
        scratch = torch.empty_like(rows[0])
        for one, other in pairs:
            _swap(rows[one], rows[other], weight[one], weight[other], scratch)
        return images
    cut, memory, corners = _Cutter(images), torch.empty_like(images[0]), boxes.tolist()
    for one, other in pairs:
        part, partner = cut(one, corners[one]), cut(other, corners[one])
        scratch = memory.as_strided(part.shape, part.stride())
        if corners[one] == corners[other]:
            _swap(part, partner, weight[one], weight[other], scratch)
        else:
            _blend(part, partner, weight[one], out=scratch)
            _blend(cut(other, corners[other]), cut(one, corners[other]), weight[other])
            part.copy_(scratch)
    return images


def _swap(one: Tensor, other: Tensor, weight: float, other_weight: float, scratch: Tensor) -> None:
    """Mixes two tensors in place, each with the other's old values."""
    _blend(one, other, weight, out=scratch)
    _blend(other, one, other_weight)
    one.copy_(scratch)


def _blend(own: Tensor, partner: Tensor, weight: float, out: Tensor | None = None) -> None:
    """Writes ``(1 - weight) * own + weight * partner`` to ``out``, or to ``own``."""
    if weight in (0, 1):
        if weight or out is not None:
            (own if out is None else out).copy_(partner if weight else own)
    else:
        torch.lerp(own, partner, weight, out=own if out is None else out)


class _Cutter:
    """Views of boxes in a batch's images, in half the time of indexing; a pair needs up to four."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.start, self.leading = images, images.storage_offset(), images.shape[1:-2]
        self.step, *self.strides = images.stride()

    def __call__(self, place: int, box: list[int]) -> Tensor:
        top, bottom, left, right = box
        start = self.start + place * self.step + top * self.strides[-2] + left * self.strides[-1]
        return self.images.as_strided((*self.leading, bottom - top, right - left), self.strides, start)


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements have memory of their own without gaps, which those of an expanded tensor do not."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()

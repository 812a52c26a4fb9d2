"""Callback for MixUp and CutMix of training batches on the device; `mixing.py` has the mathematics."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dlo_framework.batch_transform import BatchTransform, batches_are_new
from dlo_framework.batches import replace_entries
from dlo_framework.data import data_parallel_coordinates
from dlo_framework.errors import DloError, check_number, did_you_mean
from dlo_framework.progress import epochs_of_run, steps_per_epoch
from dlo_plugins.callbacks.mixing import (
    MixPlan,
    MixRecipe,
    draw_plan,
    join_plans,
    mix_images,
    mix_targets,
    soft_targets,
    to_device,
)


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
            self._run_seed = _seed_of_run() if self.seed is None else self.seed

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
        datamodule = getattr(trainer, "datamodule", None)
        found = {
            "BatchMix": self.num_classes,
            type(datamodule).__name__: getattr(datamodule, "num_classes", None),
            type(module).__name__: _setting(module, "num_classes"),
        }
        known = {name: int(value) for name, value in found.items() if isinstance(value, int)}
        if len(set(known.values())) > 1:
            values = ", ".join(f"{name} {value}" for name, value in known.items())
            raise DloError(f"BatchMix: num_classes must be the same everywhere, got {values}; leave BatchMix's out")
        return next(iter(known.values()), None)


def _setting(module: LightningModule, name: str) -> Any:
    """Returns a module's attribute or else its hyperparameter of that name; None without either."""
    value = getattr(module, name, None)
    return value if isinstance(value, int | float) else module.hparams.get(name)


def _seed_of_run() -> int:
    """Returns the seed of ``seed_everything``, or else that of torch's generator: equal on all ranks."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed else torch.initial_seed()


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

"""MixUp and CutMix of training batches on the device; the mathematics is in :mod:`dlo_plugins.mixing`."""

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
from dlo_framework.data import data_parallel_coordinates
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.progress import epochs_of_run, steps_per_epoch
from dlo_plugins.mixing import Plan, Recipe, draw, join, mix_images, mix_targets, soft_targets, to_device


class BatchMix(BatchTransform):
    """Mixes the images of a training batch with one another, MixUp or CutMix, and their targets likewise.

    It works on the device, after transfer, for every model and datamodule. Each image is mixed with its mirror image
    in the order of the batch (first with last), by timm's distribution. Targets become soft, float32 ``[B, C]``,
    throughout training; validation and test are left alone.

    ```yaml
    trainer:
      callbacks:
        - class_path: BatchMix
          init_args: {mixup_alpha: 0.8, cutmix_alpha: 1.0, off_epochs: 10}
    ```

    Args:
        mixup_alpha: MixUp draws lambda from Beta(alpha, alpha); 0 for no MixUp. Default 0.8, as in DeiT.
        cutmix_alpha: CutMix likewise; 0 for no CutMix. Default 1.0, as in its paper: areas are uniform but for what
            the border cuts off.
        cutmix_minmax: draws the sides of CutMix's boxes between two fractions of the image's instead, all of the box
            within the image; ``cutmix_alpha`` then does not matter.
        prob: how likely a batch (mode ``batch``), a pair or an image is mixed at all.
        switch_prob: how likely it is by CutMix, where both are on.
        mode: draw once for the batch, for each ``pair``, or for each image (``elem``).
        label_smoothing: the share of each target that is spread over all classes, before mixing. Default 0; either
            the model or this callback smooths, not both.
        num_classes: C; None takes the datamodule's or the module's ``num_classes``. Dense targets need none.
        multi_label: targets are dense, each class a yes or no of its own, smoothed towards 0.5 instead of 1 / C.
        off_epochs: mix nothing in this many epochs at the end of training. Where ``max_steps`` ends it, epochs to come
            are taken to have as many steps as the present one.
        seed: of the draws; None takes ``seed_everything``'s.
        group_size: mixes within groups of so many images, each with draws of its own; None for one group a batch.
            A run on fewer ranks, with as many images a group as each rank's batch had, mixes the same images by the
            same draws.
        image_key: where a batch has its images: the place in a tuple or list, or the key of a dict.
        target_key: where it has its targets.
        in_place: whether the images of a batch on the CPU may be overwritten, which saves a copy. None: where they are
            surely of that batch alone, with torch's default collation or a datamodule that declares
            ``makes_new_batches``; with a collation or data hooks of your own they are copied. True promises it.

    Raises:
        DloError: on values out of range, label smoothing in the model too, images that are not floating point, and
            targets that do not fit.
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
        self.recipe = Recipe(mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode)
        self.label_smoothing, self.num_classes, self.multi_label = label_smoothing, num_classes, multi_label
        self.off_epochs, self.seed, self.group_size = off_epochs, seed, group_size
        self.image_key, self.target_key, self.in_place = image_key, target_key, in_place
        if not 0 <= label_smoothing < 1:
            raise DloError(f"BatchMix: label_smoothing lies in [0, 1), but was {label_smoothing}; 0.1 is usual")
        if num_classes is not None and num_classes < 2:
            raise DloError(f"BatchMix: num_classes is at least 2, but was {num_classes}")
        if off_epochs < 0 or (seed is not None and seed < 0):
            raise DloError(f"BatchMix: off_epochs and seed are at least 0, but were {off_epochs} and {seed}")
        if group_size is not None and group_size < 2:
            raise DloError(f"BatchMix: a group has at least 2 images, but group_size was {group_size}")
        self._run_seed = seed or 0
        self._batches = 0  # that training was given so far, on each rank
        self._steps = 0  # optimizer steps before the present epoch
        self._classes: int | None = None
        self._checked = False
        self._trainer: Trainer | None = None
        self._shares = 1  # how many ranks' batches a batch is made of

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The seed and the batches so far, from which every rank's random numbers follow, and where the epoch began.

        A batch whose step is not complete, as when it raised, is not counted: a resumed run begins with it again.
        """
        return {"seed": self._run_seed, "batches": self._batches - self._in_step(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the draws of the run that is resumed, unless a ``seed`` of its own is given."""
        self._batches, self._steps = int(state_dict["batches"]), int(state_dict.get("steps", 0))
        if self.seed is None:
            self._run_seed = int(state_dict["seed"])

    def _in_step(self) -> int:
        if self._trainer is None:
            return 0
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready > progress.processed)

    def for_parity(self, shares: int) -> str:
        """Mixes each of so many equal shares of a batch for itself, as that many ranks mix their batches."""
        self._shares = shares
        return "each rank's batch is mixed for itself, in one process too: equal"

    # --- before training -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks what can be known before data load, and finds the seed."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        theirs = _setting(pl_module, "label_smoothing")
        if self.label_smoothing and theirs:
            raise DloError(
                f"label smoothing is applied once, but BatchMix has label_smoothing {self.label_smoothing} and"
                f" {type(pl_module).__name__} has label_smoothing {theirs}, which smooths soft targets too; set one of"
                " them to 0"
            )
        threshold = _setting(pl_module, "bce_threshold")
        if self.label_smoothing and threshold is not None:
            classes = 2 if self.multi_label else self._find_classes(trainer, pl_module)
            share = self.label_smoothing / classes if classes else 0.0
            own = 1 - self.label_smoothing + share
            if not share < threshold < own:
                raise DloError(
                    f"BatchMix: label_smoothing {self.label_smoothing} gives its own class {own:.3g} and each other"
                    f" {share:.3g}, and {type(pl_module).__name__} takes what lies above bce_threshold {threshold} for"
                    " 1 and the rest for 0; set label_smoothing to 0: a threshold takes it back anyway"
                )
        if self.off_epochs and math.isinf(epochs_of_run(trainer)) and trainer.max_steps < 0:
            raise DloError(
                f"BatchMix: off_epochs {self.off_epochs} counts from the end of training, and trainer.max_epochs and"
                " trainer.max_steps are both unlimited; set one of them, or off_epochs to 0"
            )
        self._trainer, self._checked, self._classes = trainer, False, None
        if trainer.current_epoch == 0:  # Also where a fit before has raised. What is resumed is loaded after this.
            self._batches = self._steps = 0
            self._run_seed = _seed_of_run() if self.seed is None else self.seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns where nothing will be mixed."""
        epochs = self._epochs(trainer)
        if self.off_epochs >= epochs:
            rank_zero_warn(
                f"BatchMix mixes nothing: off_epochs is {self.off_epochs}, and the run has {epochs:g} epochs"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps how many steps the epoch begins after."""
        self._steps = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets go of the trainer."""
        super().teardown(trainer, pl_module, stage)
        self._trainer = None

    # --- in training ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with mixed images and soft targets."""
        images, targets = _take(batch, self.image_key), _take(batch, self.target_key)
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
        return _put(batch, {self.image_key: images, self.target_key: soft})

    def is_on(self, trainer: Trainer) -> bool:
        """Returns whether the current epoch is none of the last ``off_epochs``."""
        return not self.off_epochs or trainer.current_epoch < self._epochs(trainer) - self.off_epochs

    def _epochs(self, trainer: Trainer) -> float:
        """Returns how many epochs the run has, 2.5 where the third ends in the middle; infinite without an end."""
        epochs = epochs_of_run(trainer)
        if trainer.max_steps >= 0:
            left = (trainer.max_steps - self._steps) / steps_per_epoch(trainer)
            epochs = min(epochs, trainer.current_epoch + left)
        return epochs

    def plan(self, number: int, rank: int, shape: torch.Size) -> Plan:
        """Returns what is drawn for one batch on one rank.

        It is a pure function of the seed, the arguments and the recipe. The generator of a group is seeded by (seed,
        number of the batch, place of the group among those of all ranks).

        Args:
            number: batches before this one.
            rank: among those that see different data; ranks that share a model replica mix alike.
            shape: of the images, ``[B, ..., H, W]``.
        """
        size = self.group_size or -(-shape[0] // self._shares)
        starts = range(0, shape[0], size)
        height, width = shape[-2:] if len(shape) > 2 else (1, 1)
        plans = []
        for place, start in enumerate(starts, rank * len(starts)):
            random = np.random.default_rng([self._run_seed, number, place])
            plans.append(draw(self.recipe, min(size, shape[0] - start), height, width, random))
        return join(plans)

    def _check(self, trainer: Trainer, module: LightningModule, images: Any, targets: Any) -> None:
        """Checks the first batch, so that later ones need not wait for the device, and finds the classes."""
        least = 3 if self.recipe.cuts else 2
        if not isinstance(images, Tensor) or not images.is_floating_point() or images.ndim < least:
            given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise DloError(
                f"BatchMix mixes floating-point images [B, ..., H, W], but batch[{self.image_key!r}] was {given};"
                " convert images in on_after_batch_transfer, and set image_key to where they are"
            )
        if not isinstance(targets, Tensor) or targets.ndim not in (1, 2) or len(targets) != len(images):
            given = str(list(targets.shape)) if isinstance(targets, Tensor) else type(targets).__name__
            raise DloError(
                f"BatchMix mixes targets [B] of class indices or [B, C], here with B = {len(images)}, but"
                f" batch[{self.target_key!r}] was {given}; set target_key to where they are"
            )
        classes = self._find_classes(trainer, module)
        if targets.ndim == 2:
            if classes not in (None, targets.shape[1]):
                raise DloError(f"BatchMix: num_classes is {classes}, but targets have {targets.shape[1]} columns")
            classes = targets.shape[1]
        elif self.multi_label or targets.is_floating_point():
            raise DloError(
                f"BatchMix: {'multi_label' if self.multi_label else 'floating-point'} targets are dense, [B, C], but"
                f" were {targets.dtype} {list(targets.shape)}; give class indices as integers, without multi_label"
            )
        elif classes is None:
            raise DloError(
                "BatchMix: the number of classes is not given, and neither datamodule nor module has num_classes;"
                f" set num_classes (the first batch has classes up to {int(targets.max())})"
            )
        elif int(targets.min()) < 0 or int(targets.max()) >= classes:
            raise DloError(
                f"BatchMix: class indices lie in 0..{classes - 1}, but the first batch has {int(targets.min())}.."
                f"{int(targets.max())}; set num_classes to the number there are"
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
            said = ", ".join(f"{name} {value}" for name, value in known.items())
            raise DloError(f"BatchMix: one number of classes, but num_classes is {said}; leave BatchMix's out")
        return next(iter(known.values()), None)


def _setting(module: LightningModule, name: str) -> Any:
    """Returns a module's attribute or, where it has none, its hyperparameter of that name; None without either."""
    value = getattr(module, name, None)
    return value if isinstance(value, int | float) else module.hparams.get(name)


def _seed_of_run() -> int:
    """Returns the seed that ``seed_everything`` was given, else that of torch's generator: equal on all ranks."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given else torch.initial_seed()


def _take(batch: Any, key: int | str) -> Any:
    """Returns an entry of a batch."""
    if isinstance(batch, dict) and key in batch:
        return batch[key]
    if isinstance(batch, tuple | list) and isinstance(key, int) and -len(batch) <= key < len(batch):
        return batch[key]
    if isinstance(batch, dict):
        given, near = f"a dict with {', '.join(map(repr, batch))}", did_you_mean(str(key), map(str, batch))
    else:
        given = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        near = ""
    raise DloError(
        f"BatchMix finds images at image_key and targets at target_key, but a batch is {given} and has no"
        f" {key!r}{near or '; set both keys'}"
    )


def _put(batch: Any, entries: dict[int | str, Any]) -> Any:
    """Returns a batch of the same kind with other entries; the one given is not changed."""
    if isinstance(batch, dict):
        return type(batch)({**batch, **entries})
    values = list(batch)
    for key, value in entries.items():
        assert isinstance(key, int)
        values[key] = value
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)

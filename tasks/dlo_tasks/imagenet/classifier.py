"""Task `ImageClassifier`: image classification with any timm model.

Losses and top-k hits are those of each sample, so that means are exact. Shapes: B samples, C classes. Targets are class
indices `[B]`, or soft targets `[B, C]` (each row a distribution, as MixUp produces them). A class of -1 (:data:`VOID`,
with which datasets of earlier versions marked padding) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.data import VOID
from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.attention import Attention
from dlo_framework.models.experts.balance import RouterTraining
from dlo_framework.models.experts.mixture_options import MixtureOptions, read_options
from dlo_framework.models.experts.routers import BIAS
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_framework.task_abilities import ChannelGroup, Distillable, KeepsBuffers, PrunesChannels, Resizable
from dlo_tasks import optim
from dlo_tasks.imagenet import classifier_logs, timm_models, vision_attention
from dlo_tasks.imagenet.classifier_logs import Confusion, SampleMean
from dlo_tasks.imagenet.timm_models import plan_for


class ImageClassifier(Task, Distillable, KeepsBuffers, PrunesChannels, Resizable):
    """Trains any timm model to classify images.

    Batches are `(images, targets)`: normalised images `[B, 3, H, W]`, and targets that are class indices `[B]` (-1 for
    a padding sample) or soft targets `[B, C]`. Validation and test log `loss` (plain cross-entropy, without smoothing),
    `acc1`, and `acc5` if there are more than 5 classes: exact means over all samples of all ranks. TensorBoard shows a
    few training images of the first batch, and the confusion matrix of the last validation when training ends (or of a
    separate validation or test run that has a logger).

    Args:
        model: Name of the model in timm; `python -c 'import timm; print(timm.list_models())'` lists them.
        model_args: Further arguments of the model's constructor, such as `drop_path_rate`.
        pretrained: Whether to download timm's weights and start from them.
        num_classes: Number of classes; None reads it from the data.
        image_size: Height and width of the images in pixels, for models built for one size; None reads it from the
            data.
        position_embedding: `sincos2d` replaces a ViT's learned position embedding by fixed sines and cosines.
        loss_name: `cross_entropy`, or `bce`, binary cross-entropy for each class (DeiT III).
        label_smoothing: Fraction of each target that is spread over all classes, also for soft targets.
        bce_threshold: Threshold of `bce` above which targets become 1, and the others 0; DeiT III uses 0. It is
            applied after `label_smoothing` and undoes it, so it must be above the smoothing of each class.
        optimizer: Name of the optimizer in timm: `adamw`, `lamb`, `lars`, `muon`, `sgd` (Nesterov),
            `momentum`...; in dlo's list: `adamw8bit`, `soap`, `adamw_schedulefree`...; or of a class under `plugins:`,
            or the path of a class.
        lr: Base learning rate for the given global batch, or with `lr_scaling` for its reference batch.
        weight_decay: Weight decay; norms, biases and parameters that the model exempts have none.
        optimizer_args: Further arguments of the optimizer, such as `betas` or `momentum`.
        layer_decay: Ratio of the learning rates of a layer and the next one (fine-tuning: 0.65 to 0.8).
        schedule: Decay of the learning rate after the warm-up, `cosine` or `linear`; `constant` uses no
            scheduler, so that a callback can set the rate.
        warmup_epochs: Length of the linear warm-up in epochs; may be fractional.
        warmup_steps: Length of the linear warm-up in optimizer steps; overrides `warmup_epochs`.
        warmup_lr: Learning rate at the first step of the warm-up.
        min_lr: Learning rate at the end of training.
        lr_scaling: Scaling of `lr` and `min_lr` by the samples of an optimizer step: `{reference_batch: 256, rule:
            linear}`, or `rule: sqrt`. None does not scale.
        ema_decay: Decay of an exponential moving average of the weights, which is then evaluated and saved; None
            keeps none.
        channels_last: Whether images and convolutions use channels-last memory, which is faster for
            convolutional models in mixed precision on GPUs.
        log_images: Number of training images to log; 0 logs none.
        attention: Kernel and mask of a ViT's attention, `{mask: {class_path: BigBird}}`; by default timm's own.
        experts: Mixtures of experts in the place of MLPs (V-MoE), which start as copies of the MLP: `{count: 8, every:
            2, top_k: 2}`; by default none.

    Raises:
        DloError: If a model, optimizer or argument is unknown, or values contradict each other.
    """

    #: Metric that selects the best checkpoint.
    best_metric = ("val_acc1", "max")

    def __init__(
        self,
        model: str = "vit_small_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        num_classes: int | None = None,
        image_size: int | None = None,
        position_embedding: Literal["learned", "sincos2d"] = "learned",
        loss_name: LossName = "cross_entropy",
        label_smoothing: float = 0.0,
        bce_threshold: float | None = None,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        optimizer_args: dict[str, Any] | None = None,
        layer_decay: float | None = None,
        schedule: Literal["cosine", "linear", "constant"] = "cosine",
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        warmup_lr: float = 0.0,
        min_lr: float = 0.0,
        lr_scaling: dict[str, Any] | None = None,
        ema_decay: float | None = None,
        channels_last: bool = False,
        log_images: int = 16,
        attention: Attention | None = None,
        experts: MixtureOptions | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["attention", "experts"])
        self.attention = vision_attention.read_option(attention)
        # Stored as plain data in checkpoints; `load_from_checkpoint` passes it as a dict.
        self.hparams["attention"] = None if self.attention is None else self.attention.settings()
        self.experts = read_options(experts)
        self.hparams["experts"] = None if self.experts is None else self.experts.settings()
        self.model_name, self.model_args, self.pretrained = model, dict(model_args or {}), pretrained
        self.num_classes, self.image_size, self.channels_last = num_classes, image_size, channels_last
        self.position_embedding, self.log_images = position_embedding, log_images
        self.loss_name: LossName = loss_name
        self.label_smoothing, self.bce_threshold = label_smoothing, bce_threshold
        self.optimizer_name, self.optimizer_args = optimizer, dict(optimizer_args or {})
        self.lr, self.weight_decay, self.layer_decay = lr, weight_decay, layer_decay
        self.schedule, self.warmup_epochs, self.warmup_steps = schedule, warmup_epochs, warmup_steps
        self.warmup_lr, self.min_lr, self.ema_decay = warmup_lr, min_lr, ema_decay
        self.lr_scaling = lr_scaling
        self._ema: WeightEMA | None = None
        self._checked = False
        timm_models.check_name(model, pretrained=pretrained)
        self._check_values()

    def _check_values(self) -> None:
        optim.check_options(self, self.layer_decay)
        check_number("label_smoothing", self.label_smoothing, "at least 0 and below 1", "0.1 is usual")
        if self.ema_decay is not None:
            WeightEMA(self.ema_decay)
        if self.experts is not None and self.experts.count is None:
            raise DloError("experts.count must be at least 2, got none; 8 is usual")
        if self.bce_threshold is not None:
            if self.loss_name != "bce":
                raise DloError(f"bce_threshold must have loss_name: bce, got {self.loss_name}; set it")
            check_threshold(self.bce_threshold, self.label_smoothing, self.num_classes)
        check_number("num_classes", self.num_classes, "at least 2", "leave it out to read the data's")

    # --- before training -----------------------------------------------------------------------------------

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Checks the number of classes and the image size against the data, and that model and optimizer can be built.

        Raises:
            DloError: If something does not fit; the message has the fix.
        """
        self._read_data(datamodule)
        if self.image_size is not None:
            timm_models.check_image_size(self.model_name, self.model_args, self.image_size)
            evaluated = DataDescription(datamodule).eval_image_size or self.image_size
            timm_models.check_eval_size(self.model_name, self.model_args, self.image_size, evaluated)
        with torch.device("meta"):
            model = self._build(pretrained=False)
        self._optimizer(model)
        self._checked = True

    def setup(self, stage: str) -> None:
        """Reads open settings from the data, and builds the metrics."""
        if not self._checked:
            self.check(run_datamodule(self.trainer))
        if not hasattr(self, "measures"):
            assert self.num_classes is not None
            names = ["loss", "acc1", "acc5"] if self.num_classes > 5 else ["loss", "acc1"]
            self.measures = nn.ModuleDict({name: SampleMean() for name in names})
            self.confusion = Confusion(self.num_classes)

    def _read_data(self, datamodule: LightningDataModule | None) -> None:
        data = DataDescription(datamodule)
        theirs = data.num_classes
        if theirs is not None and int(theirs) < 2:
            where, names = data.root or type(datamodule).__name__, data.class_names
            raise DloError(
                f"the data must have at least 2 classes, got {theirs}{f' ({names[0]})' if names else ''} in {where};"
                " set data.init_args.root to the folder whose subfolders are the classes"
            )
        if self.num_classes is None:
            if theirs is None:
                raise DloError("num_classes must be set for data without it, got none; set model.init_args.num_classes")
            self.num_classes = int(theirs)
        elif theirs is not None and int(theirs) != self.num_classes:
            raise DloError(
                f"num_classes must be the data's {theirs}, got {self.num_classes}; set"
                f" model.init_args.num_classes={theirs}, or leave it out to read the data's"
            )
        if self.bce_threshold is not None:
            check_threshold(self.bce_threshold, self.label_smoothing, self.num_classes)
        channels, given = self.model_args.get("in_chans", 3), data.channels
        if given is not None and channels != given:
            raise DloError(
                f"in_chans must be {given}, the channels of {type(datamodule).__name__}'s images, got {channels};"
                " remove in_chans from model_args"
            )
        if self.image_size is None and isinstance(data.image_size, int):
            self.image_size = data.image_size
        # Saved with a checkpoint, so that `load_from_checkpoint` builds the same model without data.
        self.hparams["num_classes"], self.hparams["image_size"] = self.num_classes, self.image_size

    def _build(self, *, pretrained: bool) -> nn.Module:
        assert self.num_classes is not None
        model = timm_models.build(
            self.model_name,
            self.model_args,
            num_classes=self.num_classes,
            image_size=self.image_size,
            pretrained=pretrained,
        )
        if self.position_embedding == "sincos2d":
            timm_models.set_sincos_positions(model)
        if self.experts is not None:
            timm_models.add_mixtures(model, plan_for(model), self.experts)
        self._kernel = vision_attention.masked_vision_model(model, self.attention, self._attention_device)
        return model

    @property
    def _attention_device(self) -> torch.device | None:
        """Device of the attention's kernel; None before the ranks of an accelerator start."""
        if self._trainer is None:
            return torch.device("cpu")
        device = self.trainer.strategy.root_device
        return device if device.type == "cpu" or self._checked else None

    def configure_model(self) -> None:
        """Builds the timm model, once."""
        if self.has_model:
            return
        if self.num_classes is None:
            raise DloError("num_classes must be set to build the model, got none; set model.init_args.num_classes")
        self.model = self._build(pretrained=self.pretrained)
        if self._trainer is not None and self.trainer.is_global_zero:
            vision_attention.log_kernel(self.model, self._kernel)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)

    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan of the timm model's family; see :mod:`dlo_tasks.imagenet.timm_models`."""
        return plan_for(self.model)

    def full_precision_buffers(self) -> list[str]:
        """Returns the loss-free biases of routers, whose steps half precision would round away."""
        return [name for name, _ in self.named_buffers() if name.endswith(BIAS)]

    def channel_groups(self) -> list[ChannelGroup]:
        """Returns the inner channels of ResNet's bottlenecks and of MBConv blocks."""
        return timm_models.channel_groups(self.model)

    def resized(self, saved: Mapping[str, Any], **sizes: float) -> dict[str, Any]:
        """Returns `model_args` of a model with fewer heads, hidden units, blocks or channels."""
        return {
            "model_args": timm_models.resized_args(self.on_meta().model, self.model_args, sizes),
            "pretrained": False,
        }

    def configure_callbacks(self) -> list[Callback]:
        """Returns the callbacks of the average of the weights (`ema_decay`), of the routers, and of the optimizer."""
        callbacks = optim.optimizer_callbacks(self.optimizer_name)
        if self.experts is not None:
            callbacks.append(RouterTraining(self.experts))
        if self.ema_decay is None:
            return callbacks
        self._ema = WeightEMA(self.ema_decay)
        return [self._ema, *callbacks]

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return optim.build_optimizer(
            model,
            self.optimizer_name,
            lr=self.lr,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            args=self.optimizer_args,
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the optimizer, with a learning-rate scheduler unless the schedule is `constant`."""
        return optim.configure(self, self._optimizer(self.model))

    # --- steps ---------------------------------------------------------------------------------------------

    def example_batch(self, datamodule: LightningDataModule | None) -> tuple[Tensor, Tensor] | None:
        """Returns a black image and its label."""
        if self.image_size is None:
            return None
        channels = self.model_args.get("in_chans", 3)
        return torch.zeros(1, channels, self.image_size, self.image_size), torch.zeros(1, dtype=torch.long)

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the images, in the weights' precision: the datamodule normalises in float32."""
        images = batch[0] if isinstance(batch, tuple | list) else batch
        images = images.to(self.dtype) if images.is_floating_point() else images
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images,), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the mean training loss of a batch's samples, in float32."""
        targets = batch[1]
        if self.loss_name == "bce":
            values = binary_cross_entropy(outputs, targets, self.label_smoothing, self.bce_threshold)
        else:
            values = cross_entropy(outputs, targets, self.label_smoothing)
        return mean_of_real(values, targets)

    @property
    def class_count(self) -> int | None:
        """Number of classes."""
        return self.num_classes

    def batch_mean(self, values: Tensor, batch: Any) -> Tensor:
        """Returns the mean over a batch's samples, without padding samples."""
        per_sample = values if values.ndim == 1 else values.flatten(1).mean(dim=1)
        real = is_real(batch[1])
        return mean_of_real(per_sample.masked_fill(~real, 0.0), batch[1])

    def use_distillation_token(self, on: bool = True) -> bool:
        """Makes a distilled model of timm return the logits of both tokens in training, or their mean."""
        switch = getattr(self.model, "set_distilled_training", None)
        if switch is None:
            return False
        switch(on)
        return True

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Metric | Tensor]:
        """Updates and returns loss, top-1 and top-5 of the stage; updates the confusion matrix too."""
        targets = batch[1]
        real = is_real(targets)
        hits = hits_at(outputs, targets, 5 if "acc5" in self.measures else 1)
        values = {"loss": cross_entropy(outputs, targets), "acc1": hits[:, 0], "acc5": hits.any(dim=1)}
        metrics: dict[str, Metric | Tensor] = {}
        for name, measure in self.measures.items():
            assert isinstance(measure, SampleMean)
            measure.update(values[name], real)
            metrics[name] = measure
        classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
        self.confusion.update(outputs.argmax(dim=1), classes, real)
        return metrics

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the class probabilities, `[B, C]`; independent ones with `bce`."""
        logits = super().predict_step(batch, batch_idx).float()
        if isinstance(batch, tuple | list):
            logits = logits[is_real(batch[1])]
        return logits.sigmoid() if self.loss_name == "bce" else logits.softmax(dim=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the averaged weights into a weights-only checkpoint, as in a full one."""
        if self._ema is not None:
            self._ema.average_only(self.trainer, self, checkpoint)

    # --- pictures ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Shows a few images of the run's first batch, as the model gets them."""
        if self.log_images and batch_idx == 0 and self.trainer.global_step == 0:
            classifier_logs.show_images(self.trainer, batch, self.log_images, self.num_classes or 0)

    def on_validation_epoch_start(self) -> None:
        """Resets the confusion matrix."""
        self.confusion.reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Shows the confusion matrix of a separate validation run."""
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            classifier_logs.show_confusion(self.trainer, self.confusion, "val")

    def on_test_epoch_end(self) -> None:
        """Shows the confusion matrix."""
        classifier_logs.show_confusion(self.trainer, self.confusion, "test")

    def on_train_end(self) -> None:
        """Shows the confusion matrix of the last validation."""
        classifier_logs.show_confusion(self.trainer, self.confusion, "val")


LossName = Literal["cross_entropy", "bce"]


def is_real(targets: Tensor) -> Tensor:
    """Returns a mask of the samples that count, `[B]` of bool: all except those whose target is VOID."""
    if targets.is_floating_point():
        return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    return targets != VOID


def dense_targets(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns targets as `[B, C]` distributions, smoothed towards uniform; a VOID row becomes class 0.

    Label smoothing (Szegedy et al. 2016, arXiv 1512.00567) gives each class `smoothing / C` and the target the rest. It
    applies to soft targets too, so MixUp must not smooth them itself.
    """
    if not targets.is_floating_point():
        targets = F.one_hot(targets.clamp(min=0), num_classes).float()
    return targets * (1 - smoothing) + smoothing / num_classes


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of each sample, `[B]` in float32; 0 for a VOID sample."""
    logits = logits.float()
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets.float(), reduction="none", label_smoothing=smoothing)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=VOID, label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Returns the binary cross-entropy of each sample, averaged over its classes: `[B]` in float32.

    Each class is an independent binary target, as in "ResNet strikes back" (Wightman et al. 2021, arXiv 2110.00476) and
    DeiT III, where a mixed image has both of its classes in full: `threshold=0`.

    Args:
        logits: Logits, `[B, C]`.
        targets: Class indices or soft targets.
        smoothing: Label smoothing, applied before the threshold.
        threshold: Threshold above which targets become 1, and the others 0; None keeps them.
    """
    dense = dense_targets(targets, logits.shape[1], smoothing)
    if threshold is not None:
        dense = (dense > threshold).float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), dense, reduction="none").mean(dim=1)
    return losses.masked_fill(~is_real(targets), 0.0)


def check_threshold(threshold: float, smoothing: float, num_classes: int | None) -> None:
    """Checks that a threshold separates a sample's class from the others after smoothing.

    Args:
        threshold: Threshold of :func:`binary_cross_entropy`.
        smoothing: Label smoothing of :func:`binary_cross_entropy`.
        num_classes: Number of classes; None if it is not known yet.

    Raises:
        DloError: If it does not separate them.
    """
    check_number("bce_threshold", threshold, "at least 0 and below 1", "DeiT III has 0, ResNet strikes back 0.2")
    others = smoothing / num_classes if num_classes else 0.0
    own = 1 - smoothing + others if num_classes else 1.0
    if not smoothing or others < threshold < own:
        return
    side, value = ("above", 1) if threshold <= others else ("at or below", 0)
    shares = f" ({own:.3g} for its own of {num_classes} classes, {others:.3g} for others)" if num_classes else ""
    raise DloError(
        f"bce_threshold must separate smoothed targets, got {threshold} with label_smoothing {smoothing}{shares}: all"
        f" targets are {side} it and become {value}; set label_smoothing to 0: a threshold undoes it anyway"
    )


def mean_of_real(values: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of `values`, `[B]` and 0 for VOID samples, over the samples that count; 0 if there are none."""
    if targets.is_floating_point():
        return values.mean()
    return values.sum() / (targets != VOID).sum().clamp(min=1)


def hits_at(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Returns a `[B, k]` bool tensor: whether the class of the j-th highest logit is the target.

    The target of a soft row is its largest class. `hits[:, 0]` is a top-1 hit, `hits.any(1)` a top-k hit.
    """
    classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
    return logits.topk(k, dim=1).indices == classes[:, None]

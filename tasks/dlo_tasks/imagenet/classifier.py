"""Image classification with any timm model: the task `ImageClassifier`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_tasks import optim
from dlo_tasks.imagenet import losses, models, show
from dlo_tasks.imagenet.measures import Confusion, SampleMean
from dlo_tasks.imagenet.plans import plan_for


class ImageClassifier(Task):
    """Trains any timm model to classify images.

    Batches are `(images, targets)`: images `[B, 3, H, W]` normalised, targets class indices `[B]` (-1 for a
    sample that only pads) or soft targets `[B, C]`. Validation and test log `loss` (plain cross-entropy,
    without smoothing), `acc1`, and `acc5` where there are more than 5 classes: exact means over all samples
    of all ranks. TensorBoard gets a few training images at the first batch, and the confusion matrix of the
    last validation when training ends (and of a validation or test run by itself, where that has a logger).

    Args:
        model: timm's name of the model; `python -c 'import timm; print(timm.list_models())'` lists them.
        model_args: More arguments for its constructor, such as `drop_path_rate`.
        pretrained: Whether to download timm's weights and start from them.
        num_classes: Number of classes; None takes it from the data.
        image_size: Height and width of the images in pixels, for models built for one size; None takes it
            from the data.
        position_embedding: `sincos2d` replaces a ViT's learned position embedding by fixed sines and cosines.
        loss_name: `cross_entropy`, or `bce`: each class its own yes or no (DeiT III).
        label_smoothing: Share of each target that is spread over all classes. Soft targets are smoothed too.
        bce_threshold: With `bce`, targets above it become 1 and the others 0; DeiT III's is 0. It comes after
            `label_smoothing`, which it takes back, and so is to lie above the share that smoothing gives each class.
        optimizer: timm's name of the optimizer: `adamw`, `lamb`, `lars`, `muon`, `sgd` (Nesterov),
            `momentum`...
        lr: Base learning rate, for the global batch as it is.
        weight_decay: Weight decay; norms, biases and what the model exempts have none.
        optimizer_args: More arguments for the optimizer, such as `betas` or `momentum`.
        layer_decay: Learning rate of each layer over that of the layer after it (fine-tuning: 0.65 to 0.8).
        schedule: How the learning rate falls after the warm-up, `cosine` or `linear`; `constant` has no
            scheduler at all, and leaves the learning rate to a callback.
        warmup_epochs: Epochs of linear warm-up; may be a part of one.
        warmup_steps: Optimizer steps of linear warm-up; holds over `warmup_epochs`.
        warmup_lr: Learning rate at the first step of the warm-up.
        min_lr: Learning rate at the end of training.
        ema_decay: Decay of an exponential moving average of the weights, which is then what is evaluated and
            saved; None for none.
        channels_last: Whether to keep images and convolutions in channels-last memory, which is faster for
            convolutional models in mixed precision on GPUs.
        log_images: How many training images to show in TensorBoard; 0 for none.

    Raises:
        DloError: for an unknown model, optimizer or argument, and values that do not fit each other.
    """

    #: What tells the best checkpoint.
    best_metric = ("val_acc1", "max")

    def __init__(
        self,
        model: str = "vit_small_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        num_classes: int | None = None,
        image_size: int | None = None,
        position_embedding: Literal["learned", "sincos2d"] = "learned",
        loss_name: losses.LossName = "cross_entropy",
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
        ema_decay: float | None = None,
        channels_last: bool = False,
        log_images: int = 16,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model_name, self.model_args, self.pretrained = model, dict(model_args or {}), pretrained
        self.num_classes, self.image_size, self.channels_last = num_classes, image_size, channels_last
        self.position_embedding, self.log_images = position_embedding, log_images
        self.loss_name: losses.LossName = loss_name
        self.label_smoothing, self.bce_threshold = label_smoothing, bce_threshold
        self.optimizer_name, self.optimizer_args = optimizer, dict(optimizer_args or {})
        self.lr, self.weight_decay, self.layer_decay = lr, weight_decay, layer_decay
        self.schedule, self.warmup_epochs, self.warmup_steps = schedule, warmup_epochs, warmup_steps
        self.warmup_lr, self.min_lr, self.ema_decay = warmup_lr, min_lr, ema_decay
        self._ema: WeightEMA | None = None
        self._checked = False
        models.check_name(model, pretrained=pretrained)
        optim.check_optimizer(optimizer)
        self._check_values()

    def _check_values(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise DloError(f"label_smoothing lies in [0, 1), given {self.label_smoothing}; 0.1 is usual")
        optim.check_rates(self.lr, min_lr=self.min_lr, warmup_lr=self.warmup_lr)
        optim.check_warmup(self.warmup_epochs, self.warmup_steps)
        optim.check_decays(self.weight_decay, self.layer_decay)
        if self.ema_decay is not None:
            WeightEMA(self.ema_decay)
        if self.bce_threshold is not None:
            if self.loss_name != "bce":
                raise DloError(f"bce_threshold needs loss_name: bce, given loss_name: {self.loss_name}")
            losses.check_threshold(self.bce_threshold, self.label_smoothing, self.num_classes)
        if self.num_classes is not None and self.num_classes < 2:
            raise DloError(f"num_classes is at least 2, given {self.num_classes}; leave it out to take the data's")

    # --- before training -----------------------------------------------------------------------------------

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Checks classes and image size against the data, and that model and optimizer can be built.

        Raises:
            DloError: if something does not fit; the message computes the fix.
        """
        self._fit_to(datamodule)
        if self.image_size is not None:
            models.check_image_size(self.model_name, self.model_args, self.image_size)
            evaluated = getattr(datamodule, "eval_image_size", None) or self.image_size
            models.check_eval_size(self.model_name, self.model_args, self.image_size, evaluated)
        with torch.device("meta"):
            model = self._build(pretrained=False)
        self._optimizer(model)
        self._checked = True

    def setup(self, stage: str) -> None:
        """Takes what was left to the data, and makes the metrics."""
        if not self._checked:
            self.check(getattr(self.trainer, "datamodule", None))
        if not hasattr(self, "measures"):
            assert self.num_classes is not None
            names = ["loss", "acc1", "acc5"] if self.num_classes > 5 else ["loss", "acc1"]
            self.measures = nn.ModuleDict({name: SampleMean() for name in names})
            self.confusion = Confusion(self.num_classes)

    def _fit_to(self, datamodule: LightningDataModule | None) -> None:
        theirs = getattr(datamodule, "num_classes", None)
        if theirs is not None and int(theirs) < 2:
            where = getattr(datamodule, "root", None) or type(datamodule).__name__
            names = getattr(datamodule, "class_names", None)
            raise DloError(
                f"a classifier tells at least 2 classes apart, but the data in {where} have {theirs}"
                f"{f': {names[0]}' if names else ''}; name the folder whose folders are the classes"
            )
        if self.num_classes is None:
            if theirs is None:
                raise DloError("num_classes is not given, and the data do not tell it; set model.init_args.num_classes")
            self.num_classes = int(theirs)
        elif theirs is not None and int(theirs) != self.num_classes:
            raise DloError(
                f"the model has {self.num_classes} classes and the data {theirs}; set"
                f" model.init_args.num_classes={theirs}, or leave it out to take the data's"
            )
        if self.bce_threshold is not None:
            losses.check_threshold(self.bce_threshold, self.label_smoothing, self.num_classes)
        channels, given = self.model_args.get("in_chans", 3), getattr(datamodule, "channels", None)
        if given is not None and channels != given:
            raise DloError(
                f"the model takes images of {channels} channels (model_args: in_chans), and"
                f" {type(datamodule).__name__} gives {given}; leave in_chans out"
            )
        size = getattr(datamodule, "image_size", None)
        if self.image_size is None and isinstance(size, int):
            self.image_size = size
        # Saved with a checkpoint, so that `load_from_checkpoint` needs no data to build the same model.
        self.hparams["num_classes"], self.hparams["image_size"] = self.num_classes, self.image_size

    def _build(self, *, pretrained: bool) -> nn.Module:
        assert self.num_classes is not None
        model = models.build(
            self.model_name,
            self.model_args,
            num_classes=self.num_classes,
            image_size=self.image_size,
            pretrained=pretrained,
        )
        if self.position_embedding == "sincos2d":
            models.set_sincos_positions(model)
        return model

    def configure_model(self) -> None:
        """Builds the timm model, once."""
        if self.has_model:
            return
        if self.num_classes is None:
            raise DloError("num_classes is not given, and no data have told it; set model.init_args.num_classes")
        self.model = self._build(pretrained=self.pretrained)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)

    def parallel_plan(self) -> ParallelPlan:
        """Returns the plan of the timm model's family; see :mod:`dlo_tasks.imagenet.plans`."""
        return plan_for(self.model)

    def configure_callbacks(self) -> list[Callback]:
        """Returns the weight average, if there is one."""
        if self.ema_decay is None:
            return []
        self._ema = WeightEMA(self.ema_decay)
        return [self._ema]

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
        """Returns the optimizer, with the schedule of its rate unless that is `constant`."""
        return optim.scheduled(
            self._optimizer(self.model),
            self._trainer,
            self.schedule,
            warmup_epochs=self.warmup_epochs,
            warmup_steps=self.warmup_steps,
            start=self.warmup_lr / self.lr,
            end=self.min_lr / self.lr,
        )

    # --- steps ---------------------------------------------------------------------------------------------

    def example_batch(self, datamodule: LightningDataModule | None) -> tuple[Tensor, Tensor] | None:
        """Returns a black image and its label."""
        if self.image_size is None:
            return None
        channels = self.model_args.get("in_chans", 3)
        return torch.zeros(1, channels, self.image_size, self.image_size), torch.zeros(1, dtype=torch.long)

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the images, in the weights' precision: the datamodule normalises to single."""
        images = batch[0] if isinstance(batch, tuple | list) else batch
        images = images.to(self.dtype) if images.is_floating_point() else images
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images,), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the mean training loss of a batch's samples, in float32."""
        targets = batch[1]
        if self.loss_name == "bce":
            values = losses.binary_cross_entropy(outputs, targets, self.label_smoothing, self.bce_threshold)
        else:
            values = losses.cross_entropy(outputs, targets, self.label_smoothing)
        return losses.mean_of_real(values, targets)

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Metric | Tensor]:
        """Updates and returns loss, top-1 and top-5 of the stage; counts the confusion matrix too."""
        targets = batch[1]
        real = losses.is_real(targets)
        hits = losses.hits_at(outputs, targets, 5 if "acc5" in self.measures else 1)
        values = {"loss": losses.cross_entropy(outputs, targets), "acc1": hits[:, 0], "acc5": hits.any(dim=1)}
        found: dict[str, Metric | Tensor] = {}
        for name, measure in self.measures.items():
            assert isinstance(measure, SampleMean)
            measure.update(values[name], real)
            found[name] = measure
        classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
        self.confusion.update(outputs.argmax(dim=1), classes, real)
        return found

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the probabilities of the classes, `[B, C]`; with `bce` each class's own."""
        logits = super().predict_step(batch, batch_idx).float()
        if isinstance(batch, tuple | list):
            logits = logits[losses.is_real(batch[1])]
        return logits.sigmoid() if self.loss_name == "bce" else logits.softmax(dim=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Makes a weights-only checkpoint hold the averaged weights too, as a full one does."""
        if self._ema is not None:
            self._ema.average_only(self.trainer, self, checkpoint)

    # --- pictures ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Shows a few images of the run's first batch, as they reach the model."""
        if self.log_images and batch_idx == 0 and self.trainer.global_step == 0:
            show.show_images(self.trainer, batch, self.log_images, self.num_classes or 0)

    def on_validation_epoch_start(self) -> None:
        """Starts the confusion matrix anew."""
        self.confusion.reset()

    def on_test_epoch_start(self) -> None:
        """Starts the confusion matrix anew."""
        self.confusion.reset()

    def on_validation_epoch_end(self) -> None:
        """Shows the confusion matrix of a validation that is a run of its own."""
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            show.show_confusion(self.trainer, self.confusion, "val")

    def on_test_epoch_end(self) -> None:
        """Shows the confusion matrix."""
        show.show_confusion(self.trainer, self.confusion, "test")

    def on_train_end(self) -> None:
        """Shows the confusion matrix of the last validation."""
        show.show_confusion(self.trainer, self.confusion, "val")

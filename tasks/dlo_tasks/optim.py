"""Optimizers by name through timm's factory, their parameter groups, and the learning-rate schedule.

Guarantees: each parameter group has a `name` (`decay`, `no_decay`, `layer_3_decay`, ...) and an `lr_scale`, and its
`lr` is already the base rate times `lr_scale`. A torch scheduler multiplies the rates it finds, so it keeps the scales;
code that sets `group["lr"]` must multiply by `group["lr_scale"]` itself.

The option `lr_scaling` sets rates in proportion to the batch, or to its root: "k times the batch, k times the step".

- linear: Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. Goyal et al., 2017, arXiv 1706.02677.
- sqrt: One weird trick for parallelizing convolutional neural networks. Krizhevsky, 2014, arXiv 1404.5997; for Adam and
  LAMB, You et al., 2019, arXiv 1904.00962.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from timm.models import group_parameters
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.errors import DloError, check_number, did_you_mean, unknown_hint
from dlo_framework.optimizers import OPTIMIZERS
from dlo_framework.progress import check_end, epochs_seen, fraction_at, fraction_seen, steps_per_epoch
from dlo_framework.registry.registry import allowed_roots, check_class_path
from dlo_framework.task import training_parameters

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.utilities.types import OptimizerLRScheduler

Shape = Literal["cosine", "linear"]
#: Rules of the options that are numbers, each with what is usual.
_RULES = {
    "lr": ("above 0", "0.001 is usual for adamw"),
    "warmup_epochs": ("at least 0", "0 switches the warm-up off"),
    "warmup_steps": ("at least 0", "leave it out to count the warm-up in epochs"),
    "weight_decay": ("at least 0", "0.05 is usual for adamw"),
    "layer_decay": ("above 0 and at most 1", "0.65 to 0.8 is usual, null switches it off"),
}


def lr_factor(
    fraction: float, warmup: float = 0.0, start: float = 0.0, end: float = 0.0, shape: Shape = "cosine"
) -> float:
    """Returns the factor of the base learning rate after a fraction of training.

    It rises linearly from `start` to 1 over the warm-up, then falls to `end` along half a cosine (Loshchilov & Hutter
    2017, arXiv 1608.03983, without restarts) or a straight line.

    Args:
        fraction: Fraction of training that is over, 0 to 1.
        warmup: Fraction of training that is warm-up; above 1, training ends during the warm-up.
        start: Factor at the first step.
        end: Factor at the end of training.
        shape: Curve of the decay.
    """
    if fraction < warmup:
        return start + (1 - start) * fraction / warmup
    after = min(1.0, (fraction - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    left = 0.5 * (1 + math.cos(math.pi * after)) if shape == "cosine" else 1 - after
    return end + (1 - end) * left


class WarmedUp:
    """Learning-rate factor at the trainer's progress: a warm-up in its own unit, then :func:`lr_factor`.

    The number of steps in an epoch, and so the fraction of training that they are, may change during a run: when the
    batch size grows, or an epoch ends inside an accumulation window. So the warm-up is counted in the unit it was given
    in, epochs or optimizer steps, and its end is stored: the decay begins there.

    torch's LambdaLR saves the ``__dict__`` of the function it calls, which here has only the two attributes below.

    Attributes:
        rising: Whether the last step was in the warm-up.
        ended: Numbers of epochs and steps at the warm-up's end; None before it, or if it was not observed.
    """

    __slots__ = ("__dict__", "end", "epochs", "shape", "start", "steps", "trainer")

    def __init__(
        self, trainer: Trainer | None, epochs: float, steps: int | None, start: float, end: float, shape: Shape
    ) -> None:
        self.trainer, self.epochs, self.steps = trainer, epochs, steps
        self.start, self.end, self.shape = start, end, shape
        self.rising = False
        self.ended: list[float] | None = None

    def __call__(self, _: int) -> float:
        """Returns the factor after the current training batch."""
        if self.trainer is not None:
            check_end(self.trainer)
        # Before the first batch the loaders may not exist, so the length of an epoch is not known yet.
        if self.trainer is None or not self.trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            return self.start if (self.epochs if self.steps is None else self.steps) else 1.0
        seen = fraction_seen(self.trainer, with_this_batch=True)
        done = self._risen(self.trainer)
        if done < 1:
            self.rising = True
            return self.start + (1 - self.start) * done
        if self.rising or self.trainer.global_step == self.steps:
            at = epochs_seen(self.trainer, with_this_batch=True)
            self.rising, self.ended = False, [at, self.trainer.global_step]
        return lr_factor(seen, min(seen, self._warmup(self.trainer)), 1.0, self.end, self.shape)

    def _risen(self, trainer: Trainer) -> float:
        """Returns the completed fraction of the warm-up, 1 or more after it."""
        if self.steps is not None:
            return trainer.global_step / self.steps if self.steps else 1.0
        if self.epochs and not math.isfinite(trainer.num_training_batches):
            raise DloError("warmup_epochs must have a training loader with a length, got none; set warmup_steps")
        return epochs_seen(trainer, with_this_batch=True) / self.epochs if self.epochs else 1.0

    def _warmup(self, trainer: Trainer) -> float:
        """Returns the fraction of training that was warm-up."""
        if not (self.epochs if self.steps is None else self.steps):
            return 0.0
        per_epoch = steps_per_epoch(trainer)
        if self.steps is not None:
            epochs = self.ended[0] if self.ended else self.steps / per_epoch
            return fraction_at(trainer, epochs, self.steps)
        return fraction_at(trainer, self.epochs, self.ended[1] if self.ended else self.epochs * per_epoch)


def scheduled(
    optimizer: Optimizer,
    trainer: Trainer | None,
    schedule: Shape | Literal["constant"],
    *,
    scaling: Mapping[str, Any] | None = None,
    warmup_epochs: float = 0.0,
    warmup_steps: int | None = None,
    start: float = 0.0,
    end: float = 0.0,
) -> OptimizerLRScheduler:
    """Returns the value of ``configure_optimizers``: the optimizer, with a scheduler unless `schedule` is `constant`.

    The scheduler follows the trainer's progress instead of counting its own steps; see :func:`lr_factor`.

    Args:
        optimizer: Optimizer at its base rates.
        trainer: Trainer of the run.
        schedule: Decay of the rate after the warm-up; `constant` leaves the rate to a callback.
        scaling: Scaling of the rates by the batch, see :func:`~dlo_tasks.optim.scale_rates`. The first rate of the
            warm-up is not scaled.
        warmup_epochs: Length of the warm-up in epochs; may be fractional.
        warmup_steps: Length of the warm-up in optimizer steps; overrides `warmup_epochs`.
        start: First rate of the warm-up, as a fraction of the base rates before scaling.
        end: Factor at the end of training, see :func:`lr_factor`.

    Raises:
        DloError: If the first rate of the warm-up is above the scaled rates, or its length is negative.
    """
    check_values(warmup_epochs=warmup_epochs, warmup_steps=warmup_steps)
    factor = scale_rates(optimizer, trainer, scaling)
    if start > factor:
        raise DloError(
            f"warmup_lr must be at most the scaled lr, got {start:g} times lr with lr_scaling's factor {factor:g};"
            " lower warmup_lr, or leave it out"
        )
    if schedule == "constant":
        return optimizer
    check_schedule(type(optimizer), schedule)
    warmed_up = WarmedUp(trainer, warmup_epochs, warmup_steps, start / factor, end, schedule)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": LambdaLR(optimizer, warmed_up), "interval": "step"},
    }


def configure(task: Any, optimizer: Optimizer) -> OptimizerLRScheduler:
    """Returns the value of ``configure_optimizers`` of a task with the options of :func:`check_options`.

    The modules that only training uses get a group of their own; see :func:`~dlo_framework.task.add_training_module`.
    """
    if parameters := training_parameters(task):
        optimizer.add_param_group({"params": parameters, "name": "training_modules", "lr_scale": 1.0})
    return scheduled(
        optimizer,
        task._trainer,
        task.schedule,
        scaling=task.lr_scaling,
        warmup_epochs=task.warmup_epochs,
        warmup_steps=task.warmup_steps,
        start=task.warmup_lr / task.lr,
        end=task.min_lr / task.lr,
    )


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    layer_decay: float | None = None,
    fallback: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Returns named parameter groups, without weight decay for norms, biases and parameters that the model exempts.

    Args:
        model: Timm model or any other module.
        weight_decay: Weight decay of all other parameters.
        layer_decay: Ratio of the learning rates of a layer and the next one, as in BEiT (Bao et al. 2021,
            arXiv 2106.08254); the head's scale is 1. None for no layer-wise decay.
        fallback: Patterns of parameters for which Muon and similar optimizers use their AdamW.
    """
    exempt = set(getattr(model, "no_weight_decay", set)())
    layers = _layers(model) if layer_decay is not None else {}
    deepest = max(layers.values(), default=0)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and not name.endswith("bias") and name not in exempt
        adam = bool(fallback) and (name in exempt or f"{name}.".startswith(tuple(f"{part}." for part in fallback)))
        layer = layers.get(name, deepest)
        label = (f"layer_{layer}_" if layers else "") + ("decay" if decays else "no_decay") + "_adam" * adam
        group = groups.setdefault(
            label,
            {
                "name": label,
                "params": [],
                "weight_decay": weight_decay if decays else 0.0,
                "lr_scale": (layer_decay or 1.0) ** (deepest - layer),
                **({"use_fallback": True} if adam else {}),
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def build_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    args: dict[str, Any] | None = None,
) -> Optimizer:
    """Builds an optimizer of dlo's list (`adamw8bit`, `soap`, ...), of timm's registry (`adamw`, `lamb`, `lars`,
    `muon`, `sgd` (Nesterov), `momentum`, ...) or of any other class.

    Args:
        model: Module whose trainable parameters are optimized, grouped by :func:`parameter_groups`.
        name: Name of the optimizer in one of the lists, or one that :func:`optimizer_class` finds. If `muon` is in it,
            the stem, the head and exempt parameters are in groups with `use_fallback: True`, for which timm's Muon uses
            AdamW.
        lr: Base learning rate.
        weight_decay: Weight decay, see :func:`parameter_groups`.
        layer_decay: Layer-wise decay of the learning rate, see :func:`parameter_groups`.
        args: Further arguments of the optimizer's constructor, such as `betas`, `momentum`, `eps`, `fused`.

    Raises:
        DloError: If the optimizer or an argument is unknown, or a value is out of range.
    """
    check_optimizer(name)
    check_values(weight_decay=weight_decay, layer_decay=layer_decay)
    other = optimizer_class(name)
    fallback = _head_names(model) if "muon" in name.lower() else ()
    groups = parameter_groups(model, weight_decay=weight_decay, layer_decay=layer_decay, fallback=fallback)
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
    try:
        if other is not None:
            return other(groups, lr=lr, weight_decay=weight_decay, **(args or {}))  # type: ignore[call-arg]
        optimizer: Optimizer = create_optimizer_v2(groups, opt=name, lr=lr, weight_decay=weight_decay, **(args or {}))
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        refuses_value = isinstance(error, TypeError | ValueError)
        if isinstance(error, ImportError) or (not refuses_value and re.search(r"(?i)\b(cuda|gpu|xpu)\b", str(error))):
            raise DloError(
                f"optimizer '{name}' cannot be built on this machine: {error}; docs/plugins/optimizers.md has one that"
                " can"
            ) from error
        raise DloError(f"optimizer_args must be arguments of optimizer '{name}', got {args}: {error}") from error
    return optimizer


def check_optimizer(name: str, schedule: str = "constant") -> None:
    """Checks that an optimizer of this name exists, and that the learning rate may have a schedule.

    Args:
        name: Name of an optimizer, or path of a class.
        schedule: Decay of the learning rate.

    Raises:
        DloError: If it does not; the message has the nearest name. If it must have no schedule.
    """
    known = list(dict.fromkeys([*OPTIMIZERS.names(), *(str(known) for known in list_optimizers())]))
    cls = optimizer_class(name)
    check_schedule(cls, schedule)
    if cls is None and name.lower().removeprefix("lookahead_") not in known:
        others = [other for other in _imported() if other.lower() not in known]
        hint = unknown_hint(name, [*known, *others])
        path = "" if hint.endswith("?") else "; or the path of a class, such as torch.optim.RAdam"
        raise DloError(f"unknown optimizer '{name}'{hint}{path}")


def check_schedule(optimizer: type[Optimizer] | None, schedule: str) -> None:
    """Checks that an optimizer's learning rate may have a schedule.

    Raises:
        DloError: If the optimizer is schedule-free, and the schedule is not `constant`.
    """
    if getattr(optimizer, "schedule_free", False) and schedule != "constant":
        raise DloError(
            f"schedule must be constant with {optimizer.__name__}, got {schedule}; set schedule: constant, and a"  # type: ignore[union-attr]
            " warm-up by optimizer_args: {warmup_steps: ...}"
        )


def optimizer_callbacks(name: str) -> list[Callback]:
    """Returns the callbacks that an optimizer needs, such as the one that evaluates a schedule-free average."""
    path = getattr(optimizer_class(name), "callback", None)
    if path is None:
        return []
    module, _, attribute = str(path).rpartition(".")
    return [getattr(importlib.import_module(module), attribute)()]


def optimizer_class(name: str) -> type[Optimizer] | None:
    """Returns the class for a name of dlo's list, or for one that timm does not know; None if timm knows it.

    Args:
        name: Name in the list of installed packages (entry points `dlo_framework.optimizers`); path of a class, such as
            `torch.optim.AdamW`; or name of an imported optimizer, such as the config's plug-ins: `OneBitAdam`.

    Raises:
        DloError: If a config may not name the path, or it does not lead to an optimizer.
    """
    if "." not in name:
        if name in OPTIMIZERS.names():
            return OPTIMIZERS.get(name)
        known = name.lower().removeprefix("lookahead_") in list_optimizers()
        return None if known else _imported().get(name)
    module, _, attribute = name.rpartition(".")
    if module not in sys.modules:
        check_class_path(name, allowed_roots())  # An import runs code.
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise DloError(f"optimizer '{name}' cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise DloError(f"optimizer must be the path of an optimizer class, such as torch.optim.AdamW, got '{name}'")
    return cls


def _imported() -> dict[str, type[Optimizer]]:
    """Returns the imported optimizer classes by name."""
    classes: dict[str, type[Optimizer]] = {}
    waiting: list[type[Optimizer]] = [Optimizer]
    while waiting:
        below = waiting.pop().__subclasses__()
        classes.update({cls.__name__: cls for cls in below if not inspect.isabstract(cls)})
        waiting += below
    return classes


def check_options(task: Any, layer_decay: float | None = None) -> None:
    """Checks a task's options of the optimizer and the schedule, which have the names of its arguments.

    Raises:
        DloError: If one is unknown or out of range.
    """
    check_optimizer(task.optimizer_name, task.schedule)
    check_values(layer_decay=layer_decay, **{name: getattr(task, name) for name in _RULES if name != "layer_decay"})
    for name in ("min_lr", "warmup_lr"):
        if not 0 <= getattr(task, name) <= task.lr:
            raise DloError(f"{name} must be between 0 and lr={task.lr}, got {getattr(task, name)}; 0 is the default")
    check_scaling(task.lr_scaling)


def check_values(**values: float | None) -> None:
    """Checks options by name; raises DloError if one is out of range."""
    for name, value in values.items():
        check_number(name, value, *_RULES[name])


def _layers(model: nn.Module) -> dict[str, int]:
    """Returns the layer of each parameter, from the stem upwards, as timm's models group them."""
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise DloError(
            f"layer_decay must have a model that groups its layers (timm's group_matcher), got {type(model).__name__}"
            " without; leave layer_decay out"
        )
    return dict(group_parameters(model, matcher(coarse=False), reverse=True))


def _head_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of classifier and stem: Muon is for hidden layers, its AdamW for the first and last."""
    if hasattr(model, "get_output_embeddings"):  # transformers
        ends: Any = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        return tuple(name for name, module in model.named_modules() if any(module is end for end in ends))
    classifier = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return (*names, *(name for name in ("patch_embed", "stem") if hasattr(model, name)))


RULES = ("linear", "sqrt")


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Checks the option `lr_scaling` of a task.

    Raises:
        DloError: If a key or value is wrong.
    """
    if scaling is None:
        return
    usual = "set {reference_batch: 256, rule: linear}"
    for key in scaling:
        if key not in ("reference_batch", "rule"):
            near = did_you_mean(str(key), ["reference_batch", "rule"])
            raise DloError(f"lr_scaling must have the keys reference_batch and rule, got {key}{near or ';'} {usual}")
    reference, rule = scaling.get("reference_batch"), scaling.get("rule", "linear")
    if not isinstance(reference, int) or reference < 1:
        raise DloError(f"reference_batch of lr_scaling must be a number of samples, got {reference}; {usual}")
    if rule not in RULES:
        near = did_you_mean(str(rule), list(RULES))
        raise DloError(f"rule of lr_scaling must be linear or sqrt, got {rule}{near or ';'} {usual}")


def scale_rates(optimizer: Optimizer, trainer: Trainer | None, scaling: Mapping[str, Any] | None) -> float:
    """Scales the learning rates of an optimizer by the samples of the run's first steps; returns the factor.

    Args:
        optimizer: Optimizer at the rates for the reference batch.
        trainer: Trainer of the run.
        scaling: `reference_batch` and `rule`; None for a factor of 1.

    Raises:
        DloError: If the data do not say their batch size.
    """
    if scaling is None:
        return 1.0
    batch = DataDescription(run_datamodule(trainer)).batch_size
    if trainer is None or not isinstance(batch, int):
        raise DloError(
            "lr_scaling must have a datamodule of dlo, whose batch_size counts the samples of all ranks, got"
            f" {type(run_datamodule(trainer)).__name__}; leave lr_scaling out, and set lr for the batch"
        )
    ratio = batch * int(trainer.accumulate_grad_batches) / scaling["reference_batch"]
    factor = ratio if scaling.get("rule", "linear") == "linear" else math.sqrt(ratio)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return factor

"""Image models as users train them: ViT-S/16, ViT-B/16 and ResNet-18, beside timm's own training step.

timm's step is that of its `train.py` with `--amp --amp-dtype bfloat16 --opt adamw`: its task makes model and loss one
call, its factory makes the optimizer and leaves out of weight decay what it leaves out. ResNet-18 has its memory in
channels-last order, by both.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from measuring.record import Table
from measuring.rounds import clock_of, take_turns
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.task import Task
from dlo_plugins.compile.callback import Compile
from on_accelerator.subjects import BATCHES, CLASSES, Size, Subject, build_network, draw_weights_on, pinned
from on_accelerator.throughput import rates_table
from on_accelerator.training import LR, Trained, Work, by_dlo, by_hand

BASE, DECAY = "timm", 0.05


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        name: Name of the model in timm.
        images: Images of a batch.
        args: Additional arguments for timm.
        channels_last: Whether its memory is in that order.
        others: Results that others report.
    """

    name: str
    images: int
    args: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    others: str = ""


MODELS = {
    "vit_s": Model(
        "vit_small_patch16_224", 256, others="Compiled, bf16, batches of 256 on an H100, a ViT-5-S: 5,560 images/s."
    ),
    "vit_b": Model("vit_base_patch16_224", 256),
    "resnet18": Model("resnet18", 512, channels_last=True),
}
_TINY_VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def image_table(part: str, size_name: str, size: Size, device: torch.device, rounds: int, backend: str) -> Table:
    """Measures one of :data:`MODELS`.

    Args:
        part: Name of the part.
        size_name: Name of the size; ``tiny`` selects smaller models of the same kind.
        size: Says for how many steps, and of how many pixels.
        device: Device of the run.
        rounds: Rounds beside the one that warms up, and compiles.
        backend: Backend of torch.compile.
    """
    model = MODELS[part]
    if size_name == "tiny":
        model = Model(model.name, size.images, {} if model.channels_last else _TINY_VIT, model.channels_last)
    torch.manual_seed(0)
    clock, subject = clock_of(device), image_subject(model, size.side, device.type != "cpu")
    work = Work(device, clock, [pinned(subject.batch(), device) for _ in range(BATCHES)], size.warm, size.steps)
    found = take_turns(contestants(subject, model, work, backend), rounds)
    table = rates_table(subject, found, clock, BASE, "timm's own step")
    if model.others:
        table.notes.append(model.others)
    return table


def image_subject(model: Model, side: int, fused: bool) -> Subject:
    """Returns what is trained; ``fused`` is for dlo's optimizer."""
    from dlo_tasks.imagenet.classifier import ImageClassifier

    args = model.args if model.channels_last else {**model.args, "img_size": side}

    def net() -> nn.Module:
        import timm
        from timm.task import ClassificationTask

        found = timm.create_model(model.name, num_classes=CLASSES, **args)
        if model.channels_last:
            found = found.to(memory_format=torch.channels_last)
        return ClassificationTask(found, verbose=False)

    def task() -> Task:
        return ImageClassifier(
            model.name, model.args, num_classes=CLASSES, image_size=side, schedule="constant", log_images=0, lr=LR,
            weight_decay=DECAY, channels_last=model.channels_last, optimizer_args={"fused": True} if fused else None,
        )  # fmt: skip

    def loss(called: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, targets = batch
        if model.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        found: Tensor = called(images, targets)["loss"]
        return found

    def batch() -> Any:
        return torch.randn(model.images, 3, side, side), torch.randint(CLASSES, (model.images,))

    return Subject(
        title=f"{model.name}, {model.images} images of {side} pixels",
        net=net,
        loss=loss,
        task=task,
        batch=batch,
        samples=model.images,
        items=model.images,
        item="images",
        scope="model",
    )


def has_timms_step() -> bool:
    """Returns whether the timm that is installed has tasks, as 1.0.31 has."""
    return importlib.util.find_spec("timm.task") is not None


def contestants(subject: Subject, model: Model, work: Work, backend: str) -> dict[str, Callable[[], Trained]]:
    """Returns who takes part. Networks stay from round to round, with the code that was compiled for them."""
    nets = {name: build_network(work.device, subject.net) for name in (BASE, f"{BASE} again", f"{BASE}, compiled")}
    compiled: Any = nets[f"{BASE}, compiled"]
    compiled.compile(backend=backend)
    tasks = {name: draw_weights_on(work.device, subject.task()) for name in ("dlo fit", "dlo fit, compiled")}

    def stepped(name: str) -> Trained:
        found = by_hand(subject, nets[name], work, make_optimizer=timms_optimizer)
        nets[name].cpu()
        return found

    def fitted(name: str) -> Trained:
        callbacks = [Compile(scope="model", backend=backend)] if name.endswith("compiled") else []
        return by_dlo(subject, tasks[name], work, callbacks)  # type: ignore[arg-type]

    theirs: dict[str, Callable[[], Trained]] = {name: functools.partial(stepped, name) for name in nets}
    return {**theirs, **{name: functools.partial(fitted, name) for name in tasks}}


def timms_optimizer(net: nn.Module) -> Optimizer:
    """Returns the optimizer that timm's ``train.py`` would make for ``--opt adamw``."""
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(net, opt="adamw", lr=LR, weight_decay=DECAY)  # type: ignore[no-any-return]

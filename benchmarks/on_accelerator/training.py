"""A few steps of training in bf16, by hand and by dlo, timed alike."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from measuring.rounds import Clock
from measuring.stopwatch import Stopwatch
from overhead import silence
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dlo_framework.costs import peak_flops
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.local_memory import memory_peak, reset_memory_peak
from dlo_framework.task import Task
from dlo_framework.watch.monitor import RunMonitor, StepClock
from on_accelerator.subjects import Batches, Subject

LR = 1e-4


@dataclass(frozen=True)
class Work:
    """How long a contestant trains, where, and on what.

    Attributes:
        device: Device of this process.
        clock: Clock to use.
        batches: Batches in host memory.
        warm: Steps before the clock starts.
        steps: Number of timed steps.
    """

    device: torch.device
    clock: Clock
    batches: list[Any]
    warm: int
    steps: int


@dataclass(frozen=True)
class Trained:
    """What a contestant's turn found.

    Attributes:
        seconds: Seconds per step.
        peak_bytes: Peak of memory that the turn added on the device; None where it is not reported.
        flops: FLOPs per sample, forward and backward; 0 where they were not counted.
        peak_flops: Peak FLOPs per second of the device at this precision; None if unknown.
    """

    seconds: float
    peak_bytes: int | None
    flops: float = 0.0
    peak_flops: float | None = None


def by_hand(
    subject: Subject,
    net: nn.Module,
    work: Work,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    *,
    autocast: bool = True,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> Trained:
    """Trains in a loop; the network stays on the device, without gradients.

    Args:
        subject: Model and data to train.
        net: Network, compiled or not.
        work: Clock, batches and steps.
        wrap: Wrapper of the network on its device, such as DistributedDataParallel.
        autocast: Whether to compute in bf16 with autocast; FSDP2 uses its mixed-precision policy instead.
        make_optimizer: Makes the optimizer of what is called; torch's AdamW, fused on an accelerator, by default.
    """
    before = _begin(work.device)
    net.to(work.device).train()
    called = wrap(net)
    trained = [parameter for parameter in called.parameters() if parameter.requires_grad]
    if make_optimizer is None:
        optimizer: Optimizer = torch.optim.AdamW(trained, lr=LR, fused=work.device.type != "cpu")
    else:
        optimizer = make_optimizer(called)
    begin: Any = None
    for number in range(work.warm + work.steps):
        if number == work.warm:
            work.clock.settle()
            begin = work.clock.mark()
        # Without a wait for the device, from page-locked memory.
        batch = move_data_to_device(work.batches[number % len(work.batches)], work.device)
        optimizer.zero_grad()
        with torch.autocast(work.device.type, torch.bfloat16, enabled=autocast):
            loss = subject.loss(called, batch)
        loss.backward()
        if subject.clip is not None:
            nn.utils.clip_grad_norm_(trained, subject.clip)
        optimizer.step()
    end = work.clock.mark()
    seconds = work.clock.between(begin, end) / work.steps
    optimizer.zero_grad()
    return Trained(seconds, _peak(work.device, before))


def by_dlo(subject: Subject, task: Task, work: Work, callbacks: list[Callback], **options: Any) -> Trained:
    """Fits as ``dlo fit`` does, everything on but checkpoints.

    Args:
        subject: Model and data to train.
        task: Task of the subject, possibly fitted before.
        work: Clock, batches and steps.
        callbacks: Callbacks in addition to dlo's own.
        **options: Options of the Trainer: strategy, devices.
    """
    before = _begin(work.device)
    watch = Stopwatch(work.clock, work.warm, work.steps)
    with tempfile.TemporaryDirectory() as name, silence():
        folder = Path(name)
        all_callbacks = add_default_callbacks(
            [*callbacks, watch], run_folder=folder, model=task, config="{}", checkpoints=False
        )
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu" if work.device.type == "cpu" else "auto",
            precision="bf16-mixed",
            callbacks=all_callbacks,
            logger=TensorBoardLogger(folder, name="", version="", default_hp_metric=False),
            profiler=StepClock(),
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            gradient_clip_val=subject.clip,
            **{"devices": 1, **options},
        )
        trainer.fit(task, subject.data(DataLoader(Batches(work.batches, work.warm + work.steps), batch_size=None)))
    monitor = next(callback for callback in all_callbacks if isinstance(callback, RunMonitor))
    counted = monitor.flops.per_sample if monitor.flops is not None else 0.0
    return Trained(watch.seconds_of_a_step, _peak(work.device, before), counted, peak_flops(trainer))


def _begin(device: torch.device) -> int:
    """Frees what earlier turns have left, and returns the bytes that stay."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    reset_memory_peak(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int) -> int | None:
    return memory_peak(device) - before if device.type == "cuda" else None

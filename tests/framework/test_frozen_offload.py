"""A teacher in CPU memory on two ranks: losses and gradients of the student equal those of one on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer

from dlo_framework import placed_model
from dlo_framework.copy_streams import CopyStreams
from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import run_distributed
from dlo_plugins.distill.callback import Distill
from support.distill_runs import lm, seeded, sharp
from support.frozen_runs import batches, make_trainer, slice_rows
from support.fsdp_nets import Batches
from support.late import DEVICE, LateStream, OnDevice

#: Another name of the CPU's memory, which passes for an accelerator's: copies between the two go by the side streams.
STEPS = 3


class OneOnDevice(SingleProcessStrategy):
    @property
    def root_device(self) -> torch.device:
        return DEVICE


STRATEGIES: dict[str, Callable[[], Any]] = {
    "zero2": lambda: OnDevice(2),
    "zero3": lambda: OnDevice(3),
}


class Notes(Callback):
    """Notes each step's loss, and the student's gradients as the optimizer gets them."""

    def __init__(self, teacher: FrozenModel) -> None:
        self.teacher, self.losses, self.gradients, self.bytes = teacher, list[float](), list[torch.Tensor](), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.bytes = self.teacher.held_bytes()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    self.gradients.append(getattr(gradient, "_local_tensor", gradient).detach().clone())


def _fit(strategy: Any, rank: int, world: int, offload: bool) -> tuple[list[float], list[torch.Tensor], int, int]:
    """Returns losses, gradients, the teacher's bytes on this rank, and the number of copies that were started."""
    streams, started = CopyStreams(LateStream(), LateStream()), list[int]()  # type: ignore[arg-type]

    def late_streams(device: torch.device) -> CopyStreams:
        started.append(1)
        return streams

    teacher = FrozenModel(task=sharp(lm(4)), offload=offload)
    notes, student = Notes(teacher), seeded(lm(2))
    run: Trainer = make_trainer(strategy, world, [Distill(teacher, "kl", 2.0), notes], max_steps=STEPS)
    rows = [slice_rows(batch, rank, world) for batch in batches("text", steps=STEPS)]
    with (
        mock.patch.object(placed_model, "copy_streams", late_streams),
        mock.patch.object(placed_model, "empty_host_tensor", lambda like, _: torch.empty_like(like, device="cpu")),
    ):
        run.fit(student, Batches(rows))
    return notes.losses, notes.gradients, notes.bytes, len(started)


def _all(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, make in STRATEGIES.items():
        for offload in (False, True):
            try:
                found[name, offload] = _fit(make(), rank, world, offload)
            except Exception as error:
                raise RuntimeError(f"{name}, offload={offload}") from error
    return found


def check(plain: Any, offloaded: Any, copies: int) -> None:
    losses, gradients, held, none = plain
    again, same, held_offloaded, started = offloaded
    assert len(losses) == STEPS
    assert losses == again
    assert gradients
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
    for one, other in zip(gradients, same, strict=True):
        assert torch.equal(one, other)
    assert (none, started) == (0, copies)
    assert held <= held_offloaded <= 1.1 * held  # The tensors of one copy are aligned.


def test_a_teacher_in_cpu_memory_changes_no_loss_and_no_gradient() -> None:
    # In a step: four blocks and what is outside of them, for the outputs; the latter again for the head.
    copies = 6 * STEPS
    check(_fit(OneOnDevice(), 0, 1, False), _fit(OneOnDevice(), 0, 1, True), copies)
    for found in run_distributed(_all, 2, timeout=500):
        for name in STRATEGIES:
            # ZeRO's stage 3 offloads shards, by the machinery of its own models.
            check(found[name, False], found[name, True], copies if name != "zero3" else 0)

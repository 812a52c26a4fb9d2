"""Inside a trial process: trains on batches of one size after another until memory runs out, and reports each."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from dlo_framework.distributed.control_group import control_group
from dlo_framework.distributed.failure import exit_process
from dlo_framework.rehearsal import Rehearsal
from dlo_plugins.callbacks.micro_batch_finder.batch_search import BatchPool, is_out_of_memory
from dlo_plugins.callbacks.micro_batch_finder.trial_events import ORDER, TrialOrder, write_event

#: Exit code of a process that is out of memory.
OUT_OF_MEMORY = 77
#: Micro-batches of an optimizer step in a trial: the second has the gradients of the first in memory.
_WINDOW = 2


def trial_order() -> TrialOrder | None:
    """Returns the order that this process has got; None if it is not a trial process."""
    text = os.environ.get(ORDER)
    return TrialOrder.from_text(text) if text else None


def mute(trainer: Trainer) -> None:
    """Replaces the trainer's loggers, so that a trial logs nowhere."""
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]


def end_with_rank(parent: int) -> None:
    """Ends this process when the rank that has started it is gone, which no signal announces on some systems."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        exit_process(1)

    threading.Thread(target=look, name="trial-parent", daemon=True).start()


def be_killed_first() -> None:
    """Makes Linux choose this process, and not the rank that waits for it, when the machine is out of memory."""
    path = Path("/proc/self/oom_score_adj")
    if path.exists():
        path.write_text("1000")


def limit_memory(device: torch.device, limit: int) -> None:
    """Limits what this process may allocate from now on.

    Args:
        device: Device whose memory is limited; on a CPU it is the process's data (RLIMIT_DATA, on Linux).
        limit: Bytes above those that are allocated now.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_reserved(device) + limit) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + limit
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _data_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def peak_bytes(device: torch.device) -> int:
    """Returns the largest number of bytes that this process has had on a device, or in memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class TrialChild:
    """Trials of this process, on all ranks together.

    Args:
        trainer: Trainer that is about to train.
        order: Order of this process.
        steps: Optimizer steps of a trial.
        epochs: Number of epochs after which the batches are assumed to come.
        memory_limit_bytes: Limit as in :func:`limit_memory`.
    """

    def __init__(
        self, trainer: Trainer, order: TrialOrder, *, steps: int, epochs: int, memory_limit_bytes: int | None
    ) -> None:
        self.trainer, self.order, self.steps = trainer, order, steps
        self.rehearsal, self.group = Rehearsal(trainer), control_group(trainer)
        self.device = trainer.strategy.root_device
        self.limit = memory_limit_bytes
        batches = trainer.num_training_batches
        # Number of a batch, counted from the first epoch; never an epoch's last, whose step Lightning runs at once.
        self.number = 2 * int(batches) * epochs if batches != float("inf") else 0

    def run(self, search: Callable[[Rehearsal, Callable[[BatchPool, int], bool]], int]) -> NoReturn:
        """Runs a search, reports its result, and ends the process; training does not begin.

        Args:
            search: Function of the rehearsal, and of a function that returns whether a size fits, which returns the
                largest size that does.
        """
        be_killed_first()
        if self.limit is not None:
            limit_memory(self.device, self.limit)
        try:
            found = search(self.rehearsal, self.fits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            write_event(self.order.events, "out_of_memory", error=str(error)[:300])
            exit_process(OUT_OF_MEMORY)
        write_event(self.order.events, "done", found=found)
        exit_process(0)

    def fits(self, pool: BatchPool, size: int) -> bool:
        """Trains on batches of one size; returns True, unless the size is known not to fit.

        Raises:
            Exception: Memory has run out, and other errors.
        """
        if size in self.order.known:
            return self.order.known[size]
        write_event(self.order.events, "try", size=size)
        self._free()
        self.trainer.accumulate_grad_batches = _WINDOW
        for _ in range(self.steps):
            for number in range(self.number, self.number + _WINDOW):
                batch = self.rehearsal.to_device(pool.batch(size), number)
                self.rehearsal.train_on(batch, number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
        write_event(self.order.events, "fits", size=size, peak_bytes=peak_bytes(self.device))
        return True

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

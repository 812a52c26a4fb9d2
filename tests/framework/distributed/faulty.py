"""A small regression that fails where a test tells it to; the plug-in of the tests of failures."""

import atexit
import os
import signal
import subprocess
import sys
import time

import torch
from lightning.pytorch import Callback
from torch import nn

from dlo_framework import DloError, ParallelPlan, Task
from dlo_framework.data import ResumableDataModule

#: Seconds after which a loader's worker looks whether its rank is still there; torch has 5.
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5


def own_rank() -> int:
    return next((int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0)


def say(what: str) -> None:
    # In one write: the ranks share a pipe.
    os.write(1, f"{what} {os.getpid()} {time.time()}\n".encode())


def endless_backend(graph, inputs):
    """Compiles for ten minutes, in another process, as Inductor waits for its C++ compiler."""
    subprocess.run([sys.executable, "-c", "import os, time\nwhile os.getppid() != 1: time.sleep(0.2)"], timeout=600)
    return graph


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class FaultyNet(Task):
    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause

    def configure_model(self):
        if not self.has_model:
            self.model = nn.Sequential(nn.Linear(8, 8), Layer(), Layer(), nn.Linear(8, 1))

    def parallel_plan(self):
        rules = {"*.up": "column", "*.down": "row"}
        return ParallelPlan(blocks=("1", "2"), stem=("0",), head=("3",), tensor=rules)

    def loss(self, outputs, batch):
        time.sleep(self.pause if self.training else 0)
        return nn.functional.mse_loss(outputs, batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class FaultyData(ResumableDataModule):
    """64 samples; from item 20 on, the loader of one rank raises."""

    def __init__(self, num_workers: int = 0, raise_on: int = -1, hang_on: int = -1, batch_size: int = 8) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.raise_on, self.hang_on = raise_on, hang_on

    def train_dataloader(self):
        return self.train_loader(Items(self.raise_on, self.hang_on))

    def val_dataloader(self):
        return self.eval_loader(Items(-1))


class Items(torch.utils.data.Dataset):
    def __init__(self, raise_on: int, hang_on: int = -1) -> None:
        self.raise_on, self.hang_on, self.told = raise_on, hang_on, False
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        if not self.told:
            self.told = True
            say("PID")  # Of a loader's worker, where there is one.
        if own_rank() == self.raise_on and index >= 20:
            say("FAULT")
            raise DloError(f"image {index} is broken; mend it")
        if own_rank() == self.hang_on and index >= 20:
            say("FAULT")
            time.sleep(600)
        return self.x[index]


class Fault(Callback):
    """At one place and step, on one rank or all (-1): raises, hangs, leaves, compiles, gets a signal, and more."""

    def __init__(self, at: str = "step", rank: int = 1, what: str = "raise", after: int = 3, once: str = "") -> None:
        self.at, self.rank, self.what, self.after, self.once = at, rank, what, after, once

    def setup(self, trainer, pl_module, stage):
        say("PID")

    def _fault(self, trainer, where: str) -> None:
        if (
            where != self.at
            or self.rank not in (-1, own_rank())
            or trainer.global_step != self.after
            or trainer.sanity_checking
        ):
            return
        if self.once and os.path.exists(f"{self.once}.{self.after}"):
            return
        if self.once:
            open(f"{self.once}.{self.after}", "w").close()
        say("FAULT")
        if self.what == "raise":
            raise ValueError("boom")
        if self.what == "hang":
            time.sleep(600)
        if self.what == "compile":
            torch.compile(torch.sin, backend=endless_backend)(torch.zeros(2))
        if self.what == "mismatch":
            torch.distributed.all_reduce(torch.ones(2 + own_rank()))
            raise ValueError("boom")
        if self.what == "call":
            module = trainer.lightning_module
            with torch.no_grad():
                module.model(torch.zeros(4, 8))
            return
        if self.what == "read":
            next(trainer.lightning_module.parameters()).norm()
            return
        os.kill(os.getpid(), getattr(signal, self.what))
        time.sleep(5)

    def on_train_batch_start(self, trainer, *_):
        self._fault(trainer, "step")

    def on_train_batch_end(self, trainer, *_):
        self._fault(trainer, "end")

    def on_validation_batch_start(self, trainer, *_):
        self._fault(trainer, "validation")

    def on_before_zero_grad(self, trainer, *_):
        self._fault(trainer, "callback")

    def on_save_checkpoint(self, trainer, *_):
        self._fault(trainer, "save")

    def on_train_epoch_end(self, trainer, *_):
        self._fault(trainer, "epoch")


class SecondFault(Fault):
    """Another one in the same run."""


class SlowExit(Callback):
    """Makes an orderly exit take 10 s."""

    def setup(self, trainer, pl_module, stage):
        atexit.register(time.sleep, 10)

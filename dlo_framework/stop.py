"""Stopping a run on request: Ctrl-C, SIGTERM and SIGUSR1 end it at the next optimizer step, with a checkpoint.

All ranks stop at the same step, whichever of them got the signal: each step starts a one-number all-reduce on a
gloo group of its own and reads the result of the step before, so that nothing waits for it and no accelerator is
synchronised.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework import runs
from dlo_framework.distributed.control import control_group
from dlo_framework.errors import OrderlyEnd
from dlo_framework.resume import mid_accumulation

#: The requests to stop; the last does what SIGTERM does.
_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]


class RunStopped(OrderlyEnd):
    """A run ended on request, its state saved; or before its first step, when there is none."""

    def __init__(self, signum: int, checkpoint: Path | None = None, step: int = 0) -> None:
        self.exit_code = 128 + signum  # A shell's convention: 130 for Ctrl-C, 143 for SIGTERM.
        if checkpoint is None:
            super().__init__("stopped before the first step; nothing to save")
        else:
            super().__init__(f"stopped at step {step}; saved {checkpoint}; go on with --ckpt_path last")


class _Request:
    """What a process has been asked. Not plain attributes of the callback, which a rehearsal would take back."""

    def __init__(self) -> None:
        self.signum = 0
        self.interrupts = 0  # Ctrl-C that this process has seen
        self.pid = 0  # of the process that has taken the signals over


class GracefulStop(Checkpoint):
    """Ends a run on Ctrl-C, SIGTERM or SIGUSR1 at the next optimizer step, saving ``last.ckpt``; on by default.

    SIGUSR1 is what SLURM sends before the time is up if it is asked to (``#SBATCH --signal=USR1@120``), and does what
    SIGTERM does, exit code 143 included; either may come to one rank or to all, and more than once. Lightning's own
    requeueing on it is off: the job's script does that, see the page on failures. A second Ctrl-C ends the run at
    once. A validation under way is finished first. It is a ``Checkpoint`` so that
    Lightning calls it after all other callbacks: what it saves holds their work of the step too.

    Args:
        folder: where ``last.ckpt`` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._asked = _Request()
        self._previous: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    #: One instance a run. Not a property: every hook of every step asks for it.
    state_key = "GracefulStop"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets what an earlier fit was asked."""
        if stage == "fit":
            pid, self._asked = self._asked.pid, _Request()
            self._asked.pid = pid

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over, after Lightning has: its own SIGTERM handler can deadlock several ranks."""
        self._take_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Likewise, where there was no sanity check."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))
        self._group = control_group(trainer)
        self._take_signals()

    def _take_signals(self) -> None:
        if not self._previous and threading.current_thread() is threading.main_thread():
            self._asked.pid = os.getpid()
            for signum in _SIGNALS:
                self._previous[signum] = signal.signal(signum, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._asked.pid:
            return  # A loading process that was forked has the handler too.
        if signum == signal.SIGINT:
            self._asked.interrupts += 1
            if self._asked.interrupts > 1:
                signal.default_int_handler(signum, frame)
        if not self._asked.signum:
            again = "; once more to stop at once" if signum == signal.SIGINT else ""
            print(
                f"\n{signal.Signals(signum).name}: finishing this step and saving{again}", file=sys.stderr, flush=True
            )
        self._asked.signum = self._asked.signum or (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops at the end of an optimizer step, if asked to."""
        signum = self._agree() if self._group is not None else self._asked.signum
        if signum and not mid_accumulation(trainer):
            self._stop(trainer, signum)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops after a validation, if asked to during it; several ranks agree at their next step instead."""
        if self._asked.signum and self._group is None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop(trainer, self._asked.signum)

    def stop_aside(self) -> None:
        """Ends a run that was asked to stop while a callback trains on the side, before training; on all ranks.

        Raises:
            RunStopped: there is nothing to save.
        """
        signum = self._agree() if self._group is not None else self._asked.signum
        if signum:
            raise RunStopped(signum)

    def _agree(self) -> int:
        """Returns the signal that any rank had by the step before, the same on every rank; 0 if none."""
        agreed = 0
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            agreed = int(flag)
        flag = torch.tensor(self._asked.signum, dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (flag, work)
        # An accumulation window may be open: keep answering until it closes.
        self._asked.signum = max(self._asked.signum, agreed)
        return agreed

    def _stop(self, trainer: Trainer, signum: int) -> None:
        path = self.folder / runs.LAST
        trainer.save_checkpoint(path, weights_only=False)
        raise RunStopped(signum, path, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives the signals back: Lightning calls no teardown, and the process may go on, as a notebook's does.

        Not on an end on request, nor of several ranks: these end, and may get the signal once more meanwhile.
        """
        if trainer.world_size == 1 and not isinstance(exception, OrderlyEnd):
            self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the signals back."""
        self._give_back()

    def _give_back(self) -> None:
        self._pending = None
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)
        self._previous = {}

"""Stops a run on request: Ctrl-C, SIGTERM and SIGUSR1 end it at the next optimizer step, with a checkpoint.

All ranks stop at the same step, whichever of them got the signal: each step starts an all-reduce of two numbers on a
separate gloo group and reads the result of the step before, so that nothing waits for it and no accelerator is
synchronised.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer import call

from dlo_framework.callback import PluginCallback, drops_gradients
from dlo_framework.distributed.failure import exit_process
from dlo_framework.distributed.groups import control_group
from dlo_framework.distributed.launcher import WatchedRanks
from dlo_framework.distributed.signals import GRACE, STOP_SIGNALS, GracePeriod, ProgressCounter, SignalListener
from dlo_framework.distributed.stacks import print_stack
from dlo_framework.errors import OrderlyEnd, check_number
from dlo_framework.run import runs
from dlo_framework.run.resume import mid_accumulation
from dlo_framework.strategy_abilities import CanonicalCheckpoints
from dlo_framework.strategy_contract import contract_of

#: Minutes after the last checkpoint when the state is saved.
SAVE_MINUTES = 10.0
#: Seconds that a single process's main thread has to exit by itself after a second Ctrl-C.
_INTERRUPTED = 1.5


class RunStopped(OrderlyEnd):
    """Run that was ended on request, with its state saved; or before its first step, without a checkpoint."""

    def __init__(self, signum: int, checkpoint: Path | None = None, step: int = 0) -> None:
        self.exit_code = 128 + signum  # The shell's convention: 130 for Ctrl-C, 143 for SIGTERM.
        if checkpoint is None:
            super().__init__("stopped before the first step; nothing to save")
        else:
            super().__init__(f"stopped at step {step}; saved {runs.shown(checkpoint)}; go on with --ckpt_path last")


class _Request:
    """Requests that a process has received. As attributes of the callback, a rehearsal would restore them."""

    def __init__(self) -> None:
        self.signum = 0
        self.interrupts = 0  # Ctrl-C that this process has received
        self.pid = 0  # of the process that has installed the handlers


class GracefulStop(PluginCallback, Checkpoint):
    """Saves ``last.ckpt`` every ten minutes, and on Ctrl-C, SIGTERM or SIGUSR1, which end the run; on by default.

    A run saves at the next optimizer step when ``minutes`` have passed since its last checkpoint, by rank 0's clock.
    The state is copied, and written in the background while training goes on. A signal ends the run at the next step.

    SLURM sends SIGUSR1 before the time limit if configured (``#SBATCH --signal=USR1@120``); it has the same effect as
    SIGTERM, exit code 143 included. Either may reach one rank or all, and more than once. Lightning's own requeueing on
    it is off: the job's script does that, see the page on failures. A second Ctrl-C ends the run at once. A running
    validation is finished first. This class is a ``Checkpoint`` so that Lightning calls it after all other callbacks:
    its checkpoint includes their work of the step.

    Python calls signal handlers in the main thread only. If that waits in a collective, in C++ code of a loader or a
    compiler, or anywhere else, other threads receive the signal: a second Ctrl-C ends the run within 2 s, and a run
    that was asked to stop and neither takes a batch nor saves for ``grace`` seconds is killed, after each rank has
    printed its stack.

    Args:
        folder: Folder of ``last.ckpt``.
        grace: Seconds without progress after a request to stop; at least twice the longest time without progress
            before, so that a long batch is finished.
        minutes: Minutes after a checkpoint when the next one is saved; 0 for never.

    Attributes:
        stepping: Number of the optimizer step that has begun last, which may have changed weights.

    Raises:
        DloError: if ``grace`` is not above 0, or ``minutes`` is negative.
    """

    def __init__(self, folder: Path, grace: float = GRACE, minutes: float = SAVE_MINUTES) -> None:
        check_number("run.stop_grace", grace, "above 0 seconds", f"the default is {GRACE:g}")
        check_number("run.save_minutes", minutes, "at least 0", f"the default is {SAVE_MINUTES:g}")
        self.minutes, self._saved, self.stepping = minutes, math.inf, -1
        self.folder = Path(folder)
        self.grace = grace
        self._alone: _SingleProcess | None = None
        self._asked = _Request()
        self._previous: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._steps_in_backward = False

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    #: One instance per run. Not a property: every hook of every step reads it.
    state_key = "GracefulStop"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops the requests of an earlier fit."""
        if isinstance(trainer.strategy, WatchedRanks):
            trainer.strategy.set_stop_grace(self.grace)
        if stage == "fit":
            pid, self._asked = self._asked.pid, _Request()
            self._asked.pid = pid

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the handlers, after Lightning's: its own SIGTERM handler can deadlock several ranks."""
        self._install_handlers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the handlers, if there was no sanity check."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))
        self._group = control_group(trainer)
        self._install_handlers(trainer)
        _disable_sigterm_broadcast(trainer)
        self._saved, self.stepping = time.monotonic(), -1
        self._steps_in_backward = drops_gradients(trainer)

    def _install_handlers(self, trainer: Trainer) -> None:
        if self._alone is None and trainer.world_size == 1:
            self._alone = _SingleProcess(trainer, self.grace)
            self._alone.start()
        if not self._previous and threading.current_thread() is threading.main_thread():
            self._asked.pid = os.getpid()
            for signum in STOP_SIGNALS:
                self._previous[signum] = signal.signal(signum, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._asked.pid:
            return  # A forked loading process has the handler too.
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

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Notes the step that begins, where backward changes weights."""
        if self._steps_in_backward:
            self.stepping = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Notes the step that begins."""
        self.stepping = trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes the time."""
        self._saved = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves or stops at the end of an optimizer step, if due; after the last of `max_steps` the run ends itself."""
        at_end = not mid_accumulation(trainer) and not _is_last(trainer)
        signum, is_due = self._agree(at_end)
        if signum and at_end:
            # Lightning (2.6) would call the module's hook, and log, after this one.
            call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
            trainer._logger_connector.update_train_step_metrics()
            self._stop(trainer, signum)
        if is_due and at_end:
            saver = contract_of(trainer.strategy).find_ability(CanonicalCheckpoints)
            with contextlib.nullcontext() if saver is None else saver.saving_in_background():
                trainer.save_checkpoint(self.folder / runs.LAST)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops after a validation, if requested during it; several ranks agree at their next step instead."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or _is_last(trainer):
            return
        if self._asked.signum and self._group is None:
            call._call_lightning_module_hook(trainer, "on_validation_end")
            self._stop(trainer, self._asked.signum)

    def stop_aside(self) -> None:
        """Ends a run that was asked to stop while a callback trains on the side, before training; on all ranks.

        Raises:
            RunStopped: if so; there is nothing to save.
        """
        signum, _ = self._agree(False)
        if signum:
            raise RunStopped(signum)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Waits for the ranks' votes of the last step, so that a copy of the run's state has their result."""
        if self._pending is not None:
            self._pending[1].wait()
        yield

    def _agree(self, saves: bool) -> tuple[int, bool]:
        """Returns the signal that any rank had by the step before, or 0, and whether a save was due on rank 0.

        Args:
            saves: Whether a save that is due comes now; the same on every rank.
        """
        if self._group is None:
            return self._asked.signum, self._is_due()
        agreed, is_due = 0, False
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            agreed, is_due = int(flag[0]), bool(flag[1])
            if is_due and saves:
                self._saved = time.monotonic()
        due = dist.get_rank() == 0 and self._is_due()
        flag = torch.tensor([self._asked.signum, due], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (flag, work)
        # An accumulation window may be open: keep answering until it closes.
        self._asked.signum = max(self._asked.signum, agreed)
        return agreed, is_due

    def _is_due(self) -> bool:
        return self.minutes > 0 and time.monotonic() - self._saved > 60 * self.minutes

    def _stop(self, trainer: Trainer, signum: int) -> None:
        path = self.folder / runs.LAST
        trainer.save_checkpoint(path, weights_only=False)
        raise RunStopped(signum, path, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the handlers: Lightning does not call teardown, and the process may continue, as in a notebook.

        It does not if the run was stopped on request, nor with several ranks: these exit, and may get the signal once
        more meanwhile.
        """
        self._end_alone()  # The process may continue after any end, and receive other requests.
        if trainer.world_size == 1 and not isinstance(exception, OrderlyEnd):
            self._restore_handlers()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the handlers, unless Lightning has by then: those before its own are the process's."""
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        self._pending = None
        self._end_alone()
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._previous.items():
                if signal.getsignal(signum) == self._request:
                    signal.signal(signum, handler)
        self._previous = {}

    def _end_alone(self) -> None:
        if self._alone is not None:
            self._alone.stop()
            self._alone = None


def _is_last(trainer: Trainer) -> bool:
    """Returns whether the last of `max_steps` is done: a run that resumed from here would end at once."""
    return 0 <= trainer.max_steps <= trainer.global_step


def _disable_sigterm_broadcast(trainer: Trainer) -> None:
    """Prevents Lightning from asking the first rank before each batch whether it has received SIGTERM.

    Lightning (2.6.6) has no option for it. It copies a number to the device, broadcasts it in the default group and
    reads it back, so that each rank waits until its device has finished the step before; the handler that would set
    that number is not installed here, and ranks agree on signals in :meth:`GracefulStop._agree`.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


class _SingleProcess:
    """Ends a run of one process whose main thread cannot end it; several ranks do so for each other.

    A notebook's process holds more of the user's work than the run, and is not ended.

    Args:
        trainer: Trainer of the run.
        grace: Seconds without progress after a request to stop.
    """

    def __init__(self, trainer: Trainer, grace: float) -> None:
        self._grace, self._progress = GracePeriod(grace), ProgressCounter(trainer)
        self._interrupts, self._over = 0, threading.Event()
        self._listener = SignalListener(self._receive)

    def start(self) -> None:
        """Starts to listen."""
        if not _IS_INTERACTIVE:
            self._listener.start()
            threading.Thread(target=self._count, name="stop-grace", daemon=True).start()

    def stop(self) -> None:
        """Stops to listen."""
        self._over.set()
        self._listener.stop()

    def _receive(self, signum: int) -> None:
        self._grace.ask(signum)
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1 and not self._over.wait(_INTERRUPTED):
            self._end("ended by a second Ctrl-C", 128 + signal.SIGINT)

    def _count(self) -> None:
        while not self._over.wait(1.0):
            if self._grace.is_over(1.0, self._progress.moves()):
                name = signal.Signals(self._grace.signum).name
                code = 128 + (signal.SIGINT if self._grace.signum == signal.SIGINT else signal.SIGTERM)
                self._end(f"{name} asked the run to stop, and it has finished no batch since; killed", code)

    def _end(self, text: str, code: int) -> None:
        if self._over.is_set():
            return
        print_stack(0, 1)
        print(f"dlo: {text}; earlier checkpoints are intact", file=sys.stderr)
        exit_process(code)

"""Progress bar with loss, lr and samples/s, redrawn at a fixed rate in time."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor
from tqdm import tqdm

from dlo_framework.batches import batch_size
from dlo_framework.progress import count_batches
from dlo_framework.units import format_duration
from dlo_framework.watch.monitor import batch_loss, data_parallel_size


class RunBar(ProgressBar):
    """Progress bar for each epoch; on by default.

    It shows loss, lr, samples/s, metrics that are logged with ``prog_bar=True``, those of the last validation, and the
    time left until the run's end.

    The loss is that of the batch. On several ranks it is their mean, of the last batch at which metrics are logged
    (``trainer.log_every_n_steps``) and of an epoch's last batch. Under manual optimization, without a loss that
    ``training_step`` returns, it is the sum of the losses whose backward ran.

    It reads the clock at each step and draws a few times a second; only then is the loss read from the device. Where
    the output is not a terminal but, for example, a log file, it prints a line for each epoch, and one each minute.

    Args:
        redraws_per_second: Redraws per second on a terminal.
        seconds_between_lines: Seconds between two printed lines without a terminal.
    """

    def __init__(self, redraws_per_second: float = 5.0, seconds_between_lines: float = 60.0) -> None:
        super().__init__()
        self.redraws_per_second = redraws_per_second
        self.seconds_between_lines = seconds_between_lines
        self._enabled = True
        self._bar: tqdm[Any] | None = None
        self._next = 0.0
        self._began = 0.0
        self._validating = 0.0
        self._samples = 0
        self._world = 1
        self._outputs: Any = None
        self._accumulated = 1
        self._backward: Tensor | None = None  # sum of the losses of the batch, in manual optimization
        self._shared: Tensor | None = None  # sum and number of the ranks' losses
        self._every, self._tick = 1, 0
        self._metrics: dict[str, float] = {}  # of the last validation
        self._first: tuple[float, int] | None = None  # clock and completed batches after the run's first batch

    def disable(self) -> None:
        """Stops drawing: on ranks other than the first, and while a callback trains for itself."""
        self._enabled = False

    def enable(self) -> None:
        """Resumes drawing."""
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is drawn; used by ``LightningModule.print``."""
        return self._enabled

    @property
    def _stream(self) -> TextIO:
        return sys.stderr

    @property
    def _interval(self) -> float:
        return 1 / self.redraws_per_second if self._stream.isatty() else self.seconds_between_lines

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the number of data-parallel ranks."""
        self._world = data_parallel_size(trainer)
        self._first = self._outputs = self._shared = None
        self._every, self._tick = max(1, trainer.log_every_n_steps), trainer.global_step  # type: ignore[attr-defined]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the epoch's bar."""
        self._open(_label(trainer), self.total_train_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forgets the last batch's losses."""
        self._backward = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Adds a loss of manual optimization."""
        if not pl_module.automatic_optimization:
            own = loss.detach()
            self._backward = own if self._backward is None else self._backward + own

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and draws if the interval has passed."""
        # The accumulation may have changed when the loss is drawn.
        self._outputs, self._accumulated = outputs, trainer.accumulate_grad_batches
        step, before = trainer.global_step, self._tick
        self._tick = step
        if self._shared is None or step // self._every > before // self._every:
            self._share_loss(trainer)
        if not self._enabled:
            return
        self._samples += batch_size(batch) * self._world
        if self._first is None:  # After the first batch, which may compile.
            self._first = (time.perf_counter(), trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        now = time.perf_counter()
        if now < self._next:
            return
        if self._bar is None:  # For an epoch resumed in the middle, Lightning calls no on_train_epoch_start.
            self.on_train_epoch_start(trainer, pl_module)
        self._next = now + self._interval
        self._draw(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the epoch's last state."""
        self._share_loss(trainer)
        # Read on all ranks: a metric of the epoch may be computed over them.
        metrics = trainer.callback_metrics
        if self._bar is not None:
            self._metrics = {name: float(value) for name, value in metrics.items() if name.startswith("val")}
            self._draw(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
            self._close()
            self._outputs = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the time at which a validation starts."""
        self._validating = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes the validation's time from the rate."""
        self._began += time.perf_counter() - self._validating

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        tqdm.write(" ".join(map(str, args)), file=self._stream)

    def _open(self, text: str, total: float) -> None:
        if not self._enabled:
            return
        self._close()
        self._samples, self._began = 0, time.perf_counter()
        finite = total != float("inf")
        self._bar = tqdm(
            desc=text,
            total=int(total) if finite else None,
            file=self._stream,
            mininterval=0,
            miniters=1,
            maxinterval=float("inf"),  # 0 < maxinterval starts a thread of tqdm's; this bar is drawn by hand.
            disable=not self._stream.isatty(),
            dynamic_ncols=True,
            bar_format="{desc} {bar:20} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            leave=True,
        )

    def _draw(self, trainer: Trainer, batches: int) -> None:
        assert self._bar is not None
        text = self._text(trainer)
        if self._bar.disable:
            print(f"{_label(trainer)} batch {batches}: {text}", file=self._stream, flush=True)
            return
        self._bar.n = batches
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()

    def _loss(self, trainer: Trainer) -> Tensor | None:
        loss = batch_loss(trainer, self._outputs, self._accumulated)
        return self._backward if loss is None else loss

    def _share_loss(self, trainer: Trainer) -> None:
        """Adds the ranks' losses; called on all of them, and not read yet."""
        if self._world > 1:
            loss = self._loss(trainer)
            none = torch.zeros(2, device=trainer.strategy.root_device)
            own = none if loss is None else torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)])
            self._shared = trainer.strategy.reduce(own, reduce_op="sum")

    def _text(self, trainer: Trainer) -> str:
        metrics, loss = self._metrics | trainer.progress_bar_metrics, self._loss(trainer)
        own = [0.0, 0.0] if loss is None else [float(loss), 1.0]
        total, count = own if self._shared is None else self._shared.tolist()
        parts = [f"loss {total / count:.4f}"] if count and "loss" not in metrics else []
        if trainer.optimizers:
            parts.append(f"lr {max(group['lr'] for group in trainer.optimizers[0].param_groups):.2e}")
        if self._samples:
            parts.append(f"{self._samples / (time.perf_counter() - self._began):,.0f} samples/s")
        parts += [f"{name} {value:.4f}" for name, value in metrics.items()]
        left = self._seconds_left(trainer)
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        return ", ".join(parts)

    def _seconds_left(self, trainer: Trainer) -> float | None:
        """Returns the seconds until the run's last batch, at its rate so far; None if its end or rate is unknown.

        Validations are in the rate: it is taken over the wall time since the run's first batch.
        """
        done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        if self._first is None or done <= self._first[1]:
            return None
        total = count_batches(trainer)
        if total is None:
            return None
        began, before = self._first
        return max(0.0, (total - done) * (time.perf_counter() - began) / (done - before))

    def _close(self, *_: Any, **__: Any) -> None:
        """Closes the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_train_end = on_exception = _close


def _label(trainer: Trainer) -> str:
    epochs = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}/{epochs if epochs is not None and epochs > 0 else '?'}"

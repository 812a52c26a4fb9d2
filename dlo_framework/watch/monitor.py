"""Monitor of a run, `RunMonitor`: logs loss, lr, gradient norm, rates, FLOPs and memory; checks of monitored names."""

from __future__ import annotations

import contextlib
import difflib
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from dlo_framework.batches import batch_size, sample_shapes
from dlo_framework.callback import PluginCallback, callbacks_of, drops_gradients
from dlo_framework.costs import FlopCounter, SampleShape, peak_flops
from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.distributed.step_primitives import agreed_gradient_norm
from dlo_framework.errors import DloError, did_you_mean, mark_agreed
from dlo_framework.local_memory import memory_now, reset_memory_peak
from dlo_framework.run.resume import gather_states
from dlo_framework.strategy_contract import data_share

#: Steps, or records on an accelerator, of which the median step time is.
_LAST_STEPS = 1000


class RunMonitor(PluginCallback):
    """Logs loss, lr, gradient norm, rates, FLOPs and memory every ``trainer.log_every_n_steps`` steps; on by default.

    Steps are optimizer steps. Between two records it sums the loss on the device, and reads no number from it.

    ============================ ==========================================================================
    tag                          meaning
    ============================ ==========================================================================
    ``train/loss``               mean training loss since the last record, over all ranks
    ``train/grad_norm``          2-norm of all gradients, after accumulation and unscaling, before clipping
    ``optim/lr``                 learning rate of each parameter group
    ``optim/momentum``           momentum of each parameter group, or Adam's first beta
    ``speed/samples_per_s``      samples of all ranks per second, without validation and checkpoints
    ``speed/data_wait``          fraction of that time spent waiting for the data loader
    ``speed/step_ms``            milliseconds per optimizer step
    ``speed/tflops``             achieved model TFLOP/s of one rank, forward and backward
    ``speed/mfu``                these over the accelerator's peak (PaLM, arXiv 2204.02311), where it is known
    ``data/corrupt_samples``     corrupt samples read, over all ranks, where the data count ``corrupt_images``
    ``memory/*``                 GB in use and peak GB, of the accelerator, or of the process on a CPU
    ============================ ==========================================================================

    Args:
        gradient_norm: Whether to log the gradient norm; it costs one pass over the gradients on the steps that are
            logged.
        flops: Whether to count the model's FLOPs, on the run's second batch and on the first batch with each further
            shape of samples.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self, gradient_norm: bool = True, flops: bool = True) -> None:
        self.gradient_norm = gradient_norm
        self.latest: dict[str, float] = {}
        self.samples = 0  # of all ranks, over the whole run
        self.seconds = 0.0  # of training, without validation and checkpoints
        self.flops = FlopCounter() if flops else None
        self._loss: torch.Tensor | None = None
        self._saved_losses: list[torch.Tensor | None] = []
        self._batches = 0
        self._window_samples = 0  # of all ranks: a run may be resumed on another number of ranks
        self._window_seconds = 0.0
        self._window_steps = 0
        self._window_shapes: dict[SampleShape, int] = {}  # samples of this rank, by their shape
        self._samples = 0  # of the batch that runs
        self._shape: SampleShape = ()
        self._running: Any = None  # batch that is processed
        self._started = 0.0
        self._paused = False
        self._due = False
        self._norm: torch.Tensor | None = None
        self._every = 1
        self._world = 1
        self._tick = 0
        self._step_times: deque[float] = deque(maxlen=_LAST_STEPS)
        self._step_began: float | None = None  # seconds of training at the last step's end
        self._waits = False  # whether the host waits for the device in each step

    def state_dict(self) -> dict[str, Any]:
        """Returns counts, the latest record and the open window, for a resumed run to continue and to report."""
        shapes = [[[list(sizes) for sizes in shape], number] for shape, number in self._window_shapes.items()]
        return {
            "samples": self.samples,
            "seconds": self.seconds,
            "flops": self.flops.state_dict() if self.flops is not None else [],
            "latest": self.latest,
            "window": {
                "samples": self._window_samples,
                "seconds": self._open_seconds(),
                "steps": self._window_steps,
                "batches": self._batches,
                "shapes": shapes,
                "losses": [],
            },
        }

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last optimizer steps, without validation and checkpoints; None before there is one.

        On an accelerator, where the host runs ahead of the device, it is of means over records.
        """
        return statistics.median(self._step_times) if self._step_times else None

    def _note_step(self) -> None:
        """Adds the time of an optimizer step that has ended, except the first one's."""
        now = self.seconds + self._open_seconds()
        if self._step_began is not None and self._waits:
            self._step_times.append(now - self._step_began)
        self._step_began = now

    def _open_seconds(self) -> float:
        running = 0.0 if self._paused or not self._started else time.perf_counter() - self._started
        return self._window_seconds + running

    def totals(self) -> tuple[int, float, float | None]:
        """Returns samples of all ranks and seconds of training so far, and the latest mean loss of this rank."""
        samples = self.samples + self._window_samples
        seconds = self.seconds + (self._open_seconds() if self._window_samples else 0.0)
        loss = self.latest.get("train/loss")
        if loss is None and self._loss is not None:
            loss = float(self._loss) / self._batches
        return samples, seconds, loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the counts of the run that is resumed."""
        self.samples, self.seconds = state_dict["samples"], state_dict["seconds"]
        self.latest = state_dict.get("latest", {})  # Older checkpoints have none.
        window = state_dict["window"]
        self._window_samples, self._window_seconds = window["samples"], window["seconds"]
        self._window_steps, self._batches, self._saved_losses = window["steps"], window["batches"], window["losses"]
        self._loss = next(iter(self._saved_losses), None)  # Rank 0's; a run without steps reports it.
        self._window_shapes = {tuple(tuple(sizes) for sizes in shape): number for shape, number in window["shapes"]}
        if self.flops is not None:
            self.flops.load_state_dict(state_dict["flops"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds each rank's loss of the open window, as a checkpoint has only rank 0's callback states."""
        losses = gather_states(None if self._loss is None else self._loss.cpu())
        if self.state_key in checkpoint.get("callbacks", {}):
            checkpoint["callbacks"][self.state_key]["window"]["losses"] = losses

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clears the FLOPs and the open window of an earlier fit, before a resumed run's state is loaded."""
        if stage == "fit":
            self._open_window()
            if self.flops is not None:
                self.flops.forget()

    def _open_window(self) -> None:
        self._loss = self._norm = None
        self._batches = self._window_samples = self._window_steps = 0
        self._window_shapes, self._window_seconds = {}, 0.0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the names of monitored metrics, before the first step."""
        check_monitored(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the values that do not change during a run, and starts the clock."""
        self._every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self._world = data_parallel_size(trainer)
        self._measures_norm = self.gradient_norm and not drops_gradients(trainer)
        self._tick = trainer.global_step
        reset_memory_peak(trainer.strategy.root_device)
        self._started, self._paused = time.perf_counter(), False
        self._step_times.clear()
        self._step_began, self._waits = None, trainer.strategy.root_device.type == "cpu"
        losses, self._saved_losses = self._saved_losses, []
        if losses:  # of a window that was open when the run was interrupted
            own = losses[trainer.global_rank % len(losses)]
            self._loss = None if own is None else own.to(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts a count of FLOPs for a new shape, and restarts the clock after a validation and its checkpoint."""
        if self._paused:
            self._paused, self._started = False, time.perf_counter()
        self._running = batch
        self._samples, self._shape = batch_size(batch), sample_shapes(batch)
        if self.flops is not None and self._shape not in self.flops.counts:
            self.flops.start(pl_module, self._shape)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measures the gradients' norm on the steps that are logged."""
        if self._measures_norm and self._completes_window(trainer.global_step + 1):
            self._norm = agreed_gradient_norm(trainer, optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Adds the batch to the window, and logs the window when it is complete."""
        self._running = None
        if self.flops is not None and self.flops.running:
            self.flops.stop(self._samples)
        loss = batch_loss(trainer, outputs)
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss.add_(loss)
        self._batches += 1
        self._window_samples += self._samples * self._world
        self._window_shapes[self._shape] = self._window_shapes.get(self._shape, 0) + self._samples
        self._samples = 0  # For a batch of None, Lightning calls this hook without on_train_batch_start.
        step = trainer.global_step
        complete = self._completes_window(step)
        self._window_steps += step - self._tick
        if step > self._tick:
            self._note_step()
        self._tick = step
        if complete:
            self.record(trainer)

    def _completes_window(self, step: int) -> bool:
        """Whether a window is complete after this step; several optimizers may make several steps in a batch."""
        return step // self._every > self._tick // self._every

    def record(self, trainer: Trainer) -> None:
        """Logs the window since the last record, and opens the next one."""
        now = time.perf_counter()
        seconds = self._open_seconds()
        samples = self._window_samples
        scalars = optimizer_scalars(trainer)
        if self._loss is not None:
            scalars["train/loss"] = float(trainer.strategy.reduce(self._loss, reduce_op="mean")) / self._batches
        if self._norm is not None:
            scalars["train/grad_norm"] = float(self._norm)
        scalars["speed/samples_per_s"] = samples / seconds
        scalars["speed/step_ms"] = 1000 * seconds / max(1, self._window_steps)
        if not self._waits and self._window_steps:
            self._step_times.append(seconds / self._window_steps)
        clock = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(clock, StepClock):
            scalars["speed/data_wait"] = clock.pop_waited() / seconds
        achieved = self.flops.total(self._window_shapes) / seconds if self.flops is not None else 0.0
        if achieved:
            scalars["speed/tflops"] = achieved / 1e12
            peak = peak_flops(trainer)
            if peak:
                scalars["speed/mfu"] = achieved / peak
        corrupt = DataDescription(run_datamodule(trainer)).corrupt_images
        if corrupt is not None:
            count = torch.tensor(float(corrupt), device=trainer.strategy.root_device)
            scalars["data/corrupt_samples"] = float(trainer.strategy.reduce(count, reduce_op="sum"))
        scalars |= memory_now(trainer.strategy.root_device)
        scalars["epoch"] = trainer.current_epoch
        self.latest = scalars
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        self.samples += samples
        self.seconds += seconds
        self._open_window()
        self._started = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock during a validation."""
        if not trainer.sanity_checking:
            self.pause()

    def pause(self) -> None:
        """Stops the clock until the next training batch, so that other work does not count."""
        if not self._paused:
            self._window_seconds += time.perf_counter() - self._started
            self._paused = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Stops the clock and the count of FLOPs in the block, so that its work does not count.

        In a batch the clock then goes on; before one, the batch starts it.
        """
        resumes = self._running is not None and not self._paused
        self.pause()
        try:
            with contextlib.nullcontext() if self.flops is None else self.flops.aside():
                yield
        finally:
            if resumes:
                self._paused, self._started = False, time.perf_counter()

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Remembers the batch, in case it ends the run."""
        self._running = args[1]

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Forgets the batch."""
        self._running = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the last window, if it has batches."""
        if self._batches:
            self.record(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends a count of FLOPs that the exception has interrupted, and adds a note about the batch."""
        note_batch(exception, self._running, run_datamodule(trainer))
        self._running = None
        if self.flops is not None:
            self.flops.stop()


def batch_loss(trainer: Trainer, outputs: Any, accumulated: int | None = None) -> torch.Tensor | None:
    """Returns a new tensor with the batch's loss as ``training_step`` returned it; None where it returned none.

    With automatic optimization, the loss that Lightning passes to hooks is divided by the number of accumulated
    batches.

    Args:
        trainer: Trainer, after the batch.
        outputs: Outputs that the hook got.
        accumulated: Number of accumulated batches at the time of the batch; None for the trainer's number now.
    """
    loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
    if not isinstance(loss, torch.Tensor):
        return None
    loss = loss.detach().mean() if loss.ndim else loss.detach()  # Manual optimization may return a loss per sample.
    automatic = trainer.lightning_module.automatic_optimization
    if accumulated is None:
        accumulated = trainer.accumulate_grad_batches
    return loss * (accumulated if automatic else 1)


def data_parallel_size(trainer: Trainer) -> int:
    """Returns the number of ranks over which the samples of a batch are distributed."""
    return data_share(trainer.strategy)[1]


def optimizer_scalars(trainer: Trainer) -> dict[str, float]:
    """Returns lr and momentum of each parameter group; groups with the same value share one curve."""
    scalars: dict[str, float] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        where = "optim" if len(trainer.optimizers) == 1 else f"optim{number}"
        groups = optimizer.param_groups
        momenta = [group["betas"][0] if "betas" in group else group.get("momentum") for group in groups]
        for name, values in (("lr", [group["lr"] for group in groups]), ("momentum", momenta)):
            known = [float(value) for value in values if value is not None]
            if len(set(known)) == 1:
                scalars[f"{where}/{name}"] = known[0]
            else:
                scalars |= {f"{where}/{name}/{index}": value for index, value in enumerate(known)}
    return scalars


def is_tensorboard(logger: Any) -> TypeGuard[TensorBoardLogger]:
    """Returns whether a logger writes TensorBoard events, and so can log images and text."""
    return isinstance(logger, TensorBoardLogger)


#: Number of entries of a list or mapping that are described.
_ENTRIES = 8


def describe_batch(batch: Any) -> str:
    """Returns the types, shapes and dtypes of a batch's parts: ``(Tensor[16, 3] float32, Tensor[16] int64)``."""
    if isinstance(batch, Tensor):
        return f"Tensor{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        parts = [f"{key}: {describe_batch(value)}" for key, value in list(batch.items())[:_ENTRIES]]
        return "{" + ", ".join([*parts, *_rest(batch)]) + "}"
    if isinstance(batch, list | tuple):
        parts = [describe_batch(value) for value in batch[:_ENTRIES]]
        return "(" + ", ".join([*parts, *_rest(batch)]) + ")"
    return type(batch).__name__


def _rest(batch: Any) -> list[str]:
    return [f"{len(batch) - _ENTRIES} more"] if len(batch) > _ENTRIES else []


def note_batch(error: BaseException, batch: Any, source: Any) -> None:
    """Adds a note about a batch to an error that ends a run; dlo's own errors say enough.

    Args:
        error: Error.
        batch: Batch that was processed; None if there was none.
        source: Datamodule, or None.
    """
    if batch is None or isinstance(error, DloError) or not isinstance(error, Exception):
        return
    of = "" if source is None else f" of {type(source).__name__}"
    error.add_note(f"The batch{of} was {describe_batch(batch)}.")


# --- time that training waits for data -----------------------------------------------------------------------


FETCH = "[_TrainingEpochLoop].train_dataloader_next"


class _Nothing:
    """Context that does nothing, with C functions as methods: ``"".format`` takes any arguments and returns ``""``."""

    __enter__ = __exit__ = staticmethod("".format)


#: ``contextlib.nullcontext`` would call two Python functions each time: 180 calls a step.
_NOTHING: Any = _Nothing()


class StepClock(Profiler):
    """Adds up the seconds that training waits for its data loader; on by default where no profiler is set.

    Lightning enters a profiler some twenty times a step, each time through a generator. This one returns the same
    context each time, which does nothing, and reads the clock only where data is fetched.

    Attributes:
        on_fetch: Function that is called before a batch is fetched with True, and after it with False; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0
        self.on_fetch: Callable[[bool], None] | None = None
        self._since = 0.0

    def start(self, action_name: str) -> None:
        """Starts the clock when a batch is fetched."""
        if action_name == FETCH:
            self._since = time.perf_counter()
            if self.on_fetch is not None:
                self.on_fetch(True)

    def stop(self, action_name: str) -> None:
        """Stops the clock when the batch has been fetched."""
        if action_name == FETCH:
            self.waited += time.perf_counter() - self._since
            if self.on_fetch is not None:
                self.on_fetch(False)

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]
        """Returns a context that does nothing: fetching is timed through :meth:`start` and :meth:`stop`."""
        return _NOTHING

    def pop_waited(self) -> float:
        """Returns the seconds waited since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited


# --- names of monitored metrics ------------------------------------------------------------------------------


#: Least similarity of two names of which one is a misspelling of the other; `train_loss` and `val_loss` have 0.67.
_MISSPELT = 0.85
#: Values that ModelCheckpoint may monitor and nobody logs.
_ALWAYS = {"epoch", "step"}


def check_monitored(trainer: Trainer) -> None:
    """Checks that no monitored name is a misspelling of a metric that the sanity validation has logged.

    Another unknown name may be one that training logs, which shows later. A warning says so of one that begins like the
    names of the validation.

    Raises:
        DloError: On all ranks, with the nearest name.
    """
    logged = sorted(trainer.callback_metrics)
    for owner, name in _monitored(trainer):
        near = find_misspelt(name, logged)
        if near is not None:
            raise mark_agreed(
                DloError(
                    f"monitor of {owner} must be a logged metric, got '{name}'; did you mean '{near}'? validation logs:"
                    f" {', '.join(logged)}"
                )
            )
        if is_doubtful(name, logged):
            rank_zero_warn(
                f"monitor of {owner} is '{name}', which validation does not log; it logs {', '.join(logged)}. The run"
                " ends at its first use, unless training logs it"
            )


def check_validates(who: str, metric: str, trainer: Trainer) -> None:
    """Checks that a run validates, for a callback that reads a metric of the validation.

    Raises:
        DloError: It does not.
    """
    if not trainer.enable_validation:
        raise DloError(
            f"{who}: the run must validate to log {metric}, got no validation; set validation data, a validation_step,"
            " and trainer.limit_val_batches above 0"
        )


def check_logged(who: str, metric: str, trainer: Trainer) -> None:
    """Checks that a validation has logged a metric that a callback reads.

    Raises:
        DloError: It has not; the message has the nearest.
    """
    logged = trainer.callback_metrics
    if metric not in logged:
        raise DloError(
            f"{who}: unknown metric '{metric}'{did_you_mean(metric, logged) or ';'} validation logs:"
            f" {', '.join(sorted(logged)) or 'none'}"
        )


def is_doubtful(name: str, logged: Iterable[str]) -> bool:
    """Returns whether a name is not logged, and begins with the word with which all logged names begin."""
    known = set(logged)
    words = {re.split(r"[_/]", other)[0] for other in known}
    return name not in known | _ALWAYS and words == {re.split(r"[_/]", name)[0]}


def explain_missing_metric(message: str) -> str | None:
    """Returns one line for Lightning's (2.6) error of an EarlyStopping whose metric nobody logs; None for others."""
    match = re.search(
        r"Early stopping conditioned on metric `(.*?)` which is not available.*following: `(.*)`", message
    )
    if match is None:
        return None
    name, logged = match[1], match[2].split("`, `")
    hint = did_you_mean(name, logged) or ";"
    return f"monitor of EarlyStopping must be a logged metric, got '{name}'{hint} logged: {', '.join(sorted(logged))}"


def find_misspelt(name: str, logged: Iterable[str]) -> str | None:
    """Returns the logged metric of which a name is a misspelling; None if it is logged, or like none."""
    known = list(logged)
    if name in known or name in _ALWAYS:
        return None
    matches = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    return matches[0] if matches else None


def _monitored(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yields the names that must be logged, with their owners."""
    for callback in callbacks_of(trainer):
        name, is_optional = getattr(callback, "monitor", None), getattr(callback, "monitor_is_optional", False)
        if isinstance(name, str) and getattr(callback, "strict", True) and not is_optional:
            yield type(callback).__name__, name
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.monitor, str) and config.strict:
            yield type(config.scheduler).__name__, config.monitor

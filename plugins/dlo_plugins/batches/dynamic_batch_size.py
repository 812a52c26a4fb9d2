"""Batch size that grows during training: schedules, windows of micro-batches, and the gradient noise scale.

Smith, Kindermans, Ying, Le 2018, "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv 1711.00489);
McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162). Departure from
the second paper: the noise is measured from one micro-batch of each step on each rank, not from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback, callbacks_of, traits_of
from dlo_framework.data import Position, ResumableDataModule, Window, data_parallel_coordinates
from dlo_framework.data.sampler import Span, plan_epoch
from dlo_framework.distributed.step_primitives import loss_scaler
from dlo_framework.errors import DloError, check_choice, check_number, check_one_of
from dlo_framework.norms import total_norm
from dlo_framework.optimizers import stepped_tensors
from dlo_framework.progress import (
    AccumulationWindow,
    RunPosition,
    any_percentage,
    check_max_epochs,
    loader_batch_size,
    parse_position,
    planned_batches,
    refresh_epoch_length,
    value_at,
)
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import is_logged, log_scalars


class DynamicBatchSize(PluginCallback):
    """Changes the batch size during training: by a schedule, instead of a learning-rate decay, or by gradient noise.

    A batch size here is the number of samples in an optimizer step, over all ranks. The loader's own batches grow up to
    ``max_micro_batch`` samples a rank, and accumulation does the rest; with a loader that is not a dlo datamodule's,
    accumulation does all of it. An epoch still visits each sample once, except for less than one batch of the first
    size at its end. Schedules that follow the fraction of samples seen (OneCycle) do not shift. Set exactly one of the
    first three arguments.

    Args:
        schedule: Points of the run, each with the batch size from there on: ``{0: 256, "50%": 512, "80%": 1024}``. A
            point is a number of epochs, ``"3 epochs"``, ``"50%"`` of ``trainer.max_epochs``, or ``"500000 samples"``.
        decay_to_growth: Step or exponential learning-rate schedule. Instead of a decay of the rate by a factor, the
            batch grows by its inverse: ``{factor: 0.2, at: ["30%", "60%", "80%"]}`` or ``{factor: 0.97, every: 2}``
            with ``every`` in epochs. Above its ``max_batch_size`` (default: the size of the data) the rate decays.
        noise_scale: Settings to measure the gradient noise scale and follow it, in powers of two from the first size
            and never down: ``{max_batch_size: 4096}``; also ``multiple`` of the noise scale (default 1), ``every``,
            the number of optimizer steps between decisions (50), and ``smoothing`` of the measurements (0.9). Each
            step then has at least two micro-batches. Accumulation changes at once, the loader's batches at the next
            epoch.
        max_micro_batch: Samples of a micro-batch that fit on one rank; MicroBatchFinder can find it. None for no limit.
        lr_rule: Rule that scales the learning rate with the growth of the batch since the start: ``linear``, ``sqrt``,
            or ``none``.
        follow_image_size: Whether to multiply the batch size by the ratio of the last image area to the current one,
            under ProgressiveResizing: memory stays constant. ``max_micro_batch``, which is for images of the last size,
            always follows.

    Raises:
        DloError: If a value is out of range, ``trainer.accumulate_grad_batches`` or ``limit_train_batches`` is set,
            optimization is manual, or a batch size is not divisible by the ranks.
    """

    #: Its batches have several shapes in a run.
    changes_batch_shapes = True

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True

    def __init__(
        self,
        schedule: dict[str | float, int] | None = None,
        decay_to_growth: LRDecay | None = None,
        noise_scale: NoiseScale | None = None,
        max_micro_batch: int | None = None,
        lr_rule: LRRule = "none",
        follow_image_size: bool = False,
    ) -> None:
        check_one_of("DynamicBatchSize", schedule=schedule, decay_to_growth=decay_to_growth, noise_scale=noise_scale)
        check_number("DynamicBatchSize: max_micro_batch", max_micro_batch, "at least 1", "leave it out")
        check_choice("DynamicBatchSize: lr_rule", lr_rule, get_args(LRRule), "leave it out")
        self.steps = {
            parse_position(point, "DynamicBatchSize.schedule"): size for point, size in (schedule or {}).items()
        }
        if schedule is not None and (not schedule or min(schedule.values()) < 1):
            raise DloError(
                f"DynamicBatchSize: schedule must have batch sizes of at least 1, got {schedule}; set {{0: 256}}, for"
                " example"
            )
        if decay_to_growth is not None:
            decay_to_growth.check()
        self._points = [*self.steps, *(decay_to_growth.points() if decay_to_growth is not None else [])]
        self.needs_max_epochs = any_percentage(self._points)
        self.decay, self.noise = decay_to_growth, noise_scale
        self.max_micro_batch, self.lr_rule, self.follow_image_size = max_micro_batch, lr_rule, follow_image_size
        self._found_micro_batch = False
        self._meter = NoiseMeter(noise_scale.smoothing) if noise_scale else None
        self._first = self._world = 1  # first batch size of the run; number of data-parallel ranks
        self._max_epochs = math.inf
        self._trainer: Trainer | None = None
        self._micro = self._size = 0  # with noise_scale: the epoch's micro-batch, and the target size
        self._window = AccumulationWindow(1, 0)
        self._epoch = 0  # epoch of the window
        self._factor = 1.0
        self._own_plan: tuple[int, list[Span]] | None = None
        self._counted: tuple[list[Span], Fraction] = [], Fraction(1)  # an epoch's plan, and its mean window
        self._hooks: list[Any] = []

    # --- the plan ------------------------------------------------------------------------------------------

    def size_at(self, at: Position) -> tuple[int, float]:
        """Returns the batch size of a step that begins at ``at``, and the factor of its learning rate."""
        left = 1.0
        if self.noise is not None:
            size = self._size
        elif self.decay is not None:
            size, left = grown_size(self.decay, self._first, at, self._max_epochs)
        else:
            size = value_at(self.steps, at, self._max_epochs) or self._first
        if self.follow_image_size:
            size = math.floor(size * self._area_factor(at))
        return size, left * lr_factor(self.lr_rule, size, self._first)

    def _area_factor(self, at: Position) -> float:
        assert self._trainer is not None
        return math.prod(traits_of(callback).area_factor(at) for callback in callbacks_of(self._trainer))

    def window_at(self, at: Position) -> Window:
        """Returns the micro-batches of a step that begins at ``at``, for the loader."""
        if self.noise is not None:
            return Window(self._micro, 1)  # Their number in a step is decided during training.
        size, left = self.size_at(at)[0], at.size - at.samples
        if size > left:
            # A multiple of the first size, so that the samples that an epoch leaves out do not depend on the ranks.
            unit = min(self._first, size)
            size = max(unit, left // unit * unit)
        return window(size, self._limit(at), self._world)

    def _limit(self, at: Position) -> int | None:
        return None if self.max_micro_batch is None else math.floor(self.max_micro_batch * self._area_factor(at))

    def set_max_micro_batch(self, per_rank: int) -> None:
        """Sets the size that MicroBatchFinder has found, before the first step."""
        self.max_micro_batch, self._found_micro_batch = per_rank, True
        if self._trainer is not None and planned_batches(self._trainer) is not None:
            self._replan(self._trainer)

    def _replan(self, trainer: Trainer) -> None:
        sampler = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        if self.noise is not None:
            self._micro = window(self._size, self._limit(Position(sampler.epoch, 0, sampler.size)), self._world, 2)[0]
        sampler.set_epoch(sampler.epoch)
        refresh_epoch_length(trainer)

    # --- before training -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the rest of the config, and sets the plan in the datamodule, whose loader is not made yet."""
        if stage != "fit":
            return
        self._trainer = trainer
        _check_trainer(trainer, pl_module)
        self._reset(trainer)
        if self.noise is not None and contract_of(trainer.strategy).zero_stage != 0:
            raise DloError(
                "DynamicBatchSize: strategy must keep each rank's own gradients for noise_scale, got"
                f" {type(trainer.strategy).__name__}; set strategy ddp, or use a schedule"
            )
        self._max_epochs = check_max_epochs(self._points, trainer.max_epochs, "DynamicBatchSize")
        self._world = data_parallel_coordinates(trainer)[1]
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, ResumableDataModule):
            self._begin(datamodule.batch_size)
            datamodule.window_at = self.window_at

    def _reset(self, trainer: Trainer) -> None:
        """Resets the state of an earlier fit, which may have raised. A resumed state is loaded after this."""
        trainer.accumulate_grad_batches = 1
        self._window, self._epoch, self._own_plan = AccumulationWindow(1, 0), 0, None
        self._factor = 1.0
        if trainer.current_epoch == 0:  # Else the same trainer continues after its earlier epochs.
            self._size = self._micro = 0
            self._meter = NoiseMeter(self.noise.smoothing) if self.noise else None

    def _begin(self, first: int) -> None:
        """Sets the first batch size of the run, and checks that the others are divisible by the ranks."""
        self._first = first
        if self.noise is not None:
            self.noise.check(first)
            self._size = self._size or first
            self._micro = self._micro or window(self._size, self.max_micro_batch, self._world, 2).batch_size
        wrong = [size for size in self.steps.values() if size % self._world]
        if wrong:
            below, above = wrong[0] // self._world * self._world, -(-wrong[0] // self._world) * self._world
            raise DloError(
                f"DynamicBatchSize: batch sizes must be multiples of the {self._world} data-parallel ranks, got"
                f" {wrong[0]}; set {below or above} or {above}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the first window; a resumed run may begin in the middle of one."""
        if planned_batches(trainer) is None:
            self._plan_for_fixed_batches(trainer)
        self._trainer = trainer
        optimizer = trainer.optimizers[0]
        self._hooks = [
            optimizer.register_step_pre_hook(lambda opt, *_: scale_rates(opt, self._factor)),
            optimizer.register_step_post_hook(lambda opt, *_: restore_rates(opt)),
        ]
        loader: Any = trainer.train_dataloader
        if planned_batches(trainer) is not None and loader.batch_sampler.epoch != trainer.current_epoch:
            # Resumed at an epoch's end, from where the loader goes on with the next: Lightning ends this one first.
            loader.batch_sampler.set_epoch(trainer.current_epoch)
            refresh_epoch_length(trainer)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self.noise is None and done:
            self._open(trainer, done)
        trainer.accumulate_grad_batches = self._window

    def _plan_for_fixed_batches(self, trainer: Trainer) -> None:
        """Prepares for a loader with batches of a fixed size, where accumulation does all the growth."""
        per_rank, batches = loader_batch_size(trainer), trainer.num_training_batches
        if per_rank is None or not math.isfinite(batches):
            raise DloError(
                "DynamicBatchSize: the training loader must have a batch_size and a length, got"
                f" batch_size {per_rank} and {batches} batches; use a DataLoader with both, or a dlo datamodule"
            )
        self._begin(per_rank * self._world)
        self._micro = self._first
        too_small = [size for size in self.steps.values() if size % self._first]
        if too_small:
            raise DloError(
                f"DynamicBatchSize: batch sizes must be multiples of the {self._first} samples of this loader's batches"
                f" (over all ranks), got {too_small[0]}; set {-(-too_small[0] // self._first) * self._first}, or use a"
                " dlo datamodule, whose batches can grow"
            )

    # --- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plans the epoch's batches, and sets their number in Lightning."""
        if planned_batches(trainer) is not None:
            self._replan(trainer)
        self._window = AccumulationWindow(1, 0)
        self._open(trainer, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Opens the next window if the last one has ended."""
        if trainer.current_epoch != self._epoch or batch_idx >= self._window.start + self._window:
            self._open(trainer, batch_idx)

    def _open(self, trainer: Trainer, batch_idx: int) -> None:
        spans = self._spans(trainer)
        if batch_idx >= len(spans):  # Resumed at an epoch's end: the next epoch opens its first window.
            return
        self._epoch = trainer.current_epoch
        span = spans[batch_idx]
        if self.noise is not None:
            wanted = max(2, round(self._size / (span.stop - span.start)))
            self._window = AccumulationWindow(min(wanted, len(spans) - batch_idx), batch_idx, wanted)
        else:
            if spans is not self._counted[0]:
                self._counted = spans, Fraction(len(spans), len({each.first for each in spans}))
            self._window = AccumulationWindow(span.batches, span.first, self._counted[1])
        start = spans[self._window.start].start
        size, self._factor = self.size_at(Position(trainer.current_epoch, start, self._samples(trainer)))
        trainer.accumulate_grad_batches = self._window
        if is_logged(trainer, trainer.global_step + 1):
            log_scalars(trainer, {"batch/size": float(size), "batch/lr_factor": self._factor})

    def _spans(self, trainer: Trainer) -> list[Span]:
        planned = planned_batches(trainer)
        if planned is not None:
            return planned
        if self._own_plan is None or self._own_plan[0] != trainer.current_epoch:
            micro = self._first

            def window_at(at: Position) -> Window:
                size = micro if self.noise is not None else self.size_at(at)[0]
                return Window(micro, max(1, size // micro))

            spans = plan_epoch(window_at, trainer.current_epoch, self._samples(trainer))
            self._own_plan = (trainer.current_epoch, spans)
        return self._own_plan[1]

    def _samples(self, trainer: Trainer) -> int:
        """Returns the number of samples in an epoch, as positions count them."""
        if planned_batches(trainer) is not None:
            return int(trainer.train_dataloader.batch_sampler.size)  # type: ignore[union-attr]
        return int(trainer.num_training_batches) * self._first

    # --- the noise scale -----------------------------------------------------------------------------------

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the gradient of a window's first micro-batch."""
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._meter is not None and self._window > 1 and ready == self._window.start + 1:
            self._meter.after_first_micro_batch(trainer, stepped_tensors(trainer.optimizers[0]), int(self._window))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measures the gradient of the full window."""
        if self._meter is not None:
            sizes = (self._micro / self._world, float(self._window * self._micro))
            self._meter.before_step(stepped_tensors(optimizer), sizes)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decides on the batch size at every ``noise_scale.every``-th step."""
        window_ended = batch_idx + 1 == self._window.start + self._window
        if self.noise is None or self._meter is None or not window_ended or trainer.global_step % self.noise.every:
            return
        self._meter.update_estimate(trainer)
        scale = self._meter.estimate.scale
        if scale is not None:
            doublings = math.floor(math.log2(max(1.0, self.noise.multiple * scale / self._first)))
            self._size = max(self._size, min(self._first * 2**doublings, self.noise.max_batch_size))
            log_scalars(trainer, {"batch/noise_scale": scale})

    # --- state ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Averages the ranks' measurements, as a checkpoint has only rank 0's callback states."""
        if self._meter is not None and trainer.state.fn == "fit":
            self._meter.average_sums(trainer)
            if self.state_key in checkpoint.get("callbacks", {}):
                checkpoint["callbacks"][self.state_key] = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Returns the open window, the measurements, and the micro-batch that was found."""
        return {
            "window": [int(self._window), self._window.start, self._epoch, *self._window.usual.as_integer_ratio()],
            "size": self._size,
            "micro": self._micro,
            "max_micro_batch": self.max_micro_batch if self._found_micro_batch else None,
            "meter": self._meter.state_dict() if self._meter else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the window, the measurements and the size of the resumed run."""
        batches, start, self._epoch, *usual = state_dict["window"]
        self._window = AccumulationWindow(batches, start, Fraction(*usual) if usual else None)
        if self.noise is not None and self._meter is not None and state_dict["meter"] is not None:
            self._size, self._micro = state_dict["size"], state_dict["micro"]
            self._meter.load_state_dict(state_dict["meter"])
        if state_dict["max_micro_batch"] is not None:
            self.max_micro_batch, self._found_micro_batch = state_dict["max_micro_batch"], True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the trainer, the optimizers and the datamodule."""
        if stage == "fit":
            self._release(trainer)
            trainer.accumulate_grad_batches = 1

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the optimizers and the datamodule, as Lightning calls no ``teardown`` after an exception.

        A checkpoint that is saved after this needs the accumulation; the next fit resets it.
        """
        if trainer.state.fn == "fit":
            self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in trainer.optimizers:
            restore_rates(optimizer)  # An exception in the step leaves them scaled.
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, ResumableDataModule):
            datamodule.window_at = None


def _check_trainer(trainer: Trainer, pl_module: LightningModule) -> None:
    options: Any = trainer
    left_over = isinstance(trainer.accumulate_grad_batches, AccumulationWindow)  # from a fit that raised
    if trainer.accumulate_grad_batches != 1 and not left_over:
        raise DloError(
            "DynamicBatchSize: trainer.accumulate_grad_batches must not be set, as the callback sets the accumulation"
            f" itself, got {trainer.accumulate_grad_batches}; remove it"
        )
    if not pl_module.automatic_optimization:
        raise DloError(
            f"DynamicBatchSize: optimization must be automatic, got {type(pl_module).__name__} with"
            " automatic_optimization = False; remove the callback"
        )
    if options.limit_train_batches != 1.0 and not options.fast_dev_run:
        raise DloError(
            "DynamicBatchSize: limit_train_batches must not be set, as the size of batches changes, got"
            f" {options.limit_train_batches}; remove it, or shorten the run with max_epochs"
        )


class NoiseMeter:
    """Compares the gradient of a step's first micro-batch on each rank with the gradient of the full step.

    Sums stay on the device; :meth:`update_estimate` averages them over the ranks and reads them.

    Args:
        smoothing: Weight of the old means in the estimate at each update.

    Attributes:
        estimate: Running means of noise and signal.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.estimate = NoiseEstimate()
        self._small: Tensor | None = None  # squared norm of the current step's first micro-batch gradient
        self._sums = torch.zeros(3, dtype=torch.float64)  # sums of noise, signal, steps

    def after_first_micro_batch(self, trainer: Trainer, parameters: list[Tensor], batches: int) -> None:
        """Measures the gradient of one micro-batch; ``batches`` is the divisor of its loss."""
        scaler = loss_scaler(trainer.precision_plugin)
        scale = scaler.get_scale() if scaler is not None else 1.0
        self._small = _squared_norm(parameters) * (batches / scale) ** 2

    def before_step(self, parameters: list[Tensor], sizes: tuple[float, float]) -> None:
        """Measures the gradient of the full step, after unscaling.

        Args:
            parameters: Parameters with gradients.
            sizes: Samples of the micro-batch on one rank, and samples of the step.
        """
        if self._small is None:
            return
        large = _squared_norm(parameters)
        noise, signal = noise_and_signal(self._small.to(large.device), large, sizes)
        self._sums = self._sums.to(large.device)
        estimates = torch.stack([noise, signal, torch.ones_like(signal)]).double()
        # A step whose gradients overflowed is left out; the scaler will skip it.
        self._sums += torch.where(estimates.isfinite().all(), estimates, torch.zeros_like(estimates))
        self._small = None

    def average_sums(self, trainer: Trainer) -> None:
        """Averages the sums over the ranks, so that they are equal on all of them."""
        sums = self._sums.to(trainer.strategy.root_device)
        self._sums = trainer.strategy.reduce(sums, reduce_op="mean")

    def update_estimate(self, trainer: Trainer) -> None:
        """Adds the measurements of all ranks since the last call to the estimate."""
        self.average_sums(trainer)
        noise, signal, steps = self._sums.tolist()
        if steps:
            self.estimate.add(noise / steps, signal / steps, self.smoothing)
        self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the estimate and the sums, as plain numbers and tensors."""
        estimate = self.estimate
        return {
            "estimate": [estimate.noise, estimate.signal, estimate.weight],
            "sums": self._sums.cpu(),
            "small": None if self._small is None else self._small.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`."""
        self.estimate = NoiseEstimate(*state["estimate"])
        self._sums, self._small = state["sums"], state["small"]


def _squared_norm(parameters: list[Tensor]) -> Tensor:
    return total_norm(parameter.grad for parameter in parameters if parameter.grad is not None).float().square()


_UNSCALED = "dlo_unscaled_lr"


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiplies the rates of an optimizer's groups, and stores the old ones in the groups."""
    if factor != 1.0:
        for group in optimizer.param_groups:
            group[_UNSCALED] = group["lr"]
            group["lr"] = group["lr"] * factor


def restore_rates(optimizer: Optimizer) -> None:
    """Restores the rates from before :func:`scale_rates`, if it was called."""
    for group in optimizer.param_groups:
        if _UNSCALED in group:
            group["lr"] = group.pop(_UNSCALED)


Number = TypeVar("Number", float, Tensor)
LRRule = Literal["none", "sqrt", "linear"]


@dataclass
class LRDecay:
    """Decaying learning-rate schedule that the batch size replaces by growth.

    Attributes:
        factor: Factor by which each decay multiplies the learning rate, in (0, 1).
        at: Points of the decays, for a step schedule: ``["30%", "60%"]``, or epochs, or samples.
        every: Number of epochs between decays, for an exponential schedule.
        max_batch_size: Largest batch size; once it is reached, the learning rate decays. None for the size of the data.
    """

    factor: float
    at: list[str | float] | None = None
    every: float | None = None
    max_batch_size: int | None = None

    def check(self) -> None:
        """Raises a DloError for values out of range, and unless exactly one of ``at`` and ``every`` is set."""
        check_number("decay_to_growth: factor", self.factor, "above 0 and below 1", "set 0.1 or 0.2, which are usual")
        check_one_of("decay_to_growth", at=self.at, every=self.every)
        check_number("decay_to_growth: 'every'", self.every, "a number of epochs above 0", "2 is usual")
        self.points()

    def points(self) -> list[RunPosition]:
        """Returns the points of a step schedule."""
        return [parse_position(point, "decay_to_growth.at") for point in self.at or []]

    def decays(self, at: Position, max_epochs: float) -> int:
        """Returns the number of decays before a batch that begins at ``at``."""
        if self.every is not None:
            # As integers, so that a rounding error cannot move a boundary by a batch.
            return int((at.epoch * at.size + at.samples) // max(1, round(self.every * at.size)))
        return sum(point.reached(at, max_epochs) for point in self.points())


@dataclass
class NoiseScale:
    """Settings of a batch size that follows the gradient noise scale, measured during the run.

    Attributes:
        max_batch_size: Largest batch size.
        multiple: Ratio of the target batch size to the noise scale. At 1, training takes twice the least number of
            steps and twice the least number of samples (McCandlish et al. 2018).
        every: Number of optimizer steps between decisions.
        smoothing: Weight of the old running means at each decision.
    """

    max_batch_size: int
    multiple: float = 1.0
    every: int = 50
    smoothing: float = 0.9

    def check(self, batch_size: int) -> None:
        """Raises a DloError for values out of range."""
        if self.max_batch_size < batch_size:
            raise DloError(
                f"noise_scale: max_batch_size must be at least the batch size of {batch_size}, got"
                f" {self.max_batch_size}; set {batch_size} or more"
            )
        check_number("noise_scale: multiple", self.multiple, "above 0", "the default is 1")
        check_number("noise_scale: every", self.every, "at least 1", "the default is 50")
        check_number("noise_scale: smoothing", self.smoothing, "at least 0 and below 1", "the default is 0.9")


@dataclass
class NoiseEstimate:
    """Running means of the two numbers whose ratio is the simple noise scale, ``tr(covariance) / |gradient|^2``.

    Each of them is unbiased (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1) but their ratio is not, so they
    are averaged separately. Their start at 0 cancels in the ratio.

    Attributes:
        noise: Trace of the covariance of one sample's gradient.
        signal: Squared norm of the true gradient.
        weight: Total weight of the measurements in both means; the rest is the weight of their start at 0.
    """

    noise: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def add(self, noise: float, signal: float, smoothing: float) -> None:
        """Adds one measurement of both; ``smoothing`` is the weight of the old means."""
        self.noise = smoothing * self.noise + (1 - smoothing) * noise
        self.signal = smoothing * self.signal + (1 - smoothing) * signal
        self.weight = smoothing * self.weight + (1 - smoothing)

    @property
    def scale(self) -> float | None:
        """Noise scale in samples; None while the measurements are too noisy to give one."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None


def noise_and_signal(small: Number, large: Number, sizes: tuple[float, float]) -> tuple[Number, Number]:
    """Returns unbiased estimates of the trace of the per-sample covariance, and of the squared true gradient.

    The mean of ``b`` samples' gradients has an expected squared norm of ``signal + noise / b``; two batch sizes
    give two equations.

    Args:
        small: Squared norm of a gradient that is the mean over ``sizes[0]`` samples.
        large: Squared norm of a gradient that is the mean over ``sizes[1]`` samples.
        sizes: Numbers of samples, the smaller one first.
    """
    few, many = sizes
    signal = (many * large - few * small) / (many - few)
    noise = (small - large) / (1 / few - 1 / many)
    return noise, signal


def grown_size(decay: LRDecay, first: int, at: Position, max_epochs: float) -> tuple[int, float]:
    """Returns the batch size that replaces a decayed learning rate, and the decay that is left for the rate.

    Smith et al. 2018 (arXiv 1711.00489): the noise of SGD is proportional to lr / batch, so dividing the rate and
    multiplying the batch anneal in the same way. Once the batch cannot grow further, the rate decays.

    Returns:
        The batch size, rounded, and a factor of the learning rate, 1 while the batch can grow.
    """
    wanted = first * decay.factor ** -decay.decays(at, max_epochs)
    most = min(decay.max_batch_size or at.size, at.size)
    if wanted <= most:
        return round(wanted), 1.0
    return most, most / wanted


def window(batch_size: int, limit: int | None, world_size: int, least: int = 1) -> Window:
    """Returns the micro-batches that make up an optimizer step of ``batch_size`` samples.

    They are as few as the limit allows, and of one size that is divisible by the ranks, so that the mean of their means
    is the mean over the samples. If no number of them gives exactly ``batch_size``, the step is smaller by up to
    ``batches * world_size - 1`` samples.

    Args:
        batch_size: Samples of an optimizer step, over all ranks.
        limit: Samples of a micro-batch that fit on one rank; None for no limit.
        world_size: Number of data-parallel ranks.
        least: Smallest number of micro-batches.
    """
    at_once = batch_size if limit is None else limit * world_size
    fewest = max(least, math.ceil(batch_size / at_once))
    for batches in range(fewest, 2 * fewest + 1):
        if batch_size % (batches * world_size) == 0:
            return Window(batch_size // batches, batches)
    return Window(max(1, batch_size // (fewest * world_size)) * world_size, fewest)


def lr_factor(rule: LRRule, batch_size: float, first: float) -> float:
    """Returns the factor on the learning rate at ``batch_size``, for a rate that was tuned at ``first`` samples a step.

    ``linear`` is from Goyal et al. 2017 (arXiv 1706.02677), for SGD; ``sqrt`` is from Krizhevsky 2014 (arXiv
    1404.5997), and from Malladi et al. 2022 (arXiv 2205.10287) for adaptive optimizers.
    """
    growth = batch_size / first
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[rule]

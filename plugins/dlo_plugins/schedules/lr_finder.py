"""Learning-rate finder: a short sweep of learning rates before training, which suggests one; and `dlo lr-find`'s run.

The sweep is Leslie N. Smith's range test ("Cyclical Learning Rates for Training Neural Networks", 2017,
arXiv 1506.01186) in fastai's form (``fastai/callback/schedule.py``), with fastai's constants and suggestions.
Departures from fastai: the last step reaches the highest rate, a loss that may be negative does not stop the sweep at
once, and ``valley`` does not read before the first point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR
from tqdm import tqdm

from dlo_framework.atomic_file import write_atomic
from dlo_framework.callback import callbacks_of
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import ShortTrainer, open_run, train_briefly
from dlo_framework.errors import DloError, OrderlyEnd, check_number
from dlo_framework.extensions import NamedFunctions
from dlo_framework.rehearsal import BeforeTraining, run_folder, trial_steps
from dlo_framework.run.runs import shown
from dlo_framework.watch.media import save_figure
from dlo_framework.watch.summary import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NAME = "lr_find"
#: Least number of steps that leaves enough points without both ends of the curve.
FEWEST_STEPS = 20
#: Seconds between progress lines without a terminal; RunBar's default.
SECONDS_BETWEEN_LINES = 60.0
#: Rates in a parameter group: the current one, and those of torch's schedulers.
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: Attributes in which torch's and timm's schedulers store rates.
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr", "base_values")


class LRFinder(BeforeTraining):
    """Tries learning rates from very low to very high before training, and sets the one that the losses suggest.

    The sweep runs ``num_steps`` optimizer steps on real batches, with the run's own optimizer and parameter groups,
    strategy, precision, clipping and accumulation. Then all state is restored bit for bit, including random numbers and
    the position in the data, and training begins as without a sweep, except for the rate. The groups keep their ratios;
    a scheduler follows, as does OneCycle. A resumed run does not sweep again. A warning says when the curve gives no
    reason to trust the rate: see :func:`find_doubts`.

    The run's folder gets ``lr_find.png``, the curve with all suggestions (loggers of images show it too), and
    ``lr_find.json`` with its points. ``dlo lr-find`` runs only the sweep.

    Args:
        min_lr: First learning rate, of the parameter group with the highest rate.
        max_lr: Last learning rate.
        num_steps: Number of optimizer steps between the two, by equal factors.
        suggestion: Method: ``minimum`` (a tenth of the rate with the lowest loss), ``valley`` (in the longest falling
            stretch), ``steep`` (where the loss falls fastest), ``slide`` (before the loss bends upwards), or one that a
            file under ``plugins:`` or an installed package registers.
        beta: Weight of the past in the smoothed loss.
        stop_factor: Factor over its lowest value at which the smoothed loss ends the sweep; a NaN ends it too.
        apply: Whether to set the rate that was found; False only reports it.

    Raises:
        DloError: If a value is out of range, optimization is manual, or the loss diverges too early for a suggestion.
    """

    example = "{num_steps: 20, min_lr: 0.0001, max_lr: 0.01, apply: false}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    turn = 1  # After MicroBatchFinder: the rate depends on the batch.

    def __init__(
        self,
        min_lr: float = 1e-7,
        max_lr: float = 10.0,
        num_steps: int = 100,
        suggestion: str = "minimum",
        beta: float = 0.98,
        stop_factor: float = 4.0,
        apply: bool = True,
    ) -> None:
        SUGGESTIONS.get(suggestion)
        if not 0 < min_lr < max_lr < math.inf:
            raise DloError(
                f"LRFinder: min_lr must be above 0 and below max_lr, got {min_lr} and {max_lr}; the defaults are 1e-7"
                " and 10"
            )
        check_number("LRFinder: num_steps", num_steps, f"at least {FEWEST_STEPS}", "its ends are left out; set 100")
        check_number("LRFinder: beta", beta, "at least 0 and below 1", "0.98 is usual")
        check_number("LRFinder: stop_factor", stop_factor, "above 1", "4 is usual")
        self.min_lr, self.max_lr, self.num_steps = min_lr, max_lr, num_steps
        self.suggestion, self.beta, self.stop_factor, self.apply = suggestion, beta, stop_factor, apply
        self.lr: float | None = None  # suggested rate of the group with the highest one
        self.suggestions: dict[str, float | None] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the suggestions, so that a resumed run has them."""
        return {"lr": self.lr, "suggestions": self.suggestions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the suggestions of the resumed run."""
        self.lr, self.suggestions = state_dict["lr"], dict(state_dict["suggestions"])

    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sweeps, reports, and sets the rate.

        Raises:
            DloError: The chosen method fails, or the curve does not allow its suggestion; after the report.
        """
        sweep = self.sweep(trainer)
        self.suggestions, errors = suggest(*sweep.trimmed())
        self.lr = self.suggestions[self.suggestion]
        self._report(trainer, sweep)
        chosen = errors.pop(self.suggestion, None)
        for error in errors.values():
            rank_zero_warn(str(error))
        if chosen is not None:
            raise chosen
        if self.lr is None:
            raise DloError(self._too_short(sweep))
        doubts = find_doubts(sweep, self.suggestions, self.lr)
        if doubts:
            rank_zero_warn(f"LRFinder: {self.suggestion}'s {self.lr:.3g} may be wrong, see the curve: {doubts}")
        if self.apply:
            set_learning_rate(trainer, self.lr)

    def sweep(self, trainer: Trainer) -> Sweep:
        """Runs the sweep, restores all state, and returns the loss at each rate, averaged over the ranks."""
        sweep = Sweep(self.num_steps, self.beta, self.stop_factor)
        rates = group_rates(trainer)
        quiet = not trainer.is_global_zero or trainer.progress_bar_callback is None
        with trial_steps(trainer) as rehearsal, _Progress(self.num_steps, quiet) as progress:
            for rate in sweep_rates(self.min_lr, self.max_lr, self.num_steps):
                for group, lr in zip(trainer.optimizers[0].param_groups, rescale_rates(rates, rate), strict=True):
                    _set_rate(group, "lr", lr)
                loss = float(trainer.strategy.reduce(rehearsal.optimizer_step(), reduce_op="mean"))
                progress.step(rate, loss)
                # The mean is the same number on every rank, so all of them stop at the same step.
                if not sweep.add(rate, loss):
                    break
        return sweep

    def _report(self, trainer: Trainer, sweep: Sweep) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        write_atomic(folder / f"{NAME}.json", self.to_json(sweep))
        path, draw = folder / f"{NAME}.png", lambda: draw_sweep(sweep, self.suggestions, self.suggestion)
        curve = shown(save_figure(trainer, "LRFinder", NAME, path, draw) or folder / f"{NAME}.json")
        lines = [f"\nlearning rates from {self.min_lr:g} to {sweep.rates[-1]:.3g} in {len(sweep.rates)} steps"]
        if sweep.stopped:
            lines[0] += f"; {sweep.stopped}"
        width = max(map(len, [*self.suggestions, "curve"])) + 2
        for name, rate in self.suggestions.items():
            lines.append(f"  {name:<{width}}{'none' if rate is None else f'{rate:.3g}'}")
            if name == self.suggestion and rate is not None:
                lines[-1] += " <- used" if self.apply else " <- suggested"
        print("\n".join([*lines, f"  {'curve':<{width}}{curve}"]), flush=True)

    def to_json(self, sweep: Sweep) -> str:
        """Returns the points, the suggestions and the chosen rate as JSON; NaN and infinity become null."""
        losses, smoothed = ([x if math.isfinite(x) else None for x in each] for each in (sweep.losses, sweep.smoothed))
        columns = zip(sweep.rates, losses, smoothed, strict=True)
        content = {
            "lr": self.lr,
            "suggestion": self.suggestion,
            "applied": self.apply and self.lr is not None,
            "suggestions": self.suggestions,
            "stopped": sweep.stopped,
            "points": [{"lr": rate, "loss": loss, "smoothed": smoothed} for rate, loss, smoothed in columns],
        }
        return json.dumps(content, indent=2) + "\n"

    def _too_short(self, sweep: Sweep) -> str:
        steps = len(sweep.rates)
        start = f"LRFinder: the curve must be long enough for a '{self.suggestion}' suggestion, got {steps} steps"
        if sweep.stopped:
            lower, last = max(self.min_lr * 1e-3, sys.float_info.min), sweep.rates[-1]
            return f"{start} up to lr {last:.3g}: {sweep.stopped}; set min_lr: {lower:.0e}, or check the data"
        others = [name for name, rate in self.suggestions.items() if rate is not None]
        fix = f"set another suggestion ({', '.join(others)})" if others else "raise num_steps"
        return f"{start}; {fix}, or see the curve in {NAME}.png"


class _Progress(contextlib.AbstractContextManager["_Progress"]):
    """Progress bar on a terminal; elsewhere a line at the first step, and one each minute."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.steps, self.done = steps, 0
        lines = not quiet and not sys.stderr.isatty()
        self.next_line = time.monotonic() if lines else math.inf
        self.bar = tqdm(total=steps, desc=LRFinder.__name__, disable=quiet or lines)

    def step(self, rate: float, loss: float) -> None:
        self.done += 1
        self.bar.update()
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line = now + SECONDS_BETWEEN_LINES
            text = f"{LRFinder.__name__} step {self.done}/{self.steps}: lr {rate:.2e}, loss {loss:.4f}"
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.bar.close()


def group_rates(trainer: Trainer) -> list[float]:
    """Returns the rate of each parameter group that its schedule scales, not the current one."""
    groups = trainer.optimizers[0].param_groups
    return [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]


def set_learning_rate(trainer: Trainer, lr: float) -> None:
    """Sets the highest rate of the parameter groups to ``lr`` and keeps their ratios.

    The rates that schedulers and groups store are multiplied by the same factor. Each callback with a method
    ``set_max_lr`` gets the rate: OneCycle, or your own.
    """
    before = group_rates(trainer)
    for group, old, new in zip(trainer.optimizers[0].param_groups, before, rescale_rates(before, lr), strict=True):
        if old == 0:
            _set_rate(group, "lr", new)
        for name in _GROUP_RATES:
            if old > 0 and name in group:
                _set_rate(group, name, float(group[name]) * new / old)
    if max(before) > 0:
        for config in trainer.lr_scheduler_configs:
            _scale_scheduler(config.scheduler, lr / max(before))
    for callback in callbacks_of(trainer):
        if hasattr(callback, "set_max_lr"):
            callback.set_max_lr(lr)


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for part in scheduler._schedulers if isinstance(scheduler, SequentialLR | ChainedScheduler) else ():
        _scale_scheduler(part, factor)
    for name in _SCHEDULER_RATES:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * factor for rate in rates])


def _set_rate(group: dict[str, Any], name: str, rate: float) -> None:
    if isinstance(group.get(name), torch.Tensor):  # in fused and captured optimizers
        group[name].fill_(rate)
    else:
        group[name] = rate


def draw_sweep(sweep: Sweep, suggestions: dict[str, float | None], chosen: str) -> Figure:
    """Returns a plot of a sweep: the loss, the smoothed loss and the suggestions over the rates.

    Only this figure uses matplotlib's Agg backend; the program's other figures keep theirs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.semilogx(sweep.rates, sweep.losses, color="0.8", label="loss")
    axes.semilogx(sweep.rates, sweep.smoothed, color="tab:blue", label="smoothed")
    rates, _ = sweep.trimmed()
    if rates:
        axes.axvspan(rates[0], rates[-1], color="0.95", zorder=0, label="suggestions are from here")
    finite = [loss for loss in sweep.smoothed if math.isfinite(loss)]
    if finite:
        # A diverging loss would flatten the valley.
        margin = 0.1 * (finite[0] - min(finite)) + 1e-6 * abs(finite[0])
        axes.set_ylim(min(finite) - margin, max(finite[: max(1, len(finite) // 2)]) + 5 * margin)
    for number, (name, rate) in enumerate(suggestions.items()):
        if rate is not None:
            width, style = (2.0, "-") if name == chosen else (1.2, "--")
            label = f"{name} {rate:.2e}"
            axes.axvline(rate, color=f"C{number + 1}", label=label, linewidth=width, linestyle=style)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.legend(loc="best")
    return figure


def sweep_rates(min_lr: float, max_lr: float, steps: int) -> list[float]:
    """Returns ``steps`` learning rates from ``min_lr`` to ``max_lr``, each the same multiple of the one before."""
    ratio = math.log(max_lr / min_lr)
    return [min_lr * math.exp(ratio * step / (steps - 1)) for step in range(steps)]


#: Function that suggests a rate from the rates of a curve, ascending, and the smoothed losses; None if it cannot.
Suggest = Callable[[Sequence[float], Sequence[float]], float | None]

#: Methods that suggest a rate, by the name that ``LRFinder.suggestion`` has.
SUGGESTIONS: NamedFunctions[Suggest] = NamedFunctions("LRFinder suggestion", "dlo_framework.lr_suggestions")


@dataclasses.dataclass
class Sweep:
    """Points of a sweep, added one at a time.

    Attributes:
        steps: Number of points of a complete sweep.
        beta: Weight of the past in the smoothed loss, an exponential moving average corrected for its start at 0.
        stop_factor: Factor over its lowest value at which the smoothed loss ends the sweep.
        rates: Learning rates so far.
        losses: Loss at each rate.
        smoothed: Smoothed loss at each rate; suggestions use it.
        stopped: Reason for which the sweep ended before its last step; None if it did not.
    """

    steps: int
    beta: float = 0.98
    stop_factor: float = 4.0
    rates: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    smoothed: list[float] = dataclasses.field(default_factory=list)
    stopped: str | None = None
    _average: float = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Adds the next point; returns whether to continue."""
        self.rates.append(rate)
        self.losses.append(loss)
        self._average = self.beta * self._average + (1 - self.beta) * loss
        self.smoothed.append(self._average / (1 - self.beta ** len(self.losses)))
        best = min(self.smoothed)
        if not math.isfinite(loss):
            self.stopped = f"the loss became {loss}"
        elif self.smoothed[-1] > best + (self.stop_factor - 1) * abs(best):
            self.stopped = f"the smoothed loss rose to {self.smoothed[-1]:.4g}, above {self.stop_factor:g} x {best:.4g}"
        return self.stopped is None and len(self.rates) < self.steps

    def trimmed(self) -> tuple[list[float], list[float]]:
        """Returns rates and smoothed losses without both ends.

        The first tenth of a complete sweep is left out, as the average has few values there; so are the last five
        points, where the loss diverges, and everything from the first NaN on.
        """
        kept = slice(self.steps // 10, -5)
        rates, losses = self.rates[kept], self.smoothed[kept]
        end = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        return rates[:end], losses[:end]


@SUGGESTIONS.register("valley")
def valley(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the rate in the middle of the longest falling stretch: at a third plus a sixth of its length.

    The stretch is the longest strictly falling subsequence, which noise interrupts less than a run of neighbours. Its
    position is computed as if it had no gaps before its last point.
    """
    lengths: list[int] = []  # length of the longest falling subsequence that ends at each point
    for at, loss in enumerate(losses):
        longest = max((lengths[before] for before in range(at) if losses[before] > loss), default=0)
        lengths.append(longest + 1)
    longest = max(lengths)
    if longest < 2:
        return None
    start = lengths.index(longest) - longest
    third = longest / 3
    return rates[max(0, start + int(third) + int(third / 2))]


@SUGGESTIONS.register("steep")
def steep(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the rate with the steepest fall of the loss over the logarithm of the rate."""
    slopes = np.diff(np.asarray(losses)) / np.diff(np.log(rates))
    return rates[int(slopes.argmin())]


@SUGGESTIONS.register("minimum")
def minimum(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns a tenth of the rate with the lowest loss."""
    return rates[int(np.argmin(losses))] / 10


@SUGGESTIONS.register("slide")
def slide(
    rates: Sequence[float], losses: Sequence[float], *, width: int = 15, threshold: float = 0.005
) -> float | None:
    """Returns the rate at the left edge of an interval that slides down from the end of the curve.

    The interval stops where the slopes of the loss at its two edges agree, which is before the loss bends upwards.

    Args:
        rates: Learning rates, ascending.
        losses: Smoothed losses.
        width: Number of points between the two edges.
        threshold: Largest difference of two slopes that agree, in loss per point.

    Returns:
        The rate; None if the curve is not wider than the interval.
    """
    count = len(losses)
    if count <= width:
        return None
    slopes = np.gradient(np.asarray(losses))
    right = count - 1
    edge = right - width
    left = edge
    while left >= 0 and abs(slopes[right] - slopes[left]) > threshold:
        edge = left
        left, right = left - 1, right - 1
    return rates[edge]


def suggest(rates: Sequence[float], losses: Sequence[float]) -> tuple[dict[str, float | None], dict[str, DloError]]:
    """Returns the suggestions of all imported methods for a curve, and the errors of those that failed.

    Args:
        rates: Learning rates, ascending.
        losses: Smoothed losses.

    Returns:
        The rate by name, None where the curve does not allow one or the method failed; and by name the error of each
        method that raised, or returned no rate.
    """
    suggestions: dict[str, float | None] = {}
    errors: dict[str, DloError] = {}
    for name, method in SUGGESTIONS.loaded().items():
        suggestions[name], problem = None, ""
        try:
            rate = method(rates, losses) if len(rates) >= 2 else None
            if rate is not None and not (rate > 0 and np.isfinite(rate)):
                problem = f"the rate {rate}"
            elif rate is not None:
                suggestions[name] = float(rate)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            rule = f"suggestion {name} must return a positive rate or None"
            errors[name] = DloError(f"{rule}, got {problem}; correct {method.__module__}")
    return suggestions, errors


#: Factor between suggestions above which they contradict each other.
LARGEST_SPREAD = 100.0


def find_doubts(sweep: Sweep, suggestions: Mapping[str, float | None], lr: float) -> str:
    """Returns why a suggestion is not to be trusted, each reason with what to do; empty without one.

    The smoothed loss fell less than the losses scatter; the rate is at an end of those that count; the loss still
    fell at the highest rate; or the suggestions contradict each other, without those at an end.

    Args:
        sweep: Complete sweep.
        suggestions: Rates by method.
        lr: Rate that is used.
    """
    rates, smoothed = sweep.trimmed()
    best, doubts = int(np.argmin(smoothed)), []
    until = sweep.losses[: max(best, FEWEST_STEPS)]
    scatter, fall = float(np.std(np.diff(until))) / math.sqrt(2), smoothed[0] - smoothed[best]
    if fall <= scatter:
        doubts.append(f"the loss fell by {fall:.2g}, and scatters by {scatter:.2g}: use a larger batch, check the data")
    if not rates[0] < lr < rates[-1]:
        doubts.append("it is at an end of the sweep: use another suggestion, or set min_lr and max_lr")
    if best == len(rates) - 1 and sweep.stopped is None:
        doubts.append("the loss still fell at the highest rate: raise max_lr")
    inner = [rate for rate in suggestions.values() if rate is not None and rates[0] < rate < rates[-1]]
    if inner and max(inner) > LARGEST_SPREAD * min(inner):
        doubts.append(f"the suggestions differ by a factor of {max(inner) / min(inner):.0f}: compare short runs")
    return "; ".join(doubts)


def rescale_rates(rates: Sequence[float], highest: float) -> list[float]:
    """Returns the groups' rates in the same ratios with ``highest`` as the highest; equal rates if all are 0."""
    top = max(rates)
    return [highest * rate / top for rate in rates] if top > 0 else [highest] * len(rates)


def find_lr(config_scan: ConfigScan) -> None:
    """Runs the learning-rate sweep of a config, and no training.

    Args:
        config_scan: Scanned command line, with ``fit`` as its command.
    """
    reasons = {"fast_dev_run": "a sweep has about 100 steps", "ckpt_path": "a sweep starts from the config's weights"}
    cli = open_run(config_scan, "lr-find", reasons)
    callbacks = cli.callbacks()
    finders = [callback for callback in callbacks if isinstance(callback, LRFinder)] or [LRFinder()]
    for finder in finders:
        finder.apply = False
    others = [callback for callback in callbacks if callback not in finders]
    train_briefly(cli, "lr-find", callbacks if len(others) < len(callbacks) else [*others, *finders], _SweepTrainer)


class _SweepTrainer(ShortTrainer):
    """Trainer that ends after the sweep, and writes no summary."""

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        every = super()._run_callbacks(users, run_folder, model, config)
        record = next(callback for callback in every if isinstance(callback, RunRecord))
        every[every.index(record)] = _ConfigRecord(record.folder, record.config, record.monitor)
        return [*every, _End()]


class _ConfigRecord(RunRecord):
    """Writes the config, and no summary: there was no training."""

    def on_exception(self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes nothing."""


class _End(Callback):
    """Ends the run at the start of the first epoch; the sweep ran in an earlier callback."""

    def on_train_epoch_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Raises an :class:`OrderlyEnd`: ``trainer.should_stop`` would still call the hooks of the epoch's end."""
        raise OrderlyEnd("the sweep is done")

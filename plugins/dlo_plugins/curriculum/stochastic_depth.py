"""Callback that changes a model's rates of stochastic depth over the run.

Deep Networks with Stochastic Depth. Huang, Sun, Liu, Sedra & Weinberger, 2016, arXiv 1603.09382, whose rates are
constant. The linear growth from 0 is that of scheduled drop path (Zoph et al. 2018, arXiv 1707.07012).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from timm.layers import DropPath
from torch import nn
from torchvision.ops import StochasticDepth as TorchvisionDepth

from dlo_framework.callback import PluginCallback
from dlo_framework.costs import is_compiled
from dlo_framework.errors import DloError, check_number
from dlo_framework.progress import check_end
from dlo_framework.run.position import FollowsSteps, StepFraction
from dlo_framework.task import checkable_module
from dlo_framework.watch.media import is_logged, log_scalars

#: Modules that drop a residual branch of a sample, and their attributes with the rate.
_RATES: dict[type[nn.Module], str] = {DropPath: "drop_prob", TorchvisionDepth: "p"}
_MOST_COMPILED = 8


def depth_factor(fraction: float, start: float, end: float, until: float, stages: int | None) -> float:
    """Returns the factor of the rates after a fraction of training.

    Args:
        fraction: Fraction of training, 0 to 1.
        start: Factor at the start.
        end: Factor from ``until`` on.
        until: Fraction of training at which the change ends.
        stages: Number of equally long stages, the first with ``start`` and the last with ``end``; None for a line.
    """
    position = min(1.0, fraction / until)
    if stages is not None:
        position = min(stages - 1, int(position * stages + 1e-9)) / (stages - 1)
    return start + (end - start) * position


class StochasticDepthSchedule(FollowsSteps, PluginCallback):
    """Changes the rates of stochastic depth (drop path) over the run, each in proportion to the model's own rate.

    The model's rates are those of its constructor, such as `drop_path_rate` of timm's models, which rise from block to
    block. From the run's start to `until`, they are multiplied by a factor that goes from `start` to `end`. Modules are
    timm's `DropPath` and torchvision's `StochasticDepth`. It works under every strategy: a rate is a number, and
    samples are drawn as without it.

    Logged every ``trainer.log_every_n_steps``: ``stochastic_depth/factor``.

    Args:
        start: Factor of the rates at the start; 0 for full depth.
        end: Factor of the rates at `until`, and from there on.
        until: Fraction of training at which the change ends.
        stages: Number of equally long stages in place of a change at each step; needed with torch.compile, which
            compiles again for each rate.

    Raises:
        DloError: If a value is out of range, the model has no such module with a rate above 0, or it is compiled and
            `stages` is not set.
    """

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it drops branches at random, which each rank draws for its own samples"

    def __init__(self, start: float = 0.0, end: float = 1.0, until: float = 1.0, stages: int | None = None) -> None:
        if min(start, end) < 0 or start == end:
            raise DloError(
                f"StochasticDepthSchedule: start and end must be at least 0 and differ, got {start} and {end}; the"
                " defaults are 0 and 1"
            )
        check_number("StochasticDepthSchedule: until", until, "above 0 and at most 1", "leave it out")
        check_number("StochasticDepthSchedule: stages", stages, "at least 2", "set 4")
        self.start, self.end, self.until, self.stages = start, end, until, stages
        super().__init__()
        self._rates: list[tuple[nn.Module, str, float]] = []

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that the model has rates that can be multiplied, before processes start.

        Raises:
            DloError: If it has none, or one would exceed 1.
        """
        check_end(trainer)
        if (checkable := checkable_module(module)) is not None:
            self._find_rates(checkable)

    def _find_rates(self, module: nn.Module) -> list[tuple[nn.Module, str, float]]:
        found = [
            (part, attribute, float(getattr(part, attribute)))
            for part in module.modules()
            for kind, attribute in _RATES.items()
            if isinstance(part, kind)
        ]
        largest = max((rate for *_, rate in found), default=0.0)
        if largest == 0:
            raise DloError(
                f"StochasticDepthSchedule: the model must have stochastic depth, got {type(module).__name__} without;"
                " set model_args: {drop_path_rate: 0.1}"
            )
        if largest * max(self.start, self.end) >= 1:
            raise DloError(
                "StochasticDepthSchedule: rates must stay below 1, got a factor of"
                f" {max(self.start, self.end):g} for a rate of {largest:g}; set at most {0.99 / largest:.2g}"
            )
        return found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run."""
        self._clock = StepFraction()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the rates."""
        check_end(trainer)
        self._restore()
        self._rates = self._find_rates(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that a compiled model has few rates; callbacks may compile it in :meth:`on_fit_start`."""
        if is_compiled(pl_module) and (self.stages is None or self.stages > _MOST_COMPILED):
            self._restore()
            raise DloError(
                f"StochasticDepthSchedule: stages must be at most {_MOST_COMPILED} for a compiled model, got"
                f" {self.stages}; set stages: 4"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the rates of a new step, and logs their factor."""
        is_new = self._clock.update(trainer)
        factor = depth_factor(self._clock.fraction, self.start, self.end, self.until, self.stages)
        for part, attribute, rate in self._rates:
            setattr(part, attribute, rate * factor)
        step = trainer.global_step + 1
        if is_new and is_logged(trainer, step):
            log_scalars(trainer, {"stochastic_depth/factor": factor}, step)

    def _restore(self, *_: Any, **__: Any) -> None:
        """Restores the model's own rates."""
        for part, attribute, rate in self._rates:
            setattr(part, attribute, rate)
        self._rates = []

    on_train_end = on_exception = _restore

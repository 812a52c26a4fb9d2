"""Callbacks that change a model's depth over the run: progressive layer drop, and the rates of stochastic depth.

Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping. Zhang & He, 2020,
arXiv 2010.13369. Departure: draws are a hash of (seed, step, block) and not of a generator, so that they are the same
on all ranks and after a resume.

Deep Networks with Stochastic Depth. Huang, Sun, Liu, Sedra & Weinberger, 2016, arXiv 1603.09382, whose rates are
constant. The linear growth from 0 is that of scheduled drop path (Zoph et al. 2018, arXiv 1707.07012).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth as TorchvisionDepth

from dlo_framework.callback import PluginCallback
from dlo_framework.costs import is_compiled
from dlo_framework.data.sampler import uniform
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.recompute import has_backward
from dlo_framework.progress import FollowsSteps, StepFraction, check_end
from dlo_framework.strategy_abilities import BlocksInPlace
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task import checkable_module
from dlo_framework.watch.media import is_logged, log_scalars
from dlo_plugins.curriculum.block_schedule import (
    BlockSchedule,
    ModelBlocks,
    call_with_forward,
    check_hidden,
    pass_gradient,
)
from dlo_plugins.memory.block_calls import Handler, split_hidden
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.parallel.tensor.sequence_parallel import ShardedSequence


class LayerDrop(BlockSchedule):
    """Leaves blocks out of training steps, more of them as training goes on: progressive layer drop.

    In a step, block `i` of `L` runs with probability `p = 1 - i / L * (1 - theta)`; otherwise its input is its output,
    its parameters have gradients of zero, and neither its forward nor its backward is computed. `theta` falls from 1 to
    its final value. The change that a running block makes to its input is divided by `p`, so that the mean output is
    that of evaluation, where all blocks run.

    The draws are a function of `seed`, step and block: all ranks and all micro-batches of a step leave out the same
    blocks, as does a resumed run, so that losses and weights are those of one process under every strategy. Blocks are
    those of the parallel plan.

    Logged every ``trainer.log_every_n_steps``: ``layer_drop/theta`` and ``layer_drop/kept``, the fraction of the blocks
    that run in the step.

    Args:
        theta: Final value of theta: the keep probability that the deepest block approaches. The paper's is 0.5.
        rate: Rate of theta's fall over the run, the paper's gamma times the number of steps: with 100, it has fallen
            by 63% of the way after 1% of training.
        skip: Patterns of blocks that always run, relative to the model, such as those that change the shape.
        scale: Whether a running block's change is divided by its keep probability.
        seed: Seed of the draws.

    Raises:
        DloError: If a value is out of range, a block changes its input's shape, the loss uses outputs of all blocks, or
            another option needs blocks that always run.
    """

    example = "{theta: 0.4, rate: 10}"

    #: Place of the handler among those of other callbacks: inside Freeze, outside TokenDrop.
    order = 20
    replaces_outputs = True

    def __init__(
        self,
        theta: float = 0.5,
        rate: float = 100.0,
        skip: list[str] | None = None,
        scale: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("LayerDrop: theta", theta, "above 0 and at most 1", "the paper has 0.5")
        check_number("LayerDrop: rate", rate, "above 0", "the paper has 100")
        self.theta, self.rate, self.skip, self.scale, self.seed = theta, rate, list(skip or []), scale, seed
        self._probabilities: list[float] = []
        self._kept: list[bool] = []
        self._stream: ShardedSequence | None = None

    # --- before training -----------------------------------------------------------------------------------

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks the strategy and the other callbacks.

        Raises:
            DloError: If they do not go with blocks that are left out.
        """
        super().check_trainer(trainer)
        contract_of(trainer.strategy).ability(BlocksInPlace, "LayerDrop")

    def choose_blocks(self, blocks: ModelBlocks) -> list[str]:
        """Returns the names of the blocks that may be left out."""
        return blocks.without(self.skip)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to handle the blocks' calls."""
        self.check_run(trainer, pl_module)
        self.handle_blocks(pl_module)
        self.begin_step()
        cut = ParallelState.of(pl_module)
        self._stream = None if cut is None or cut.tensor is None else cut.tensor.stream

    # --- steps ---------------------------------------------------------------------------------------------

    @property
    def current_theta(self) -> float:
        """Value of theta in the current step."""
        return progressive_theta(self._clock.fraction, self.theta, self.rate)

    def begin_step(self) -> dict[str, float]:
        """Draws the blocks of a new step, and returns theta and the fraction that runs."""
        self._probabilities = keep_probabilities(self.current_theta, len(self._names))
        self._kept = draw_kept(self._probabilities, max(0, self._clock.step), self.seed)
        return {"layer_drop/theta": self.current_theta, "layer_drop/kept": sum(self._kept) / len(self._kept)}

    def handler(self, number: int, name: str, block: nn.Module) -> Handler:
        """Returns a handler that leaves the block out, or scales its change."""

        def call(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (has_backward() and block.training):
                return inner(*args, **kwargs)
            if not self._kept[number]:
                return call_with_forward(block, _identity(block), *args, **kwargs)
            output = inner(*args, **kwargs)
            if number == 0:
                return output  # It always runs.
            given = split_hidden(args, kwargs)[0]
            if self._stream is not None and isinstance(given, Tensor):
                given = self._stream.as_returned(given, block)
            hidden, changed = check_hidden(given, output, name, "LayerDrop")
            keep = self._probabilities[number]
            # Under autocast a block may return another dtype than it gets.
            return torch.lerp(hidden.to(changed.dtype), changed, 1 / keep) if self.scale and keep < 1 else changed

        return call


def _identity(block: nn.Module) -> Callable[..., Tensor]:
    """Returns a forward that returns its first argument, and gives the block's parameters gradients of zero."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return pass_gradient(split_hidden(args, kwargs)[0], *block.parameters())

    return forward


_STREAM = 0x4C44  # of the draws, among other hashes of the same seed


def progressive_theta(fraction: float, final: float, rate: float) -> float:
    """Returns theta, the keep probability of the deepest blocks: it falls from 1 to its final value.

    Args:
        fraction: Fraction of training, 0 to 1.
        final: Limit of theta; the paper's is 0.5.
        rate: Rate of the fall: `gamma` of the paper times the number of steps, 100 there.
    """
    return (1 - final) * math.exp(-rate * fraction) + final


def keep_probabilities(theta: float, blocks: int) -> list[float]:
    """Returns the keep probability of each block: 1 for the first, and falling linearly to almost theta at the last."""
    return [1 - number / blocks * (1 - theta) for number in range(blocks)]


def draw_kept(probabilities: list[float], step: int, seed: int) -> list[bool]:
    """Returns whether each block runs in a step.

    Args:
        probabilities: Keep probability of each block.
        step: Number of optimizer steps before this one.
        seed: Seed of the draws.
    """
    draws = uniform(np.arange(len(probabilities)), seed, step, _STREAM)
    return [bool(draw < keep) for draw, keep in zip(draws, probabilities, strict=True)]


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

    example = "{stages: 2}"

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
        rates = [
            (part, attribute, float(getattr(part, attribute)))
            for part in module.modules()
            for kind, attribute in _RATES.items()
            if isinstance(part, kind)
        ]
        largest = max((rate for *_, rate in rates), default=0.0)
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
        return rates

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

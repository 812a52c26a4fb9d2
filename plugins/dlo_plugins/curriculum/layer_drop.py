"""Callback that leaves blocks out of training steps: progressive layer drop.

Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping. Zhang & He, 2020,
arXiv 2010.13369. Departure: draws are a hash of (seed, step, block) and not of a generator, so that they are the same
on all ranks and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.data.order import uniform
from dlo_framework.errors import check_number
from dlo_framework.models.recompute import has_backward
from dlo_framework.strategy_abilities import BlocksInPlace
from dlo_framework.strategy_contract import contract_of
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

"""Blocks of a run's model, handlers around their calls, and the base of callbacks that schedule them.

Several callbacks may handle the calls of a block at once, under every strategy. A handler sees a block's call before
its hooks do, so that recomputation, compiled code and the gathering of FSDP and ZeRO 3 are inside. A block whose
computation is left out still runs its hooks: all ranks then gather and reduce the same units in the same order,
whatever is left out. :func:`pass_gradient` gives its parameters gradients of zero, so that no strategy misses one, and
the optimizer does the same on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.ability import find_ability
from dlo_framework.callback import PluginCallback
from dlo_framework.errors import DloError, agreed_errors
from dlo_framework.plan import match_names
from dlo_framework.progress import FollowsSteps, StepFraction, check_end
from dlo_framework.strategy_contract import plain_name
from dlo_framework.task import Task, checkable_module, model_and_plan
from dlo_framework.task_abilities import LooksInside
from dlo_framework.watch.media import is_logged, log_scalars
from dlo_plugins.compile.callback import check_block_scope
from dlo_plugins.memory.block_calls import Handler, intercept_calls, restore_calls
from dlo_plugins.memory.rotor_callback import Rotor


class BlockSchedule(FollowsSteps, PluginCallback, ABC):
    """Callback with handlers around the blocks' calls, which are removed when training ends.

    A subclass chooses the blocks, calls :meth:`handle_blocks` in ``on_train_start``, and prepares for a step in
    :meth:`begin_step`.
    """

    #: Whether the output of a block is not that of the full model, so that the loss must not use it.
    replaces_outputs = False

    #: Place of the handlers among those of other callbacks: those with lower numbers are called around the others.
    order: int

    def __init__(self) -> None:
        super().__init__()
        self._removers: list[Callable[[], None]] = []
        self._names: list[str] = []

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the strategy, the other callbacks and the model, before processes start.

        Raises:
            DloError: If they do not go with what the callback does.
        """
        name = type(self).__name__
        self.check_trainer(trainer)
        inside = find_ability(module, LooksInside)
        if self.replaces_outputs and inside is not None and inside.needs_hidden_states:
            raise DloError(
                f"{name}: the loss must not use outputs of all blocks, got {type(module).__name__}"
                f" ({inside.looks_inside_by}); leave {name} out{inside.looks_inside_fix}"
            )
        if (checkable := checkable_module(module)) is not None:
            self.choose_blocks(ModelBlocks(checkable, name))

    def choose_blocks(self, blocks: ModelBlocks) -> list[str]:
        """Returns the names of the blocks whose calls are handled.

        Raises:
            DloError: If the model does not go with what the callback does.
        """
        return blocks.names

    def handle_blocks(self, module: LightningModule) -> ModelBlocks:
        """Begins to handle the calls of the chosen blocks, and returns all blocks."""
        self._remove()
        blocks = ModelBlocks(module, type(self).__name__)
        self._names = self.choose_blocks(blocks)
        for number, name in enumerate(self._names):
            block = blocks.model.get_submodule(name)
            self._removers.append(handle_calls(block, self.handler(number, name, block), self.order))
        return blocks

    @abstractmethod
    def handler(self, number: int, name: str, block: nn.Module) -> Handler:
        """Returns the handler of a block's calls.

        Args:
            number: Number of the block among those chosen.
            name: Name of the block, relative to the model.
            block: Block.
        """

    @abstractmethod
    def begin_step(self) -> dict[str, float]:
        """Prepares for a new step, and returns the numbers to log."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Prepares for a new step, and logs."""
        if self._clock.update(trainer):
            scalars, step = self.begin_step(), trainer.global_step + 1
            if is_logged(trainer, step):
                log_scalars(trainer, scalars, step)

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks that training has an end, and the other callbacks; a subclass may check more.

        Raises:
            DloError: If training has no end, or another callback needs the blocks' own calls.
        """
        name = type(self).__name__
        check_end(trainer)
        check_block_scope(name, trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Rotor):
                raise DloError(
                    f"{name}: Rotor must be left out, as it plans for blocks that always do the same, got both; use"
                    " ActivationCheckpoint, or recompute: true of the task"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run, and checks this one."""
        self._clock = StepFraction()
        if stage == "fit":
            with agreed_errors():
                self.check_trainer(trainer)

    def _remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Makes the blocks run as before."""
        self._remove()

    on_exception = on_train_end


class ModelBlocks:
    """Blocks of a model by its parallel plan.

    Args:
        module: LightningModule with its model built.
        what: Name of the callback, for messages.

    Attributes:
        names: Names of all blocks, in the order of execution, relative to the model.
        model: Model that the names are relative to.

    Raises:
        DloError: If the plan names no blocks.
    """

    def __init__(self, module: LightningModule, what: str) -> None:
        self.model, self.plan = model_and_plan(module)
        self.names = self.plan.block_names(self.model)
        self._prefix, self._what = "model." if isinstance(module, Task) else "", what
        if not self.names:
            raise DloError(
                f"{what}: the parallel plan must name blocks, got none of {type(module).__name__}; name them in"
                " Task.parallel_plan: ParallelPlan(blocks=(...))"
            )

    def without(self, skip: Sequence[str]) -> list[str]:
        """Returns the names of the blocks that no pattern of ``skip`` matches.

        Raises:
            DloError: If a pattern matches no block, or no block is left.
        """
        skipped = match_names(skip, self.names, self.names, f"{self._what}: each pattern of skip must match a block")
        left = [name for name in self.names if name not in skipped]
        if not left:
            raise DloError(
                f"{self._what}: skip must leave at least one block, got {list(skip)} for all; remove one of them"
            )
        return left

    @property
    def unit_count(self) -> int:
        """Number of units: the stem, each block, and the head."""
        return len(self.names) + 2

    def unit_of(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the unit of each parameter: 0 for the stem, then the blocks from 1 on, then the head.

        A parameter that is tied to one of a later unit belongs to that one. Parameters outside of the plan, such as
        those of modules that only training uses, belong to the head.

        Args:
            names: Names of parameters of the LightningModule.
        """
        return {name: self._unit(plain_name(name)) for name in names}

    def _unit(self, name: str) -> int:
        inner = name.removeprefix(self._prefix)
        tied = next((group for group in self.plan.tied if inner in group), (inner,))
        return max(self._own_unit(one) for one in tied) if name.startswith(self._prefix) else len(self.names) + 1

    def _own_unit(self, name: str) -> int:
        for number, block in enumerate(self.names, start=1):
            if name.startswith(block + "."):
                return number
        return 0 if self.plan.owners(name)[:1] == ["stem"] else len(self.names) + 1


_CHAIN = "_dlo_block_chain"


class _Chain:
    """Handlers of one block, the outermost first."""

    def __init__(self) -> None:
        self.handlers: list[tuple[int, Handler]] = []

    def __call__(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = own
        for _, handler in reversed(self.handlers):
            call = partial(_call_handler, handler, call)
        return call(*args, **kwargs)


def _call_handler(handler: Handler, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return handler(inner, args, kwargs)


def _remove_handler(block: nn.Module, removed: Handler) -> None:
    """Removes a handler; the block's class is its own again after the last one."""
    chain = block.__dict__.get(_CHAIN)
    if chain is None:
        return
    chain.handlers = [(order, handler) for order, handler in chain.handlers if handler is not removed]
    if not chain.handlers:
        del block.__dict__[_CHAIN]
        restore_calls(block)


def handle_calls(block: nn.Module, handler: Handler, order: int) -> Callable[[], None]:
    """Adds a handler to the calls of a block; returns a function that removes it.

    Args:
        block: Block.
        handler: Function of the inner call, the positional and the keyword arguments.
        order: Place among other handlers: those with lower numbers are called first, and around the others.
    """
    chain = block.__dict__.get(_CHAIN)
    if chain is None:
        chain = block.__dict__[_CHAIN] = _Chain()
        intercept_calls(block, chain)
    chain.handlers = sorted([*chain.handlers, (order, handler)], key=lambda pair: pair[0])
    return partial(_remove_handler, block, handler)


def call_with_forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a block's hooks around another forward than its own, uncompiled.

    torch (2.11 to 2.15) runs hooks in ``Module._call_impl``, and calls ``self.forward`` there; a compiled module calls
    its compiled code in place of it.

    Args:
        block: Block.
        forward: Forward of this call alone.
        *args: Arguments of the call.
        **kwargs: Arguments by name.
    """
    own = {key: value for key, value in block.__dict__.items() if key == "forward"}
    block.__dict__["forward"] = forward
    try:
        return nn.Module._call_impl(block, *args, **kwargs)
    finally:
        del block.__dict__["forward"]
        block.__dict__.update(own)


class _PassGradient(torch.autograd.Function):
    """Identity of a tensor, whose backward gives other tensors gradients of zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *anchors: Tensor) -> Tensor:
        ctx.described = [(anchor.shape, anchor.dtype, anchor.device) for anchor in anchors]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = ctx.needs_input_grad
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_wanted else None
            for is_wanted, (shape, dtype, device) in zip(wanted[1:], ctx.described, strict=True)
        ]
        return (gradients[0] if wanted[0] else None, *zeros)


def pass_gradient(value: Tensor, *anchors: Tensor) -> Tensor:
    """Returns a tensor; in backward, it gets its gradient, and the anchors that train get gradients of zero.

    Args:
        value: Tensor of any shape.
        *anchors: Tensors, such as the parameters of a block that did not run.
    """
    trained = [anchor for anchor in anchors if anchor.requires_grad]
    if not trained:
        return value
    passed: Tensor = _PassGradient.apply(value, *trained)
    return passed


def check_hidden(hidden: Any, output: Any, name: str, what: str) -> tuple[Tensor, Tensor]:
    """Returns the hidden state and the output of a block, which must be tensors of one shape.

    Args:
        hidden: First argument of the call.
        output: Output of the call.
        name: Name of the block.
        what: Name of the callback, for the message.

    Raises:
        DloError: If the block changes the shape, or does not map a tensor to a tensor.
    """
    if isinstance(hidden, Tensor) and isinstance(output, Tensor) and hidden.shape == output.shape:
        return hidden, output
    raise DloError(
        f"{what}: a block must map a tensor to one of its shape, got {_shape(hidden)} to {_shape(output)} for '{name}';"
        f" leave it out by skip: ['{name}']"
    )


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__

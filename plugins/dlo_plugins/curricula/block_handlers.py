"""Handlers around the calls of a model's blocks, of several callbacks at once, under every strategy.

A handler sees a block's call before its hooks do, so that recomputation, compiled code and the gathering of FSDP and
ZeRO 3 are inside. A block whose computation is left out still runs its hooks: all ranks then gather and reduce the same
units in the same order, whatever is left out. :func:`pass_gradient` gives its parameters gradients of zero, so that no
strategy misses one, and the optimizer does the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.remat.block_calls import Handler, intercept_calls, restore_calls

_CHAIN = "_dlo_block_chain"


class _Chain:
    """Handlers of one block, the outermost first."""

    def __init__(self) -> None:
        self.handlers: list[tuple[int, Handler]] = []

    def __call__(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = own
        for _, handler in reversed(self.handlers):
            call = _Link(handler, call)
        return call(*args, **kwargs)


class _Link:
    """Call of a handler, with the call that it may make."""

    def __init__(self, handler: Handler, inner: Callable[..., Any]) -> None:
        self.handler, self.inner = handler, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(self.inner, args, kwargs)


class BlockHandle:
    """Handle of a block's handler.

    Args:
        block: Block.
        handler: Handler of its calls.
    """

    def __init__(self, block: nn.Module, handler: Handler) -> None:
        self._block, self._handler = block, handler

    def remove(self) -> None:
        """Removes the handler; the block's class is its own again after the last one."""
        chain = self._block.__dict__.get(_CHAIN)
        if chain is None:
            return
        chain.handlers = [(order, handler) for order, handler in chain.handlers if handler is not self._handler]
        if not chain.handlers:
            del self._block.__dict__[_CHAIN]
            restore_calls(self._block)


def handle_calls(block: nn.Module, handler: Handler, order: int) -> BlockHandle:
    """Adds a handler to the calls of a block.

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
    return BlockHandle(block, handler)


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
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        return nn.Module._call_impl(block, *args, **kwargs)
    finally:
        if own is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = own


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


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the hidden state of a block's call: its first argument."""
    return args[0] if args else next(iter(kwargs.values()), None)


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments with another hidden state."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


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

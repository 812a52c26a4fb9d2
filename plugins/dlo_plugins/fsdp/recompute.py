"""Recomputation: activations inside a unit are dropped after its forward, and computed again in backward.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang & Guestrin, 2016, arXiv 1604.06174. With the units as
segments, memory holds one activation a unit and the insides of one, for one more forward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Recomputed:
    """A module's forward that keeps nothing but its inputs; random numbers are drawn again as they were.

    Args:
        forward: the module's own.
        context_fn: of torch's checkpoint: what of the inside is kept after all.
        holding: called with the inputs; returns a context in which they are put aside.
    """

    def __init__(
        self,
        forward: Any,
        context_fn: Callable[[], Any] | None = None,
        holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.forward = forward
        self.options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        self.holding = holding
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with contextlib.nullcontext() if self.holding is None else self.holding((args, kwargs)):
            if any(isinstance(arg, Tensor) for arg in args):
                return checkpoint(self.forward, *args, use_reentrant=False, **self.options, **kwargs)
            # torch (2.11 to 2.15) draws the random numbers of the devices again on which positional tensors are.
            return checkpoint(self._called, args, kwargs, use_reentrant=False, **self.options)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)


def recompute(
    modules: Iterable[nn.Module],
    context_fn: Callable[[], Any] | None = None,
    holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> None:
    """Lets modules recompute their activations, once each.

    Their ``forward`` is replaced on the object, so that no wrapper shows in names or types, and hooks of the module,
    such as FSDP's gathering, stay outside.

    Args:
        modules: whose activations are recomputed.
        context_fn: of torch's checkpoint: what of the inside is kept after all; by default nothing.
        holding: called with a module's inputs; returns a context in which they are put aside for backward.
    """
    for module in modules:
        if not isinstance(module.__dict__.get("forward"), _Recomputed):
            module.forward = _Recomputed(module.forward, context_fn, holding)

"""Recomputes activations: those inside a unit are dropped after its forward, and computed again in backward.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang & Guestrin, 2016, arXiv 1604.06174. With the units as
segments, memory holds one activation per unit and all activations of one unit, at the cost of one more forward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError


class _Recomputed:
    """Forward of a module that keeps only its inputs for backward; recomputation draws the same random numbers.

    Args:
        forward: Forward of the module.
        context_fn: Function for ``context_fn`` of torch's checkpoint, which selects activations to keep.
        holding: Function that gets the inputs and returns a context in which they are saved elsewhere.
    """

    def __init__(
        self,
        forward: Any,
        context_fn: Callable[[], Any] | None = None,
        holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.forward, self.context_fn = forward, context_fn
        self.options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        self.holding = holding
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with contextlib.nullcontext() if self.holding is None else self.holding((args, kwargs)):
            if any(isinstance(arg, Tensor) for arg in args):
                return checkpoint(self.forward, *args, use_reentrant=False, **self.options, **kwargs)
            # torch (2.11 to 2.15) restores the random state only of devices of positional tensors.
            return checkpoint(self._called, args, kwargs, use_reentrant=False, **self.options)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)


def recompute(
    modules: Iterable[nn.Module],
    context_fn: Callable[[], Any] | None = None,
    holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> None:
    """Makes modules recompute their activations in backward; all recomputation of dlo is by this function.

    A module that recomputes already is left alone, so that two options that ask for it agree. ``forward`` is replaced
    on the object, so that names and types do not change, and hooks of the module, such as FSDP's gathering, run
    outside.

    Args:
        modules: Modules whose activations are recomputed.
        context_fn: Function for ``context_fn`` of torch's checkpoint, which selects activations to keep; by default
            none are.
        holding: Function that gets a module's inputs and returns a context in which they are saved elsewhere for
            backward.

    Raises:
        DloError: A module recomputes already, and not in the way that is asked for here.
    """
    for module in modules:
        present = module.__dict__.get("forward")
        if not isinstance(present, _Recomputed):
            module.forward = _Recomputed(module.forward, context_fn, holding)
        elif (context_fn, type(holding)) not in ((None, type(None)), (present.context_fn, type(present.holding))):
            raise DloError(
                "blocks must recompute by one option where it is selective or offloads, got"
                f" {type(module).__name__} that recomputes already; leave out recompute: true of the task or strategy"
            )

"""Recomputes activations: those inside a unit are dropped after its forward, and computed again in backward.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang & Guestrin, 2016, arXiv 1604.06174. With the units as
segments, memory holds one activation per unit and all activations of one unit, at the cost of one more forward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError

#: Number of the module that owns a buffer, and the buffer's name in it.
_Place = tuple[int, str]


def in_backward() -> bool:
    """Returns whether a backward runs in this thread, as torch's own checkpoint asks (2.11 to 2.15)."""
    return bool(torch._C._current_graph_task_id() != -1)


class BufferGuard:
    """Makes recomputation start from the buffers' values before the forward, and leave the buffers as they are.

    Otherwise a batch norm would count each batch twice in its running statistics. The first forward copies all buffers,
    and finds those that it changes; later ones copy only these.

    Args:
        modules: Modules that are recomputed together.
    """

    def __init__(self, *modules: nn.Module) -> None:
        owners = {id(owner): owner for module in modules for owner in module.modules() if owner._buffers}
        self._owners = list(owners.values())
        self._changing: set[_Place] | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes of one copy of the buffers that a forward changes; 0 before the first forward."""
        buffers = self._buffers()
        return sum(buffers[place].nbytes for place in self._changing or () if place in buffers)

    @property
    def is_needed(self) -> bool:
        """Whether the modules have buffers."""
        return bool(self._owners)

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Returns a context for one forward, and one for its recomputation."""
        before: dict[_Place, Tensor] = {}  # of the buffers that this forward changes
        return self._forward(before), self._recomputation(before)

    def _buffers(self) -> dict[_Place, Tensor]:
        return {
            (number, name): buffer
            for number, owner in enumerate(self._owners)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    @contextlib.contextmanager
    def _forward(self, before: dict[_Place, Tensor]) -> Iterator[None]:
        buffers = self._buffers()
        versions = {place: buffer._version for place, buffer in buffers.items()}
        watched = (
            buffers if self._changing is None else {place: buffers[place] for place in self._changing & {*buffers}}
        )
        copies = {place: buffer.detach().clone() for place, buffer in watched.items()}
        try:
            yield
        finally:
            now = self._buffers()
            for place, version in versions.items():
                is_changed = now[place] is not buffers[place] or now[place]._version != version
                if is_changed or _counts_silently(self._owners[place[0]]):
                    before[place] = copies[place] if place in copies else now[place].detach().clone()
            self._changing = (self._changing or set()) | before.keys()

    @contextlib.contextmanager
    def _recomputation(self, before: dict[_Place, Tensor]) -> Iterator[None]:
        own = self._buffers()
        for (number, name), value in before.items():
            self._owners[number]._buffers[name] = value.clone()
        try:
            yield
        finally:
            for number, name in before:
                self._owners[number]._buffers[name] = own[number, name]


def _counts_silently(module: nn.Module) -> bool:
    """Returns whether a module's operator writes to its buffers without a new version of them (torch 2.11 to 2.15)."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


class _Later:
    """Whether the forward that runs now keeps no activations, and runs again before its backward."""

    is_on: bool = False


@contextlib.contextmanager
def recomputed_later() -> Iterator[None]:
    """Context of a forward without gradients that runs again, with gradients, before its backward."""
    before, _Later.is_on = _Later.is_on, True
    try:
        yield
    finally:
        _Later.is_on = before


def has_backward() -> bool:
    """Returns whether the forward that runs now has a backward, at once or after it runs again."""
    return _Later.is_on or torch.is_grad_enabled()


def checkpointed(
    function: Callable[..., Any],
    *args: Any,
    guard: BufferGuard | None = None,
    context_fn: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a function that keeps only its arguments for backward; recomputation draws the same random numbers.

    Args:
        function: Function to call.
        *args: Arguments.
        guard: Guard of the buffers of the modules that the function runs.
        context_fn: Function for ``context_fn`` of torch's checkpoint, which selects activations to keep.
        **kwargs: Arguments by name.
    """
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    # torch.compile makes one graph of both passes, in which buffers change once.
    if guard is not None and guard.is_needed and not torch.compiler.is_compiling():
        options["context_fn"] = functools.partial(_both_contexts, guard, context_fn)
    if any(isinstance(arg, Tensor) for arg in args):
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    # torch (2.11 to 2.15) restores the random state only of devices of positional tensors.
    return checkpoint(lambda one, two: function(*one, **two), args, kwargs, use_reentrant=False, **options)


def _both_contexts(guard: BufferGuard, context_fn: Callable[[], Any] | None) -> tuple[Any, Any]:
    """Returns the contexts of a guard, each around the context of a selection."""
    guarded = guard.contexts()
    return guarded if context_fn is None else tuple(map(_entered, guarded, context_fn()))  # type: ignore[return-value]


@contextlib.contextmanager
def _entered(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


class _Recomputed:
    """Forward of a module that keeps only its inputs for backward; recomputation draws the same random numbers.

    Args:
        module: Module.
        context_fn: Function for ``context_fn`` of torch's checkpoint, which selects activations to keep.
        holding: Function that gets the inputs and returns a context in which they are saved elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        context_fn: Callable[[], Any] | None = None,
        holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.forward, self.context_fn = module.forward, context_fn
        self.holding, self._guard = holding, BufferGuard(module)
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with contextlib.nullcontext() if self.holding is None else self.holding((args, kwargs)):
            return checkpointed(self.forward, *args, guard=self._guard, context_fn=self.context_fn, **kwargs)


def recompute(
    modules: Iterable[nn.Module],
    context_fn: Callable[[], Any] | None = None,
    holding: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> None:
    """Makes modules recompute their activations in backward; all recomputation of dlo is by this function.

    A module that recomputes already is left alone, so that two options that ask for it agree. ``forward`` is replaced
    on the object, so that names and types do not change, and hooks of the module, such as FSDP's gathering, run
    outside. Buffers that forward changes, such as running statistics, change once.

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
            module.forward = _Recomputed(module, context_fn, holding)
        elif (context_fn, type(holding)) not in ((None, type(None)), (present.context_fn, type(present.holding))):
            raise DloError(
                "blocks must recompute by one option where it is selective or offloads, got"
                f" {type(module).__name__} that recomputes already; leave out recompute: true of the task or strategy"
            )


def recomputes(module: nn.Module) -> bool:
    """Returns whether :func:`recompute` has made a module recompute its activations."""
    return isinstance(module.__dict__.get("forward"), _Recomputed)


def undo_recompute(modules: Iterable[nn.Module]) -> None:
    """Makes modules that :func:`recompute` has changed keep their activations again."""
    for module in modules:
        present = module.__dict__.get("forward")
        if isinstance(present, _Recomputed):
            del module.__dict__["forward"]
            if present.forward != type(module).forward.__get__(module):
                module.forward = present.forward

"""Named ranges around the modules' forwards, and around their backwards for NVTX, by hooks that are removed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.autograd.profiler import record_function

from dlo_framework.batches import tree_leaves
from dlo_plugins.profile.step_breakdown import MARK, MODULE


def mark(label: str) -> None:
    """Writes a mark into the trace of torch's profiler.

    Args:
        label: Phase that begins, `step N` or `end N`.
    """
    with record_function(MARK + label):
        pass


def profiled_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and submodules that get ranges.

    A hook inside a compiled module would be compiled with it, or make it compile again; so the compiled module and its
    submodules get none, and their time belongs to the module around them.
    """
    profiled: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, part in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in compiled):
            continue
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            compiled.append(name)
        elif name and not isinstance(part, torch.jit.ScriptModule | nn.ModuleList | nn.ModuleDict):
            profiled.append((name, part))
    return profiled


class ModuleRanges:
    """Ranges around the forward of each module, and around its backward.

    A backward's range begins when the gradient of the module's output is known, and ends when that of its inputs is; at
    the latest at the end of backward. The graph stays as it was: nodes and tensors get hooks, and no node is added.

    Args:
        module: Module whose submodules get ranges.
        begin: Function that begins a range of a module's name in `forward` or `backward`, and returns its id.
        end: Function that ends the range of an id.
        backward: Whether backwards have ranges too.
    """

    def __init__(
        self, module: nn.Module, begin: Callable[[str, str], Any], end: Callable[[Any], None], backward: bool = True
    ) -> None:
        self._module, self._begin, self._end, self._backward = module, begin, end, backward
        self._handles: list[Any] = []
        self._forwards: list[Any] = []
        self._backwards: dict[int, Any] = {}  # ids of open ranges, by the call's number
        self._calls = 0

    def start(self) -> None:
        """Registers the hooks."""
        for name, part in profiled_modules(self._module):
            enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(part.register_forward_hook(leave, always_call=True, with_kwargs=True))

    def _enter(self, name: str, *_: Any) -> None:
        self._forwards.append(self._begin(name, "forward"))

    def _leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._forwards:
            self._end(self._forwards.pop())
        if self._backward and torch.is_grad_enabled():
            self._watch_backward(name, (args, kwargs), output)

    def _watch_backward(self, name: str, inputs: Any, output: Any) -> None:
        nodes = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        sources = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        number, self._calls = self._calls, self._calls + 1

        def begin(*_: Any) -> None:
            if number not in self._backwards:
                self._backwards[number] = self._begin(name, "backward")

        def end(*_: Any) -> None:
            if number in self._backwards:
                self._end(self._backwards.pop(number))

        for node in nodes:
            node.register_prehook(begin)
        if nodes and sources:
            register_multi_grad_hook(sources, end)

    def end_backward(self) -> None:
        """Ends the ranges of modules whose inputs have no gradient."""
        while self._backwards:
            self._end(self._backwards.popitem()[1])

    def stop(self) -> None:
        """Removes the hooks, and ends all ranges, also those of a forward that an error has ended."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._forwards:
            self._end(self._forwards.pop())
        self.end_backward()


def trace_ranges(module: nn.Module) -> ModuleRanges:
    """Returns the ranges of modules' forwards in the trace of torch's profiler; backwards need none there."""

    def begin(name: str, phase: str) -> Any:
        entered = record_function(MODULE + name)
        entered.__enter__()
        return entered

    return ModuleRanges(module, begin, lambda entered: entered.__exit__(None, None, None), backward=False)


def nvtx_ranges(module: nn.Module) -> ModuleRanges:
    """Returns the NVTX ranges of modules' forwards and backwards, for NVIDIA's Nsight Systems."""
    nvtx = torch.cuda.nvtx
    return ModuleRanges(module, lambda name, phase: nvtx.range_start(f"{name} {phase}"), nvtx.range_end)

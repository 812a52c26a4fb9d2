"""Named ranges around the modules' forwards, and around their backwards for NVTX, by hooks that are removed again."""

from __future__ import annotations

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
    found: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, part in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in compiled):
            continue
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            compiled.append(name)
        elif name and not isinstance(part, torch.jit.ScriptModule | nn.ModuleList | nn.ModuleDict):
            found.append((name, part))
    return found


class ModuleRanges:
    """Ranges of `record_function` around the forward of each module, named like the module.

    Args:
        module: Module whose submodules get ranges.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self._open: list[Any] = []

    def start(self) -> None:
        """Registers the hooks."""
        for name, part in profiled_modules(self._module):
            self._handles.append(part.register_forward_pre_hook(self._enter(MODULE + name), prepend=True))
            self._handles.append(part.register_forward_hook(self._leave, always_call=True))

    def _enter(self, label: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            entered = record_function(label)
            entered.__enter__()
            self._open.append(entered)

        return enter

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._open:  # Of a forward that an error has ended.
            self._open.pop().__exit__(None, None, None)


class NvtxRanges:
    """NVTX ranges around the forward and the backward of each module, for NVIDIA's Nsight Systems.

    A backward's range begins when the gradient of the module's output is known, and ends when that of its inputs is; at
    the latest at the end of backward. The graph stays as it was: nodes and tensors get hooks, and no node is added.

    Args:
        module: Module whose submodules get ranges.
        begin: Function that begins a range, and returns its id; `torch.cuda.nvtx.range_start`.
        end: Function that ends the range of an id; `torch.cuda.nvtx.range_end`.
    """

    def __init__(self, module: nn.Module, begin: Callable[[str], Any], end: Callable[[Any], None]) -> None:
        self._module, self._begin, self._end = module, begin, end
        self._handles: list[Any] = []
        self._forwards: list[Any] = []
        self._backwards: dict[int, Any] = {}  # ids of open ranges, by the call's number
        self._calls = 0

    def start(self) -> None:
        """Registers the hooks."""
        for name, part in profiled_modules(self._module):
            self._handles.append(part.register_forward_pre_hook(self._enter(name), prepend=True))
            self._handles.append(part.register_forward_hook(self._leave(name), always_call=True, with_kwargs=True))

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._forwards.append(self._begin(f"{name} forward"))

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._forwards:
                self._end(self._forwards.pop())
            if torch.is_grad_enabled():
                self._watch_backward(f"{name} backward", (args, kwargs), output)

        return leave

    def _watch_backward(self, label: str, inputs: Any, output: Any) -> None:
        nodes = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        sources = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        number, self._calls = self._calls, self._calls + 1

        def begin(*_: Any) -> None:
            if number not in self._backwards:
                self._backwards[number] = self._begin(label)

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
        """Removes the hooks, and ends all ranges."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._forwards:
            self._end(self._forwards.pop())
        self.end_backward()

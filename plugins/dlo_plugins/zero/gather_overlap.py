"""Overlaps the all-gather after a step of stages 1 and 2 with the next forward, in the order of use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dlo_framework.watch.flops import is_compiled
from dlo_plugins.sharding.outside_use import OutsideUse
from dlo_plugins.zero.flat_group import FlatGroup


class GatherOverlap:
    """Hooks that make each unit wait, before its forward, for the last step's all-gather of its parameters.

    A step ends with one all-gather per bucket, started in the order in which forward uses the buckets. A step waits at
    its beginning for parameters of no unit, and for those that the first step of its kind used outside their unit's
    forward. Backward waits for all others. Until then parameters read as NaN, so that a later step that newly uses one
    outside its unit's forward fails visibly instead of reading the previous step's values. Such a read cannot wait:
    torch shows reads of plain tensors only to a mode, which costs microseconds for each function of the step.

    Args:
        module: Root module.
        units: Names of the modules that wait for their own parameters.
        groups: Buckets of parameters.

    Attributes:
        enabled: Whether all-gathers may continue after the optimizer's step. Otherwise they end with it.
        handles: Handles of the hooks on the modules.
    """

    def __init__(self, module: nn.Module, units: list[str], groups: list[FlatGroup]) -> None:
        self._module, self._groups, self.enabled = module, groups, False
        self._running = False
        self._watched: set[str] = set()  # kinds of step that have been watched
        self._home: dict[int, str] = {}  # each parameter's unit by its id; empty for none or several
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            home = next((name for name in units if full_name.startswith(name + ".")), "")
            known = self._home.setdefault(id(parameter), home)
            self._home[id(parameter)] = home if known == home else ""
        of_unit: dict[str, list[FlatGroup]] = {name: [] for name in ("", *units)}
        for group in groups:
            for name in {self._home[id(parameter)] for parameter in group.parameters}:
                of_unit[name].append(group)
        self._first = of_unit.pop("")  # a step waits for these at its beginning
        self._units = {name: module.get_submodule(name) for name, found in of_unit.items() if found}
        self.handles = [
            part.register_forward_pre_hook(torch.compiler.disable(self._make_wait_hook(of_unit[name])))
            for name, part in self._units.items()
        ]

    def after_step(self) -> None:
        """Hides the parameters until their all-gathers, which a step has just started, end."""
        self._running = True
        if not self.enabled:
            self.finish()
            return
        for group in self._groups:
            group.hide_params()

    def finish(self) -> None:
        """Waits for all parameters."""
        if self._running:
            self._wait(self._groups)
            self._running = False

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Waits for the parameters used first, and watches the first step of a kind, such as "training"."""
        compiled = kind not in self._watched and is_compiled(self._module)
        if compiled:
            self.enabled = False  # Compiled code hides which parameters it uses, and where.
        if not self.enabled:
            self.finish()
        self._wait(self._first)
        needs_watch = self.enabled or not all(group.shares_memory for group in self._groups)
        if kind in self._watched or compiled or not needs_watch:
            yield
            return
        self._watched.add(kind)
        inside: set[str] = set()

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: inside.add(name)

        def leave(name: str) -> Callable[..., None]:
            return lambda *_: inside.discard(name)

        def on_use(parameter: int, by_data: bool) -> None:
            home = self._home[parameter]
            used = [g for g in self._groups if any(id(p) == parameter for p in g.parameters)]
            if home and home not in inside:
                self._first += [group for group in used if group not in self._first]
                self._wait(used)
            for group in used if by_data else ():
                group.watch_data()

        handles = [part.register_forward_pre_hook(enter(name)) for name, part in self._units.items()]
        handles += [part.register_forward_hook(leave(name), always_call=True) for name, part in self._units.items()]
        try:
            with OutsideUse(set(self._home), on_use):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_wait_hook(self, groups: list[FlatGroup]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._running:
                self._wait(groups)

        return wait

    @staticmethod
    def _wait(groups: list[FlatGroup]) -> None:
        for group in groups:
            group.finish_gather()

"""Stages 1 and 2: what a step has changed arrives while the next forward runs, in the order of use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dlo_plugins.zero.group import FlatGroup
from dlo_plugins.zero.outside import OutsideUse, is_compiled


class Arrivals:
    """Has each unit of a module wait, before its forward, for the parameters that the last step's all-gather brings.

    A step ends with an all-gather for each bucket, that of the parameters which forward uses first before the others.
    What belongs to no unit, and what the first step of a kind uses outside its unit's forward, is waited for as a step
    begins; what nothing has waited for, as backward begins. Until then parameters read as NaN: a later step that begins
    to use one outside its unit's forward shows, rather than take the values of the step before.

    Args:
        module: the root.
        units: names of the modules that wait for their own parameters.
        groups: the buckets.

    Attributes:
        enabled: whether gathers go on after the optimizer's step. Otherwise they end with it.
        handles: of the hooks on the modules.
    """

    def __init__(self, module: nn.Module, units: list[str], groups: list[FlatGroup]) -> None:
        self._module, self._groups, self.enabled = module, groups, False
        self._under_way = False
        self._watched: set[str] = set()  # the kinds of step that have been watched
        self._home: dict[int, str] = {}  # each parameter's unit, by its id; empty for those of none, or of several
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            home = next((name for name in units if full_name.startswith(name + ".")), "")
            known = self._home.setdefault(id(parameter), home)
            self._home[id(parameter)] = home if known == home else ""
        of_unit: dict[str, list[FlatGroup]] = {name: [] for name in ("", *units)}
        for group in groups:
            for name in {self._home[id(parameter)] for parameter in group.parameters}:
                of_unit[name].append(group)
        self._first = of_unit.pop("")  # waited for as a step begins
        self._units = {name: module.get_submodule(name) for name, found in of_unit.items() if found}
        self.handles = [
            part.register_forward_pre_hook(torch.compiler.disable(self._waiting(of_unit[name])))
            for name, part in self._units.items()
        ]

    def started(self) -> None:
        """Called after a step's all-gathers have been started."""
        self._under_way = True
        if not self.enabled:
            self.finish()
            return
        for group in self._groups:
            group.hide()

    def finish(self) -> None:
        """Waits for all parameters."""
        if self._under_way:
            self._wait(self._groups)
            self._under_way = False

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Waits for what is used first, and watches the first step of a kind, such as "training"."""
        if is_compiled(self._module) if kind not in self._watched else False:
            self.enabled = False  # What it uses, and where, cannot be seen.
        if not self.enabled:
            self.finish()
        self._wait(self._first)
        if kind in self._watched or not self.enabled:
            yield
            return
        self._watched.add(kind)
        inside: set[str] = set()

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: inside.add(name)

        def leave(name: str) -> Callable[..., None]:
            return lambda *_: inside.discard(name)

        def found(parameter: int) -> None:
            home = self._home[parameter]
            if home and home not in inside:
                used = [g for g in self._groups if any(id(p) == parameter for p in g.parameters)]
                self._first += [group for group in used if group not in self._first]
                self._wait(used)

        handles = [part.register_forward_pre_hook(enter(name)) for name, part in self._units.items()]
        handles += [part.register_forward_hook(leave(name), always_call=True) for name, part in self._units.items()]
        try:
            with OutsideUse(set(self._home), found):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _waiting(self, groups: list[FlatGroup]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._under_way:
                self._wait(groups)

        return wait

    @staticmethod
    def _wait(groups: list[FlatGroup]) -> None:
        for group in groups:
            group.finish_gather()

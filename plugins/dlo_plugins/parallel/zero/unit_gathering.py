"""Gathers parameters in the order of their use: stage 3's units ahead of each, stages 1 and 2's after a step.

A unit is a module (a transformer block) whose parameters are gathered together. Stage 3 gathers it one unit ahead of
its use in forward and backward, and frees it after it (:class:`UnitGatherer`). Parameters of no unit belong to the root
and are gathered for a full step. In stages 1 and 2 the all-gather after a step overlaps with the next forward
(:class:`GatherOverlap`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from dlo_framework.batches import tree_leaves
from dlo_framework.costs import is_compiled
from dlo_framework.errors import DloError
from dlo_plugins.parallel.user_code import OutsideUse
from dlo_plugins.parallel.zero.flat_group import FlatGroup


class Unit:
    """Module with the flat groups of its parameters.

    Attributes:
        name: Name of the module; empty for the root.
        inside: Whether the module's forward is running.
        kept: Whether the unit stays gathered for a full step: the root, and those that a step uses outside their
            forward.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[FlatGroup]) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.inside, self.kept = False, not name

    def start(self) -> None:
        """Starts gathering the unit's parameters."""
        for group in self.groups:
            group.start_gather()

    def finish(self) -> None:
        """Waits until the unit's parameters can be used."""
        for group in self.groups:
            group.finish_gather()

    def release(self, *, frozen_only: bool = False) -> None:
        """Frees the unit's parameters before the step's end, unless the unit is kept."""
        if not self.kept:
            self.free(frozen_only=frozen_only)

    def free(self, *, frozen_only: bool = False) -> None:
        """Frees the unit's parameters."""
        for group in self.groups:
            if group.gathered and not (frozen_only and group.trains):
                group.free()


class UnitGatherer:
    """Gathers and frees units as a step goes through them.

    Args:
        units: Units, the root first, then in the order of registration.
        module: Root module.

    Attributes:
        in_backward: Whether a backward is running; a forward inside it is a recomputation.
        handles: Handles of the hooks on the modules.
    """

    def __init__(self, units: list[Unit], module: nn.Module) -> None:
        self.root, self.units = units[0], units[1:]
        self.in_backward = False
        self._order: list[Unit] = []  # units of the last forward in their order, for the prefetch
        self._seen: list[Unit] = []
        self._kept_groups = {id(group) for unit in units if unit.kept for group in unit.groups}
        self._module = module
        self._watched: set[str] = set()  # kinds of step that have been watched
        self.handles = [module.register_forward_pre_hook(_outside_graphs(lambda *_: self.begin_step()))]
        self._reads_names = False
        groups = {id(parameter): group for unit in units for group in unit.groups for parameter in group.parameters}
        for part in module.modules():
            held = {id(groups[id(p)]): groups[id(p)] for p in part._parameters.values() if id(p) in groups}
            if held:
                self.handles.append(part.register_state_dict_pre_hook(self._check_state(list(held.values()))))
        for unit in self.units:
            before, after = _outside_graphs(self._before_forward(unit)), _outside_graphs(self._after_forward(unit))
            self.handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(unit.module.register_forward_hook(after))

    def _check_state(self, groups: list[FlatGroup]) -> Any:
        """Returns a hook that makes a submodule's ``state_dict`` raise while its parameters are freed."""

        def check(*_: Any) -> None:
            if not self._reads_names and not all(group.gathered for group in groups):
                raise DloError(
                    "state_dict under ZeRO stage 3 must be taken of a module whose parameters are gathered, got it"
                    " outside of a step; take the weights from a checkpoint (trainer.save_checkpoint)"
                )

        return check

    @contextlib.contextmanager
    def allow_names(self) -> Iterator[None]:
        """Allows ``state_dict`` inside the block, for its names and buffers."""
        self._reads_names = True
        try:
            yield
        finally:
            self._reads_names = False

    def begin_step(self) -> None:
        """Begins a step: gathers the root and the kept units, until :meth:`release_all`."""
        if not self.in_backward and self._seen:
            self._order, self._seen = self._seen, []
        whole_step = [unit for unit in (self.root, *self.units) if unit.kept]
        for unit in whole_step:
            unit.start()
        if self._order:
            self._order[0].start()
        for unit in whole_step:
            unit.finish()

    @contextlib.contextmanager
    def watch_step(self, kind: str) -> Iterator[None]:
        """Watches the first step of a kind: units that it uses outside their forward are kept from then on.

        All ranks take the same steps, so they gather the same units in the same order.

        Args:
            kind: Kind of step, such as "training".
        """
        if kind in self._watched or is_compiled(self._module):
            yield
            return
        self._watched.add(kind)
        homes = self._homes
        names: list[str] = []

        def on_use(parameter: int, by_data: bool) -> None:
            unit, group = homes[parameter]
            if not unit.inside and not unit.kept:
                self._keep(unit)
                names.append(unit.name)
            if by_data:
                group.watch_data()

        with OutsideUse(set(homes), on_use):
            yield
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            rank_zero_warn(
                f"ZeRO stage 3 gathers the weights of {shown} for each full step, because the {kind} step uses them"
                " outside these modules' own forward; that costs the memory that stage 3 saves"
            )

    @functools.cached_property
    def _homes(self) -> dict[int, tuple[Unit, FlatGroup]]:
        """Unit and group of each parameter, by its id."""
        units = (self.root, *self.units)
        return {id(p): (unit, group) for unit in units for group in unit.groups for p in group.parameters}

    @contextlib.contextmanager
    def gather_used(self, meet: Callable[[], None]) -> Iterator[None]:
        """Gathers the units that code in the block uses where they are freed, and frees these at its end.

        Args:
            meet: Function that is called before the first is gathered, which needs all ranks.
        """
        homes, opened = self._homes, list[Unit]()

        def on_use(parameter: int, by_data: bool) -> None:
            unit, group = homes[parameter]
            if not all(group.gathered for group in unit.groups):
                if not opened:
                    meet()
                opened.append(unit)
            unit.finish()
            if by_data:
                group.watch_data()

        with OutsideUse(set(homes), on_use):
            yield
        for unit in opened:
            unit.free()

    def _keep(self, unit: Unit) -> None:
        """Gathers a unit now, and for the full length of later steps."""
        unit.kept = True
        self._kept_groups |= {id(group) for group in unit.groups}
        unit.finish()

    def _before_forward(self, unit: Unit) -> Any:
        def fetch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            unit.finish()
            unit.inside = True
            if self.in_backward:
                return
            self._seen.append(unit)
            if len(self._seen) < len(self._order):
                self._order[len(self._seen)].start()
            if torch.is_grad_enabled():
                inputs = list(_differentiable((args, kwargs)))
                if inputs:
                    # Once the inputs have their gradients, the weights are not needed, frozen ones included.
                    register_multi_grad_hook(inputs, lambda _: unit.release(frozen_only=True))

        return fetch

    def _after_forward(self, unit: Unit) -> Any:
        def release(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            unit.inside = False
            if self.in_backward:
                return
            differentiable = list(_differentiable(outputs)) if torch.is_grad_enabled() else []
            if not differentiable:
                unit.release()
                return
            seen = self._seen  # units of this forward; another forward may run before its backward
            before = seen[-2] if len(seen) > 1 else None
            register_multi_grad_hook(differentiable, lambda _: self._before_backward(unit, before), mode="any")
            # Backward begins with the last unit, which would be gathered again at once.
            if len(seen) != len(self._order):
                unit.release()

        return release

    def _before_backward(self, unit: Unit, before: Unit | None) -> None:
        if torch.is_grad_enabled():
            self._keep(unit)  # This backward is differentiated in turn, which uses the weights again.
        unit.finish()
        if before is not None:
            before.start()

    def release(self, group: FlatGroup) -> None:
        """Frees a group whose gradients are being reduced; those of the root and of kept units stay for the step."""
        if id(group) not in self._kept_groups and group.gathered:
            group.free()

    def release_all(self) -> None:
        """Frees all units, at the end of a backward or an evaluation."""
        for unit in (self.root, *self.units):
            unit.inside = False  # A forward that raised leaves it set.
            unit.free()
        if self._seen:
            self._order, self._seen = self._seen, []


def _differentiable(nest: Any) -> Iterator[Tensor]:
    """Yields the tensors in a nested structure that require a gradient."""
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _outside_graphs(hook: Any) -> Any:
    """Returns a hook that torch.compile leaves out of its graphs, because it allocates and frees storage."""
    return torch.compiler.disable(hook)


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
        self._units = {name: module.get_submodule(name) for name, own in of_unit.items() if own}
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
    def watch_data(self) -> Iterator[None]:
        """Finds writes through ``data`` to the parameters that code in the block reads it of."""
        homes = {id(parameter): group for group in self._groups for parameter in group.parameters}
        with OutsideUse(set(homes), lambda parameter, by_data: homes[parameter].watch_data() if by_data else None):
            yield

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

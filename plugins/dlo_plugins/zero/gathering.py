"""Stage 3: parameters are gathered a unit ahead of use, in forward and in backward, and freed after it.

A unit is a module (a transformer block) whose parameters are gathered together. What belongs to no unit is the
root's: it is gathered for the whole of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dlo_framework.errors import DloError
from dlo_plugins.zero.group import FlatGroup
from dlo_plugins.zero.outside import OutsideUse, is_compiled


class Unit:
    """A module, and the flat groups of its parameters.

    Attributes:
        name: the module's; empty for the root.
        inside: whether its module's forward is under way.
        kept: whether a step uses it outside that too: it is there for the whole of a step, as the root is.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[FlatGroup]) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.inside = self.kept = False

    def start(self) -> None:
        """Starts gathering the unit's parameters."""
        for group in self.groups:
            group.start_gather()

    def finish(self) -> None:
        """Waits until they can be used."""
        for group in self.groups:
            group.finish_gather()

    def let_go(self, *, frozen_only: bool = False) -> None:
        """Gives their memory back before the step's end, unless the step may use them again."""
        if not self.kept:
            self.free(frozen_only=frozen_only)

    def free(self, *, frozen_only: bool = False) -> None:
        """Gives their memory back."""
        for group in self.groups:
            if group.gathered and not (frozen_only and group.trains):
                group.free()


class Gathering:
    """Gathers and frees units as a step goes through them.

    Args:
        units: the root first, then in the order of registration.
        module: the root's.

    Attributes:
        in_backward: whether a backward is under way; a forward inside it is a recomputation.
        handles: of the hooks on the modules.
    """

    def __init__(self, units: list[Unit], module: nn.Module) -> None:
        self.root, self.units = units[0], units[1:]
        self.in_backward = False
        self._order: list[Unit] = []  # of the last forward: what to fetch next
        self._seen: list[Unit] = []
        self._kept_groups = {id(group) for group in self.root.groups}
        self._module = module
        self._watched: set[str] = set()  # the kinds of step that have been watched
        self.handles = [module.register_forward_pre_hook(_outside_graphs(lambda *_: self.enter()))]
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
        """Returns a hook that keeps a part's ``state_dict`` from being taken while it has no values."""

        def check(*_: Any) -> None:
            if not self._reads_names and not all(group.gathered for group in groups):
                raise DloError(
                    "state_dict under ZeRO stage 3 must be taken of a module whose parameters are gathered, got it"
                    " outside of a step; take the weights from a checkpoint (trainer.save_checkpoint)"
                )

        return check

    @contextlib.contextmanager
    def names(self) -> Iterator[None]:
        """Lets ``state_dict`` be taken for its names and buffers, inside the block."""
        self._reads_names = True
        try:
            yield
        finally:
            self._reads_names = False

    def enter(self) -> None:
        """Called as a step begins: the root is there until :meth:`release_all`."""
        if not self.in_backward and self._seen:
            self._order, self._seen = self._seen, []
        whole_step = [self.root, *(unit for unit in self.units if unit.kept)]
        for unit in whole_step:
            unit.start()
        if self._order:
            self._order[0].start()
        for unit in whole_step:
            unit.finish()

    @contextlib.contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        """Looks, in the first step of a kind, which units it uses outside their forward, and keeps these from now on.

        All ranks take the same steps, so that they gather the same units in the same order.

        Args:
            kind: of step, such as "training".
        """
        if kind in self._watched or is_compiled(self._module):
            yield
            return
        self._watched.add(kind)
        homes = {id(p): unit for unit in self.units for group in unit.groups for p in group.parameters}
        names: list[str] = []

        def found(parameter: int) -> None:
            unit = homes[parameter]
            if not unit.inside and not unit.kept:
                self._keep(unit)
                names.append(unit.name)

        with OutsideUse(set(homes), found):
            yield
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            rank_zero_warn(
                f"ZeRO 3: the {kind} step uses weights of {shown} outside these modules' own forward; so they are"
                " gathered for the whole of a step, which takes the memory that stage 3 saves"
            )

    def _keep(self, unit: Unit) -> None:
        """Gathers a unit now, and for the whole of the steps that come."""
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
            following = self._neighbour(len(self._seen))
            if following is not None:
                following.start()
            if torch.is_grad_enabled():
                inputs = list(_differentiable((args, kwargs)))
                if inputs:
                    # Once its inputs have their gradients, nobody needs the weights, frozen ones included.
                    register_multi_grad_hook(inputs, lambda _: unit.let_go(frozen_only=True))

        return fetch

    def _after_forward(self, unit: Unit) -> Any:
        def let_go(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            unit.inside = False
            if self.in_backward:
                return
            found = list(_differentiable(outputs)) if torch.is_grad_enabled() else []
            if not found:
                unit.let_go()
                return
            seen = self._seen  # of this forward, whatever comes before its backward
            before = seen[-2] if len(seen) > 1 else None
            register_multi_grad_hook(found, lambda _: self._before_backward(unit, before), mode="any")
            # Backward begins with the last unit: fetching it again at once would be for nothing.
            if len(seen) != len(self._order):
                unit.let_go()

        return let_go

    def _before_backward(self, unit: Unit, before: Unit | None) -> None:
        unit.finish()
        if before is not None:
            before.start()

    def _neighbour(self, position: int) -> Unit | None:
        return self._order[position] if position < len(self._order) else None

    def release(self, group: FlatGroup) -> None:
        """Frees a group whose gradients are on their way; the root's, and units' that are kept, stay for the step."""
        if id(group) not in self._kept_groups and group.gathered:
            group.free()

    def release_all(self) -> None:
        """Frees everything: a backward, or an evaluation, has ended."""
        for unit in (self.root, *self.units):
            unit.inside = False  # A forward that raised has left it.
            unit.free()
        if self._seen:
            self._order, self._seen = self._seen, []


def _differentiable(nest: Any) -> Iterator[Tensor]:
    """Yields the tensors in a nest that a gradient can come back through."""
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _outside_graphs(hook: Any) -> Any:
    """Keeps a hook out of what torch.compile compiles: it moves memory, which a graph must not know of."""
    return torch.compiler.disable(hook)

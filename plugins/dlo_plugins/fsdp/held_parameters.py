"""Finds parameters that attributes of modules or callbacks, or globals, hold, which FSDP2, `tp` and `pp` replace."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.errors import DloError
from dlo_plugins.sharding.outside_use import ASKING

#: Number of entries of a container, and depth of containers in each other, that are searched.
_MOST, _DEEPEST = 10_000, 6


def check_held(module: nn.Module, replaced: Mapping[str, weakref.ref[nn.Parameter]]) -> None:
    """Checks that no attribute of a module or of a callback, and no global beside them, holds a replaced parameter.

    Args:
        module: Module whose parameters have been sharded or cut.
        replaced: Weak references to the parameters before sharding, by name; most are gone.

    Raises:
        DloError: A list, dict, optimizer, function or another object in an attribute holds one.
    """
    held = {id(parameter): name for name, reference in replaced.items() if (parameter := reference()) is not None}
    known = vars(LightningModule()).keys() if held else ()
    root = type(module).__name__
    owners: list[tuple[str, Any]] = [(f"{root}.{part}".rstrip("."), one) for part, one in module.named_modules()]
    if isinstance(module, LightningModule) and module._trainer is not None:
        owners += [(type(callback).__name__, callback) for callback in module._trainer.callbacks]  # type: ignore[attr-defined]
    kinds = {kind.__module__ for _, one in owners if held for kind in type(one).__mro__}
    owners += [
        (name, sys.modules[name]) for name in kinds if name in sys.modules and not name.startswith(("torch.", *ASKING))
    ]
    for owner, one in owners if held else ():
        for key, value in list(vars(one).items()):
            if key in known or str(key).startswith("__"):
                continue
            name = _find(value, held, set(), _DEEPEST)
            if name:
                raise DloError(
                    "attributes and globals must not hold parameters under a strategy that cuts the model, which"
                    f" replaces them, got {name} in {owner}.{key}; take them from the module where they are used, as"
                    " `self.net.parameters()` in training_step, or use strategy ddp, zero1, zero2 or zero3"
                )


def _find(value: Any, held: Mapping[int, str], seen: set[int], depth: int) -> str:
    """Returns the name of a held parameter in a value; empty if there is none."""
    if id(value) in held:
        return held[id(value)]
    if (
        depth == 0
        or id(value) in seen
        or isinstance(value, Tensor | nn.Module | Trainer | ModuleType | str | bytes | type)
    ):
        return ""
    seen.add(id(value))
    found = (_find(one, held, seen, depth - 1) for one in itertools.islice(_contents(value), _MOST))
    return next(filter(None, found), "")


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return itertools.chain(value.keys(), value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, Optimizer):
        return value.param_groups
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # The variable has not been assigned yet.
        return False

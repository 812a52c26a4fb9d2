"""Finds parameters that a module's attributes hold, which FSDP2 replaces as it shards."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.errors import DloError

#: Number of entries of a container, and depth of containers in each other, that are searched.
_MOST, _DEEPEST = 10_000, 6


def check_held(module: nn.Module, replaced: Mapping[str, weakref.ref[nn.Parameter]]) -> None:
    """Checks that no attribute of a module holds a parameter that sharding has replaced.

    Args:
        module: Module that is sharded.
        replaced: Weak references to the parameters before sharding, by name; most are gone.

    Raises:
        DloError: A list, dict, optimizer, function or another object in an attribute holds one.
    """
    held = {id(parameter): name for name, reference in replaced.items() if (parameter := reference()) is not None}
    known = vars(LightningModule()).keys() if held else ()
    for part, submodule in module.named_modules() if held else ():
        for key, value in list(vars(submodule).items()):
            if key in known or str(key).startswith("__"):
                continue
            name = _find(value, held, set(), _DEEPEST)
            if name:
                home = f"{type(module).__name__}.{part + '.' if part else ''}{key}"
                raise DloError(
                    "attributes must not hold parameters under a strategy that shards them with FSDP2, which replaces"
                    f" them, got {name} in {home}; take them from the module where they are used, as"
                    " `self.net.parameters()` in training_step, or use strategy ddp, zero1, zero2 or zero3"
                )


def _find(value: Any, held: Mapping[int, str], seen: set[int], depth: int) -> str:
    """Returns the name of a held parameter in a value; empty if there is none."""
    if id(value) in held:
        return held[id(value)]
    if depth == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module | Trainer | str | bytes | type):
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

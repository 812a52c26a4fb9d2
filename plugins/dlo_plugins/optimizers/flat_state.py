"""Optimizer state as canonical checkpoints hold it: one tensor or plain value a key, no lists of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from dlo_framework.optimizers import run_closure

_NUMBERED = re.compile(r"^(.+)\.(\d+)$")


class FlatState(Optimizer):
    """Base of optimizers whose ``state_dict`` has a flat form of each parameter's state.

    It precedes the library's class in the bases. :meth:`flatten` and :meth:`restore` are the two directions.
    """

    def flatten(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state with ``key.0``, ``key.1``, ... in place of each list under ``key``."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, list) and value:
                found |= {f"{key}.{number}": item for number, item in enumerate(value)}
            else:
                found[key] = value
        return found

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state from which :meth:`flatten` made ``state``."""
        found: dict[str, Any] = {}
        lists: dict[str, dict[int, Any]] = {}
        for key, value in state.items():
            match = _NUMBERED.match(key)
            if match is None:
                found[key] = value
            else:
                lists.setdefault(match[1], {})[int(match[2])] = value
        return found | {key: [items[number] for number in sorted(items)] for key, items in lists.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in its flat form."""
        packed = super().state_dict()
        return {**packed, "state": {number: self.flatten(state) for number, state in packed["state"].items()}}

    def load_state_dict(self, state_dict: Any, *options: Any, **named: Any) -> None:
        """Loads a state in its flat form; more arguments are those of the library's class."""
        state = {number: self.restore(state) for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state}, *options, **named)


class FullMatrices(FlatState):
    """Base of optimizers whose library expects gradients of matrices, and takes any keyword.

    A strategy's placeholder, which has no elements, is not stepped.
    """

    def step(self, closure: Any = None) -> Any:
        """Takes a step."""
        loss = run_closure(closure)
        empty = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.numel() == 0]
        for parameter, _ in empty:
            parameter.grad = None
        try:
            super().step()
        finally:
            for parameter, gradient in empty:
                parameter.grad = gradient
        return loss

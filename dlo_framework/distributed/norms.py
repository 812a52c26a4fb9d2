"""Gradient norms, also of gradients that are sharded over ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dlo_framework.distributed.stacks import is_dlos, own_line
from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import contract_of

#: Most elements whose squares are added up one after the other.
_ROW = 1 << 14


def total_norm(optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of an optimizer's gradients on this rank; for DTensors, over their mesh."""
    parts: list[Tensor] = []
    kinds = set()
    device = None
    for group in optimizer.param_groups:  # Few calls of Python functions: it runs in every step.
        for parameter in group["params"]:
            gradient, device = parameter.grad, device or parameter.device
            if gradient is not None:
                kinds.add((type(gradient), gradient.device.type, gradient.dtype))
                parts += [gradient] if gradient.numel() < 2 * _ROW else split_for_norm(gradient)
    if not parts:
        return torch.zeros((), device=device)
    if len(kinds) == 1 and (Tensor, "cpu") == kinds.pop()[:2]:
        # What torch's function (2.11 to 2.15) computes, except one by one on CPUs.
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts))).detach()
    norm = torch.nn.utils.get_total_norm(parts)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def split_for_norm(gradient: Tensor) -> list[Tensor]:
    """Returns tensors with the same joint 2-norm as a gradient, for which torch computes it precisely.

    torch (2.11 to 2.15) adds up a CPU tensor's squares in the order of its elements: for 16 million elements in single
    precision the norm is off by 6e-4. So the norms of rows are computed first, and then their norm, in the same time.
    """
    rows = gradient.numel() // _ROW
    if rows < 2 or isinstance(gradient, DTensor) or gradient.device.type != "cpu" or not gradient.is_contiguous():
        return [gradient]
    flat = gradient.view(-1)
    return [torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), dim=1), flat[rows * _ROW :]]


def shards_state(strategy: Any) -> bool:
    """Returns whether a strategy of dlo shards optimizer state, gradients or parameters."""
    return (contract_of(strategy).zero_stage or 0) > 0


def gradient_norm(strategy: Any, optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of an optimizer's full gradient under a strategy; called on all ranks.

    A strategy that shards gradients has a method for it; under any other, a rank has the full gradients.
    """
    of_strategy = contract_of(strategy).gradient_norm(optimizer)
    return total_norm(optimizer) if of_strategy is None else of_strategy


class JointGradients(TorchFunctionMode):
    """Raises where a user's hook computes a number from several gradients, of which each rank has other ones.

    Clipping by such a norm would scale each rank's gradients by another factor. Values of one gradient, and changes of
    gradients, are allowed.

    Args:
        divided: Axes of the mesh that divide gradients, such as ``pp=2``.
    """

    def __init__(self, divided: str) -> None:
        super().__init__()
        self._divided = divided
        self._sources: Any = WeakIdKeyDictionary()  # By tensor: ids of the parameters whose gradients it depends on.
        self._in_numbers: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows gradients through one function.

        Raises:
            DloError: The result is a number that depends on several gradients.
        """
        result = func(*args, **(kwargs or {}))
        if func == _GET_GRADIENT:
            if result is not None:
                self._sources[result] = {id(args[0])}
            return result
        if getattr(func, "__name__", "").startswith("_foreach"):
            for place, value in enumerate(result or ()):
                self._add(value, self._of([item[place] for item in args if isinstance(item, list | tuple)]))
            return result
        found = self._of(tree_leaves((args, kwargs)))
        if found:
            values = tree_leaves(result)
            for value in [args[0]] if func == torch.Tensor.__setitem__ else values:
                self._add(value, found)
            if func.__name__ in _NUMBERS and not is_dlos(self._caller()):
                self._in_numbers |= found
                self._check(self._in_numbers)
        return result

    @staticmethod
    def _caller() -> Any:
        """Returns the innermost frame outside of torch and this module."""
        frame: Any = sys._getframe(2)
        while str(frame.f_globals.get("__name__")).partition(".")[0] == "torch" or frame.f_globals is globals():
            frame = frame.f_back
        return frame

    def _of(self, values: list[Any]) -> set[int]:
        tensors = (value for value in values if isinstance(value, Tensor))
        return set().union(*(self._sources.get(tensor, ()) for tensor in tensors))

    def _add(self, value: Any, found: set[int]) -> None:
        if isinstance(value, Tensor) and found:
            if value.numel() == 1 and is_dlos(self._caller()):
                return  # dlo's own norms are over all ranks, and anyone may read them.
            self._sources[value] = self._sources.get(value, set()) | found
            if value.numel() == 1:
                self._check(self._sources[value])

    def _check(self, found: set[int]) -> None:
        if len(found) > 1 and not is_dlos(frame := self._caller()):
            raise DloError(
                f"a number from several gradients in a hook does not support {self._divided}: each rank has other"
                f" gradients ({own_line(frame)}); clip by --trainer.gradient_clip_val or self.clip_gradients(), and get"
                " the norm over all ranks from dlo_framework.distributed.step_primitives."
                "agreed_gradient_norm(trainer, optimizer)"
            )


#: Function that a mode gets where `.grad` is read.
_GET_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
#: Functions that return a tensor's values as Python numbers.
_NUMBERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__format__")

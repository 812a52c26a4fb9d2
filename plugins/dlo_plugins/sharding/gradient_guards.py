"""Modes for hooks of users: they raise where a hook uses or changes gradients in a way that ranks cannot follow."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dlo_framework.batches import tree_leaves
from dlo_framework.distributed.stacks import is_dlos, own_line
from dlo_framework.errors import DloError
from dlo_plugins.sharding.outside_use import LowestMode, attribute_of

#: Message about a gradient that was changed where the optimizer does not see it.
CHANGED = (
    "gradients of sharded parameters must be changed in on_after_backward, or later in place if the optimizer is"
    " elementwise, got that of {1} {0} after it; change it in on_after_backward"
)


class GradientWrites(LowestMode):
    """Raises where code writes to gradients.

    Args:
        gradients: Names by the ids of the gradients; entries may be added and removed inside the block.
    """

    def __init__(self, gradients: Mapping[int, str]) -> None:
        super().__init__()
        self._gradients = gradients
        self._aliases: dict[int, tuple[Tensor, Any]] = {}  # Results of ``data`` and ``detach``, and their sources.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, unless it writes to a gradient.

        Raises:
            DloError: It does.
        """
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
        for leaf in tree_leaves((args, kwargs)) if writes and self._gradients else ():
            source = self._aliases[id(leaf)][1] if id(leaf) in self._aliases else leaf
            if id(source) in self._gradients:
                raise DloError(CHANGED.format("written", self._gradients[id(source)]))
        result = func(*args, **(kwargs or {}))
        if name == "detach" or (name == "__get__" and attribute_of(func) == "data"):
            self._aliases[id(result)] = (result, args[0])
        return result


#: Special methods that write to a tensor.
_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"}


class JointGradients(LowestMode):
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
        """Returns the innermost frame outside of torch, this module and other modes."""
        frame: Any = sys._getframe(2)
        while (
            str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
            or frame.f_globals is globals()
            or frame.f_code.co_name == "__torch_function__"
        ):
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

"""Check for skip connections across pipeline stages, which would use a placeholder in place of a value.

A stage uses zeros as placeholders for the outputs of earlier stages. That is correct as long as nothing is computed
from them after the hidden state has been received. This check follows the placeholders through the operations of one
forward: by their storage, so that views count, and through all results computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.errors import DloError

#: Operations that use only a tensor's shape, dtype and device.
_SHAPE_ONLY = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")


class SkipCheck(TorchDispatchMode):
    """Raises where a placeholder is used after the hidden state has been received.

    Attributes:
        place: Name of the block that was called last, for messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        # The storages are kept alive, so that no other tensor gets the same address.
        self._sources: dict[int, tuple[Any, str]] = {}
        self._received = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled parts of a model run compiled: their inputs are checked before."""
        return True

    def mark(self, tensor: Tensor, source: str) -> None:
        """Marks a tensor as the placeholder of a module's output, or of a parameter."""
        storage = tensor.untyped_storage()
        self._sources[storage._cdata] = (storage, source)

    def mark_received(self) -> None:
        """Begins the check: the hidden state has been received, and placeholders must not be used from now on."""
        self._received = True

    def check_arguments(self, arguments: Any, name: str) -> None:
        """Checks a block's arguments.

        Raises:
            DloError: If one of them is a placeholder.
        """
        if not self._received:
            return
        for tensor in tensors_in(arguments):
            source = self._source(tensor)
            if source is not None:
                raise DloError(_message(f"'{name}' with an argument", source))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows the placeholders through one operation."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source = None
        if not name.endswith(_SHAPE_ONLY):
            source = next((s for t in tensors_in((args, kwargs)) if (s := self._source(t)) is not None), None)
        if source is not None and self._received:
            raise DloError(_message(f"'{name}' after '{self.place}' on a value", source))
        result = func(*args, **kwargs)
        if source is not None:
            for tensor in tensors_in(result):
                self.mark(tensor, source)
        return result

    def _source(self, tensor: Tensor) -> str | None:
        try:
            found = self._sources.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # A tensor without storage cannot be a placeholder.
            return None
        return None if found is None else found[1]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _message(what: str, source: str) -> str:
    return (
        f"a pipeline stage must use nothing of earlier stages but the hidden state, got {what} computed from"
        f" '{source}', which is in an earlier stage; keep both in one stage (split), or train with pp=1"
    )

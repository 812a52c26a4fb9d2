"""Finding what passes from one pipeline stage to a later one beside the hidden state.

A stage stands in zeros for what earlier stages compute. That is right as long as nothing is made of those zeros once
the hidden state has been received. This follows them through the operations of one forward: by the memory they lie in,
so that views count, and through whatever is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.errors import DloError

#: Operations that look at a tensor's shape, dtype and device alone.
_SHAPE_ONLY = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")


class LeakCheck(TorchDispatchMode):
    """Raises where a stood-in value is used after the hidden state has been received.

    Attributes:
        place: name of the block that was called last, for messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        # The storages are kept, so that no other tensor can come to lie at the same address.
        self._sources: dict[int, tuple[Any, str]] = {}
        self._received = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled parts of a model run compiled: what goes into them has been looked at."""
        return True

    def mark(self, tensor: Tensor, source: str) -> None:
        """Notes that a tensor stands in for what a module would return, or for a parameter."""
        storage = tensor.untyped_storage()
        self._sources[storage._cdata] = (storage, source)

    def begin(self) -> None:
        """Notes that the hidden state is here: from now on nothing else of earlier stages may be used."""
        self._received = True

    def look(self, arguments: Any, name: str) -> None:
        """Looks at a block's arguments.

        Raises:
            DloError: if one of them is a stood-in value.
        """
        if not self._received:
            return
        for tensor in tensors_in(arguments):
            source = self._source(tensor)
            if source is not None:
                raise DloError(_message(f"'{name}' is given", source))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows the stood-in values through one operation."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source = None
        if not name.endswith(_SHAPE_ONLY):
            source = next((s for t in tensors_in((args, kwargs)) if (s := self._source(t)) is not None), None)
        if source is not None and self._received:
            raise DloError(_message(f"after '{self.place}', '{name}' uses", source))
        result = func(*args, **kwargs)
        if source is not None:
            for tensor in tensors_in(result):
                self.mark(tensor, source)
        return result

    def _source(self, tensor: Tensor) -> str | None:
        try:
            found = self._sources.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # A tensor that has no storage of its own holds nothing that was stood in.
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
        f"only the hidden state passes from one pipeline stage to the next, and {what} something else that is computed"
        f" from '{source}', which is an earlier stage's; keep both in one stage (split), or train with pp=1"
    )

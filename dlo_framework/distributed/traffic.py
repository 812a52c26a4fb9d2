"""Counts the communication of a block of code, by collective and axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.distributed.collectives import PAIRWISE_LISTENERS

_COLLECTIVES = ("c10d", "_c10d_functional")
#: Common names of torch's operators; others keep their own.
_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_": "receive",
}
#: Operators whose first argument is a rank's input, a shard of the result.
_GROWS = ("all_gather_into_tensor",)
_MESSAGES = ("send", "recv_")
_SKIPPED = ("wait_tensor", "barrier", "monitored_barrier_")


@dataclass(frozen=True)
class Traffic:
    """Communication of a rank, of one kind along one axis.

    Attributes:
        kind: Kind of collective: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`, `send` or
            `receive`.
        axis: Axis of the mesh; several that form one group are joined by " x ".
        count: Number of collectives.
        elements: Number of elements of all collectives; a buffer of n elements counts n, as in the ZeRO paper: the
            output of an all-gather, the input of a reduce-scatter.
        bytes: Number of bytes of these elements.
    """

    kind: str
    axis: str
    count: int
    elements: int
    bytes: int


class TrafficCounter(TorchDispatchMode):
    """Counts collectives and messages inside the block; tensors may be real or fake, but not compiled.

    A collective that :class:`~dlo_framework.distributed.collectives.Communicator` exchanges as messages between pairs
    of ranks counts as that collective.

    Args:
        axis_of: Function that returns the axis of a process group, given its name.
    """

    supports_higher_order_operators = True

    def __init__(self, axis_of: Callable[[str], str]) -> None:
        super().__init__()
        self._axis_of = axis_of
        self._own_messages = 0  # of a collective that has been counted
        self._counts: Counter[tuple[str, str]] = Counter()
        self._elements: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    @property
    def found(self) -> tuple[Traffic, ...]:
        """Communication so far, by axis and kind."""
        rows = sorted(self._counts, key=lambda key: (key[1], key[0]))
        return tuple(Traffic(*key, self._counts[key], self._elements[key], self._bytes[key]) for key in rows)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts a collective, and runs the operator."""
        if isinstance(func, OpOverload) and func.namespace in _COLLECTIVES:
            name = func._schema.name.rpartition("::")[2]
            if self._own_messages and name in _MESSAGES:
                self._own_messages -= 1
            elif name not in _SKIPPED:
                self._count(name, args)
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns that functions which torch.compile has compiled run as such inside the block (torch 2.11 on)."""
        return True

    def __enter__(self) -> Self:
        """Begins to count."""
        PAIRWISE_LISTENERS.append(self._count_pairwise)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the count."""
        super().__exit__(*error)
        PAIRWISE_LISTENERS.remove(self._count_pairwise)

    def _count_pairwise(self, kind: str, group: str, buffer: Tensor, messages: int) -> None:
        self._add(kind, group, buffer.numel(), buffer.nbytes)
        self._own_messages = messages

    def _add(self, kind: str, group: str, elements: int, size: int) -> None:
        key = kind, self._axis_of(group)
        self._counts[key] += 1
        self._elements[key] += elements
        self._bytes[key] += size

    def _count(self, name: str, args: Any) -> None:
        group, ranks = _group_of(args)
        # For an all-gather torch's first argument is the result, which is the larger buffer.
        tensors = list(_tensors(args[1] if name == "_reduce_scatter_base_" else args[0]))
        times = ranks if name in _GROWS else 1
        self._add(
            _KINDS.get(name, name), group, times * sum(tensor.numel() for tensor in tensors),
            times * sum(tensor.nbytes for tensor in tensors),
        )  # fmt: skip


def _group_of(args: Iterable[Any]) -> tuple[str, int]:
    """Returns the name and size of the process group among an operator's arguments.

    torch (2.11 to 2.15) passes the group itself, boxed, to the older operators, and its name, the last string, to the
    functional ones.
    """
    names: list[Any] = []
    for arg in args:
        if isinstance(arg, str):
            names.append(arg)
        elif type(arg).__name__ == "ScriptObject" and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
            return group.group_name, group.size()
    return names[-1], _resolve_process_group(names[-1]).size()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

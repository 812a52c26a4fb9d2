"""What this rank holds of tensors: its memory of one, and the bytes of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local(tensor: Tensor) -> Tensor:
    """Returns the memory that this rank holds of a tensor: of a DTensor its part, of others all."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors on this rank, memory that several share counted once."""
    held: dict[int, int] = {}
    for tensor in tensors:
        # Asked of the tensor itself: ZeRO 3 takes a detach amid a step by hand for a use of its values.
        storage = (local(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.nbytes():
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def optimizer_states(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Returns what an optimizer keeps of each parameter on this rank.

    It is asked by ``state_dict``, which is where one that wraps another (Lookahead) has it.
    """
    return [state for state in optimizer.state_dict()["state"].values() if isinstance(state, Mapping)]


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of optimizers' state on this rank."""
    return memory_of(
        value
        for optimizer in optimizers
        for state in optimizer_states(optimizer)
        for value in state.values()
        if isinstance(value, Tensor)
    )

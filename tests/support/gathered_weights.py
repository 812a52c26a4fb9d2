"""A weight that is there during a call of its module alone, as under FSDP and ZeRO 3."""

from __future__ import annotations

from torch import nn


def free_until_called(projection: nn.Linear, calls: list[int]) -> None:
    """Frees a weight that a forward then gathers, as FSDP and ZeRO's third stage do."""
    weight, storage = projection.weight.detach().clone(), projection.weight.untyped_storage()
    size = storage.nbytes()

    def gather(*_: object) -> None:
        calls.append(1)
        storage.resize_(size)
        projection.weight.data.copy_(weight)

    storage.resize_(0)
    projection.register_forward_pre_hook(gather)

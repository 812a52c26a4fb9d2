"""What a tensor that travels is like, and what a micro-batch is like: known before it comes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlo_plugins.pipeline.precision import autocast_dtype


@dataclass(frozen=True)
class Layout:
    """Of a hidden state, and of its gradient.

    Attributes:
        size: its shape.
        stride: of its dims in memory; it leaves no gaps.
        dtype: of its elements.
        requires_grad: whether its gradient is wanted.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Returns a tensor's layout; channels-last ones keep theirs, those with gaps get a contiguous one."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(size, stride):
            stride = tuple(torch.empty(size, device="meta").stride())
        return cls(size, stride, tensor.dtype, tensor.requires_grad)

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's elements in 1-D, as they lie in memory; copied if it is laid out otherwise."""
        tensor = tensor.detach()
        if tuple(tensor.stride()) != self.stride or tensor.dtype != self.dtype:
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def room(self, device: torch.device) -> Tensor:
        """Returns a 1-D tensor to receive one in."""
        return torch.empty(torch.Size(self.size).numel(), dtype=self.dtype, device=device)

    def shaped(self, flat: Tensor) -> Tensor:
        """Returns what has been received, in its own shape."""
        return flat.as_strided(self.size, self.stride)


def _is_dense(size: Iterable[int], stride: Iterable[int]) -> bool:
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def signatures(micro_batches: Iterable[Any], model: nn.Module, device: torch.device) -> list[Hashable]:
    """Returns what hidden states' layouts depend on: equal for micro-batches of one shape, whatever their values.

    Args:
        micro_batches: of a step.
        model: whose mode counts too, and which of its parameters are frozen.
        device: whose autocast counts.
    """
    frozen = tuple(not parameter.requires_grad for parameter in model.parameters())
    state = (model.training, torch.is_grad_enabled(), hash(frozen), autocast_dtype(device.type))
    return [(_described(micro_batch), state) for micro_batch in micro_batches]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    return value if isinstance(value, str | int | bool) else type(value).__name__

"""Layouts of hidden states, which a receiver knows in advance, and signatures of micro-batches, which decide them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlo_plugins.pipeline.autocast import autocast_dtype


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a hidden state and of its gradient.

    Attributes:
        size: Shape of the tensor.
        stride: Strides of its dims in elements; they leave no gaps in memory.
        dtype: Dtype of its elements.
        requires_grad: Whether to send its gradient back.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorLayout:
        """Returns a tensor's layout; channels-last tensors keep their strides, those with gaps get contiguous ones."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(size, stride):
            stride = tuple(torch.empty(size, device="meta").stride())
        return cls(size, stride, tensor.dtype, tensor.requires_grad)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's elements in 1-D, in the order of this layout; copied if its own layout differs."""
        tensor = tensor.detach()
        if tuple(tensor.stride()) != self.stride or tensor.dtype != self.dtype:
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def empty(self, device: torch.device) -> Tensor:
        """Returns an uninitialised 1-D tensor to receive such a tensor."""
        return torch.empty(torch.Size(self.size).numel(), dtype=self.dtype, device=device)

    def unflatten(self, flat: Tensor) -> Tensor:
        """Returns a received 1-D tensor as a view in its own shape."""
        return flat.as_strided(self.size, self.stride)


def _is_dense(size: Iterable[int], stride: Iterable[int]) -> bool:
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def batch_signatures(micro_batches: Iterable[Any], model: nn.Module, device: torch.device) -> list[Hashable]:
    """Returns a key for each micro-batch on which the layouts of its hidden states depend.

    It is equal for micro-batches of the same shapes and dtypes, whatever their values.

    Args:
        micro_batches: Micro-batches of a step.
        model: Model; its training mode and its frozen parameters are part of the key.
        device: Device whose autocast state is part of the key.
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

"""Steps bf16 weights in single precision, and rounds the result stochastically: no master weights.

Revisiting BFloat16 Training. Zamirai et al., 2020, arXiv 2010.06192. Departures: every optimizer steps in single
precision, with its state in single precision, and each element's random bits are a hash of the run's seed, the step,
the parameter's name and the element's index in the full tensor. So the bits do not depend on the number of ranks, nor
on how they shard the parameter, and a resumed run draws those of the uninterrupted one. torchao (0.18) draws from the
device's generator, in optimizers of its own.

Rounding to nearest loses each update below half of the last of 8 bits, 0.2 to 0.4% of the weight. Stochastic rounding
keeps the update in expectation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.shards import Box, Shard, held_boxes

#: Bits of a float32 below those of a bf16.
_BELOW = 16
#: Multipliers of the integer hash `lowbias32` (C. Wellons), below 2^31.
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Returns values in bf16, each rounded to one of its two neighbours, so that the mean is the value.

    Args:
        values: Values in single precision.
        bits: Uniform random 32-bit integers in the same shape, of which 16 bits count.
    """
    below = (1 << _BELOW) - 1
    rounded = (values.view(torch.int32) + (bits & below)) & ~below
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).bfloat16()


def hash_bits(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns the random 32-bit integers of elements, in int32; the same for the same index and key.

    Args:
        index: Index of each element, in int32.
        key: Two 32-bit integers.
    """
    return _mix(_mix(index ^ _signed(key[0])) + _signed(key[1]))


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        x = (x ^ _shift_right(x, shift)) * factor  # Integers wrap at 32 bits.
    return x ^ _shift_right(x, 15)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def element_indices(shard: Shard) -> None:
    """Writes each element's index in the full tensor into a shard of int32, modulo 2^32."""
    shape = tuple(shard.shape)
    for box, view in held_boxes(shard):
        view.copy_(_box_indices(box, shape, view.device))


def _box_indices(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    indices, stride = torch.zeros((), dtype=torch.int32, device=device), 1
    for dim in reversed(range(len(shape))):
        first, count = box.offsets[dim], box.sizes[dim]
        along = (torch.arange(first, first + count, device=device) * stride).to(torch.int32)
        indices = indices + along.view(-1, *(1 for _ in shape[dim + 1 :]))
        stride *= shape[dim]
    return indices


class StochasticSteps:
    """Optimizer steps of bf16 tensors in single precision, with stochastic rounding.

    The optimizer's tensors stay bf16. During a step they have values and gradients in single precision, so that the
    optimizer makes its state in single precision too.

    Args:
        count_steps: Function that returns the number of optimizer steps before this one.
    """

    def __init__(self, count_steps: Callable[[], int]) -> None:
        self._count_steps = count_steps
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # Lightning's, of `seed_everything`.
        self._names: dict[int, str] = {}
        self._places: dict[int, Callable[[str, Tensor], Shard]] = {}
        self._stepped: dict[int, list[Tensor]] = {}
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}  # value and gradient in bf16 of each widened tensor

    def attach(
        self, optimizer: Optimizer, tensors: Mapping[str, Tensor], place: Callable[[str, Tensor], Shard]
    ) -> None:
        """Makes an optimizer step its bf16 tensors so; hooks that are registered later see the rounded values.

        Args:
            optimizer: Optimizer, which has taken no step.
            tensors: Tensors that it steps on this rank, by parameter name.
            place: Function that returns a tensor in the shape of a stepped one as a shard of the parameter.
        """
        own = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
        for name, tensor in own.items():
            tensor.grad_dtype = None
            self._names[id(tensor)], self._places[id(tensor)] = name, place
            state = optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                    state[key] = value.float()
        self._stepped[id(optimizer)] = list(own.values())
        held = self._stepped[id(optimizer)]

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
            if not closures:
                self.widen(held)
                return None

            def closure() -> Any:  # Lightning's runs forward and backward.
                loss = closures[0]()
                self.widen(held)
                return loss

            swapped = [closure if value is closures[0] else value for value in args]
            return tuple(swapped), {k: closure if v is closures[0] else v for k, v in kwargs.items()}

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self.narrow(held))

    @torch.no_grad()
    def widen(self, tensors: Iterable[Tensor]) -> None:
        """Gives those of the tensors that have gradients their values and gradients in single precision."""
        for tensor in tensors:
            if id(tensor) in self._homes:  # A step has raised.
                home, _ = self._homes.pop(id(tensor))
                gradient, tensor.grad = tensor.grad, None
                tensor.data, tensor.grad = home, gradient
            if id(tensor) not in self._names or tensor.grad is None:
                continue
            home, gradient = tensor.data, tensor.grad
            tensor.grad = None
            tensor.data = home.float()
            tensor.grad = gradient.float()
            self._homes[id(tensor)] = home, gradient

    @torch.no_grad()
    def narrow(self, tensors: Iterable[Tensor]) -> None:
        """Rounds the stepped values of tensors to bf16, into their own memory."""
        steps = self._count_steps()
        for tensor in tensors:
            if id(tensor) not in self._homes:
                continue
            home, before = self._homes.pop(id(tensor))
            stepped, gradient, tensor.grad = tensor.data, tensor.grad, None
            name = self._names[id(tensor)]
            index = torch.empty_like(stepped, dtype=torch.int32)
            element_indices(self._places[id(tensor)](name, index))
            home.copy_(round_stochastically(stepped, hash_bits(index, self._key(steps, name))))
            tensor.data = home
            tensor.grad = None if gradient is None else before

    def around(self, step: Callable[[list[Tensor]], None]) -> Callable[[list[Tensor]], None]:
        """Returns a function that steps some tensors, with rounding."""

        def rounded(tensors: list[Tensor]) -> None:
            self.widen(tensors)
            step(tensors)
            self.narrow(tensors)

        return rounded

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Makes the tensors count as single precision, in which torch then keeps loaded optimizer state."""
        tensors = [tensor for held in self._stepped.values() for tensor in held]
        before = [(tensor.grad, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
            tensor.data = torch.zeros((), device=tensor.device).expand(tensor.shape)  # Takes no memory.
        try:
            yield
        finally:
            for tensor, (gradient, data) in zip(tensors, before, strict=True):
                tensor.data, tensor.grad = data, gradient

    def _key(self, steps: int, name: str) -> tuple[int, int]:
        digest = hashlib.blake2b(f"{self._seed}/{steps}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

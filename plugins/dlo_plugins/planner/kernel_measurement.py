"""Measures the bandwidths of kinds of kernels on a device, for kernels of several sizes, from cache to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from dlo_plugins.planner.kernel_kind import Kind

_aten = torch.ops.aten
_WIDTH, _HEADS, _ROWS = 1024, 16, 8
#: Bytes that a kernel moves. A GPU's smaller kernels take as long as their launch.
_SIZES = {"cpu": (1 << 18, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 25, 1 << 27, 1 << 29)}
#: Bytes that the calls of one timing move at least, but for their number.
_ENOUGH, _MOST_CALLS = 1 << 24, 64


class KernelCall(NamedTuple):
    """Call of a kernel.

    Attributes:
        run: Function that runs the kernel.
        moved: Bytes that it reads and writes.
    """

    run: Callable[[], Any]
    moved: float


def kernel_calls(kind: Kind, size: int, device: torch.device, dtype: torch.dtype) -> list[KernelCall]:
    """Returns calls of a kind, each of which moves about as many bytes; their outputs are new tensors, as in a run.

    Args:
        kind: Kind of the kernels.
        size: Bytes.
        device: Device of the kernels.
        dtype: Dtype of their tensors.
    """
    rows = max(_ROWS, size // (2 * _WIDTH * dtype.itemsize) // _ROWS * _ROWS)
    x, y = (torch.full((rows, _WIDTH), 0.5, device=device, dtype=dtype) for _ in range(2))
    n, width = float(x.nbytes), [_WIDTH]
    weight, bias = torch.ones(_WIDTH, device=device, dtype=dtype), torch.zeros(_WIDTH, device=device, dtype=dtype)

    def call(run: Callable[[], Any], moved: float) -> list[KernelCall]:
        return [KernelCall(run, moved)]

    if kind == "copy":
        return call(x.clone, 2 * n)
    if kind == "pointwise":
        return call(lambda: x + y, 3 * n)
    if kind == "activation":
        return [KernelCall(lambda: nn.functional.gelu(x), 2 * n), KernelCall(lambda: nn.functional.silu(x), 2 * n)]
    if kind == "strided":
        heads, halves = x.view(-1, _ROWS, _HEADS, _WIDTH // _HEADS).transpose(1, 2), x.chunk(2, dim=-1)
        return [KernelCall(heads.contiguous, 2 * n), KernelCall(lambda: torch.cat(halves[::-1], dim=-1), 2 * n)]
    if kind == "cast":
        other = torch.bfloat16 if dtype == torch.float32 else torch.float32
        moved = n + x.numel() * other.itemsize
        back = x.to(other)
        return [KernelCall(lambda: x.to(other), moved), KernelCall(lambda: back.to(dtype), moved)]
    if kind == "norm":
        return call(lambda: _aten.native_layer_norm(x, width, weight, bias, 1e-5), 2 * n)
    if kind == "norm_backward":
        _, mean, deviation = _aten.native_layer_norm(x, width, weight, bias, 1e-5)
        every = [True, True, True]
        return call(lambda: _aten.native_layer_norm_backward(y, x, width, mean, deviation, weight, bias, every), 3 * n)
    if kind == "softmax":
        return call(lambda: torch.softmax(x, -1), 2 * n)
    if kind == "reduction":
        return [KernelCall(lambda: x.sum(0), n), KernelCall(lambda: x.mean(-1), n)]
    assert kind == "gather", "an optimizer is measured by itself"
    order = torch.randperm(rows, device=device)
    return call(lambda: x.index_select(0, order), 2 * n)


def measure_kinds(
    kinds: Iterable[Kind], device: torch.device, dtype: torch.dtype, seconds: Callable[[Callable[[], object]], float]
) -> dict[tuple[Kind, float], float]:
    """Returns the bytes a second of kernels, by kind and bytes.

    Args:
        kinds: Kinds.
        device: Device of the kernels.
        dtype: Dtype of their tensors.
        seconds: Function that returns the time of a function.
    """
    found: dict[tuple[Kind, float], float] = {}
    with torch.no_grad():
        for kind in kinds:
            # What a call takes beside its work; on a GPU that overlaps the work of the calls before.
            overhead = _seconds(kernel_calls(kind, 0, device, dtype), seconds)[0] if device.type == "cpu" else 0.0
            for size in _SIZES[device.type]:
                taken, moved, count = _seconds(kernel_calls(kind, size, device, dtype), seconds)
                if taken > 2 * overhead:  # Otherwise the difference is noise.
                    found[kind, moved / count] = moved / (taken - overhead)
    return found


def _seconds(calls: list[KernelCall], seconds: Callable[[Callable[[], object]], float]) -> tuple[float, float, int]:
    """Returns the seconds and the bytes of one call of each kernel, and the number of kernels."""
    moved = sum(call.moved for call in calls)
    repeats = int(min(_MOST_CALLS, max(1, _ENOUGH // moved)))

    def run() -> None:
        for _ in range(repeats):
            for call in calls:
                call.run()

    return seconds(run) / repeats, moved, len(calls)

"""Memory on this rank: of tensors, parameters and optimizer state, and what device and process use, now and at most."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's local tensor: the shard of a DTensor, any other tensor itself, detached."""
    if isinstance(tensor, DTensor):
        if torch.is_grad_enabled():
            with torch.no_grad():  # Where autograd records, to_local is an operation that it records.
                local = tensor.to_local()
        else:
            local = tensor.to_local()
        return local.detach() if local.requires_grad else local  # A step calls this for each gradient.
    return tensor.detach()


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors on this rank; memory that several tensors share is counted once."""
    bytes_at: dict[int, int] = {}
    for tensor in tensors:
        for held in stored_tensors(tensor):
            storage = held.untyped_storage()
            if storage.nbytes():
                bytes_at[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_at.values())


def stored_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors with memory on this rank in a tensor of several others, such as torchao's codes and scales.

    Of an ordinary tensor it is itself, without detach: during a step ZeRO 3 takes a detach for a use of the values.
    """
    if isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    inner = inner_tensors(tensor)
    if not inner:
        yield tensor
    for part in inner.values():
        yield from stored_tensors(part)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors that a tensor of several others is made of, by attribute; of an ordinary one none."""
    flatten = None if type(tensor) in (Tensor, torch.nn.Parameter) else getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}


def state_bytes(
    parameters: Iterable[Tensor], optimizers: Iterable[Optimizer], buffers: Iterable[Tensor] = ()
) -> dict[str, float]:
    """Returns the bytes on this rank of ``parameters``, their ``gradients``, and ``optimizer`` state.

    Args:
        parameters: Tensors of the parameters, and copies of them.
        optimizers: Optimizers that have state.
        buffers: Gradients beside those of the tensors.
    """
    parameters = list(parameters)
    return {
        "parameters": memory_of(parameters),
        "gradients": memory_of([*(p.grad for p in parameters if p.grad is not None), *buffers]),
        "optimizer": optimizer_bytes(optimizers),
    }


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of optimizers' state on this rank."""
    return memory_of(value for optimizer in optimizers for _, state in _states(optimizer) for value in _tensors(state))


def _states(optimizer: Optimizer) -> list[tuple[Any, Mapping[Any, Any]]]:
    """Returns an optimizer's states on this rank and their parameters, with those of optimizers that it wraps.

    It does not call ``state_dict``, which may export another state than that in memory, and may raise (that of
    ZeroRedundancyOptimizer before its state is consolidated, and where DeepSpeed has replaced the parameters).
    """
    by_id: dict[int, tuple[Any, Mapping[Any, Any]]] = {}
    for one in _with_wrapped(optimizer):  # Lookahead, which may share the states.
        states = one.state.items() if isinstance(one.state, Mapping) else ()
        by_id |= {id(state): (key, state) for key, state in states if isinstance(state, Mapping)}
    return list(by_id.values())


def states_per_parameter(optimizers: Iterable[Optimizer]) -> float:
    """Returns the bytes of state for each element of the parameters that have state; scalars do not count."""
    pairs = [pair for optimizer in optimizers for pair in _states(optimizer)]
    held = memory_of(value for _, state in pairs for value in _tensors(state) if value.ndim > 0)
    stepped = {id(key): local_tensor(key).numel() for key, _ in pairs if isinstance(key, Tensor)}
    return held / max(1, sum(stepped.values()))


def _with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and, recursively, the optimizers among its attributes, each once."""
    optimizers, waiting = {id(optimizer): optimizer}, [optimizer]
    while waiting:
        inner = {id(value): value for value in vars(waiting.pop()).values() if isinstance(value, Optimizer)}
        waiting += [value for key, value in inner.items() if key not in optimizers]
        optimizers |= inner
    return list(optimizers.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


# --- memory of the device and the process --------------------------------------------------------------------


GB = 1e9


def memory_now(device: torch.device) -> dict[str, float]:
    """Returns GB in use and peak GB, by tag."""
    if device.type == "cuda":
        return {
            "memory/allocated_gb": torch.cuda.memory_allocated(device) / GB,
            "memory/reserved_gb": torch.cuda.memory_reserved(device) / GB,
            "memory/peak_gb": memory_peak(device) / GB,
        }
    return {"memory/process_gb": _resident() / GB, "memory/peak_gb": memory_peak(device) / GB}


def memory_peak(device: torch.device) -> int:
    """Returns the peak memory so far, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_peak()


def process_peak() -> int:
    """Returns the peak memory of this process so far, in bytes.

    Linux's ``ru_maxrss`` begins with the peak of the process that has started this one, so it is the last choice.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Linux counts in kB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_memory_peak(device: torch.device) -> None:
    """Resets the peak memory, where the device supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _resident() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return memory_peak(torch.device("cpu"))
    return int(statm.read_text().split()[1]) * resource.getpagesize()

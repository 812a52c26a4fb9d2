"""What the search for the largest micro-batch consists of: the order of sizes, batches of any size, and the errors
that mean that memory has run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from dlo_framework.errors import DloError


def largest(fits: Callable[[int], bool], start: int, limit: int, *, powers: bool = False) -> int:
    """Returns the largest size for which ``fits`` holds, 0 if there is none: by doubling, then by bisection.

    Args:
        fits: whether a size fits; where one does, all smaller ones are taken to.
        start: the size to try first.
        limit: the largest that may be tried.
        powers: try powers of two only.
    """
    size, limit = (_power(start), _power(limit)) if powers else (start, limit)
    size = min(size, limit)
    fit, unfit = 0, limit + 1
    while unfit - fit > 1:
        if fits(size):
            fit = size
        else:
            unfit = size
        if unfit > limit:
            size = min(2 * fit, limit)
        elif powers:
            if fit:
                break
            size = unfit // 2
        else:
            size = (fit + unfit) // 2
    return fit


def _power(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def keep_global_batch(batch_size: int, per_rank: int, world_size: int) -> tuple[int, int]:
    """Returns how to make a step's batch of the largest equal micro-batches that fit.

    Args:
        batch_size: samples of an optimizer step, over all ranks.
        per_rank: samples that fit on a rank.
        world_size: data-parallel ranks, which divide ``batch_size``.

    Returns:
        Samples of a micro-batch over all ranks, and how many of them make the step.
    """
    share = batch_size // world_size
    micro = next(size for size in range(min(per_rank, share), 0, -1) if share % size == 0)
    return micro * world_size, share // micro


#: What errors say where memory has run out, beside those of types of their own.
_MESSAGES = (
    "out of memory",  # CUDA, HIP, MPS, XPU
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's answer where it gets no workspace
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # the same on Windows
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that memory has run out, of an accelerator or of this process."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class Budget:
    """A limit on what a forward pass keeps for the backward pass, in place of a memory that has none.

    As a context, it adds up the tensors that autograd saves, each memory once and parameters left out.

    Args:
        limit: in bytes; None for no limit.
        module: whose parameters they are.
    """

    def __init__(self, limit: int | None, module: torch.nn.Module) -> None:
        self.limit = limit
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._seen: set[int] = set()
        self._bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, _same)

    def __enter__(self) -> None:
        self._seen, self._bytes = set(self._parameters), 0
        if self.limit is not None:
            self._hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.limit is not None:
            self._hooks.__exit__(kind, error, trace)

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
            if self.limit is not None and self._bytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"out of memory: a step keeps more than memory_limit_bytes, {self.limit}, for its backward pass"
                )
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Pool:
    """Batches of any size, made of the loader's.

    Args:
        next_batch: gives the loader's next.
        first: what it gave first.
    """

    def __init__(self, next_batch: Callable[[], Any], first: Any) -> None:
        self._next_batch, self._held = next_batch, first

    def batch(self, size: int) -> Any:
        """Returns a batch of ``size`` samples; more are fetched where fewer are held."""
        if samples(self._held) < size:
            parts = [self._held]
            while sum(map(samples, parts)) < size:
                parts.append(self._next_batch())
            self._held = joined(parts)
        return first_samples(self._held, size)


def samples(batch: Any) -> int:
    """Returns the number of samples of a batch: the length of the first tensor in it.

    Raises:
        DloError: if there is none.
    """
    found = _length(batch)
    if found is None:
        raise DloError(
            "MicroBatchFinder: a batch is a tensor or a nest of tuples, lists and dicts with one, but the loader gave"
            f" a {type(batch).__name__}"
        )
    return found


def _length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := _length(part)) is not None), None)


def joined(batches: Sequence[Any]) -> Any:
    """Returns one batch with the samples of several, all of the same structure; what has no samples is the first's.

    Raises:
        DloError: if their samples differ in shape.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        if not first.ndim:
            return first
        shapes = {batch.shape[1:] for batch in batches}
        if len(shapes) > 1:
            raise DloError(
                f"MicroBatchFinder joins batches, but their samples differ in shape: {', '.join(map(str, shapes))};"
                " pad them to one shape, or remove it"
            )
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return type(first)({key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(parts) for parts in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if _length(first) is None:  # Of strings, paths or numbers: an item a sample.
            return type(first)(item for batch in batches for item in batch)
        return type(first)(joined(parts) for parts in zip(*batches, strict=True))
    return first


def first_samples(batch: Any, size: int) -> Any:
    """Returns the first ``size`` samples of a batch, in memory of their own."""
    if isinstance(batch, torch.Tensor):
        return batch[:size].clone() if batch.ndim else batch
    if isinstance(batch, dict):
        return type(batch)({key: first_samples(value, size) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(first_samples(part, size) for part in batch))
    if isinstance(batch, list | tuple):
        if _length(batch) is None:
            return batch[:size]
        return type(batch)(first_samples(part, size) for part in batch)
    return batch

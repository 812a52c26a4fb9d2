"""Search for the largest micro-batch: the order of sizes, batches of any size, and the errors for running out of
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from dlo_framework.batches import find_batch_size, map_leaves, slice_batch
from dlo_framework.distributed.local_memory import stored_tensors
from dlo_framework.errors import DloError


def find_largest(fits: Callable[[int], bool], start: int, limit: int, *, powers: bool = False) -> int:
    """Returns the largest size that fits, 0 if there is none: by doubling, then by bisection.

    Args:
        fits: Function that returns whether a size fits; if it does, all smaller sizes are assumed to fit.
        start: First size to try.
        limit: Largest size to try.
        powers: Whether to try powers of two only.
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
    """Returns the split of a step's batch into the largest equal micro-batches that fit.

    Args:
        batch_size: Samples of an optimizer step, over all ranks.
        per_rank: Samples that fit on a rank.
        world_size: Number of data-parallel ranks; it divides ``batch_size``.

    Returns:
        Samples of a micro-batch over all ranks, and the number of micro-batches in the step.
    """
    share = batch_size // world_size
    micro = next(size for size in range(min(per_rank, share), 0, -1) if share % size == 0)
    return micro * world_size, share // micro


#: Messages of out-of-memory errors that have no type of their own.
_MESSAGES = (
    "out of memory",  # CUDA, HIP, MPS, XPU
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's answer where it gets no workspace
    "can't allocate memory",  # torch's CPU allocator
    "std::bad_alloc",  # C++'s, in libraries that torch calls
    "not enough memory",  # the same on Windows
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or one that has caused it, means that an accelerator or this process is out of memory.

    A compiler, for one, raises its own error from that of its code.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(cause, RuntimeError) and any(message in str(cause) for message in _MESSAGES):
            return True
        cause = cause.__cause__
    return False


class ActivationBudget:
    """Limit on the bytes that a forward pass saves for the backward pass, for a device that reports no memory limit.

    As a context, it adds up the tensors that autograd saves: each storage once, parameters excluded.

    Args:
        limit: Limit in bytes; None for no limit.
        module: Module whose parameters are excluded.

    Attributes:
        raises: Whether a forward pass that exceeds the limit ends in an out-of-memory error.
        largest: Most bytes that a pass has saved.
    """

    def __init__(self, limit: int | None, module: torch.nn.Module) -> None:
        self.limit, self.raises, self.largest = limit, True, 0
        stored = (held for parameter in module.parameters() for held in stored_tensors(parameter))
        self._parameters = {held.untyped_storage().data_ptr() for held in stored}
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
        for held in stored_tensors(tensor):
            storage = held.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._bytes += storage.nbytes()
        self.largest = max(self.largest, self._bytes)
        if self.raises and self.limit is not None and self._bytes > self.limit:
            raise torch.OutOfMemoryError(
                f"out of memory: a step saves more than memory_limit_bytes, {self.limit}, for its backward pass"
            )
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class BatchPool:
    """Batches of any size, made from the loader's batches.

    Args:
        next_batch: Function that returns the loader's next batch.
        first: First batch of the loader.
    """

    def __init__(self, next_batch: Callable[[], Any], first: Any) -> None:
        self._next_batch, self._cached = next_batch, first

    def batch(self, size: int) -> Any:
        """Returns a batch of ``size`` samples; fetches more of the loader's batches if it needs them."""
        if count_samples(self._cached) < size:
            parts = [self._cached]
            while sum(map(count_samples, parts)) < size:
                parts.append(self._next_batch())
            self._cached = concat_batches(parts)
        # A copy: a transform may write to the batch in place.
        return map_leaves(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, slice_batch(self._cached, 0, size)
        )


def count_samples(batch: Any) -> int:
    """Returns the number of samples of a batch: the length of the first tensor in it.

    Raises:
        DloError: If the batch has no tensor.
    """
    found = find_batch_size(batch)
    if found is None:
        raise DloError(
            "MicroBatchFinder: a batch must be a tensor, or tuples, lists and dicts with a tensor in them, got a"
            f" {type(batch).__name__} from the loader; return tensors from its collate_fn"
        )
    return found


def concat_batches(batches: Sequence[Any]) -> Any:
    """Returns one batch with the samples of several batches of one structure; other entries are the first batch's.

    Raises:
        DloError: If their samples differ in shape.
    """

    def concat(first: Any, *others: Any) -> Any:
        if isinstance(first, list | tuple):  # Strings, paths or numbers: one item for each sample.
            return type(first)(item for part in (first, *others) for item in part)
        if not isinstance(first, torch.Tensor) or not first.ndim:
            return first
        shapes = {part.shape[1:] for part in (first, *others)}
        if len(shapes) > 1:
            raise DloError(
                f"MicroBatchFinder: samples of all batches must have one shape, got {', '.join(map(str, shapes))};"
                " pad them to one shape, or remove the callback"
            )
        return torch.cat([first, *others])

    return map_leaves(concat, *batches)

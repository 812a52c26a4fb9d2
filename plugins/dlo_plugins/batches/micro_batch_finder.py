"""Search for the largest micro-batch that fits in memory, by trials in this process.

No rank may wait for another that is out of memory. Under ddp and in one process the trials run without the all-reduce
of gradients: after each part of a trial, the ranks exchange its outcome over a process group of their own, and then all
of them continue in the same way. Where forward and backward communicate, no rank runs out of memory: a size is tried
only if the memory predicted for it, from those tried before, fits on all ranks.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.atomic_file import write_atomic
from dlo_framework.batches import find_batch_size, map_leaves, slice_batch
from dlo_framework.data import Position, ResumableLoader, data_parallel_coordinates
from dlo_framework.errors import DloError, check_number
from dlo_framework.local_memory import memory_peak, reset_memory_peak, stored_tensors
from dlo_framework.rehearsal import BeforeTraining, Rehearsal, run_folder, training_loaders, trial_steps
from dlo_framework.strategy_contract import contract_of

FILE = "batch_size.json"
#: Number of epochs of a run without a last epoch.
FAR = 1_000_000


class MicroBatchFinder(BeforeTraining):
    """Finds the largest micro-batch that fits in memory before training, and restores all state.

    It doubles the size until memory runs out, then bisects. Each trial trains on full batches made from the loader's:
    forward, backward and the optimizer step, so that the optimizer state takes its memory too. Under
    ProgressiveResizing, the images have their last size. All ranks find the same size. Afterwards all state is as
    before, including random numbers and the position in the data.

    If a callback has a method ``set_max_micro_batch`` (DynamicBatchSize), the size is set there. Otherwise the batch
    size does not change, being part of the recipe: the callback prints the size, with the ``batch_size`` and
    ``accumulate_grad_batches`` that make the same step from the largest micro-batches that fit, and writes them to
    ``batch_size.json`` in the run's folder. A resumed run does not search again.

    Where forward and backward communicate (ZeRO, FSDP, a mesh, DeepSpeed, synchronised batch norm), a size is tried
    only if the memory predicted for it fits on all ranks: memory is taken as linear in the size. The first size is the
    loader's own.

    Args:
        max_size: Largest size to try, in samples per rank; None for the size of the dataset, divided by the ranks.
        steps_per_trial: Number of optimizer steps in a trial. From the second step on, the optimizer state is in
            memory.
        power_of_two: Whether to try powers of two only, which takes fewer trials.
        margin: Fraction of the found size to leave free, as memory fragments during training. It is not subtracted if
            memory did not run out, or from a power of two.
        memory_limit_bytes: Bytes that the forward pass may save for the backward pass; None for the device's memory. A
            CPU needs it, as the system ends a process that is out of memory.
        timeout: Seconds that a rank waits for the others after a part of a trial.

    Raises:
        DloError: If a value is out of range, optimization is manual, ``memory_limit_bytes`` is missing on a CPU, or not
            a single sample fits.
    """

    example = "{memory_limit_bytes: 4000000000, max_size: 4, steps_per_trial: 1}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True

    def __init__(
        self,
        max_size: int | None = None,
        steps_per_trial: int = 3,
        power_of_two: bool = False,
        margin: float = 0.05,
        memory_limit_bytes: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (
            ("max_size", max_size),
            ("steps_per_trial", steps_per_trial),
            ("memory_limit_bytes", memory_limit_bytes),
        ):
            check_number(f"MicroBatchFinder: {name}", value, "at least 1", "leave it out")
        check_number("MicroBatchFinder: margin", margin, "at least 0 and below 1", "0.05 is usual")
        self.max_size, self.steps_per_trial, self.power_of_two = max_size, steps_per_trial, power_of_two
        self.margin, self.memory_limit_bytes, self.timeout = margin, memory_limit_bytes, timeout
        self.per_rank: int | None = None  # largest micro-batch in samples, once found
        self.trials: list[tuple[int, bool]] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the found size, so that a resumed run has it."""
        return {"per_rank": self.per_rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the size that the resumed run has found."""
        self.per_rank = state_dict["per_rank"]

    def check_run(self, trainer: Any, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that memory has a limit, before ranks start.

        Raises:
            DloError: It has none.
        """
        kind = trainer.strategy.root_device.type
        communicating = _communicates(trainer)
        if self.memory_limit_bytes is not None or kind == "cuda" or (kind != "cpu" and communicating is None):
            return
        raise DloError(
            "MicroBatchFinder: memory_limit_bytes must be set on a CPU, where the system ends a process that is out of"
            " memory, got none; set memory_limit_bytes to the bytes that a forward pass may save for the backward pass"
            if kind == "cpu"
            else f"MicroBatchFinder: memory_limit_bytes must be set under {communicating} on {kind}, whose free memory"
            " torch does not report, got none; set it to the bytes that a forward pass may save for the backward pass"
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that memory has a limit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.check_run(trainer, pl_module)

    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Searches, reports, and sets the size in the callbacks that take it."""
        world_size = data_parallel_coordinates(trainer)[1]
        vote = Vote(trainer.world_size, self.timeout)
        try:
            with trial_steps(trainer) as rehearsal:
                present, limit, largest, trials = self._search(trainer, rehearsal, vote, world_size)
        finally:
            vote.close()
        self.trials = trials  # Not before: the rehearsal restores this callback too.
        if not largest:
            raise DloError(
                "MicroBatchFinder: at least one sample a rank must fit in memory, got out of memory with 1; use a"
                " smaller model, smaller samples or a lower"
                f" precision{'' if self.memory_limit_bytes is None else ', or raise memory_limit_bytes'}"
            )
        ran_out = any(not fits for _, fits in self.trials)
        self.per_rank = largest if self.power_of_two or not ran_out else max(1, math.floor(largest * (1 - self.margin)))
        step = present * world_size * int(trainer.accumulate_grad_batches)
        takers = [each for each in trainer.callbacks if hasattr(each, "set_max_micro_batch")]  # type: ignore[attr-defined]
        most = f"max_size {limit}" if limit == self.max_size else f"the data, {limit} samples a rank"
        self._report(trainer, world_size, step, "memory" if ran_out else most, takers)
        for callback in takers:
            callback.set_max_micro_batch(self.per_rank)

    def _largest_allowed(self, trainer: Trainer, world_size: int) -> int:
        lengths = [sized_len(getattr(loader, "dataset", None)) for loader in training_loaders(trainer)]
        limits = [length // world_size for length in lengths if length is not None]
        limit = min(limits + ([self.max_size] if self.max_size else []), default=0)
        if limit < 1:
            raise DloError(
                "MicroBatchFinder: max_size must be set for a loader without a length, got none; set max_size"
            )
        return limit

    def _search(
        self, trainer: Trainer, rehearsal: Rehearsal, vote: Vote, world_size: int
    ) -> tuple[int, int, int, list[tuple[int, bool]]]:
        """Returns the current size, the largest allowed one, the largest one that fits, and all trials."""
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else FAR
        _fix_image_size(epochs, trainer)
        first = rehearsal.next_batch()
        present, limit = count_samples(first), self._largest_allowed(trainer, world_size)
        kind = Trial if _communicates(trainer) is None else PredictedTrial
        trial = kind(rehearsal, BatchPool(rehearsal.next_batch, first), vote, self.memory_limit_bytes, epochs)
        trials = []

        def fits(size: int) -> bool:
            outcome = trial.fits(size, self.steps_per_trial)
            trials.append((size, outcome))
            return outcome

        return present, limit, find_largest(fits, present, limit, powers=self.power_of_two), trials

    def _report(self, trainer: Trainer, world_size: int, step: int, bound: str, takers: list[Any]) -> None:
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        assert self.per_rank is not None
        batch_size, accumulate = keep_global_batch(step, self.per_rank, world_size)
        content = {
            "per_rank": self.per_rank,
            "all_ranks": self.per_rank * world_size,
            "bound": bound,
            "batch_size": batch_size,
            "accumulate_grad_batches": accumulate,
            "trials": [{"per_rank": size, "fits": outcome} for size, outcome in self.trials],
        }
        write_atomic(folder / FILE, json.dumps(content, indent=2) + "\n")
        lines = [
            f"\nlargest micro-batch: {self.per_rank} samples a rank, {self.per_rank * world_size} over all;"
            f" bound by {bound}, {len(self.trials)} sizes tried"
        ]
        lines += [f"  set in {type(callback).__name__}" for callback in takers]
        if not takers:
            lines += [
                f"  for the same {step} samples a step:",
                f"    data.init_args.batch_size: {batch_size}",
                f"    trainer.accumulate_grad_batches: {accumulate}",
            ]
        print("\n".join(lines), flush=True)


def _communicates(trainer: Trainer) -> str | None:
    """Returns what communicates in forward and backward, for a message; None if nothing does."""
    strategy: Any = trainer.strategy
    if contract_of(strategy).zero_stage != 0:
        return type(strategy).__name__
    return "trainer.sync_batchnorm" if trainer.world_size > 1 and strategy._layer_sync else None


def _fix_image_size(epochs: int, trainer: Trainer) -> None:
    """Makes the loaders use the image size after a number of epochs, until the rehearsal ends."""
    for loader in training_loaders(trainer):
        sampler = loader.batch_sampler if isinstance(loader, ResumableLoader) else None
        if sampler is not None and sampler.image_size_at is not None:
            sampler.image_size_at = partial(_size_after, sampler.image_size_at, epochs)


def _size_after(size_at: Callable[[Position], int], epochs: int, at: Position) -> int:
    return size_at(Position(epochs, 0, at.size))


class Trial:
    """Trains on batches of one size, on all ranks, until one is out of memory.

    Args:
        rehearsal: Rehearsal that restores all state afterwards.
        pool: Source of the batches.
        vote: Vote by which the ranks agree.
        limit: Limit in bytes as in :class:`~dlo_plugins.batches.micro_batch_finder.ActivationBudget`.
        epochs: Number of epochs after which the batches are assumed to come.
    """

    def __init__(self, rehearsal: Rehearsal, pool: BatchPool, vote: Vote, limit: int | None, epochs: int) -> None:
        self.rehearsal, self.pool, self.vote = rehearsal, pool, vote
        self.trainer = rehearsal.trainer
        self.budget = ActivationBudget(limit, self.trainer.lightning_module)
        batches = self.trainer.num_training_batches
        # Number of a batch, counted from the first epoch; never an epoch's last, whose step Lightning runs at once.
        self.number = 2 * int(batches) * epochs if math.isfinite(batches) else 0

    def fits(self, size: int, steps: int) -> bool:
        """Returns whether no rank ran out of memory in ``steps`` steps; the same on all."""
        self.rehearsal.stop_if_asked()
        self.trainer.accumulate_grad_batches = 2
        batch: list[Any] = []
        parts: tuple[Callable[[], object], ...] = (
            lambda: batch.append(self.rehearsal.to_device(self.pool.batch(size), self.number)),
            lambda: self._train(batch.pop()),
            lambda: self.rehearsal.step_optimizer(self.number + 1),
        )
        for _ in range(steps):
            for part in parts:
                if self.vote.any(ran_out_of_memory(part)):
                    batch.clear()
                    self.trainer.optimizers[0].zero_grad(set_to_none=True)
                    gc.collect()
                    if self.trainer.strategy.root_device.type == "cuda":
                        torch.cuda.empty_cache()
                    return False
        return True

    def _train(self, batch: Any) -> None:
        """Runs forward and backward as for the first of two batches of a step, so that gradients are not reduced."""
        with self.budget:
            self.rehearsal.train_on(batch, self.number)


class PredictedTrial(Trial):
    """Trains on batches of a size whose predicted memory fits on all ranks, and measures it; see :class:`Trial`.

    Memory is counted as a share of the limit: the bytes that the forward pass saves of ``memory_limit_bytes``, or a
    GPU's peak of what it has free for this process.
    """

    def __init__(self, rehearsal: Rehearsal, pool: BatchPool, vote: Vote, limit: int | None, epochs: int) -> None:
        super().__init__(rehearsal, pool, vote, limit, epochs)
        self.budget.raises = False
        #: Share of the limit on the rank with most, by size; of no sample it is that of the model and its state.
        self.shares: dict[int, float] = {}

    def fits(self, size: int, steps: int) -> bool:
        """Returns whether a size fits on all ranks; the same on all."""
        self.rehearsal.stop_if_asked()
        if predict_share(self.shares, size) > 1:
            return False
        self.trainer.accumulate_grad_batches = 2
        device = self.trainer.strategy.root_device
        reset_memory_peak(device)
        self.budget.largest = 0
        for _ in range(steps):
            for number in (self.number, self.number + 1):  # The second has the gradients of the first in memory.
                batch = self.rehearsal.to_device(self.pool.batch(size), number)
                with self.budget:
                    self.rehearsal.train_on(batch, number)
        used, rest, limit = self.budget.largest, 0, self.budget.limit
        if limit is None:
            free, _ = torch.cuda.mem_get_info(device)
            used, rest = memory_peak(device), torch.cuda.memory_allocated(device)
            limit = free + torch.cuda.memory_reserved(device)
        self.shares[0] = self.vote.largest(rest / limit)
        self.shares[size] = self.vote.largest(used / limit)
        return self.shares[size] <= 1


def predict_share(shares: Mapping[int, float], size: int) -> float:
    """Returns the share of a size by the line through those of the two largest measured sizes; 0 without any.

    Args:
        shares: Shares by size, in samples; that of size 0 is there if any is.
        size: Size in samples.
    """
    if len(shares) < 2:
        return 0.0
    near, far = sorted(shares)[-2:]
    slope = max(0.0, (shares[far] - shares[near]) / (far - near))
    return shares[far] + slope * (size - far)


def ran_out_of_memory(action: Callable[[], object]) -> bool:
    """Calls ``action``; returns whether memory ran out. It drops the error, which refers to tensors in memory."""
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


class Vote:
    """Logical or of a flag, and largest number, over all ranks, on a process group of its own.

    A rank that is out of memory votes while others may still compute. On training's process group, its message could be
    matched with one of theirs.

    Args:
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self._group: Any = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def any(self, happened: bool) -> bool:
        """Returns whether the flag is set on any rank; raises as :meth:`largest`."""
        return bool(self.largest(float(happened)))

    def largest(self, number: float) -> float:
        """Returns the largest of the ranks' numbers.

        Raises:
            DloError: If the others do not answer in time.
        """
        if self._group is None:
            return number
        maximum = torch.tensor(number, dtype=torch.float64)
        try:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise DloError(
                f"MicroBatchFinder: all ranks must finish a part of a trial within {self.timeout:g} s, got a timeout."
                " Either a rank has failed, or training_step communicates (for example by self.log with sync_dist) and"
                f" a rank that is out of memory blocks the others; log without sync_dist, or set max_size ({error})"
            ) from error
        return float(maximum)

    def close(self) -> None:
        """Destroys the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


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
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._seen, self._bytes = set(self._parameters), 0
        if self.limit is not None:
            self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.limit is not None:
            self._hooks.__exit__(*error)

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
    size = find_batch_size(batch)
    if size is None:
        raise DloError(
            "MicroBatchFinder: a batch must be a tensor, or tuples, lists and dicts with a tensor in them, got a"
            f" {type(batch).__name__} from the loader; return tensors from its collate_fn"
        )
    return size


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

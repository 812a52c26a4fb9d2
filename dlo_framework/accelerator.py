"""Settings of a run on an accelerator: precision of float32 products, cuDNN, garbage collection, copies of batches."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from dlo_framework.batch_transform import BatchCopier, join_transfer, leave_transfer
from dlo_framework.batches import tree_leaves
from dlo_framework.distributed.optimizer_steps import disable_fused_unscale
from dlo_framework.errors import check_choice, check_number
from dlo_framework.strategy_contract import contract_of

#: Types that a batch may hold beside tensors and still be copied on a separate stream.
_PLAIN = (int, float, str, bytes, type(None))
MatmulPrecision = Literal["highest", "high", "medium"]


class AcceleratorSettings(BatchCopier):
    """Configures torch for speed on CUDA; on by default, without effect on a CPU but for fused optimizers.

    - **Float32 products** run on tensor cores with inputs rounded to TF32 (`matmul_precision`), as cuDNN's convolutions
      do by torch's own default. A value other than torch's default, `highest`, that was set before the run stays.
    - **cuDNN** measures its algorithms for each shape of a convolution and takes the fastest (`cudnn_benchmark`), if
      the module has convolutions and `trainer.deterministic` is off. `trainer.benchmark: false` switches it off too.
    - **Python's garbage collection** runs after every `gc_steps` batches, on all ranks after the same ones, not
      whenever objects have accumulated: ranks that collect at different times wait for each other. Objects that exist
      when training starts are excluded.
    - **Batches** are copied to the device on a separate stream (`copy_stream`), while it still computes earlier steps.
      It needs pinned memory, which dlo's loaders use on an accelerator.
    - **Fused optimizers** may have their gradients clipped in mixed precision; Lightning (2.6) alone refuses it.

    Args:
        matmul_precision: Value of torch's `float32_matmul_precision`.
        cudnn_benchmark: Whether to let cuDNN measure its algorithms.
        gc_steps: Number of batches between two collections; 0 leaves them to Python.
        copy_stream: Whether to copy batches on a separate stream.

    Raises:
        DloError: for an unknown value.
    """

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "AcceleratorSettings"
    left_out_of_parity = "it rounds float32 products and chooses algorithms by their speed"

    def __init__(
        self,
        matmul_precision: MatmulPrecision = "high",
        cudnn_benchmark: bool = True,
        gc_steps: int = 50,
        copy_stream: bool = True,
    ) -> None:
        check_choice("AcceleratorSettings: matmul_precision", matmul_precision, get_args(MatmulPrecision))
        check_number("AcceleratorSettings: gc_steps", gc_steps, "at least 0", "0 leaves it to Python")
        self.matmul_precision, self.cudnn_benchmark = matmul_precision, cudnn_benchmark
        self.gc_steps, self.copy_stream = gc_steps, copy_stream
        self._copy: Callable[[Any], Any] | None = None
        self._collector: Collector | None = None
        self._before: tuple[str, bool] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the precision, and installs the copy of batches."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        if torch.get_float32_matmul_precision() == "highest":  # torch's default, so no one has set another
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.copy_stream:
            copies, contract = BatchCopyStream(device), contract_of(trainer.strategy)
            self._copy = lambda batch: copies.copy(contract.attach_counts(batch))
            join_transfer(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets cuDNN measure its algorithms, once the model exists."""
        if trainer.strategy.root_device.type == "cuda" and self.cudnn_benchmark and may_benchmark(pl_module):
            torch.backends.cudnn.benchmark = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over garbage collection, and the unscaling of gradients of fused optimizers."""
        for optimizer in trainer.optimizers:
            disable_fused_unscale(optimizer)
        if trainer.strategy.root_device.type != "cpu" and self.gc_steps:
            self._collector = Collector(self.gc_steps)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Collects garbage when it is due."""
        if self._collector is not None:
            self._collector.step()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Collects garbage when it is due: a validation within a fit may be long."""
        self.on_train_batch_end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Returns garbage collection to Python."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores all settings."""
        self.on_train_end(trainer, pl_module)
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before[0])
            torch.backends.cudnn.benchmark = self._before[1]
            self._before = None
        if self._copy is not None:
            self._copy = None
            leave_transfer(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores all settings: Lightning does not call ``teardown`` then."""
        self.teardown(trainer, pl_module, "fit")

    def copy_batch(self, batch: Any) -> Any:
        """Returns the batch on the device, with the sample count that the strategy has taken before."""
        return batch if self._copy is None else self._copy(batch)


class BatchCopyStream:
    """Copies batches to a device on a separate stream; the compute stream waits for the copy, the host does not.

    Args:
        device: Target device.
        streams: `torch.cuda`, or a module with the same `Stream`, `stream` and `current_stream`.
    """

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        self.device, self._streams = device, streams
        self.stream = streams.Stream(device)

    def copy(self, batch: Any) -> Any:
        """Returns a batch with its tensors on the device; one with tensors inside other objects is unchanged."""
        from lightning.fabric.utilities import move_data_to_device

        if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in tree_leaves(batch)):
            return batch  # The lifetime of tensors inside other objects cannot be tracked.
        computes = self._streams.current_stream(self.device)
        with self._streams.stream(self.stream):
            moved = move_data_to_device(batch, self.device)
        computes.wait_stream(self.stream)
        before = {id(leaf) for leaf in tree_leaves(batch)}
        for leaf in tree_leaves(moved):
            # Its memory belongs to the copy stream, which reuses it only after `computes` has finished with it.
            if isinstance(leaf, torch.Tensor) and id(leaf) not in before:
                leaf.record_stream(computes)
        return moved


class Collector:
    """Collects garbage after a fixed number of steps, and at no other time.

    Args:
        every: Number of steps between two collections.
    """

    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0
        self._was_on, self._froze = gc.isenabled(), gc.get_freeze_count() == 0
        _collect_in_forks()
        gc.disable()
        gc.collect()
        if self._froze:
            gc.freeze()

    def step(self) -> None:
        """Counts a step."""
        self.steps += 1
        if self.steps % self.every == 0:
            gc.collect()

    def close(self) -> None:
        """Returns collection to Python, if it was enabled."""
        if self._froze:
            gc.unfreeze()
        if self._was_on:
            gc.enable()


@functools.cache
def _collect_in_forks() -> None:
    """Lets forked processes, such as loaders' workers, collect their own garbage."""
    os.register_at_fork(after_in_child=gc.enable)


def may_benchmark(module: nn.Module) -> bool:
    """Returns whether cuDNN has algorithms to measure, and determinism is not requested."""
    if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
        return False
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())

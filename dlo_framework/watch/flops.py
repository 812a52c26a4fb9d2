"""A model's FLOPs, counted once on a real step, and the peak of the accelerator they are held against."""

from __future__ import annotations

import functools

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode


class FlopCounter:
    """Counts the FLOPs of one training step (matrix products, convolutions, attention; a multiply-add is two).

    The count is of the operators as they run, forward and backward, so recomputed activations count too. A model
    that knows its own number gives it by a ``flops_per_sample()`` method. A compiled model runs no operators that
    can be counted: it is counted before it is compiled, or not at all.
    """

    #: The batch that is counted: the first one still pays for warming up, and counting slows it further.
    BATCH = 2

    def __init__(self) -> None:
        self.per_sample: float = 0.0
        self._mode: FlopCounterMode | None = None
        self._seen = 0
        self._batch = self.BATCH
        self.wanted = True

    @property
    def running(self) -> bool:
        """Returns whether this batch is being counted."""
        return self._mode is not None

    def count_first(self) -> None:
        """Counts the first batch instead: for a callback that has all later ones run compiled."""
        self._batch = 1

    def take(self, per_sample: float) -> None:
        """Takes a count that was made before, by the run that is resumed, and counts no more."""
        self.per_sample, self.wanted = per_sample, False

    def start(self, module: LightningModule) -> None:
        """Starts to count, if this is the batch to count."""
        self._seen += 1
        if self._seen < self._batch:
            return
        self.wanted = False
        own = getattr(module, "flops_per_sample", lambda: None)()
        if own:
            self.per_sample = float(own)
        elif not is_compiled(module):
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def stop(self, samples: int = 0) -> None:
        """Ends the count of a batch of ``samples`` samples; 0 where the batch failed."""
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)
        if samples:
            self.per_sample = self._mode.get_total_flops() / samples
        self._mode = None


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether torch.compile has wrapped the module or any part of it."""
    return any(
        part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule" for part in module.modules()
    )


def peak_flops(trainer: Trainer) -> float | None:
    """Returns the peak FLOP/s of this rank's accelerator at the run's precision; None where it is not known."""
    device = trainer.strategy.root_device
    return _peak(device, _dtype(str(trainer.precision))) if device.type == "cuda" else None


@functools.cache
def _peak(device: torch.device, dtype: torch.dtype) -> float | None:
    peak = get_available_flops(device, dtype)
    return float(peak) if peak else None


def _dtype(precision: str) -> torch.dtype:
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32

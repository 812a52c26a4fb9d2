"""FLOPs of a model, counted on real steps, for the utilisation (MFU)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.costs import OperatorCounter, device_peak

#: Shape of one sample: for each tensor of a batch, its sizes without the first.
SampleShape = tuple[tuple[int, ...], ...]


class FlopCounter:
    """Counter of the FLOPs of a training step (matrix products, convolutions, attention; a multiply-add is two).

    It counts once for each shape of the samples, on the first batch with it. It counts the operators that run, forward
    and backward, so that recomputed activations count too. A model can give its own number by a method
    ``flops_per_sample()``, which replaces each count. torch (2.11 to 2.15) runs compiled modules uncompiled while they
    are counted.

    Attributes:
        counts: FLOPs of a sample, by its shape; 0 where they could not be counted.
        running: Whether a count is in progress.
        uncompile: Function that makes the next batch run uncompiled, called before a count; set by the code that
            compiles the model.
    """

    #: First batch of a run that is counted: the very first one still warms up, and counting would slow it further.
    BATCH = 2
    #: Most shapes to count. Where samples have arbitrary shapes, counting each would slow the run down; later shapes
    #: are assumed to cost as much per element as the last one that was counted.
    MOST = 64

    def __init__(self) -> None:
        self.counts: dict[SampleShape, float] = {}
        self.running = False
        self.uncompile: Callable[[], None] | None = None
        self._mode: OperatorCounter | None = None
        self._shape: SampleShape = ()
        self._pass_over = self.BATCH - 1

    @property
    def per_sample(self) -> float:
        """FLOPs of a sample of the shape that was counted last; 0 before a count."""
        return next(reversed(self.counts.values()), 0.0)

    def forget(self) -> None:
        """Clears all counts, for another run."""
        self.stop()
        self.counts, self._pass_over = {}, self.BATCH - 1

    def count_first(self) -> None:
        """Counts the run's first batch too, for a callback that compiles the model after it."""
        self._pass_over = 0

    def state_dict(self) -> list[Any]:
        """Returns the counts as lists and numbers."""
        return [[[list(sizes) for sizes in shape], count] for shape, count in self.counts.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restores the counts of the run that is resumed."""
        self.counts = {tuple(tuple(sizes) for sizes in shape): float(count) for shape, count in state}

    def start(self, module: LightningModule, shape: SampleShape) -> None:
        """Starts to count a batch whose samples have a new shape, if it is to be counted."""
        self.stop()  # Ends the count of a batch that a hook has skipped.
        if len(self.counts) >= self.MOST:
            return
        if self._pass_over and not self.counts:
            self._pass_over -= 1
            return
        own = getattr(module, "flops_per_sample", lambda: None)()
        if own:
            self.counts[shape] = float(own)
            return
        if self.uncompile is not None:
            self.uncompile()
        self._shape, self.running = shape, True
        self._mode = OperatorCounter()
        self._mode.__enter__()

    def stop(self, samples: int = 0) -> None:
        """Ends the count of a batch of ``samples`` samples; with 0, for a batch that failed, discards it."""
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)
        if samples:
            self.counts[self._shape] = 0.0 if self._mode.refused else self._mode.get_total_flops() / samples
        self._mode, self.running = None, False

    def total(self, samples: Mapping[SampleShape, int]) -> float:
        """Returns the FLOPs of a number of samples of each shape; 0 if those of a shape are not known."""
        counts = [(self._count(shape), number) for shape, number in samples.items() if number]
        return sum(count * number for count, number in counts) if all(count for count, _ in counts) else 0.0

    def _count(self, shape: SampleShape) -> float:
        if shape in self.counts:
            return self.counts[shape]
        if len(self.counts) < self.MOST:
            return 0.0
        last = next(reversed(self.counts))
        return self.counts[last] * _elements(shape) / _elements(last)


def _elements(shape: SampleShape) -> int:
    return max(1, sum(math.prod(sizes) for sizes in shape))


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether torch.compile has compiled the module or any submodule, in place or in a wrapper."""
    return any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in module.modules())


def peak_flops(trainer: Trainer) -> float | None:
    """Returns the peak FLOP/s of this rank's accelerator at the run's precision; None where it is not known."""
    device, dtype = trainer.strategy.root_device, _dtype(str(trainer.precision))
    if device.type != "cuda" or dtype is None:
        return None
    return _peak(device, dtype, torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def _peak(device: torch.device, dtype: torch.dtype, tf32: bool) -> float | None:
    return device_peak(device, dtype, tf32)  # Cached: Lightning warns about each unknown device.


def _dtype(precision: str) -> torch.dtype | None:
    """Returns the dtype of matrix products at a Trainer's precision; None for engines of others."""
    of_bits = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
    return of_bits.get(precision.partition("-")[0])

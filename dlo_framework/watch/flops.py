"""FLOPs of a model, counted on real steps, and the accelerator's peak, for the utilisation (MFU)."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, flop_registry

from dlo_framework.watch.peaks import device_peak

_log = logging.getLogger(__name__)
#: Shape of one sample: for each tensor of a batch, its sizes without the first.
SampleShape = tuple[tuple[int, ...], ...]


def grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of `grouped_mm`, the product of a mixture's experts: those of the rows that run.

    Args:
        a: Shape of the left operand, `[M, K]` or `[G, M, K]`; without G, groups are along one of its dims.
        b: Shape of the right operand, `[K, N]` or `[G, K, N]`.
    """
    groups = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def product_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a matrix product with a dtype for its result.

    Args:
        a: Shape of the left operand, `[M, K]` or `[G, M, K]`.
        b: Shape of the right operand, `[K, N]` or `[G, K, N]`.
    """
    return 2 * math.prod(a) * b[-1]


def added_product_flops(added: torch.Size, a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a matrix product that is added to a matrix; shapes as in :func:`product_flops`."""
    return product_flops(a, b)


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of attention, forward; those that a causal mask leaves out count too, as in torch's counter.

    Args:
        query: Shape `[batch, heads, queries, width]`.
        key: Shape `[batch, groups, keys, width]`; the number of heads is a multiple of `groups`.
        value: Shape `[batch, groups, keys, width of a value]`.
    """
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def attention_backward_flops(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    """Returns the FLOPs of attention's backward, which computes the scores again; shapes as in the forward."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def packed_attention_flops(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any, **__: Any
) -> int:
    """Returns the FLOPs of attention within packed documents, forward; it reads their lengths from the device.

    Args:
        query: Queries of all documents, `[tokens, heads, width]`.
        key: Keys, `[tokens, groups, width]`.
        value: Values, `[tokens, groups, width of a value]`.
        ends_q: Ends of the documents in `query`, from 0, `[documents + 1]`.
        ends_k: Ends of the documents in `key`.
    """
    return 2 * _pairs(ends_q, ends_k) * query.shape[1] * (query.shape[2] + value.shape[2])


def packed_attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends_q: Tensor, ends_k: Tensor,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Returns the FLOPs of the backward of attention within packed documents; arguments as in the forward."""
    return 2 * _pairs(ends_q, ends_k) * query.shape[1] * (3 * query.shape[2] + 2 * value.shape[2])


def _pairs(ends_q: Tensor, ends_k: Tensor) -> int:
    """Returns the number of pairs of a query and a key of one document."""
    return int((ends_q.diff().double() * ends_k.diff().double()).sum())


def _formulas() -> dict[Any, Callable[..., int]]:
    """Returns FLOPs by operator where torch's counter has none, or (2.11) refuses what runs.

    torch 2.11 refuses attention with fewer groups than heads, and products with a dtype for their result.
    """
    from torch.nn.attention import varlen  # noqa: F401  It registers the operators.

    aten, packed = torch.ops.aten, torch.ops.torch_attn
    found: dict[Any, Callable[..., int]] = {aten._grouped_mm: grouped_flops, aten.bmm: product_flops}
    found |= dict.fromkeys((aten.addmm, aten.baddbmm), added_product_flops)
    for kind in ("flash", "efficient", "cudnn"):
        found[getattr(aten, f"_scaled_dot_product_{kind}_attention")] = attention_flops
        found[getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")] = attention_backward_flops
    for operator, formula in (
        (packed._varlen_attn, packed_attention_flops),
        (packed._varlen_attn_backward, packed_attention_backward_flops),
    ):
        if operator not in flop_registry:
            _take_tensors(formula)
            found[operator] = formula
    return found


def _take_tensors(formula: Any) -> None:
    """Marks a formula that gets tensors in place of their shapes, as torch's own are marked."""
    formula._get_raw = True


class FlopCounter:
    """Counter of the FLOPs of a training step (matrix products, convolutions, attention; a multiply-add is two).

    It counts once for each shape of the samples, on the first batch with it. It counts the operators that run, forward
    and backward, so that recomputed activations count too. A model can give its own number by a method
    ``flops_per_sample()``, which replaces each count. The operators of a compiled model cannot be counted: it is
    counted before it is compiled, or not at all.

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
        self._mode: _Mode | None = None
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
        if is_compiled(module):
            self.counts[shape] = 0.0
            return
        self._shape, self.running = shape, True
        self._mode = _Mode(display=False, custom_mapping=_formulas())
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


class _Mode(FlopCounterMode):
    """Mode that counts; where a formula refuses an operator's shapes, the step goes on, and the count is left out.

    It counts FLOPs for the model only, not for each module. To count per module torch's (2.15) hooks the gradients of
    modules' inputs, which breaks derivatives with respect to them in a training step:
    ``torch.autograd.grad(self.net(x).sum(), x)``. torch (2.11 to 2.15) has no public hook around a formula.

    Attributes:
        refused: Whether a formula has refused.
    """

    refused = False

    def __enter__(self) -> Any:
        self.mode = _Observer(self)
        self.mode.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        assert self.mode is not None
        self.mode.__exit__(*args)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super()._count_flops(func_packet, out, args, kwargs)
        except Exception as error:  # Formulas assert what they expect, or unpack it.
            if not self.refused:
                _log.warning("the FLOPs of %s are not known, so that the run has no MFU: %s", func_packet, error)
            self.refused = True
            return out


class _Observer(_FlopCounterMode):
    """Runs each operator's own kernel, as without a count.

    torch's mode (2.11 to 2.15) runs the decomposition of each operator that has one, also where the device has a
    kernel: of SiLU's backward, with other roundings.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload) or not _has_kernel(func, args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self.counter._count_flops(func._overloadpacket, func(*args, **(kwargs or {})), args, kwargs or {})


def _has_kernel(func: OpOverload, args: Any) -> bool:
    """Returns whether an operator has a kernel of its own for its arguments' device (torch 2.11 to 2.15)."""
    name, devices = func.name(), (leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    key = torch._C._dispatch_key_for_device(next(devices, "cpu"))
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


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

"""Costs of operators in FLOPs, by torch's table of formulas, FLOPs of a run's steps, and peaks of accelerators.

Everything that counts FLOPs counts them here. A multiply-add is two; operators other than matrix products, convolutions
and attention are none. Attention under a causal mask counts in full, as in torch's counter.

Sources of the peaks, all by NVIDIA: the data sheets of V100, T4, A10, A10G, A40, A100, L4, L40, L40S, H100, H200,
GH200, and of Blackwell (HGX B200, GB200 NVL72); the white papers of GA102 (RTX A6000, RTX 3090), Ada (RTX 4090),
Hopper (H100) and RTX Blackwell (RTX 5090). Where a source gives a rate with sparsity only, the table has half of it.
GeForce cards have two rates in half precision: torch accumulates in single precision, which has the lower one. In
double precision the rate is that of tensor cores, where they support it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, flop_registry, shape_wrapper

from dlo_framework.batches import tree_leaves

_log = logging.getLogger(__name__)


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


def _flex_backward_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return attention_backward_flops(query, query, key, value)


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


@functools.cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Returns FLOPs by operator where torch's counter has none, or (2.11) refuses what runs.

    torch (2.11 to 2.15) does not count attention on a CPU. torch 2.11 refuses attention with fewer groups than heads,
    and products with a dtype for their result.
    """
    from torch.nn.attention import flex_attention, varlen  # noqa: F401  They register the operators.

    aten, packed = torch.ops.aten, torch.ops.torch_attn
    formulas: dict[Any, Callable[..., int]] = {aten._grouped_mm: grouped_flops}
    formulas |= dict.fromkeys((aten.bmm, aten._int_mm), product_flops)
    added = (aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten._addmm_activation)
    formulas |= dict.fromkeys(added, added_product_flops)
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        formulas[getattr(aten, f"_scaled_dot_product_{kind}")] = attention_flops
        formulas[getattr(aten, f"_scaled_dot_product_{kind}_backward")] = attention_backward_flops
    flex = torch.ops.higher_order  # uncompiled, where it computes all scores
    formulas[flex.flex_attention], formulas[flex.flex_attention_backward] = attention_flops, _flex_backward_flops
    for operator, formula in (
        (packed._varlen_attn, packed_attention_flops),
        (packed._varlen_attn_backward, packed_attention_backward_flops),
    ):
        if operator not in flop_registry:
            formulas[operator] = formula
    packed_formulas = (packed_attention_flops, packed_attention_backward_flops)
    return {operator: _wrapped(formula, formula in packed_formulas) for operator, formula in formulas.items()}


def _wrapped(formula: Callable[..., int], takes_tensors: bool) -> Callable[..., int]:
    """Returns a formula as torch's table has it: it takes tensors, and is marked so that torch wraps it no more."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    wrapped: Any = count if takes_tensors else shape_wrapper(formula)
    wrapped._get_raw = True
    return wrapped


class OperatorCounter(FlopCounterMode):
    """Mode that counts the FLOPs of all operators; where a formula refuses shapes, the step goes on uncounted.

    It counts FLOPs for the model only, not for each module. To count per module torch's (2.15) hooks the gradients of
    modules' inputs, which breaks derivatives with respect to them in a training step:
    ``torch.autograd.grad(self.net(x).sum(), x)``. torch (2.11 to 2.15) has no public hook around a formula.

    Attributes:
        refused: Whether a formula has refused.
        current: Counter that counts now; None for none.
    """

    refused = False
    current: ClassVar[OperatorCounter | None] = None

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=dict(_formulas()))

    def __enter__(self) -> Any:
        self.mode = _Observer(self)
        self.mode.__enter__()
        self._outer, OperatorCounter.current = OperatorCounter.current, self
        return self

    def __exit__(self, *args: Any) -> None:
        assert self.mode is not None
        OperatorCounter.current = self._outer
        self.mode.__exit__(*args)

    def add(self, operator: Any, flops: int) -> None:
        """Adds the FLOPs of an operator that ran where the counter does not see it."""
        self.flop_counts["Global"][operator] += flops

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            if isinstance(func_packet, HigherOrderOperator) and func_packet not in self.flop_registry:
                raise NotImplementedError("it has no formula")
            return super()._count_flops(func_packet, out, args, kwargs)
        except Exception as error:  # Formulas assert what they expect, or unpack it.
            if not self.refused:
                _log.warning("the FLOPs of %s are not known, so that the run has no MFU: %s", func_packet, error)
            self.refused = True
            return out


class _Observer(_FlopCounterMode):
    """Runs each operator's own kernel, as without a count.

    torch's mode (2.11 to 2.15) decomposes each operator for which it can, also where the device has a kernel
    that rounds differently, such as SiLU's backward.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns whether torch may compile what is called: in FlexAttention alone, which needs it even uncompiled."""
        from torch.nn.attention.flex_attention import flex_attention

        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not flex_attention.__code__:
            frame = frame.f_back
        return frame is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and _has_kernel(func, args):
            return self.counter._count_flops(func._overloadpacket, func(*args, **kwargs), args, kwargs)
        op_output = super().__torch_dispatch__(func, types, args, kwargs)
        if op_output is NotImplemented and isinstance(func, HigherOrderOperator):  # It would be an error of the step.
            return self.counter._count_flops(func, func(*args, **kwargs), args, kwargs)
        return op_output


def _has_kernel(func: OpOverload, args: Any) -> bool:
    """Returns whether an operator has a kernel of its own for its arguments' device (torch 2.11 to 2.15)."""
    name, devices = func.name(), (leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    key = torch._C._dispatch_key_for_device(next(devices, "cpu"))
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class Peak(NamedTuple):
    """TFLOP/s of dense matrix products on one accelerator, by dtype; None where no source gives it.

    Attributes:
        bf16: Rate in bfloat16.
        fp16: Rate in float16.
        tf32: Rate of float32 in TF32.
        fp32: Rate of float32 without TF32.
        fp64: Rate in float64.
    """

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None
    fp64: float | None = None

    def rates(self, tf32: bool = False) -> dict[str, float]:
        """Returns the FLOP/s by name of the dtype, without those that no source gives.

        Args:
            tf32: Whether float32 is multiplied in TF32, where the device supports it.
        """
        single = self.tf32 or self.fp32 if tf32 else self.fp32
        teraflops = {"bfloat16": self.bf16, "float16": self.fp16, "float32": single, "float64": self.fp64}
        return {name: rate * 1e12 for name, rate in teraflops.items() if rate is not None}


_A100 = Peak(312, 312, 156, 19.5, 19.5)
_H100_SXM = Peak(989.4, 989.4, 494.7, 66.9, 66.9)
_H100_NVL = Peak(835.5, 835.5, 417.5, 60, 60)

#: Patterns in an accelerator's CUDA name, each with the peak; the first match counts.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"gb200", Peak(2500, 2500, 1250, 80, 40)),
    (r"b200", Peak(2250, 2250, 1100, 75, 37)),
    (r"h200 nvl", _H100_NVL),
    (r"g?h200", _H100_SXM),
    (r"h100 nvl", _H100_NVL),
    (r"h100 pcie", Peak(756, 756, 378, 51.2, 51.2)),
    (r"h100 80gb hbm3|h100 sxm", _H100_SXM),
    (r"l40s", Peak(362.05, 362.05, 183, 91.6)),
    (r"l40", Peak(181.05, 181.05, 90.5, 90.5)),
    (r"l4", Peak(121, 121, 60, 30.3)),
    (r"geforce rtx 5090", Peak(209.5, 209.5, 104.8, 104.8)),
    (r"geforce rtx 4090", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"geforce rtx 3090(?! ti)", Peak(71, 71, 35.6, 35.6)),
    (r"a100", _A100),
    (r"rtx a6000", Peak(154.8, 154.8, 77.4, 38.7)),
    (r"a40", Peak(149.7, 149.7, 74.8, 37.4)),
    (r"a10g", Peak(70, 70, 35, 35)),
    (r"a10", Peak(125, 125, 62.5, 31.2)),
    (r"t4", Peak(None, 65, None, 8.1)),
    (r"v100s pcie", Peak(None, 130, None, 16.4, 8.2)),
    (r"v100 sxm2", Peak(None, 125, None, 15.7, 7.8)),
    (r"v100 pcie", Peak(None, 112, None, 14, 7)),
)
#: Names of slices of an accelerator, and of slower variants with the same name.
_LESS = re.compile(r"\b(mig|laptop|max q|rtx \d+ d)\b")
#: Names of cards for which Lightning (2.6) has the rate without tensor cores, in half precision too.
_WITHOUT_TENSOR_CORES = re.compile(r"\b(geforce|titan)\b")


def known_peak(name: str) -> Peak | None:
    """Returns the peak of an accelerator by its name; None for an unknown one, and for a slice of one (MIG)."""
    plain = _plain(name)
    if _LESS.search(plain):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(rf"\b({pattern})\b", plain)), None)


@functools.cache  # Lightning warns about each unknown device.
def device_peak(device: torch.device, dtype: torch.dtype, tf32: bool) -> float | None:
    """Returns the peak FLOP/s of an accelerator; None where it is not known.

    Args:
        device: CUDA device. One that is not in the table is looked up in Lightning's (2.6), as far as that is right.
        dtype: Dtype of the matrix product.
        tf32: Whether torch multiplies float32 in TF32, where the device supports it.
    """
    name = torch.cuda.get_device_name(device)
    peak = known_peak(name)
    if peak is not None:
        return peak.rates(tf32).get(str(dtype).removeprefix("torch."))
    plain = _plain(name)
    if _LESS.search(plain) or (dtype is not torch.float32 and _WITHOUT_TENSOR_CORES.search(plain)):
        return None
    try:
        available_flops = get_available_flops(device, dtype)
    except RuntimeError:  # It reads torch's old setting of TF32, which fails where the new one has been used.
        return None
    return float(available_flops) if available_flops else None


def _plain(name: str) -> str:
    """Returns a name in lower case, its parts separated by spaces: V100-SXM2-16GB becomes v100 sxm2 16gb."""
    return re.sub(r"[^a-z0-9.]+", " ", name.lower())


# --- FLOPs of a run ------------------------------------------------------------------------------------------


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

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves the operators that run in the block out of the count."""
        counted = {} if self._mode is None else self._mode.flop_counts["Global"]
        before = dict(counted)
        try:
            yield
        finally:
            counted.clear()
            counted.update(before)

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
    of_bits = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
    device, dtype = trainer.strategy.root_device, of_bits.get(str(trainer.precision).partition("-")[0])
    if device.type != "cuda" or dtype is None:  # Engines of others have precisions of their own.
        return None
    return device_peak(device, dtype, torch.backends.cuda.matmul.fp32_precision == "tf32")

"""Adam, AdamW and LAMB with a state of 8 or 4 bits or fp8, of torchao (0.18).

8-bit Optimizers via Block-wise Quantization. Dettmers, Lewis, Shleifer, Zettlemoyer, 2021, arXiv 2110.02861. Memory
Efficient Optimizers with 4-bit States. Li, Chen, Zhu, 2023, arXiv 2309.01507.

Both moments of a tensor are codes, with one fp32 scale a block of consecutive elements (256; 128 with 4 bits). Tensors
of fewer than 4096 elements, or whose size is not a multiple of the block, keep fp32 moments. A block's scale is its
largest value, so the update of an element depends on others: a strategy steps full tensors.

Departures from torchao: learning rates are numbers, which schedules may set, instead of tensors; on a CPU the step is
not compiled, because torch.compile would build a kernel for each shape; checkpoints hold codes and scales as plain
tensors, so that a resumed run continues bit for bit. A run may also continue from the state of a plain AdamW, or of
another number of bits, which is quantised on loading.

LAMB is :class:`~dlo_plugins.optimizers.lamb.BoundedLamb` with torchao's state. The block-wise step of bitsandbytes'
``LAMB8bit`` (0.50) leaves the trust ratio out: it is Adam's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import unset_fake_temporarily
from dlo_framework.optimizers import FlatState, run_closure
from dlo_plugins.optimizers.lamb import BoundedLamb

try:
    from torchao import optim as torchao_optim
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8
except ImportError as missing:
    raise DloError(
        f"optimizers with quantised state must have torchao, got {missing}; pip install 'dlo_framework[quantisation]'"
    ) from missing

#: Smallest tensor whose state is quantised, as in torchao and bitsandbytes.
SMALLEST = 4096
_CODES, _SCALE, _SHAPE = ".codes", ".scale", ".shape"
_TYPES = (OptimState8bit, OptimState4bit, OptimStateFp8)


def make_tables() -> None:
    """Has torchao make the tables of codes, which it keeps for the process, of tensors that have values.

    Those of a plan have none, so that tables that are made in one are zeros; on the meta device they cannot be read.
    """
    with unset_fake_temporarily(), torch.device("cpu"):
        for kind, signed in itertools.product((OptimState8bit, OptimState4bit), (True, False)):
            kind.zeros((256,), signed, 128)


make_tables()


def make_buffer(like: Tensor, bits: int | str, *, signed: bool, block_size: int) -> Tensor:
    """Returns zeros in the shape of a tensor, quantised if it is large enough.

    Args:
        like: Parameter, or a moment in full precision.
        bits: 8, 4 or ``fp8``.
        signed: Whether values may be negative.
        block_size: Number of consecutive elements with one scale.
    """
    if like.numel() < SMALLEST or like.numel() % block_size:
        return torch.zeros_like(like, requires_grad=False)
    where: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    if bits == "fp8":
        made: Tensor = OptimStateFp8.zeros(like.shape, block_size, **where)
    elif bits == 4:
        made = OptimState4bit.zeros(like.shape, signed, block_size, **where)
    else:
        made = OptimState8bit.zeros(like.shape, signed, block_size, **where)
    return made


def _join(key: str, codes: Tensor, scale: Tensor, shape: list[int] | None) -> Tensor:
    """Returns the quantised tensor of codes and scales; its type is that of the codes."""
    scale = scale.to(codes.device)
    if codes.dtype == torch.float8_e4m3fn:
        made: Tensor = OptimStateFp8(codes, scale, dtype=torch.float32)
        return made
    signed = key == "exp_avg"
    kind = OptimState8bit if shape is None else OptimState4bit
    small = torch.zeros(256, device=codes.device)
    qmap = kind.zeros(small.shape, signed, 128, device=codes.device).qmap
    if shape is None:
        made = OptimState8bit(codes, scale, qmap, signed, dtype=torch.float32)
    else:
        made = OptimState4bit(codes, scale, qmap, signed, torch.Size(shape), dtype=torch.float32)
    return made


class QuantisedState(FlatState):
    """Base of optimizers with torchao's quantised moments ``exp_avg`` and ``exp_avg_sq``.

    Attributes:
        bits: 8, 4 or ``fp8``.
        block_size: Number of consecutive elements with one scale.
    """

    bits: int | str = 8
    block_size: int

    def flatten(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state with codes and scales in place of each quantised tensor."""
        flat: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, _TYPES):
                flat |= {key + _CODES: value.codes, key + _SCALE: value.scale}
                if isinstance(value, OptimState4bit):
                    flat[key + _SHAPE] = list(value.shape)
            else:
                flat[key] = value
        return flat

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state; moments in full precision, or in another number of bits, are quantised."""
        restored = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALE, _SHAPE))}
        for key in [key.removesuffix(_CODES) for key in state if key.endswith(_CODES)]:
            restored[key] = _join(key, state[key + _CODES], state[key + _SCALE], state.get(key + _SHAPE))
        for key in [key for key in restored if key.endswith(("exp_avg", "exp_avg_sq"))]:
            full = restored[key].dequantize() if isinstance(restored[key], _TYPES) else restored[key]
            wanted = make_buffer(full, self.bits, signed=key == "exp_avg", block_size=self.block_size)
            if type(wanted) is not type(restored[key]):
                restored[key] = wanted.copy_(full)
        return restored


class _TorchAO(QuantisedState):
    """Base in front of one of torchao's classes: learning rates are numbers, and a CPU does not compile."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; torchao makes its learning rate a tensor, and this a number again."""
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = float(self.param_groups[-1]["lr"])

    def step(self, closure: Any = None) -> Any:
        """Takes a step."""
        loss = run_closure(closure)
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        rates = [group["lr"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                super().step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss


class Adam8bit(_TorchAO, torchao_optim.Adam8bit):
    """Adam with moments of 8 bits."""


class Adam4bit(_TorchAO, torchao_optim.Adam4bit):
    """Adam with moments of 4 bits."""

    bits = 4


class AdamFp8(_TorchAO, torchao_optim.AdamFp8):
    """Adam with moments in fp8 (e4m3)."""

    bits = "fp8"


class AdamW8bit(_TorchAO, torchao_optim.AdamW8bit):
    """AdamW with moments of 8 bits."""


class AdamW4bit(_TorchAO, torchao_optim.AdamW4bit):
    """AdamW with moments of 4 bits."""

    bits = 4


class AdamWFp8(_TorchAO, torchao_optim.AdamWFp8):
    """AdamW with moments in fp8 (e4m3)."""

    bits = "fp8"


class Lamb8bit(QuantisedState, BoundedLamb):
    """LAMB with moments of 8 bits.

    Args:
        params: Parameters, or parameter groups.
        block_size: Number of consecutive elements with one scale; None for 256, or 128 with 4 bits.
        trust_bounds: Smallest and largest trust ratio; None for no bounds.
        **options: Other arguments of :class:`~dlo_plugins.optimizers.lamb.BoundedLamb`.

    Raises:
        DloError: A value is out of range.
    """

    bits = 8

    def __init__(
        self,
        params: Any,
        *,
        block_size: int | None = None,
        trust_bounds: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        self.block_size = block_size or (128 if self.bits == 4 else 256)
        if self.block_size < 2 or self.block_size % 2:
            raise DloError(f"block_size of {type(self).__name__} must be even and positive, got {block_size}; use 256")
        super().__init__(params, trust_bounds=trust_bounds, **options)

    def new_moment(self, parameter: Tensor, *, signed: bool) -> Tensor:
        """Returns a moment of a parameter, zeros, quantised if it is large enough."""
        return make_buffer(parameter, self.bits, signed=signed, block_size=self.block_size)


class Lamb4bit(Lamb8bit):
    """LAMB with moments of 4 bits."""

    bits = 4

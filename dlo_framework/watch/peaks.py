"""Peak FLOP/s of accelerators for dense matrix products, from their data sheets.

Sources, all by NVIDIA: the data sheets of V100, T4, A10, A10G, A40, A100, L4, L40, L40S, H100, H200, GH200, and of
Blackwell (HGX B200, GB200 NVL72); the white papers of GA102 (RTX A6000, RTX 3090), Ada (RTX 4090), Hopper (H100) and
RTX Blackwell (RTX 5090). Where a source gives a rate with sparsity only, the table has half of it. GeForce cards have
two rates in half precision: torch accumulates in single precision, which has the lower one. In double precision the
rate is that of tensor cores, where they support it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from lightning.fabric.utilities.throughput import get_available_flops


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
        single = peak.tf32 or peak.fp32 if tf32 else peak.fp32
        rates = {torch.bfloat16: peak.bf16, torch.float16: peak.fp16, torch.float32: single, torch.float64: peak.fp64}
        rate = rates.get(dtype)
        return None if rate is None else rate * 1e12
    plain = _plain(name)
    if _LESS.search(plain) or (dtype is not torch.float32 and _WITHOUT_TENSOR_CORES.search(plain)):
        return None
    try:
        found = get_available_flops(device, dtype)
    except RuntimeError:  # It reads torch's old setting of TF32, which fails where the new one has been used.
        return None
    return float(found) if found else None


def _plain(name: str) -> str:
    """Returns a name in lower case, its parts separated by spaces: V100-SXM2-16GB becomes v100 sxm2 16gb."""
    return re.sub(r"[^a-z0-9.]+", " ", name.lower())

"""The option `attention:` of tasks: a kernel and a mask; and the choice of a kernel for a machine and a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.errors import DloError, check_choice
from dlo_framework.models.attention.attention_mask import AttentionMask
from dlo_framework.models.attention.sparsity_patterns import SparsityPattern, pattern_from_settings

KernelChoice = Literal["auto", "blocks", "flex", "sdpa", "flash", "cudnn", "varlen", "eager"]

#: Kernels that compute a sparse mask.
_SPARSE = ("blocks", "flex", "sdpa")
#: Compute capabilities from which FlashAttention-2 and cuDNN's attention run.
_LEAST = {"flash": (8, 0), "cudnn": (8, 0), "varlen": (8, 0), "flex": (7, 0)}


class Attention:
    """Attention of a model: the kernel that computes it, and its mask.

    Args:
        kernel: Kernel. `auto` chooses one for the device and the mask. `blocks`: gathered blocks, on any device;
            `flex`: FlexAttention, compiled, on CUDA; `sdpa`: torch's scaled_dot_product_attention, with a dense mask
            where one is needed; `flash` and `cudnn`: its backends of these names, on CUDA, without a mask; `varlen`:
            packed documents without a mask, for language models; `eager`: the model's own operations, without a mask.
        mask: Sparsity pattern: `{class_path: BSLongformer, init_args: {...}}`; None for the model's own attention.

    Raises:
        DloError: If the kernel is unknown, or does not compute the mask.
    """

    def __init__(self, kernel: KernelChoice = "auto", mask: SparsityPattern | None = None) -> None:
        names = get_args(KernelChoice)
        check_choice("attention.kernel", kernel, names)
        if mask is not None and not mask.is_dense and kernel not in ("auto", *_SPARSE):
            raise DloError(
                f"attention.kernel must be auto, {', '.join(_SPARSE)} with a sparse mask, got {kernel} with"
                f" {type(mask).__name__}; set kernel: auto"
            )
        self.kernel: KernelChoice = kernel
        self.mask = mask

    def settings(self) -> dict[str, Any]:
        """Returns this option as plain data, for checkpoints; :meth:`from_settings` reads it."""
        if self.mask is None:
            return {"kernel": self.kernel}
        return {"kernel": self.kernel, "mask": {"name": type(self.mask).__name__, **self.mask.settings()}}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Attention:
        """Builds the option from :meth:`settings`.

        Raises:
            DloError: If the mask's class is not imported.
        """
        mask = settings.get("mask")
        if isinstance(mask, Mapping):
            mask = pattern_from_settings(mask["name"], {key: value for key, value in mask.items() if key != "name"})
        return cls(settings.get("kernel", "auto"), mask)


class Kernel(NamedTuple):
    """Chosen kernel.

    Attributes:
        name: Name, one of :data:`KernelChoice`.
        reason: Reason of the choice, a clause.
    """

    name: str
    reason: str


def choose_kernel(
    wanted: KernelChoice,
    mask: AttentionMask,
    device: torch.device,
    dtype: torch.dtype,
    *,
    dropout: bool,
    plain_scores: bool = True,
    biased: bool = False,
) -> Kernel:
    """Returns the kernel that computes a mask.

    Args:
        wanted: Kernel of the config.
        mask: Mask.
        device: Device of the run.
        dtype: Precision of queries, keys and values.
        dropout: Whether attention weights have dropout.
        plain_scores: Whether scores are products of queries and keys, without a soft cap and sinks.
        biased: Whether a bias of positions, a dense matrix, is added to the scores.

    Raises:
        DloError: If the wanted kernel does not run on the device, or not with dropout, a soft cap, sinks or a bias.
    """
    if biased:
        if wanted not in ("auto", "sdpa"):
            raise DloError(
                f"attention.kernel must be auto or sdpa for scores with a bias of positions, got {wanted}; set kernel:"
                " auto"
            )
        return Kernel("sdpa", "its bias of positions is a dense matrix, which a mask does not shorten")
    if not plain_scores and wanted not in ("auto", "blocks", "sdpa"):
        raise DloError(
            f"attention.kernel must be auto, blocks or sdpa for soft-capped scores and sinks, got {wanted}; set kernel:"
            " auto"
        )
    if wanted != "auto":
        _check_kernel(wanted, device, dtype, dropout=dropout)
        return Kernel(wanted, "the config sets it")
    kind = type(mask.pattern).__name__
    if mask.pattern.is_dense:
        return Kernel("sdpa", "its backends skip nothing that this mask allows")
    if not plain_scores:
        return Kernel("blocks", f"fused kernels have no soft caps and sinks, and {kind} leaves out blocks")
    if dropout:
        return Kernel("blocks", f"FlexAttention has no dropout of weights, and {kind} leaves out blocks")
    if device.type == "cuda":
        return Kernel("flex", f"FlexAttention skips the blocks that {kind} leaves out")
    return Kernel("blocks", f"FlexAttention does not train on {device.type}, and {kind} leaves out blocks")


def _check_kernel(name: str, device: torch.device, dtype: torch.dtype, *, dropout: bool) -> None:
    least = _LEAST.get(name)
    if least is not None:
        on_cuda = device.type == "cuda" and torch.version.cuda is not None
        if not on_cuda or torch.cuda.get_device_capability(device) < least:
            raise DloError(
                f"attention.kernel must run on {device.type}, got {name}, which needs a CUDA device of compute"
                f" capability {least[0]}.{least[1]}; set kernel: auto"
            )
        if name in ("flash", "cudnn") and dtype not in (torch.bfloat16, torch.float16):
            raise DloError(
                f"attention.kernel must compute {dtype}, got {name}, which is for half precision; set kernel: auto, or"
                " the Trainer's precision: bf16-mixed"
            )
    if name == "flex" and dropout:
        raise DloError(
            "attention.kernel must have dropout for this model, got flex, which has none; set kernel: auto, or the"
            " model's attention dropout to 0"
        )


def log_choice(kernel: Kernel, mask: AttentionMask | None, length: int | None = None) -> None:
    """Logs the kernel, the reason and the mask, on the first rank; the caller does so once a run.

    Args:
        kernel: Chosen kernel.
        mask: Mask; None for the model's own.
        length: Positions of a sequence, for the share of blocks that are computed.
    """
    what = "" if mask is None else f"; mask {mask.pattern}"
    if mask is not None and length:
        what += f", {mask.density(length):.0%} of the blocks of {length} positions"
    rank_zero_info(f"attention: {kernel.name}, because {kernel.reason}{what}")

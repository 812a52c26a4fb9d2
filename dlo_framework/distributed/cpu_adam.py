"""Adam and AdamW for parameters in CPU memory, by a kernel that is compiled for this CPU.

torch's fused kernel divides twice an element and has vectors of 256 bits, so that on a fast core it computes for
longer than it reads. `cpu_adam.c` divides once and is compiled with all of the CPU's instructions, in 0.3 seconds, by
the system's C compiler. State and step counts are those of torch's AdamW, in the same places.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Adam, AdamW, Optimizer

from dlo_framework.distributed.step_override import StepOverride, take_bare_step

SOURCE = Path(__file__).with_suffix(".c")
#: No error numbers or traps: with them a compiler makes no vectors of square roots.
FLAGS = (
    "-O3",
    "-march=native",
    "-funroll-loops",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_COMPILERS = ("cc", "gcc", "clang")
_ARGUMENTS = [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_int] + [ctypes.c_float] * 9

Kernel = Callable[..., None]


@functools.cache
def build_kernel() -> Kernel | str:
    """Returns the kernel, or why it cannot be built.

    It is built once a process in a temporary folder, and loaded: a file that is kept could meet another CPU.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        return f"none of the C compilers {', '.join(_COMPILERS)} is installed"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cpu_adam.so"
        command = [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(library), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            kernel = ctypes.CDLL(str(library)).adam_step
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            return f"{compiler} fails: {reason[0] if reason else error}"
    kernel.argtypes, kernel.restype = _ARGUMENTS, None
    return kernel


def use_cpu_kernel(optimizer: Optimizer) -> bool:
    """Makes torch's Adam or AdamW step with the compiled kernel where it can, and logs which kernel it is.

    A step that the kernel does not compute is torch's own: the first of a parameter, whose state it creates; with
    ``amsgrad`` or ``maximize``; of tensors that are not fp32, not in CPU memory or not dense.

    Returns:
        Whether the kernel has been built.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW):
        return False
    kernel = build_kernel()
    if isinstance(kernel, str):
        rank_zero_info(f"{name} of parameters in CPU memory steps by torch's fused kernel, because {kernel}")
        return False
    rank_zero_info(f"{name} of parameters in CPU memory steps by a kernel compiled for this CPU")
    StepOverride(optimizer, lambda: _step(optimizer, kernel))
    return True


def _step(optimizer: Optimizer, kernel: Kernel) -> None:
    updates = [(group, _tensors(optimizer, group)) for group in optimizer.param_groups]
    if getattr(optimizer, "found_inf", None) is not None or any(tensors is None for _, tensors in updates):
        return take_bare_step(optimizer)
    threads = torch.get_num_threads()
    for group, tensors in updates:
        if not tensors:
            continue
        counts = [state["step"] for _, state in tensors]
        torch._foreach_add_(counts, 1)
        for (parameter, state), count in zip(tensors, counts, strict=True):
            assert parameter.grad is not None
            tensors_of = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            pointers = (tensor.data_ptr() for tensor in tensors_of)
            kernel(*pointers, parameter.numel(), threads, *_scalars(group, int(count), isinstance(optimizer, AdamW)))
            increment_version((parameter, state["exp_avg"], state["exp_avg_sq"]))  # A backward with old values fails.


def _scalars(group: dict[str, Any], step: int, decoupled: bool) -> tuple[float, ...]:
    """Returns the kernel's arguments from `beta1` on."""
    rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - rate * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        rate / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
    )


def _tensors(optimizer: Optimizer, group: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]] | None:
    """Returns the parameters of a group with gradients, and their state; None if the kernel cannot step them."""
    values = (group["lr"], group["weight_decay"], *group["betas"])
    if group["amsgrad"] or group["maximize"] or any(isinstance(value, Tensor) for value in values):
        return None
    found = []
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state = optimizer.state.get(parameter, {})
        if not _fits(parameter, parameter.grad, state):
            return None
        found.append((parameter, state))
    return found


def _fits(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether a parameter, its gradient and its moments are dense fp32 tensors of one layout in CPU memory."""
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return False
    tensors: list[Tensor] = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.dtype != torch.float32 for t in tensors):
        return False
    if any(t.layout != torch.strided or t.device.type != "cpu" for t in tensors):
        return False
    stride = parameter.stride()
    if any(t.stride() != stride for t in tensors[1:]):
        return False
    return parameter.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))

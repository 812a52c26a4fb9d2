"""Autocast of an accelerator on fake tensors of a CPU, and the weights that it casts.

CPUs and GPUs have lists of their own: a GPU computes norms, softmax and powers in single precision, a CPU in the dtype
of the operands. Fake tensors of a GPU would have its list, but torch (2.11 to 2.15) cannot run their backward without
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALF = (torch.bfloat16, torch.float16)
#: Functions that autocast computes in single precision on a GPU (torch.amp, "CUDA Ops that can autocast to float32").
#: Left out are a few losses for pairs and margins.
_SINGLE = {
    *("layer_norm", "group_norm", "rms_norm", "normalize", "norm", "softmax", "log_softmax", "softmin", "softplus"),
    *(
        "pow",
        "square",
        "__pow__",
        "__rpow__",
        "__rtruediv__",
        "__rdiv__",
        "exp",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "reciprocal",
    ),
    *("rsqrt", "sum", "prod", "cumsum", "cumprod", "cosine_similarity", "cdist", "dist", "tan", "sinh", "cosh"),
    *("acos", "asin", "erfinv", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "kl_div", "mse_loss"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "cosine_embedding_loss", "margin_ranking_loss"),
}


@contextlib.contextmanager
def device_autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Chooses the dtypes of operations as autocast does on a type of device, for fake tensors of a CPU.

    Args:
        device: Type of the device.
        dtype: Dtype of matrix products; None for no autocast.
    """
    if dtype is None:
        yield
        return
    single = contextlib.nullcontext() if device == "cpu" else _SingleFunctions()
    with torch.autocast("cpu", dtype=dtype), single:
        yield


class _SingleFunctions(TorchFunctionMode):
    """Mode in which functions of the GPU's list get operands in single precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _SINGLE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_single, (args, kwargs))
        return func(*args, **kwargs)


def _single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf


class CastWeights(TorchDispatchMode):
    """Mode that finds the parameters that autocast casts to half precision; enter it inside a `FakeTensorMode`.

    Args:
        module: Module with fake parameters.
        stack: Modules whose forward is running, the innermost last.

    Attributes:
        found: Names of the parameters. Of tied ones only those of the modules that cast them.
    """

    def __init__(self, module: nn.Module, stack: list[nn.Module]) -> None:
        super().__init__()
        self._stack = stack
        self._names: Mapping[int, str] = {id(part): name for name, part in module.named_modules()}
        self._owners: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name)
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in _HALF:
            names = self._owners.get(id(args[0]), [])
            running = self._names.get(id(self._stack[-1])) if self._stack else None
            own = [name for name in names if name.rpartition(".")[0] == running] if len(names) > 1 else names
            self.found.update(own)
        return func(*args, **(kwargs or {}))


def cast_parameters(module: nn.Module, names: set[str], dtype: torch.dtype) -> None:
    """Replaces fake parameters by ones of another dtype; a tied one only where its module is named."""
    made: dict[int, nn.Parameter] = {}
    for name in sorted(names):
        parent, _, key = name.rpartition(".")
        owner = module.get_submodule(parent)
        old = owner._parameters[key]
        assert old is not None
        if id(old) not in made:
            made[id(old)] = nn.Parameter(torch.empty_like(old, dtype=dtype), requires_grad=old.requires_grad)
        owner._parameters[key] = made[id(old)]

"""How FSDP's own mixed precision goes with the Trainer's.

The Trainer's ``precision`` stays what it is in a single process: ``bf16-mixed`` and ``16-mixed`` compute by autocast
on parameters in single precision, so that the losses are those of a single process. On top of it, ``param_dtype``
gathers parameters in half precision, which halves what passes and the memory of what is gathered; it rounds what
autocast leaves in single precision (embeddings, norms' weights), so that the losses are no longer quite the same.

Gathered in single precision, each weight is cast by autocast, and autograd keeps the cast until backward: 2 bytes a
parameter of the whole model that no number of ranks divides. So on an accelerator ``bf16-mixed`` gathers in bfloat16
by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from dlo_framework.errors import DloError, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "32": "float32", "bf16": "bfloat16", "fp16": "float16", "16": "float16"}

#: The Trainer's precision, and what parameters can be gathered in under it.
_COMPUTE = {
    "32-true": ("float32", "bfloat16", "float16"),
    "bf16-mixed": ("float32", "bfloat16"),
    "16-mixed": ("float32", "float16"),
    "bf16-true": ("bfloat16",),
    "16-true": ("float16",),
}


def dtype_of(option: str, name: str | None) -> torch.dtype | None:
    """Returns the dtype that a config names.

    Raises:
        DloError: for another name.
    """
    if name is None:
        return None
    name = _SHORT.get(name, name).removeprefix("torch.")
    if name not in DTYPES:
        raise DloError(f"unknown {option} '{name}'{did_you_mean(name, DTYPES) or ';'} available: {', '.join(DTYPES)}")
    return DTYPES[name]


def mixed_precision(
    precision: str, param_dtype: str | None, reduce_dtype: str | None, output_dtype: str | None
) -> MixedPrecisionPolicy:
    """Returns FSDP's policy.

    Args:
        precision: the Trainer's.
        param_dtype: what parameters are gathered and computed in; None for their own.
        reduce_dtype: what gradients are summed in; None for the parameters' own dtype, whatever they are gathered in.
        output_dtype: what the module's outputs are cast to; None leaves them.

    Raises:
        DloError: if they contradict each other.
    """
    given = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "output_dtype": output_dtype}
    dtypes = {option: dtype_of(option, name) for option, name in given.items()}
    param = dtypes["param_dtype"]
    if param is not None:
        if precision not in _COMPUTE:
            raise DloError(f"precision {precision} and param_dtype {param_dtype} do not go together; leave one out")
        possible = [DTYPES[name] for name in _COMPUTE[precision]]
        if param not in possible:
            raise DloError(
                f"precision {precision} computes in another dtype than param_dtype {param_dtype}; leave param_dtype"
                f" out, or use {' or '.join(_COMPUTE[precision])}"
            )
    if param == torch.float16 and precision != "16-mixed":
        raise DloError(
            f"param_dtype float16 needs a loss scale, which precision {precision} does not have; set the trainer's"
            " precision to 16-mixed, or param_dtype to bfloat16"
        )
    reduce = dtypes["reduce_dtype"]
    if reduce is None and param is not None:
        reduce = torch.float32  # What torch 2.15 does by itself; before, it summed in the gathered dtype.
    casts = param is not None and not precision.endswith("-mixed")  # Autocast does, and leaves targets as they are.
    return MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce, output_dtype=dtypes["output_dtype"], cast_forward_inputs=casts
    )


def default_param_dtype(precision: str, device: torch.device, module: nn.Module | None = None) -> str | None:
    """Returns what parameters are gathered in where a config does not say; None for their own dtype.

    Args:
        precision: the Trainer's.
        device: where this rank computes.
        module: where all of it would be gathered so; one with batch norm keeps single precision: it does not take
            weights in half precision beside statistics in single precision.
    """
    if precision != "bf16-mixed" or device.type == "cpu":
        return None
    return None if module is not None and has_batch_norm(module) else "bfloat16"


def has_batch_norm(module: nn.Module) -> bool:
    """Returns whether any part of a module is a batch norm."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def of_unit(policy: MixedPrecisionPolicy, trained: Mapping[str, Tensor], units: list[str]) -> MixedPrecisionPolicy:
    """Returns the policy of one unit: complex gradients are summed as they are, for ``reduce_dtype`` is a real one.

    Args:
        policy: of all units.
        trained: the unit's parameters that train, by name.
        units: the names of all units.

    Raises:
        DloError: if they have several dtypes: FSDP2 (torch 2.11 to 2.15) sums a unit's gradients in one buffer.
    """
    dtypes = {parameter.dtype: name for name, parameter in reversed(list(trained.items()))}
    if len(dtypes) > 1:
        (one, name), (other, another), *_ = reversed(dtypes.items())
        odd = {n for n, parameter in trained.items() if parameter.dtype != one}
        homes = dict.fromkeys(n.rpartition(".")[0] for n in odd)
        apart = sorted(home for home in homes if home and not _holds(home, trained.keys() - odd))
        named = f"units: [{', '.join([*units, *apart])}]" if apart else "units"
        raise DloError(
            f"FSDP2 sums the gradients of one unit in one dtype, but {name} is {str(one).removeprefix('torch.')} and"
            f" {another} {str(other).removeprefix('torch.')}; let modules that hold one dtype alone be units of their"
            f" own ({named}), or use strategy zero3, which takes any"
        )
    return replace(policy, reduce_dtype=None) if any(dtype.is_complex for dtype in dtypes) else policy


def _holds(module: str, names: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for name in names)

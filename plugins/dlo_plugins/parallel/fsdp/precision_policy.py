"""Combines FSDP's mixed precision with the Trainer's.

The Trainer's ``precision`` means the same as in a single process: ``bf16-mixed`` and ``16-mixed`` compute by autocast
on parameters in single precision, so that the losses equal those of a single process. In addition, ``param_dtype``
gathers parameters in half precision, which halves the all-gathers and the memory of gathered parameters. It also
rounds parameters that autocast leaves in single precision (embeddings, norms' weights), so that the losses differ
slightly.

When parameters are gathered in single precision, autocast casts each weight, and autograd keeps the cast until
backward: 2 bytes per parameter of the full model on each rank, for any number of ranks. So on an accelerator
``bf16-mixed`` gathers in bfloat16 by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dlo_framework.batches import tree_map_only
from dlo_framework.errors import DloError
from dlo_plugins.parallel.gathered_dtype import DTYPES, parse_dtype

#: The dtypes in which parameters can be gathered, by the Trainer's precision.
_COMPUTE = {
    "32-true": ("float32", "bfloat16", "float16"),
    "bf16-mixed": ("float32", "bfloat16"),
    "16-mixed": ("float32", "float16"),
    "bf16-true": ("bfloat16",),
    "16-true": ("float16",),
}


def mixed_precision(
    precision: str, param_dtype: str | None, reduce_dtype: str | None, output_dtype: str | None
) -> MixedPrecisionPolicy:
    """Returns FSDP's policy.

    Args:
        precision: Precision of the Trainer.
        param_dtype: Dtype in which parameters are gathered and computed; None for their own.
        reduce_dtype: Dtype in which gradients are summed; None for the parameters' own, even if they are gathered in
            another.
        output_dtype: Dtype to which the module's outputs are cast; None leaves them.

    Raises:
        DloError: The dtypes contradict each other.
    """
    given = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "output_dtype": output_dtype}
    dtypes = {option: parse_dtype(option, name) for option, name in given.items()}
    param = dtypes["param_dtype"]
    if param is not None:
        if precision not in _COMPUTE:
            raise DloError(
                f"precision must be {', '.join(_COMPUTE)} with a param_dtype, got precision {precision} and param_dtype"
                f" {param_dtype}; leave one out"
            )
        possible = [DTYPES[name] for name in _COMPUTE[precision]]
        if param not in possible:
            raise DloError(
                f"param_dtype must be {' or '.join(_COMPUTE[precision])} under precision {precision}, got"
                f" {param_dtype}; use that, or leave param_dtype out"
            )
    if param == torch.float16 and precision != "16-mixed":
        raise DloError(
            f"param_dtype float16 must come with a loss scale, got precision {precision}, which has none; set the"
            " trainer's precision to 16-mixed, or param_dtype to bfloat16"
        )
    reduce = dtypes["reduce_dtype"]
    if reduce is None and param is not None:
        reduce = torch.float32  # The default of torch 2.15; before, it summed in the gathered dtype.
    casts = param is not None and not precision.endswith("-mixed")  # Autocast casts too, and leaves targets alone.
    return MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce, output_dtype=dtypes["output_dtype"], cast_forward_inputs=casts
    )


def unit_policy(policy: MixedPrecisionPolicy, trained: Mapping[str, Tensor], units: list[str]) -> MixedPrecisionPolicy:
    """Returns the policy of one unit; complex gradients are summed in their own dtype, as ``reduce_dtype`` is real.

    Args:
        policy: Policy of all units.
        trained: Trainable parameters of the unit, by name.
        units: Names of all units.

    Raises:
        DloError: The unit has several dtypes, while FSDP2 (torch 2.11 to 2.15) sums its gradients in one buffer.
    """
    dtypes = {parameter.dtype: name for name, parameter in reversed(list(trained.items()))}
    if len(dtypes) > 1:
        (one, name), (other, another), *_ = reversed(dtypes.items())
        odd = {n for n, parameter in trained.items() if parameter.dtype != one}
        homes = {n.rpartition(".")[0] for n in odd} - {""}
        apart = sorted(home for home in homes if not any(n.startswith(f"{home}.") for n in trained.keys() - odd))
        named = f"units: [{', '.join([*units, *apart])}]" if apart else "units"
        raise DloError(
            "parameters of a unit must have one dtype under FSDP2, got"
            f" {str(one).removeprefix('torch.')} {name} and {str(other).removeprefix('torch.')} {another}; make modules"
            f" of one dtype units of their own ({named}), or use strategy zero3, which accepts any"
        )
    return replace(policy, reduce_dtype=None) if any(dtype.is_complex for dtype in dtypes) else policy


def cast_tensors(part: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Casts the floating-point inputs and outputs of a module that FSDP2 does not wrap, as its policy does."""

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)

    inputs, outputs = policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype
    if inputs is not None:
        part.register_forward_pre_hook(lambda _, *given: cast(given, inputs), with_kwargs=True)
    if outputs is not None:
        part.register_forward_hook(lambda *given: cast(given[-1], outputs))

"""Element types that a checkpoint stores, under torch's names and under those of safetensors."""

from __future__ import annotations

from functools import lru_cache

import torch

from dlo_framework.errors import DloError

#: torch's name -> the code in a safetensors header. Types without a code are stored as their bytes.
SAFETENSORS_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
#: Types that are stored as bytes: the last dim of the stored shape is an element's bytes.
AS_BYTES = ("complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")

_NAMES = {code: name for name, code in SAFETENSORS_CODES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a type without the ``torch.``, for example ``bfloat16``.

    Raises:
        DloError: if a checkpoint cannot store it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_CODES and name not in AS_BYTES:
        known = ", ".join([*SAFETENSORS_CODES, *AS_BYTES])
        raise DloError(f"a checkpoint cannot store tensors of {dtype}; convert it to one of: {known}")
    return name


@lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """Returns the type of a name from :func:`dtype_name`.

    Raises:
        DloError: if the name is unknown, or this build of torch lacks the type.
    """
    dtype = getattr(torch, name, None) if name in SAFETENSORS_CODES or name in AS_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise DloError(f"unknown element type {name!r} in a checkpoint; torch {torch.__version__} has no such dtype")
    return dtype


def from_safetensors_code(code: str) -> str:
    """Returns torch's name of a safetensors code.

    Raises:
        DloError: if the code is not known.
    """
    if code not in _NAMES:
        raise DloError(f"unknown element type {code!r} in a safetensors file; known: {', '.join(_NAMES)}")
    return _NAMES[code]

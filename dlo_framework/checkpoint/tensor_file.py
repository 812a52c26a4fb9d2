"""Writes safetensors files as a stream, and reads them by mapping them into memory.

The format (https://github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON
header with each tensor's byte range; the bytes, row-major, without gaps. The library's own writer needs all tensors in
memory at once; this one holds one bucket of 64 MB at a time, and computes the SHA-256 on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

#: torch's names of the codes in a header that has been read, in which types that are stored as bytes are codes too.
_NAMES = {code: name for name, code in SAFETENSORS_CODES.items()} | {name: name for name in AS_BYTES}


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


#: Longest valid header, safetensors' own limit.
MOST_HEADER_BYTES = 100_000_000
#: Entry of the header with the types that have no code in safetensors, and are stored as bytes.
_BYTE_TYPES = "dlo.types"


@dataclass(frozen=True)
class Stored:
    """Location of one tensor, or a slice of one, in a file.

    Attributes:
        dtype: Torch's name of the element type.
        shape: Shape of the tensor or slice.
        begin: First byte, counted from the file's start.
        end: Byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], about: dict[str, str]) -> bytes:
    """Returns a file's first bytes, up to its first tensor.

    Args:
        tensors: Name, dtype and shape of each, in the order of the file: larger elements first, so that all of them are
            aligned.
        about: Text for the header's ``__metadata__``.
    """
    tensors = list(tensors)
    bare = {name: dtype for name, dtype, _ in tensors if dtype not in SAFETENSORS_CODES}
    header: dict[str, Any] = {"__metadata__": {**about, **({_BYTE_TYPES: json.dumps(bare)} if bare else {})}}
    at = 0
    for name, dtype, shape in tensors:
        assert name not in header
        element = dtype_of(dtype).itemsize
        size = math.prod(shape) * element
        code = SAFETENSORS_CODES.get(dtype)
        dims = list(shape) if code else [*shape, element]
        header[name] = {"dtype": code or "U8", "shape": dims, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_memoryview(tensor: Tensor) -> memoryview:
    """Returns a tensor's elements as bytes: its own memory if it is contiguous and on the CPU, else a copy."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    # mypy on Python 3.11 does not know that arrays are buffers.
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Reads a safetensors file's header, and no tensor.

    Returns:
        The location of each tensor, and the header's ``__metadata__``.

    Raises:
        DloError: if it is not a safetensors file, or the header does not fit the file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
                raise DloError(f"{path} is not a safetensors file, or truncated: its {size} bytes hold no header")
            header = json.loads(file.read(length))
        about = header.pop("__metadata__", {})
        bare = json.loads(about.pop(_BYTE_TYPES, "{}"))
        for name, dtype in bare.items():
            header[name] = {**header[name], "dtype": dtype, "shape": header[name]["shape"][:-1]}
        stored = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except OSError as error:
        raise DloError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DloError):
            raise
        raise DloError(f"{path} is not a safetensors file, or damaged: {error}") from error
    return stored, about


def _stored(path: Path, name: str, entry: dict[str, Any], start: int, size: int) -> Stored:
    begin, end = (start + int(offset) for offset in entry["data_offsets"])
    code = entry["dtype"]
    if code not in _NAMES:
        raise DloError(f"unknown element type {code!r} in a safetensors file; known: {', '.join(_NAMES)}")
    stored = Stored(_NAMES[code], tuple(map(int, entry["shape"])), begin, end)
    need = math.prod(stored.shape) * dtype_of(stored.dtype).itemsize
    if min(stored.shape, default=0) < 0 or not start <= begin <= end <= size or end - begin != need:
        raise DloError(f"{path} is damaged or truncated: '{name}' does not fit the file's {size} bytes")
    return stored

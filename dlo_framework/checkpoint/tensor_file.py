"""Writes safetensors files as a stream, and reads them by mapping them into memory.

The format (https://github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON
header with each tensor's byte range; the bytes, row-major, without gaps. The library's own writer needs all tensors in
memory at once; this one holds one bucket of 64 MB at a time, and computes the SHA-256 on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.shards import BUCKET_BYTES, Box, byte_range, full_box, slice_view, split_box

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


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], about: dict[str, str]
) -> tuple[bytes, dict[str, Stored]]:
    """Computes a file's header and the location of each tensor.

    Args:
        tensors: Name, dtype and shape of each, in the order of the file: larger elements first, so that all of them are
            aligned.
        about: Text for the header's ``__metadata__``.

    Returns:
        The file's first bytes, and the location of each tensor.
    """
    tensors = list(tensors)
    bare = {name: dtype for name, dtype, _ in tensors if dtype not in SAFETENSORS_CODES}
    header: dict[str, Any] = {"__metadata__": {**about, **({_BYTE_TYPES: json.dumps(bare)} if bare else {})}}
    relative: dict[str, Stored] = {}
    at = 0
    for name, dtype, shape in tensors:
        assert name not in header
        element = dtype_of(dtype).itemsize
        size = math.prod(shape) * element
        code = SAFETENSORS_CODES.get(dtype)
        dims = list(shape) if code else [*shape, element]
        header[name] = {"dtype": code or "U8", "shape": dims, "data_offsets": [at, at + size]}
        relative[name] = Stored(dtype, tuple(shape), at, at + size)
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = {n: Stored(s.dtype, s.shape, s.begin + start, s.end + start) for n, s in relative.items()}
    return len(text).to_bytes(8, "little") + text, placed


class HashedFile:
    """New file that is hashed while it is written, and synced to the disk when it is closed.

    Args:
        path: Path of the file; an existing one is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  Closed by __exit__.
        self._hash = hashlib.sha256()
        self.bytes = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, content: bytes | memoryview) -> int:
        """Appends bytes."""
        self._hash.update(content)
        self._file.write(content)
        size = memoryview(content).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Flushes the buffer to the operating system."""
        self._file.flush()

    def write_tensor(self, tensor: Tensor, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Appends a tensor's elements, row-major; copies at most a bucket of them at a time."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        box = full_box(tuple(tensor.shape))
        for part in split_box(box, tensor.element_size(), bucket_bytes):
            self.write(memory_of(slice_view(tensor, box, part)))

    @property
    def sha256(self) -> str:
        """The hash of the bytes written so far, as hexadecimal digits."""
        return self._hash.hexdigest()


def memory_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's elements as bytes: its own memory if it is contiguous and on the CPU, else a copy."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    # mypy on Python 3.11 does not know that arrays are buffers.
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


class TensorFile:
    """Safetensors file (or any file of row-major tensors) that is mapped into memory.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: mmap.mmap | None = None
        self._streaming: mmap.mmap | None = None

    def tensor(self, stored: Stored) -> Tensor:
        """Returns a tensor on the file's own pages; writing to it changes this process's copy alone."""
        if self._mapped is None:
            self._mapped = self._map()
        return _map_tensor(self._mapped, stored)

    def copy_part(self, stored: Stored, box: Box, part: Box, target: Tensor) -> None:
        """Copies ``part`` of a tensor into ``target``, at most a bucket at a time, converting its dtype.

        Args:
            stored: Location of the elements of ``box``.
            box: Stored box, in coordinates of the full tensor.
            part: Box to copy, in coordinates of the full tensor.
            target: Tensor in the shape of ``part``, on any device.
        """
        if self._streaming is None:
            self._streaming = self._map()
        source = _map_tensor(self._streaming, stored)
        # The larger of the two types: a conversion makes a copy in the target's.
        element = max(source.element_size(), target.element_size())
        for piece in split_box(part, element):
            slice_view(target, part, piece).copy_(slice_view(source, box, piece))
            begin, end = byte_range(box, piece, source.element_size())
            self._release_pages(stored.begin + begin, stored.begin + end)

    def _release_pages(self, begin: int, end: int) -> None:
        """Releases pages that have been copied from the process's memory; the system may still cache them."""
        assert self._streaming is not None
        page = mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            start = begin // page * page
            self._streaming.madvise(
                mmap.MADV_DONTNEED, start, min(-(-end // page) * page, len(self._streaming)) - start
            )

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                # Copy on write: torch warns of memory that cannot be written. Without a reserve of memory for those
                # copies a file may be larger than the machine's memory.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
                return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise DloError(f"cannot read {self.path}: {error}") from error


def _map_tensor(mapped: mmap.mmap, stored: Stored) -> Tensor:
    dtype = dtype_of(stored.dtype)
    if stored.begin == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.begin % dtype.itemsize:
        # Files of other writers may be unaligned.
        raw = bytearray(memoryview(mapped)[stored.begin : stored.end])
        return torch.frombuffer(raw, dtype=dtype).view(stored.shape)
    return torch.frombuffer(mapped, dtype=dtype, count=math.prod(stored.shape), offset=stored.begin).view(stored.shape)


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
    stored = Stored(
        code if code in AS_BYTES else from_safetensors_code(code), tuple(map(int, entry["shape"])), begin, end
    )
    need = math.prod(stored.shape) * dtype_of(stored.dtype).itemsize
    if min(stored.shape, default=0) < 0 or not start <= begin <= end <= size or end - begin != need:
        raise DloError(f"{path} is damaged or truncated: '{name}' does not fit the file's {size} bytes")
    return stored

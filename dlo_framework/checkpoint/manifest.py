"""What a checkpoint's files hold: the manifest, and headers of safetensors files.

The manifest has the tensors, their location, and the hash of each file; it is written last. It is JSON, so reading it
executes nothing; its content is checked for consistency before use, because a checkpoint may come from an untrusted
source.

A tensor's chunks are lists: ``[shard, begin, offsets, sizes]``, where ``begin`` counts from the shard's ``data``, and
with ``length, dim, stride`` after these for a :class:`~dlo_framework.checkpoint.manifest.Run` of several. In format 1,
which is still read, each was a mapping of ``offsets``, ``sizes``, ``file``, ``begin`` and ``end``.

Tensors are in safetensors files, written as a stream, and read by mapping them into memory. The format
(https://github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON header with
each tensor's byte range; the bytes, row-major, without gaps. The library's own writer needs all tensors in memory at
once; this one holds one bucket of 64 MB at a time, and computes the SHA-256 on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.shards import Box, is_tiling, overlap

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


Key = tuple[str, str]


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor and its bytes ``[begin, end)`` in ``file``."""

    box: Box
    file: str
    begin: int
    end: int


class Run(NamedTuple):
    """Boxes of one size, contiguous along a dim, at the same offset of several files.

    Attributes:
        box: First box of the run.
        shard: Number of the first box's file.
        begin: Offset of the box, in bytes from the first tensor in the file; the same in all files.
        length: Number of boxes.
        dim: Dimension along which the boxes follow each other.
        stride: Difference between the numbers of successive files.
    """

    box: Box
    shard: int
    begin: int
    length: int = 1
    dim: int = 0
    stride: int = 1

    @property
    def shards(self) -> range:
        """The numbers of the files."""
        return range(self.shard, self.shard + self.length * self.stride, self.stride)

    @property
    def union(self) -> Box:
        """The union of the boxes."""
        offsets, sizes = self.box
        return self.box if self.length == 1 else Box(offsets, _with(sizes, self.dim, sizes[self.dim] * self.length))


class Runs(Collection[Chunk]):
    """Collection of a tensor's chunks, each constructed on access.

    Args:
        runs: Runs that the chunks belong to.
        element: Size of an element, in bytes.
        starts: {shard number: offset in bytes of the shard's first tensor}.
    """

    def __init__(self, runs: Sequence[Run], element: int, starts: Mapping[int, int]) -> None:
        self.runs = runs
        self._element, self._starts = element, starts

    def __len__(self) -> int:
        return sum(run.length for run in self.runs)

    def __contains__(self, chunk: object) -> bool:
        return chunk in list(self)

    def __iter__(self) -> Iterator[Chunk]:
        return (self._chunk(run, number) for run in self.runs for number in range(run.length))

    def overlapping(self, box: Box) -> Iterator[Chunk]:
        """Yields the chunks that overlap a box; the others cost nothing."""
        for run in self.runs:
            shared = overlap(run.union, box)
            if shared is None:
                continue
            first = last = 0
            if run.length > 1:
                at, size = shared.offsets[run.dim] - run.box.offsets[run.dim], run.box.sizes[run.dim]
                first, last = at // size, (at + shared.sizes[run.dim] - 1) // size
            yield from (self._chunk(run, number) for number in range(first, last + 1))

    def _chunk(self, run: Run, number: int) -> Chunk:
        shard = run.shards[number]
        begin = self._starts[shard] + run.begin
        box = next_box(run.box, run.dim, number) if number else run.box
        return Chunk(box, shard_name(shard), begin, begin + run.box.numel * self._element)


@dataclass
class SavedTensor:
    """Tensor in a checkpoint: its dtype, its shape, and the chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Collection[Chunk] = ()

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yields each chunk that overlaps a box, with the overlap."""
        for chunk in self.chunks.overlapping(box) if isinstance(self.chunks, Runs) else self.chunks:
            shared = overlap(chunk.box, box)
            if shared is not None:
                yield chunk, shared


def shard_name(number: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """Returns the number in a name made by :func:`shard_name`; None for other names."""
    digits = name.removeprefix("shard-").removesuffix(".safetensors")
    return int(digits) if digits.isdecimal() and shard_name(int(digits)) == name else None


def next_box(box: Box, dim: int, steps: int = 1) -> Box:
    """Returns the box of the same size that is one, or more, such sizes further along a dim."""
    offsets, sizes = box
    return Box(_with(offsets, dim, offsets[dim] + steps * sizes[dim]), sizes)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


MANIFEST = "manifest.json"
STATE = "state.pt"
FORMAT = 2
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_HASH = "manifest_sha256"
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass
class Manifest:
    """Content of a checkpoint's ``manifest.json``.

    Attributes:
        step: Optimizer steps done.
        epoch: Epoch of the save.
        world_size: Number of ranks that wrote it.
        time: Time of the save, in seconds since 1970.
        versions: Versions of dlo and torch.
        weights_only: True if it has no optimizer state, so that no run can resume from it.
        about: Description by the strategy: its name, its mesh, the config.
        tensors: {group: {name: tensor}}.
        files: {name: {"bytes": size, "sha256": hash}}; all files but the manifest. Of shards also "data": where
            their first tensor begins.
    """

    step: int
    epoch: int
    world_size: int
    time: float
    versions: dict[str, str]
    weights_only: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, SavedTensor]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(int(file["bytes"]) for file in self.files.values())


def to_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON, one line for each tensor, with a hash of all of it.

    The chunks of its tensors must be :class:`~dlo_framework.checkpoint.manifest.Runs`.
    """
    content = _content(manifest)
    lines = [f"{json.dumps(key)}: {_dumps(value)}" for key, value in content.items() if key != "tensors"]
    groups = []
    for group, tensors in content["tensors"].items():
        entries = ",\n".join(f"    {json.dumps(name)}: {_dumps(tensor)}" for name, tensor in tensors.items())
        groups.append(f"  {json.dumps(group)}: {{\n{entries}\n  }}")
    lines.append('"tensors": {\n' + ",\n".join(groups) + "\n}")
    lines.append(f'"{_OWN_HASH}": "{_hash(content)}"')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Returns the manifest in the content of a file, and checks that it is consistent.

    Args:
        text: Content of the file.
        path: Path of the file, for errors.

    Raises:
        DloError: if it is damaged, or of a later version.
    """
    try:
        content = json.loads(text)
        own_hash = content.pop(_OWN_HASH)
        version = content["format"]
        if isinstance(version, int) and version > FORMAT:
            raise DloError(f"{path}: format must be at most {FORMAT}, got {version}; update dlo")
        if own_hash != _hash(content):
            raise DloError(f"damaged checkpoint: the SHA-256 of {path} differs from the recorded one")
        return _parse(content)
    except DloError:
        raise
    except Exception as error:  # Damaged bytes raise anything.
        raise DloError(f"damaged checkpoint: {path} cannot be read ({error})") from None


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _content(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "time": manifest.time,
        "versions": manifest.versions,
        "weights_only": manifest.weights_only,
        # Keys and paths become text, as in JSON, so that the hash is that of what is read back.
        "about": json.loads(json.dumps(manifest.about, default=str)),
        "files": manifest.files,
        "tensors": {
            group: {name: _tensor_content(tensor) for name, tensor in tensors.items()}
            for group, tensors in manifest.tensors.items()
        },
    }


def _tensor_content(tensor: SavedTensor) -> dict[str, Any]:
    assert isinstance(tensor.chunks, Runs)
    chunks = [(run.shard, run.begin, *run.box, *(run[3:] if run.length > 1 else ())) for run in tensor.chunks.runs]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}


def _parse(content: dict[str, Any]) -> Manifest:
    files = content["files"]
    for name, file in files.items():
        _check(_FILE_NAME.fullmatch(name) is not None, f"'{name}' is not a plain file name")
        _check(isinstance(file["bytes"], int) and isinstance(file["sha256"], str), f"'{name}' has no size or hash")
    shards = _Shards(files, has_starts=content["format"] > 1)
    return Manifest(
        step=int(content["step"]),
        epoch=int(content["epoch"]),
        world_size=int(content["world_size"]),
        time=float(content["time"]),
        versions=dict(content["versions"]),
        weights_only=bool(content["weights_only"]),
        about=dict(content["about"]),
        tensors={
            group: {name: shards.parse_tensor(name, tensor) for name, tensor in named.items()}
            for group, named in content["tensors"].items()
        },
        files=files,
    )


class _Shards:
    """Shard files that a manifest lists, by number.

    Args:
        files: Files of the manifest.
        has_starts: Whether the manifest says where the first tensor of each begins; in format 1 it does not, and chunks
            count from the file's start.
    """

    def __init__(self, files: dict[str, dict[str, Any]], has_starts: bool) -> None:
        by_number = {number: file for name, file in files.items() if (number := shard_number(name)) is not None}
        self._starts = {number: int(file["data"]) if has_starts else 0 for number, file in by_number.items()}
        self._sizes = {number: file["bytes"] - self._starts[number] for number, file in by_number.items()}
        _check(min(self._starts.values(), default=0) >= 0, "a shard's data begin before its file")
        self._least: dict[range, int] = {}

    def parse_tensor(self, name: str, content: dict[str, Any]) -> SavedTensor:
        """Returns a tensor, whose chunks are checked to fit in their files and to tile it."""
        shape, element, runs = tuple(map(int, content["shape"])), dtype_of(content["dtype"]).itemsize, []
        for entry in content["chunks"]:
            shard, begin, offsets, sizes, *repeat = _of_format_1(entry, element) if isinstance(entry, dict) else entry
            length, dim, stride = map(int, repeat or (1, 0, 1))
            box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
            _check(len(box.offsets) == len(box.sizes) == len(shape), f"a chunk of '{name}' has another number of dims")
            _check(min(box.sizes, default=1) > 0 and length > 0, f"a chunk of '{name}' is empty")
            _check(
                length == 1 or 0 <= dim < len(shape),
                f"the chunks of '{name}' follow each other along a dim that it does not have",
            )
            _check(stride > 0, f"the chunks of a run of '{name}' are in one file")
            run = Run(box, int(shard), int(begin), length, dim, stride)
            room = self._smallest_size(name, run.shards)
            _check(0 <= run.begin <= room - box.numel * element, f"'{name}' is outside its file")
            runs.append(run)
        _check(min(shape, default=0) >= 0, f"'{name}' has a negative size")
        _check(is_tiling(shape, [run.union for run in runs]), f"the chunks of '{name}' do not tile it")
        return SavedTensor(content["dtype"], shape, Runs(runs, element, self._starts))

    def _smallest_size(self, name: str, numbers: range) -> int:
        """Returns the bytes of the tensors in the smallest of some shards."""
        if numbers not in self._least:
            lacking = next((number for number in numbers if number not in self._sizes), None)
            if lacking is not None:
                raise ValueError(f"'{name}' is in '{shard_name(lacking)}', which the manifest does not list")
            self._least[numbers] = min(self._sizes[number] for number in numbers)
        return self._least[numbers]


def _of_format_1(entry: dict[str, Any], element: int) -> list[Any]:
    """Returns a chunk of format 1 as one of the current format."""
    number = shard_number(entry["file"])
    _check(number is not None, f"'{entry['file']}' is not a shard")
    size = math.prod(map(int, entry["sizes"])) * element
    _check(int(entry["end"]) - int(entry["begin"]) == size, f"a chunk of '{entry['file']}' has the wrong size")
    return [number, entry["begin"], entry["offsets"], entry["sizes"]]


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)

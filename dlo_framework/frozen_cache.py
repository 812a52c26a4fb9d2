"""Outputs of a second model on disk, a record for each sample, keyed by the content of its inputs.

A cache is a folder: `cache.json` with the fingerprint of the model, and segments, one for each process that has
written. A process appends records to its own segment only, so that no two write one file, and reads those of all. A
record begins with its length and ends with a checksum: what a kill has cut off is not read, and is computed again.

The key of a sample is 128 bits of its inputs' bytes, dtypes and shapes: two sums of products with pseudo-random odd
numbers, modulo 2^64. They are computed on the device, and only the keys are copied to the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from dlo_framework.atomic_file import open_atomic
from dlo_framework.batches import find_batch_size, leaves, map_leaves, rebuild
from dlo_framework.errors import DloError

#: File with the fingerprint.
INFO = "cache.json"
#: Ending of a segment.
SEGMENT = ".records"
#: Start of a record: mark, key, bytes of the header, bytes of the values.
_START = struct.Struct("<4s16sII")
_MARK, _CHECKSUM = b"dlo1", struct.Struct("<I")
#: Offsets of the two sums' pseudo-random numbers, so that they are independent.
_SUMS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def sample_keys(inputs: Any, salt: str = "") -> list[bytes]:
    """Returns the key of each sample of a nest of inputs.

    Args:
        inputs: Tensors ``[B, ...]`` in dicts, lists and tuples; None is allowed.
        salt: Text that is part of every key.

    Raises:
        DloError: A value is not a tensor with an entry for each sample, so that samples cannot be told apart.
    """
    rows = find_batch_size(inputs)
    found = [leaf for leaf in leaves(inputs) if leaf is not None]
    wrong = next((leaf for leaf in found if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows), None)
    if rows is None or wrong is not None:
        what = f"a tensor of shape {list(wrong.shape)}" if isinstance(wrong, Tensor) else f"a {type(wrong).__name__}"
        raise DloError(
            f"inputs of a second model with a cache must be tensors with an entry for each of {rows or 0} samples, got"
            f" {what}; override cached_inputs of the task, or leave cache out"
        )
    sums = [torch.zeros(rows, dtype=torch.int64, device=found[0].device) for _ in _SUMS]
    described = salt
    for leaf in found:
        described += f"|{leaf.dtype}{list(leaf.shape[1:])}"
        words = _words(leaf)
        for number, start in enumerate(_SUMS):
            weights = _odd_numbers(words.shape[1], _signed(start), words.device)
            sums[number] = sums[number] * 31 + (words * weights).sum(dim=1)
    kind = hashlib.sha256(described.encode()).digest()
    return [hashlib.sha256(kind + struct.pack("<qq", *pair)).digest()[:16] for pair in torch.stack(sums, 1).tolist()]


def _words(leaf: Tensor) -> Tensor:
    """Returns the bytes of each sample as 64-bit words, ``[B, W]``; the last is filled with zeros."""
    flat = leaf.detach().reshape(len(leaf), -1).contiguous()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    octets = flat.view(torch.uint8)
    if octets.shape[1] % 8:
        octets = torch.nn.functional.pad(octets, (0, 8 - octets.shape[1] % 8))
    return octets.contiguous().view(torch.int64)


def _odd_numbers(count: int, start: int, device: torch.device) -> Tensor:
    """Returns pseudo-random odd 64-bit numbers: those of SplitMix64 (Steele, Lea & Flood, 2014)."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GOLDEN + start
    state = (state ^ _shift(state, 30)) * _MIX1
    state = (state ^ _shift(state, 27)) * _MIX2
    return (state ^ _shift(state, 31)) | 1


def _shift(value: Tensor, bits: int) -> Tensor:
    """Returns a logical shift to the right; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class OutputCache:
    """Cache of outputs in a folder, which any number of processes read and write.

    Args:
        folder: Folder; created if it does not exist.
        fingerprint: Description of the model whose outputs it holds, as plain data.

    Raises:
        DloError: The folder has the outputs of another model, or cannot be written.
    """

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self._claim(fingerprint)
        self._index: dict[bytes, tuple[Path, int, int, int]] = {}
        self._read_to: dict[Path, int] = {}
        self._files: dict[Path, int] = {}
        self._own: int | None = None
        self.refresh()

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        path = self.folder / INFO
        text = json.dumps(fingerprint, sort_keys=True, indent=2)
        try:
            if not path.exists():
                with open_atomic(path, shared=True) as partial:
                    partial.write_text(text)
            found = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise DloError(f"cache must be a folder that can be written, got {self.folder}: {error}") from error
        if found != json.loads(text):
            differs = [key for key in sorted({*found, *fingerprint}) if found.get(key) != fingerprint.get(key)]
            shown = ", ".join(
                f"{key} {_short(found.get(key))} instead of {_short(fingerprint.get(key))}" for key in differs
            )
            raise DloError(
                f"cache must hold the outputs of this second model, got {self.folder} of another ({shown}); choose"
                " another folder"
            )

    def refresh(self) -> None:
        """Reads which records other processes have added."""
        for path in sorted(self.folder.glob(f"*{SEGMENT}")):
            begin = self._read_to.get(path, 0)
            if path.stat().st_size > begin:
                self._read_to[path] = self._scan(path, begin)

    def _scan(self, path: Path, begin: int) -> int:
        """Indexes the complete records of a segment from an offset; returns the offset of their end."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while begin + _START.size <= size:
                file.seek(begin)
                mark, key, header, values = _START.unpack(file.read(_START.size))
                end = begin + _START.size + header + values + _CHECKSUM.size
                if mark != _MARK or end > size:
                    break  # Being written, or cut off by a kill.
                self._index.setdefault(key, (path, begin, header, values))
                begin = end
        return begin

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def read(self, key: bytes) -> Any:
        """Returns the outputs of a sample, as :meth:`write` got them, in CPU memory; None if the record is damaged."""
        path, begin, header, values = self._index[key]
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        content = os.pread(self._files[path], _START.size + header + values + _CHECKSUM.size, begin)
        body, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
        if _CHECKSUM.pack(zlib.crc32(body)) != checksum:
            del self._index[key]
            return None
        described = json.loads(body[_START.size : _START.size + header])
        return _decode(described, memoryview(bytearray(body[_START.size + header :])))

    def write(self, key: bytes, outputs: Any) -> None:
        """Appends the outputs of a sample to this process's segment.

        Args:
            key: Key of the sample.
            outputs: Tensors in dicts, lists and tuples.

        Raises:
            DloError: The disk is full, or the outputs are of another kind.
        """
        if self._own is None:
            name = f"{os.getpid()}-{uuid4().hex}{SEGMENT}"
            self._own = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._own_path = self.folder / name
        parts: list[bytes] = []
        header = json.dumps(_encode(outputs, parts)).encode()
        values = b"".join(parts)
        body = _START.pack(_MARK, key, len(header), len(values)) + header + values
        record = memoryview(body + _CHECKSUM.pack(zlib.crc32(body)))
        begin = os.lseek(self._own, 0, os.SEEK_END)
        try:
            while record:
                record = record[os.write(self._own, record) :]
        except OSError as error:
            os.ftruncate(self._own, begin)
            raise DloError(
                f"cannot write the cache {self.folder}: {error.strerror}; free space, or leave it out"
            ) from error
        self._index[key] = (self._own_path, begin, len(header), len(values))
        self._read_to[self._own_path] = begin + len(body) + _CHECKSUM.size

    def close(self) -> None:
        """Closes the files."""
        for descriptor in (*self._files.values(), *([self._own] if self._own is not None else [])):
            os.close(descriptor)
        self._files, self._own = {}, None


def split_samples(outputs: Any, rows: int) -> Iterator[Any]:
    """Yields the outputs of each sample, in CPU memory.

    Raises:
        DloError: An output is not a tensor with an entry for each sample.
    """
    for leaf in leaves(outputs):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise DloError(
                f"outputs of a second model with a cache must be tensors with an entry for each of {rows} samples, got"
                f" {what}; leave cache out"
            )
    here = map_leaves(lambda leaf: leaf.cpu(), outputs)
    for number in range(rows):
        yield map_leaves(lambda leaf, n=number: leaf[n], here)


def join_samples(samples: list[Any], device: torch.device) -> Any:
    """Returns the outputs of a batch from those of its samples, on a device."""
    return map_leaves(lambda *parts: torch.stack(parts).to(device, non_blocking=True), *samples)


def _encode(nest: Any, parts: list[bytes]) -> Any:
    if isinstance(nest, Tensor):
        flat = nest.contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return {"dtype": str(nest.dtype).removeprefix("torch."), "shape": list(nest.shape)}
    if type(nest) is dict:
        return {"dict": {str(key): _encode(value, parts) for key, value in nest.items()}}
    if type(nest) in (list, tuple):
        return {type(nest).__name__: [_encode(value, parts) for value in nest]}
    raise DloError(
        f"outputs of a second model with a cache must be tensors, dicts, lists and tuples, got a {type(nest).__name__};"
        " leave cache out"
    )


def _decode(described: Any, values: memoryview) -> Any:
    found, rest = _decode_part(described, values)
    assert not len(rest)
    return found


def _decode_part(described: Any, values: memoryview) -> tuple[Any, memoryview]:
    if "dtype" in described:
        dtype, shape = getattr(torch, described["dtype"]), described["shape"]
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype), values
        return torch.frombuffer(values[:size], dtype=dtype).view(shape), values[size:]
    kind, content = next(iter(described.items()))
    items = []
    for part in content.values() if kind == "dict" else content:
        item, values = _decode_part(part, values)
        items.append(item)
    if kind == "dict":
        return dict(zip(content, items, strict=True)), values
    return rebuild([] if kind == "list" else (), items), values


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."

"""Writes tokenised shards by the formats' own specifications, without the packages of their authors."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np


def documents(count: int, longest: int = 60, vocab: int = 300, seed: int = 0) -> list[np.ndarray]:
    """Returns documents of 1 to ``longest`` random ids, int64."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, generator.integers(1, longest + 1)) for _ in range(count)]


def write_megatron(prefix: Path, docs: list[np.ndarray], dtype: str = "uint16") -> None:
    """Writes PREFIX.bin and PREFIX.idx, each document one sequence."""
    kind = np.dtype(dtype).newbyteorder("<")
    code = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    Path(f"{prefix}.bin").write_bytes(b"".join(doc.astype(kind).tobytes() for doc in docs))
    lengths = np.array([len(doc) for doc in docs], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * kind.itemsize)[:-1]]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(docs), len(docs) + 1)
    bounds = np.arange(len(docs) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Writes a tar of (name, content)."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def npy(ids: np.ndarray) -> bytes:
    """Returns an array in NumPy's file format."""
    content = io.BytesIO()
    np.save(content, ids)
    return content.getvalue()

"""Writes tokenised shards by the formats' own specifications, without the packages of their authors."""

from __future__ import annotations

import io
import json
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


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict[str, bytes]], per_shard: int = 20) -> None:
    """Writes an MDS dataset of encoded columns; those of fixed size are numbers and arrays with a type and a shape."""
    folder.mkdir(parents=True)
    names = sorted(columns)
    sizes = [fixed_size(columns[name]) for name in names]
    entries = []
    for number, first in enumerate(range(0, len(samples), per_shard)):
        some = samples[first : first + per_shard]
        entry = {
            "column_encodings": [columns[name] for name in names],
            "column_names": names,
            "column_sizes": sizes,
            "compression": None,
            "format": "mds",
            "hashes": [],
            "raw_data": {"basename": f"shard.{number:05}.mds", "bytes": 0, "hashes": {}},
            "samples": len(some),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        config = json.dumps({"columns": columns}).encode()
        bodies = []
        for sample in some:
            variable = [len(sample[name]) for name, size in zip(names, sizes, strict=True) if size is None]
            bodies.append(np.array(variable, "<u4").tobytes() + b"".join(sample[name] for name in names))
        offsets = np.cumsum([0, *map(len, bodies)]) + 4 + 4 * (len(bodies) + 1) + len(config)
        content = struct.pack("<I", len(some)) + offsets.astype("<u4").tobytes() + config + b"".join(bodies)
        entry["raw_data"]["bytes"] = len(content)
        (folder / entry["raw_data"]["basename"]).write_bytes(content)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def fixed_size(encoding: str) -> int | None:
    parts = encoding.split(":")
    if parts[0] == "ndarray":
        return int(np.prod([int(n) for n in parts[2].split(",")])) * np.dtype(parts[1]).itemsize if parts[2:] else None
    return {"int": 8, "int32": 4, "int64": 8, "uint16": 2}.get(encoding)


def mds_array(ids: np.ndarray, encoding: str) -> bytes:
    """Returns an array with one dim, encoded as MDS does."""
    parts = encoding.split(":")
    kind = np.dtype(parts[1]) if len(parts) > 1 else ids.dtype
    head = b"" if len(parts) > 1 else bytes([{"uint16": 16, "int32": 33, "int64": 65}[kind.name]])
    if len(parts) < 3:
        width, code = next((w, c) for c, w in enumerate((1, 2, 4)) if len(ids) < 256**w)
        head += bytes([1 << 2 | code]) + len(ids).to_bytes(width, "little")
    return head + ids.astype(kind).tobytes()


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

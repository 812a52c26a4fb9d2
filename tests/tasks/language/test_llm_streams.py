"""Tokenised shards of each format, on disk and in object stores: their windows have the documents' tokens."""

from __future__ import annotations

import importlib
import json
import pickle
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dlo_framework.data import Draw
from dlo_framework.data.mixture import MixOptions
from dlo_framework.data.remote import BlockCache, RemoteFile, Storage, find_files
from dlo_framework.errors import DloError
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.step_tokens import AccumulationPlan, TextBatchSampler
from dlo_tasks.language.token_cache import Document, write_store
from dlo_tasks.language.token_sources import TokenFiles, open_tokens
from dlo_tasks.language.token_windows import JoinedWindows, TokenWindows, count_from_begins, document_of
from support.object_stores import serve_store
from support.token_files import documents, npy, write_megatron, write_tar

SEQ = 16


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(BlockCache(tmp_path / "cache", 1 << 20, 1 << 12), tmp_path / "indices", {})


def write_foreign_tars(folder: Path, docs: list[np.ndarray], suffix: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "shard-%03d.tar"), maxcount=30, verbose=0) as writer:
        for number, doc in enumerate(docs):
            value = doc.tolist() if suffix == "json" else doc.astype(np.int32)
            writer.write({"__key__": f"{number:05}", suffix: value, "txt": "other"})


def write(kind: str, folder: Path, docs: list[np.ndarray]) -> TokenFiles:
    path = folder / "data"
    if kind == "dlo":
        path = folder / "tokens-0123.bin"
        write_store(path, (Document(doc, np.ones(len(doc), bool), n, 0, n) for n, doc in enumerate(docs)), 300)
    elif kind in ("uint16", "int32"):
        write_megatron(path, docs, kind)
    elif kind in ("npy", "json"):
        path.mkdir()
        for shard in range(3):
            members = []
            for number in range(shard, len(docs), 3):
                content = npy(docs[number]) if kind == "npy" else json.dumps(docs[number].tolist()).encode()
                members += [(f"a/{number:04}.{kind}", content), (f"a/{number:04}.txt", b"other")]
            write_tar(path / f"{shard}.tar", members)
        return TokenFiles("some", f"{path}/*.tar", column=kind)
    else:
        write_foreign_tars(path, docs, kind.removeprefix("foreign "))
        return TokenFiles("some", str(path), column=kind.removeprefix("foreign "))
    return TokenFiles("some", str(path))


KINDS = ["dlo", "uint16", "int32", "npy", "json"]
FOREIGN = ["foreign npy", "foreign json"]


def check_windows(windows: TokenWindows, shards: list[list[np.ndarray]]) -> None:
    """Compares all windows with those of the documents, computed token by token."""
    number = 0
    order = np.random.default_rng(0).permutation(len(windows))
    batch = windows.fetch([Draw(int(index), 0, True) for index in order])
    rows = {name: values.numpy()[np.argsort(order)] for name, values in batch.items()}
    for docs in shards:
        flat = np.concatenate(docs)
        document = np.repeat(np.arange(len(docs)), [len(doc) for doc in docs])
        for start in range(0, len(flat) - SEQ, SEQ):
            assert np.array_equal(rows["input_ids"][number], flat[start : start + SEQ])
            same = document[start : start + SEQ] == document[start + 1 : start + SEQ + 1]
            assert np.array_equal(
                rows["labels"][number], np.where(same, flat[start + 1 : start + SEQ + 1], IGNORE_INDEX)
            )
            place = 0
            for offset, position in enumerate(rows["position_ids"][number].tolist()):
                place = place + 1 if offset and same[offset - 1] else 0
                assert position == place
            number += 1
    assert number == len(windows)
    assert np.array_equal(windows.count_targets(order), (batch["labels"] != IGNORE_INDEX).sum(1).numpy())


def shards_of(kind: str, docs: list[np.ndarray], opened: list) -> list[list[np.ndarray]]:
    """Returns the documents of each shard, whose order their names give."""
    if kind in ("npy", "json"):
        return [docs[shard::3] for shard in range(3)]
    counts = [shard.documents for shard in opened]
    bounds = np.cumsum([0, *counts])
    assert bounds[-1] == len(docs)
    return [docs[first:past] for first, past in pairwise(bounds.tolist())]


@pytest.mark.parametrize("kind", [*KINDS, *FOREIGN])
def test_windows_of_every_format_have_the_documents_tokens(kind, tmp_path, storage):
    docs = documents(90)
    opened = open_tokens(write(kind, tmp_path, docs), storage)
    assert kind in ("dlo", "uint16", "int32") or len(opened) > 1
    check_windows(TokenWindows(opened, SEQ, 300, "some"), shards_of(kind, docs, opened))
    again = pickle.loads(pickle.dumps(opened))
    check_windows(TokenWindows(again, SEQ, 300, "some"), shards_of(kind, docs, opened))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_remote_shards_alone_are_fetched_ahead_by_their_ranges(kind, tmp_path, storage):
    opened = open_tokens(write(kind, tmp_path, documents(90)), storage)
    windows = TokenWindows(opened, SEQ, 300, "some")
    assert JoinedWindows([windows], 4).batches_ahead == 0
    asked = list[tuple[int, int]]()

    class Remote(RemoteFile):
        def __init__(self, file):
            self.read_ahead = lambda ranges: asked.extend(ranges)
            self.read = file.read

    for shard in opened:
        shard.file = Remote(shard.file)
    joined = JoinedWindows([windows], 4)
    assert joined.batches_ahead == 4
    joined.read_ahead([Draw(index, 0, True) for index in (3, 4)])
    content = b"".join(opened[0].file.read(*one) for one in asked)
    expected = windows.read(np.array([3, 4]))
    if kind in ("uint16", "int32", "dlo"):
        found = np.frombuffer(content, "<i4" if kind == "int32" else "<u2") & 0x7FFF
        assert np.array_equal(found.reshape(2, SEQ + 1), expected)
    else:
        assert len(asked) > 0
        assert all(size > 0 for _, size in asked)


def test_an_index_is_built_once_and_again_for_other_files(tmp_path, storage):
    files = write("npy", tmp_path, documents(30))
    open_tokens(files, storage)
    stamps = {path: path.stat().st_mtime_ns for path in storage.indices.glob("*.npy")}
    open_tokens(files, storage)
    assert stamps == {path: path.stat().st_mtime_ns for path in storage.indices.glob("*.npy")}
    write_tar(tmp_path / "data" / "0.tar", [("b.npy", npy(np.arange(40)))])
    opened = open_tokens(files, storage)
    assert opened[0].windows(np.zeros(1, np.int64), 40).tolist() == [list(range(40))]


class Bounds:
    """Documents of given lengths, whose reads of bounds are counted."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        self.documents, self.tokens, self.reads = len(lengths), int(self.ends[-1]), 0

    def bounds(self, index: np.ndarray) -> np.ndarray:
        self.reads += 1
        return self.ends[index]


@pytest.mark.parametrize("kind", ["equal", "one", "random", "heavy tail", "growing", "mostly empty", "one is large"])
def test_documents_are_found_in_few_reads_whatever_their_lengths(kind):
    generator, count = np.random.default_rng(0), 100_000
    lengths = {
        "equal": np.full(count, 7),
        "one": np.array([1000]),
        "random": generator.integers(0, 2000, count),
        "heavy tail": generator.lognormal(3, 3, count).astype(np.int64),
        "growing": np.arange(count),
        "mostly empty": np.where(generator.random(count) < 0.01, 50, 0),
        "one is large": np.where(np.arange(count) == 70_000, 10**9, 1),
    }[kind]
    shard = Bounds(lengths)
    edges = shard.ends[generator.integers(0, shard.documents, 500)]
    tokens = np.concatenate([edges, edges - 1, generator.integers(0, shard.tokens, 500), [0, shard.tokens - 1]])
    tokens = tokens[(tokens >= 0) & (tokens < shard.tokens)].reshape(-1, 1)
    found = document_of(shard, tokens)
    assert np.array_equal(found, np.searchsorted(shard.ends, tokens, side="right") - 1)
    assert shard.reads <= 6


def test_positions_restart_where_documents_begin():
    positions = np.full((2, 6), 9)
    # the third place is one where an empty document and the next one begin, the last one the end of a row
    row, offset = np.array([1, 0, 0, 0, 1]), np.array([1, 2, 5, 5, 6])
    count_from_begins(positions, row, offset)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]


def write_sparse_megatron(prefix: Path, tokens: int, length: int) -> None:
    """Writes a corpus of zeros as a sparse file, with a real index of documents of equal length."""
    count = tokens // length
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(count * length * 2)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        np.full(count, length, "<i4").tofile(file)
        (np.arange(count, dtype="<i8") * (length * 2)).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def test_a_corpus_of_100_gigabytes_opens_in_little_memory(tmp_path, storage):
    write_sparse_megatron(tmp_path / "large", 50_000_000_000, 8192)
    tracemalloc.start()
    windows = TokenWindows(open_tokens(TokenFiles("large", str(tmp_path / "large")), storage), 2048, 65536, "large")
    joined = JoinedWindows([windows])
    order = MixOptions(None, "step", "global", 256, 8192, None).order(["large"], [len(windows)], 0)
    sampler = TextBatchSampler(
        order.size, batch_size=8, shuffle=True, drop_last=True, order=order,
        count_targets=joined.count_targets, accumulation=lambda: AccumulationPlan(2, float("inf")),
    )  # fmt: skip
    batch = joined.fetch(next(sampler.batches_from(len(windows) // 2)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(windows) == (50_000_000_000 // 8192 * 8192 - 1) // 2048
    assert int(batch["tokens_in_step"]) == pytest.approx(2 * 8 * 2048, abs=16)
    assert peak < 100 << 20


def test_ids_outside_the_vocabulary_are_refused(tmp_path, storage):
    docs = documents(60)
    docs[30][0] = 999
    opened = open_tokens(write("uint16", tmp_path, docs), storage)
    windows = TokenWindows(opened, SEQ, 300, "web")
    with pytest.raises(DloError, match=r"sources.web: token ids must be below the tokenizer's .* size 300, got 999"):
        windows.fetch([Draw(index, 0, True) for index in range(len(windows))])
    with pytest.raises(DloError, match="set the tokenizer that the source was tokenised"):
        TokenWindows(opened, SEQ, 100, "web")


def test_joined_datasets_keep_the_order_of_the_draws(tmp_path, storage):
    docs = documents(90)
    opened = open_tokens(write("uint16", tmp_path, docs), storage)
    windows = TokenWindows(opened, SEQ, 300, "some")
    middle = len(windows) // 3
    joined = JoinedWindows([windows.part(0, middle), windows.part(middle, len(windows))])
    order = np.random.default_rng(1).permutation(len(windows))[:40]
    draws = [Draw(int(index), 0, True) for index in order]
    for name, values in windows.fetch(draws).items():
        assert values.equal(joined.fetch(draws)[name])
    assert np.array_equal(joined.count_targets(order), windows.count_targets(order))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "data.idx").write_bytes(b"x" * 50), "must be an index of Megatron-LM"),
        (lambda folder: (folder / "data.bin").write_bytes(b"x" * 50), "must have the .* bytes that"),
        (lambda folder: (folder / "data.idx").write_bytes((folder / "data.idx").read_bytes()[:-8]), "copy it again"),
        (lambda folder: (folder / "data.idx").unlink(), "cannot be read"),
    ],
)
def test_damaged_megatron_files_are_refused(change, message, tmp_path, storage):
    files = write("uint16", tmp_path, documents(20))
    change(tmp_path)
    with pytest.raises(DloError, match=message):
        open_tokens(files, storage)


def test_wrong_options_of_shards_are_refused(tmp_path, storage):
    tars = write("npy", tmp_path, documents(20))
    for name in ("x.txt", "x.mds", "x.parquet"):
        (tmp_path / name).write_text("x")
    for files, message in [
        (tars._replace(column="ids"), "sources.some.column must be the suffix of members of .*; it has npy, txt"),
        (tars._replace(path=f"{tmp_path}/dat"), "which does not exist; did you mean"),
        (tars._replace(path=str(tmp_path / "x.txt"), format="webdataset"), "must name files of the format webdataset"),
        (tars._replace(path=str(tmp_path / "x.txt")), "format must be one of dlo, megatron, webdataset, .* name text"),
        (tars._replace(path=str(tmp_path / "x.mds")), "removed in 0.2: write the shards again as tars"),
        (tars._replace(path=str(tmp_path / "x.parquet")), "removed in 0.2: write shards again as tars"),
    ]:
        with pytest.raises(DloError, match=message):
            open_tokens(files, storage)


# tokenised shards on a web server, and in object stores by their own clients, from stores on this machine


WINDOW, BLOCK = 16, 1 << 12
CLIENTS = {"http": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}


@pytest.fixture(params=CLIENTS)
def store(request, tmp_path, monkeypatch):
    # Otherwise gcsfs asks a server of Google what kind of bucket it is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip(CLIENTS[request.param])
    # Their clients wait for seconds before they try again.
    if request.param == "hf":
        monkeypatch.setattr(importlib.import_module("huggingface_hub.utils._http").time, "sleep", lambda _: None)
    folder = tmp_path / "bucket"
    folder.mkdir()
    with serve_store(request.param, folder) as (url, options, handler):
        yield folder, url, options, handler


def write_sources(folder: Path, docs: list[np.ndarray]) -> dict[str, TokenFiles]:
    """Writes the documents in three formats; returns their files, relative to the folder."""
    (folder / "tars").mkdir()
    write_megatron(folder / "corpus", docs, "int32")
    write("dlo", folder, docs)
    for shard in range(2):
        members = [(f"{number:04}.npy", npy(docs[number])) for number in range(shard, len(docs), 2)]
        write_tar(folder / f"tars/part {shard}+.tar", members)
    return {
        "megatron": TokenFiles("some", "corpus.bin"),
        "tar": TokenFiles("some", "tars/*.tar", column="npy"),
        "dlo": TokenFiles("some", "tokens-0123.bin"),
    }


def read_all(files: TokenFiles, storage: Storage) -> np.ndarray:
    windows = TokenWindows(open_tokens(files, storage), WINDOW, 300, "some")
    windows.read_ahead([Draw(index, 0, True) for index in range(len(windows))])
    return windows.read(np.arange(len(windows)))


def test_every_format_has_the_windows_of_local_files_and_is_read_by_ranges(store, tmp_path):
    folder, url, options, handler = store
    sources = write_sources(folder, documents(300))
    local = Storage(BlockCache(tmp_path / "local", 1 << 20, BLOCK), tmp_path / "indices", {})
    for name, files in sources.items():
        cache = BlockCache(tmp_path / f"cache {name}", 1 << 20, BLOCK)
        there = Storage(cache, tmp_path / f"indices {name}", options)
        remote = files._replace(path=f"{url}/{files.path}")
        expected = read_all(files._replace(path=f"{folder}/{files.path}"), local)
        assert len(expected) > 50
        assert np.array_equal(read_all(remote, there), expected), name
        asked = [at for method, _, at in handler.requested if at is not None and method == "GET"]
        spans = [tuple(map(int, at.removeprefix("bytes=").split("-"))) for at in asked]
        if name != "dlo":  # It is fetched in full, for a map.
            assert len(spans) > 2
            assert max(last - first + 1 for first, last in spans) <= BLOCK, "a client has fetched more than a block"
        handler.requested.clear()
        assert np.array_equal(read_all(remote, there), expected)
        assert not [at for _, _, at in handler.requested if at is not None], "the second pass is read from the cache"
        handler.requested.clear()


def test_errors_that_pass_and_changed_and_missing_objects(store, tmp_path):
    folder, url, options, handler = store
    content = np.random.default_rng(0).bytes(20_000)
    (folder / "data.bin").write_bytes(content)
    cache = BlockCache(tmp_path / "cache", 1 << 20, BLOCK)
    file = RemoteFile(f"{url}/data.bin", cache, options)
    handler.failures = 2
    assert file.read(100, 6000) == content[100:6100]
    assert handler.failures == 0
    (folder / "data.bin").write_bytes(bytes(20_000))
    type(importlib.import_module("fsspec").core.url_to_fs(url, **options)[0]).clear_instance_cache()
    assert RemoteFile(f"{url}/data.bin", cache, options).read(100, 6000) == bytes(6000), "a new version has new blocks"
    assert find_files(f"{url}/none/*.bin", options) == []
    with pytest.raises(DloError, match=r"none.bin cannot be read: .*; correct the URL"):
        RemoteFile(f"{url}/none.bin", cache, options)

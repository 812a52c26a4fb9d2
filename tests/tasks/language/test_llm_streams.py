"""Windows of tokens: of shards of each format, on disk and in object stores; packing, the cache, and counts."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlo_framework.data import Draw
from dlo_framework.data.mixture import MixOptions
from dlo_framework.data.remote import BlockCache, RemoteFile, Storage, find_files
from dlo_framework.errors import DloError
from dlo_tasks.language import batches, families
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.packing import count_targets, cut_documents, pack_best_fit
from dlo_tasks.language.step_tokens import AccumulationPlan, TextBatchSampler, bucket_by_length
from dlo_tasks.language.token_cache import DamagedTokenCache, Document, TokenStore, verify_checksum, write_store
from dlo_tasks.language.token_sources import TokenFiles, open_tokens
from dlo_tasks.language.token_windows import JoinedWindows, TokenWindows, count_from_begins, document_of
from support.object_stores import serve_store
from support.token_batches import GROUPED, packed_rows
from support.token_files import documents, npy, write_megatron, write_tar
from support.waits import Waits

SEQ = 16


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(BlockCache(tmp_path / "cache", 1 << 20, 1 << 12), tmp_path / "indices", {})


def write(kind: str, folder: Path, docs: list[np.ndarray]) -> TokenFiles:
    path = folder / "data"
    if kind == "dlo":
        path = folder / "tokens-0123.bin"
        write_store(path, (Document(doc, np.ones(len(doc), bool), n, 0, n) for n, doc in enumerate(docs)), 300)
    elif kind in ("uint16", "int32"):
        write_megatron(path, docs, kind)
    else:
        path.mkdir()
        for shard in range(3):
            members = []
            for number in range(shard, len(docs), 3):
                content = npy(docs[number]) if kind == "npy" else json.dumps(docs[number].tolist()).encode()
                members += [(f"a/{number:04}.{kind}", content), (f"a/{number:04}.txt", b"other")]
            write_tar(path / f"{shard}.tar", members)
        return TokenFiles("some", f"{path}/*.tar", column=kind)
    return TokenFiles("some", str(path))


KINDS = ["dlo", "uint16", "int32", "npy", "json"]


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


@pytest.mark.parametrize("kind", KINDS)
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


# --- token windows: cutting and packing documents, the cache of their tokens, and what is counted of a batch --------


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best fit, decreasing, by its definition; returns the room left in each window."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 50))
    return draw(st.lists(st.integers(1, capacity), max_size=120)), capacity


@given(lengths_and_capacity())
def test_packing_is_best_fit_decreasing(case):
    lengths, capacity = case
    packed = pack_best_fit(np.array(lengths, dtype=int), capacity)
    taken = np.zeros((packed.windows, capacity), int)
    for window, offset, length in zip(packed.window, packed.offset, lengths, strict=True):
        taken[window, offset : offset + length] += 1
    assert taken.max(initial=0) <= 1, "no two pieces overlap"
    assert (np.diff(taken, axis=1) <= 0).all(), "each window is filled from its start"
    assert sorted((capacity - taken.sum(axis=1)).tolist()) == one_by_one(lengths, capacity)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 6]])
def test_lengths_out_of_range_are_refused(lengths):
    with pytest.raises(DloError, match=r"lengths must be in 1\.\.5"):
        pack_best_fit(np.array(lengths), 5)


BOUNDS = np.array([0, 1, 5, 16, 16, 20])  # documents of 1, 4, 11, 0 and 4 tokens: 0, 3, 10, none and 3 positions
ALL = np.arange(5)


def cut_to(policy, documents=ALL, seq_len=4):
    pieces = cut_documents(BOUNDS, documents, seq_len, policy)
    return list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)), pieces


def test_a_document_too_long_is_split_truncated_or_dropped():
    split, pieces = cut_to("split")
    assert split == [(1, 1, 3), (2, 5, 4), (2, 9, 4), (2, 13, 2), (4, 16, 3)]
    assert (pieces.too_long, pieces.too_short) == (1, 2)
    assert cut_to("truncate")[0] == [(1, 1, 3), (2, 5, 4), (4, 16, 3)]
    assert cut_to("drop")[0] == [(1, 1, 3), (4, 16, 3)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["split", "truncate", "drop"]),
    st.integers(0, 2**32 - 1),
)
def test_targets_are_counted_as_one_would(sizes, seq_len, policy, seed):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    learned = np.random.default_rng(seed).random(int(bounds[-1])) < 0.5
    pieces = cut_documents(bounds, np.arange(len(sizes)), seq_len, policy)
    expected = [
        int(learned[start + 1 : start + length + 1].sum())
        for start, length in zip(pieces.start, pieces.length, strict=True)
    ]
    assert count_targets(learned, pieces).tolist() == expected
    if policy == "split":  # each position is in one piece
        assert pieces.length.sum() == sum(max(0, size - 1) for size in sizes)


def test_bucketed_batches_have_like_lengths_and_the_order_is_a_permutation():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 1003), 1, 512).astype(int)
    order = bucket_by_length(lengths, 8, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(1003))
    assert order[1000:].tolist() == [1000, 1001, 1002]  # what fills no batch is what was drawn last
    batches = lengths[order[:1000]].reshape(-1, 8)
    plain = lengths[:1000].reshape(-1, 8)
    padded, unsorted = (int(some.max(axis=1).sum()) * 8 / int(lengths[:1000].sum()) for some in (batches, plain))
    assert padded < 1.1 < 1.8 < unsorted
    assert not (np.diff(batches[:, 0]) >= 0).all()  # batches are not in the order of their lengths
    assert not np.array_equal(order, bucket_by_length(lengths, 8, seed=3, epoch=2))


# --- the token cache: what is written is read, and nothing else is ---------------------------------------------------


def document(ids, learned=None, digest=1, file=0, row=1):
    flags = np.ones(len(ids), dtype=bool) if learned is None else np.array(learned, dtype=bool)
    return Document(np.array(ids, dtype=np.int64), flags, digest, file, row)


DOCUMENTS = [document([5, 6, 7]), document([], digest=2**64 - 1, row=2), document([0, 299], [0, 0], file=1, row=7)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.bin"
    write_store(path, iter(DOCUMENTS), 300)
    return path


def test_what_is_written_is_read(path):
    store = TokenStore(path)
    ids, learned = store.read(np.arange(5))
    assert ids.tolist() == [5, 6, 7, 0, 299]
    assert learned.tolist() == [True, True, True, False, False]
    assert store.learned().tolist() == learned.tolist()
    assert store.bounds.tolist() == [0, 3, 3, 5]
    assert store.hashes.tolist() == [1, 2**64 - 1, 1]
    assert (store.files.tolist(), store.rows.tolist()) == ([0, 0, 1], [1, 2, 7])
    assert len(store) == 3
    assert not store.all_learned
    verify_checksum(path)
    assert os.listdir(path.parent) == ["tokens.bin"]


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(1 << 15, 2), ((1 << 15) + 1, 4)])
def test_a_token_takes_two_bytes_where_they_are_enough(tmp_path, vocab_size, bytes_each):
    path = tmp_path / "tokens.bin"
    write_store(path, [document([vocab_size - 1] * 4096)], vocab_size)
    assert path.stat().st_size == 4096 * (1 + bytes_each) + 8 * (2 + 1 + 1 + 1)
    ids, learned = TokenStore(path).read(np.arange(4096))
    assert set(ids.tolist()) == {vocab_size - 1}
    assert learned.all()
    assert TokenStore(path).all_learned


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(DloError, match=r"the tokenizer's vocabulary size 32768, got 40000; correct the tokenizer"):
        write_store(tmp_path / "tokens.bin", [document([1]), document([1, 40_000])], 1 << 15)
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_sent_to_a_worker_maps_the_file_again(path):
    sent = pickle.dumps(TokenStore(path))
    assert len(sent) < 1000
    assert pickle.loads(sent).read(np.array([1]))[0].tolist() == [6]


@pytest.mark.parametrize(
    ("place", "message"), [(0, "not of this format"), (60, "damaged header"), (4096, "checksum"), (-1, "checksum")]
)
def test_a_changed_byte_is_found(path, place, message):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedTokenCache, match=message):
        verify_checksum(path)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield document([1, 2])
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_store(tmp_path / "tokens.bin", broken(), 300)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_has_left_is_cleared_in_time(tmp_path):
    old, new = tmp_path / "a.bin.1.dlo-partial", tmp_path / "b.bin.2.dlo-partial"
    for left in (old, new):
        left.write_text("unfinished")
    os.utime(old, (0, 0))
    write_store(tmp_path / "tokens.bin", [], 300)
    assert sorted(os.listdir(tmp_path)) == [new.name, "tokens.bin"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DloError, match=r"cannot be written to .*file.*set cache_dir"):
        write_store(tmp_path / "file" / "tokens.bin", [], 300)


# what a step has to know of a batch is counted before the batch is moved, and the device is not asked for it


PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])


def task() -> CausalLM:
    torch.manual_seed(0)
    made = CausalLM(config={"model_type": "llama", **GROUPED})
    made.configure_model()
    return made


def batch(**more: Any) -> dict[str, Tensor]:
    return {**packed_rows(4, torch.Generator().manual_seed(3)), **more}


def as_moved(found: dict[str, Tensor]) -> dict[str, Tensor]:
    batches.attach_counts(found, batches.count_rows(found))
    return found


@pytest.mark.parametrize("targets", ["some", "all", "none"])
def test_a_loss_whose_targets_are_counted_asks_for_nothing_and_is_the_same(targets: str) -> None:
    made, found = task(), batch(tokens_in_step=torch.tensor(50))
    if targets != "some":
        found["labels"].fill_(3 if targets == "all" else -100)
    hidden = made.forward(**made.inputs(found)[1])
    with Waits() as waits:
        expected = made.loss(hidden, found)
    assert waits.calls == ["nonzero"]
    as_moved(found)
    with Waits() as waits:
        inputs = made.inputs(found)
        loss = made.loss(hidden, found)
    assert waits.calls == []
    assert torch.equal(loss, expected)
    assert inputs[1]["input_ids"] is found["input_ids"]


def test_documents_that_are_counted_are_not_asked_for_and_others_once() -> None:
    positions = PLACES.clone()
    with Waits() as waits:
        expected = families.flash_arguments(positions)
    assert waits.calls == ["tolist"]
    assert expected["cu_seq_lens_q"].tolist() == [0, 3, 8, 14, 16]
    assert expected["max_length_q"] == 6
    as_moved({"position_ids": positions})
    with Waits() as waits:
        found = families.flash_arguments(positions)
    assert waits.calls == []
    assert torch.equal(found["cu_seq_lens_k"], expected["cu_seq_lens_k"])
    assert found["max_length_k"] == 6


def test_counts_are_of_these_very_tensors_as_they_were() -> None:
    found = as_moved(batch())
    number = int((found["labels"] != -100).sum())
    assert batches.read_target_count(found["labels"]) == number
    other = found["labels"].t().contiguous().t()  # of the same shape, in another order
    for part in (found["labels"][:, :4], found["labels"].T, found["labels"].flatten(), found["labels"][::2], other[:2]):
        assert batches.read_target_count(part) is None
    assert batches.read_target_count(found["labels"].clone()) is None
    assert batches.count_documents(PLACES) == (4, 6, 1)
    assert batches.count_documents(torch.tensor([[5, 6, 7, 8], [2, 3, 9, 10]])) == (3, 4, 0)
    found["labels"][found["labels"] != -100] = -100
    assert batches.read_target_count(found["labels"]) is None
    assert task().training_step(found, 0)["loss"] == 0
    with torch.inference_mode():  # Where tensors do not note that they are written to.
        assert batches.read_target_count(as_moved(batch())["labels"].clone()) is None


@pytest.mark.parametrize("is_view", [False, True])
def test_rows_of_a_batch_are_known_too(is_view: bool) -> None:
    """As a pipeline cuts micro-batches."""
    whole = batch()
    if is_view:  # as a loader may cut batches of a tensor
        before = {name: torch.cat([torch.zeros_like(value), value]) for name, value in whole.items()}
        as_moved({name: value[:4] for name, value in before.items()})
        whole = {name: value[4:] for name, value in before.items()}
    found = as_moved(whole)
    labels, positions = found["labels"], found["position_ids"]
    for first, past in ((0, 2), (1, 4), (3, 4), (0, 4)):
        with Waits() as waits:
            number = batches.read_target_count(labels[first:past])
            documents = batches.count_documents(positions[first:past])
        assert waits.calls == []
        assert number == int((labels[first:past] != -100).sum())
        assert documents == batches.count_documents(positions[first:past].clone())
    labels[0] = -100
    assert batches.read_target_count(labels[2:]) is None  # written to since


def test_batches_of_no_text_are_left_alone() -> None:
    for other in ((torch.zeros(2, 3), torch.zeros(2)), {"input_ids": torch.zeros(2, 3)}, torch.zeros(2)):
        assert batches.count_rows(other) == {}

"""Tokenised shards in object stores: s3://, gs:// and hf:// by their own clients, from stores on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from dlo_framework.data import Draw
from dlo_framework.data.remote import BlockCache, RemoteFile, Storage, find_files
from dlo_framework.errors import DloError
from dlo_tasks.language.token_sources import TokenFiles, open_tokens
from dlo_tasks.language.token_windows import TokenWindows
from support.object_stores import serve_store
from support.token_files import documents, npy, write_megatron, write_tar

SEQ, BLOCK = 16, 1 << 12
CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}


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
    """Writes the documents in two formats; returns their files, relative to the folder."""
    (folder / "tars").mkdir()
    write_megatron(folder / "corpus", docs, "uint16")
    for shard in range(2):
        members = [(f"{number:04}.npy", npy(docs[number])) for number in range(shard, len(docs), 2)]
        write_tar(folder / f"tars/part {shard}+.tar", members)
    return {
        "megatron": TokenFiles("some", "corpus.bin"),
        "tar": TokenFiles("some", "tars/*.tar", column="npy"),
    }


def read_all(files: TokenFiles, storage: Storage) -> np.ndarray:
    windows = TokenWindows(open_tokens(files, storage), SEQ, 300, "some")
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

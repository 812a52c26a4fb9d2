"""The token cache: what is written is read, and nothing else is."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from dlo_framework.errors import DloError
from dlo_tasks.language.token_cache import DamagedTokenCache, Document, TokenStore, verify_checksum, write_store


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


def test_a_truncated_cache_is_refused(path):
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        DamagedTokenCache, match=rf"tokens.bin: the token cache is truncated: {size - 1} of {size} bytes"
    ):
        TokenStore(path)


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

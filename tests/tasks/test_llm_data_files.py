"""TextData and its files: what is held out of them, what is kept of them, and prompts to complete."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_tasks.llm.records import content_hash
from dlo_tasks.llm.text_data import TextData
from dlo_tasks.llm.token_build import cached_tokens
from dlo_tasks.llm.tokenizer import fingerprint
from support.texts import documents_in, lines, sentences, word_tokenizer

# --- the split, the cache ------------------------------------------------------------------------------------


def test_the_split_goes_by_content(make, tmp_path):
    texts = sentences(80)

    def held_out(texts, **options):
        data = make(texts, val_fraction=0.3, seq_len=400, batch_size=1, **options)
        data.setup("fit")
        batches = [*data.train_dataloader()], [*data.val_dataloader()]
        sides = [{data.tokenizer.decode(ids) for batch in side for ids, _ in documents_in(batch)} for side in batches]
        return sides

    train, val = held_out(texts)
    assert train | val == set(texts)
    assert not train & val
    assert 10 < len(val) < 40
    more = sentences(30, seed=5)
    train_2, val_2 = held_out([*more, *reversed(texts), *texts[:5]], seed=9)
    assert val <= val_2
    assert train <= train_2
    assert not train_2 & val_2


def test_a_split_without_documents_is_refused(make):
    with pytest.raises(DloError, match=r"val_fraction must leave documents for validation, got 0\.001 of 60 documents"):
        make(val_fraction=0.001).setup("fit")


def tokenised(monkeypatch) -> list[int]:
    """Counts how often files are tokenised from now on."""
    from dlo_tasks.llm import token_build

    calls: list[int] = []
    original = token_build.write_store
    monkeypatch.setattr(token_build, "write_store", lambda *args: (calls.append(1), original(*args)))
    return calls


def test_files_are_tokenised_once_for_their_content_and_tokenizer(make, monkeypatch):
    calls = tokenised(monkeypatch)
    texts = sentences(20, seed=11)
    make(texts).setup("fit")
    make(texts, seq_len=32, packing="none").setup("fit")
    assert len(calls) == 1
    make([*texts, "one more"]).setup("fit")
    assert len(calls) == 2
    make(texts, vocab_size=330).setup("fit")
    assert len(calls) == 3


def test_ids_with_gaps_between_them_stay_as_they_are(tmp_path):
    words = word_tokenizer({"<end>": 0, "hello": 1, "world": 40_000})
    words.save_pretrained(tmp_path / "words")
    file = lines(tmp_path / "a.jsonl", {"text": "hello world hello"})
    options = {"tokenizer": str(tmp_path / "words"), "cache_dir": str(tmp_path), "val_fraction": 0.0, "seq_len": 3}
    data = TextData(train_files=str(file), batch_size=1, **options)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].tolist() == [[1, 40_000, 1]]
    assert batch["labels"].tolist() == [[40_000, 1, 0]]


@pytest.mark.parametrize(("ids", "is_as_before"), [([0, 1, 2], True), ([0, 1, 40_000], False)])
def test_a_cache_keeps_its_name_where_ids_have_no_gaps(tmp_path, ids, is_as_before):
    """Caches that were made before gaps counted are found again, but for those in which ids became others."""
    words = word_tokenizer(dict(zip(("<end>", "hello", "world"), ids, strict=True)))
    file = lines(tmp_path / "a.jsonl", {"text": "hello world"})
    made_of = [1, content_hash([file]), fingerprint(words), []]
    name = f"tokens-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]}.bin"
    assert (cached_tokens([file], words, tmp_path) == name) is is_as_before


def test_a_truncated_cache_is_made_anew_with_a_warning(make, monkeypatch, cache):
    texts = sentences(20, seed=12)
    data = make(texts)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    path = cache / data._names["train"]
    os.truncate(path, path.stat().st_size - 8)
    again = make(texts)
    with pytest.warns(UserWarning, match=r"the token cache is truncated: \d+ of \d+ bytes; it is written again"):
        again.setup("fit")
    assert torch.equal(next(iter(again.train_dataloader()))["input_ids"], batch["input_ids"])


# --- prediction -----------------------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left(make, tmp_path):
    (tmp_path / "prompts.txt").write_text("the loss\nthe loss of a packed document\nno\n")
    data = make(predict_files=str(tmp_path / "prompts.txt"), batch_size=2)
    data.setup("predict")
    batches = list(data.predict_dataloader())
    assert data.prompts == ["the loss", "the loss of a packed document", "no"]
    index = torch.cat([batch["index"] for batch in batches]).tolist()
    assert index == [0, 1, 2]
    for batch in batches:
        for ids, mask, number in zip(batch["input_ids"], batch["attention_mask"], batch["index"], strict=True):
            assert mask.tolist() == sorted(mask.tolist())
            assert data.tokenizer.decode(ids[mask.bool()]) == data.prompts[number]

"""TextData and its files: what is held out of them, what is kept of them, prompts to complete, and refusals."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlo_framework.errors import DloError
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.tokenizer import END
from support.texts import CHATML, WORDS, documents_in, lines, sentences, word_tokenizer

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


def test_too_few_texts_have_their_ends_held_out(make):
    texts = [" ".join(f"{n}: {text}" for text in sentences(20, seed=n)) for n in range(3)]
    options = {"val_fraction": 0.05, "seq_len": 4000, "batch_size": 1}
    data = make(texts, **options)
    data.setup("fit")

    def parts(loader) -> list[str]:
        return [data.tokenizer.decode(ids[:1] + labels) for batch in loader for ids, labels in documents_in(batch)]

    train, val = parts(data.train_dataloader()), parts(data.val_dataloader())
    assert len(train) == len(val) == 3
    joined = {first + last.removesuffix(END) for first in train for last in val}
    assert joined.issuperset(texts), "each text is its two parts, neither of which has a token of the other"
    ids = [len(data.tokenizer(text)["input_ids"]) + 1 for text in texts]
    assert data.statistics["val"].tokens == sum(math.ceil(0.05 * size) - 1 for size in ids)
    again = make(texts, **options, num_workers=1)
    again.setup("fit")
    assert parts(again.val_dataloader()) == val, "workers divide the documents too"


def test_a_split_without_conversations_is_refused(make, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
        for text in sentences(60)
    ]
    options = {"train_files": str(lines(tmp_path / "chats.jsonl", *chats)), "seq_len": 512}
    with pytest.raises(
        DloError,
        match=r"val_fraction must leave documents for training and for validation, got 0\.0001 of 60 documents; set ",
    ) as raised:
        make(**options, val_fraction=0.0001).setup("fit")
    fix = float(re.search(r"; set ([\d.]+), or val_files", str(raised.value))[1])
    make(**options, val_fraction=fix).setup("fit")
    (tmp_path / "chats.jsonl").write_text(json.dumps(chats[0]) + "\n")
    with pytest.raises(DloError, match="set val_files, or 0 for none"):
        make(**options, val_fraction=0.5).setup("fit")


def tokenised(monkeypatch) -> list[int]:
    """Counts how often files are tokenised from now on."""
    from dlo_tasks.language import tokenization

    calls: list[int] = []
    original = tokenization.write_store
    monkeypatch.setattr(tokenization, "write_store", lambda *args: (calls.append(1), original(*args)))
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


def test_prediction_without_prompts_is_refused(make):
    for ask in (TextData.check_predict, lambda data: data.setup("predict")):
        with pytest.raises(
            DloError, match=r"predict_files must be set for prediction, got None; set data\.init_args\.predict_files"
        ):
            ask(make())
    make(predict_files="prompts.txt").check_predict()


def test_a_document_too_long_is_named_by_its_line(make):
    with pytest.raises(
        DloError,
        match=r"texts\.jsonl:2: document must have at most 49 tokens to fit seq_len, .*raise seq_len by \d+",
    ):
        make(["short", " ".join(WORDS * 9)], long_samples="error").setup("fit")


def test_data_without_anything_to_learn_are_refused(make, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    file = lines(tmp_path / "chats.jsonl", {"messages": [{"role": "user", "content": "the loss"}]})
    data = make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(
        DloError,
        match=r"documents must have at least one target, got none in the 1 of .*chats\.jsonl: .* 1 pieces have no",
    ):
        data.setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len and corpus_bytes must be at least 1"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        ({"columns": {"body": "text"}}, "columns must rename messages, .*, got body"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(DloError, match=message):
        TextData(**options)


def test_the_check_finds_what_is_missing_before_the_run(make, tmp_path):
    with pytest.raises(DloError, match="val_files must match a file"):
        make(val_files=str(tmp_path / "*.parquet")).check()
    file = lines(tmp_path / "other.jsonl", {"test": "a"})
    with pytest.raises(DloError, match=r"other\.jsonl:1: record must have .* got 'test'; did you mean 'text'"):
        make(train_files=str(file)).check()


def test_a_model_whose_tokenizer_has_no_chat_template_is_refused_before_the_run(make, tmp_path):
    words = make()
    words.setup("fit")
    words.tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(tmp_path / "model")
    chat = {"messages": [{"role": "user", "content": "the loss"}, {"role": "assistant", "content": "is 3"}]}
    file = lines(tmp_path / "chats.jsonl", chat)
    task = CausalLM(model=str(tmp_path / "model"))
    with pytest.raises(DloError, match=r"chats\.jsonl:1: tokenizer must have a chat template for messages, got none"):
        task.check(make(train_files=str(file)))
    (tmp_path / "chat.jinja").write_text(CHATML)
    task.check(make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja")))

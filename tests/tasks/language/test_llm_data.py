"""TextData: its batches, which come when, what is held out, kept and refused of its files; and of several sources."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from transformers import LlamaConfig, LlamaForCausalLM

from dlo_framework.data import Draw, Position, Window
from dlo_framework.errors import DloError
from dlo_framework.progress import AccumulationTail
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore, write_store
from dlo_tasks.language.token_windows import JoinedWindows
from dlo_tasks.language.tokenization import tokenize_in_processes
from dlo_tasks.language.tokenizer import END
from support import curricula_runs
from support.texts import CHATML, WORDS, documents_in, lines, sampler, sentences, word_tokenizer
from support.token_files import documents, write_megatron
from support.trainers import quiet_trainer

# --- what a batch holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_document_comes_once_and_its_labels_are_what_follows(make, packing, workers, capsys):
    texts = sentences(64)
    data = make(texts, packing=packing, long_samples="truncate", batch_size=1, num_workers=workers, seq_len=400)
    data.setup("fit")
    found = [document for batch in data.train_dataloader() for document in documents_in(batch)]
    data.teardown("fit")
    whole = [ids + labels[-1:] for ids, labels in found]
    assert all(labels == document[1:] for (_, labels), document in zip(found, whole, strict=True))
    assert all(document[-1] == data.tokenizer.eos_token_id for document in whole)
    assert sorted(data.tokenizer.decode(document[:-1]) for document in whole) == sorted(texts)
    statistics = data.statistics["train"]
    assert statistics.tokens == statistics.targets == sum(len(ids) for ids, _ in found)
    assert f"train: 64 documents, {statistics.tokens:,} tokens" in capsys.readouterr().out


def test_windows_are_full_and_their_padding_is_no_document(make):
    data = make()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.pop("tokens_in_step").shape == ()
    assert {(values.shape, values.dtype) for values in batch.values()} == {((4, 48), torch.int64)}
    unused = batch["labels"] == IGNORE_INDEX
    assert set(batch["input_ids"][unused].tolist()) <= {data.tokenizer.pad_token_id}
    assert data.statistics["train"].fill > 0.97


def test_padded_batches_are_as_long_as_their_longest_and_run_on(make):
    data = make(packing="none", long_samples="truncate")
    data.setup("fit")
    widths, used, made = set(), 0, 0
    for batch in data.train_dataloader():
        used += int((batch["labels"] != IGNORE_INDEX).sum())
        made += batch["labels"].numel()
        width = batch["input_ids"].shape[1]
        longest = int((batch["labels"] != IGNORE_INDEX).sum(1).max())
        assert longest <= width < longest + 8 or width == 48
        assert torch.equal(batch["position_ids"], torch.arange(width).expand(4, width))
        assert "attention_mask" not in batch  # padding comes after all real tokens
        widths.add(width)
    assert len(widths) > 2
    assert used / made > 0.85  # in random order it is 0.69: like lengths come together


def test_ranks_pad_to_the_longest_sample_of_them_all(make):
    data = make(packing="none", long_samples="truncate")
    data.setup("fit")
    dataset = data._datasets["train"]
    shares = [list(sampler(2, rank, size=len(dataset), lengths=dataset.lengths)) for rank in range(2)]
    differ = 0
    for one, other in zip(*shares, strict=True):
        widths = {dataset.fetch(share)["input_ids"].shape[1] for share in (one, other)}
        assert len(widths) == 1
        differ += len({dataset.fetch(list(share))["input_ids"].shape[1] for share in (one, other)}) > 1
    assert differ


def test_only_answers_are_labels_of_chats_and_pairs(make, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    chat = [{"role": "user", "content": "the loss"}, {"role": "assistant", "content": "equals"}]
    unanswered = chat[:1]
    file = lines(
        tmp_path / "mixed.jsonl",
        {"messages": chat},
        {"messages": unanswered},
        {"prompt": "of a", "completion": " document"},
    )
    data = make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja"), batch_size=1)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    labels = batch["labels"][batch["labels"] != IGNORE_INDEX]
    assert data.tokenizer.decode(labels) in (
        "equals</> document<|endoftext|>",
        " document<|endoftext|>equals</>",
    )
    assert int(batch["tokens_in_step"]) == len(labels)
    assert data.statistics["train"].untaught == 1
    assert data.statistics["train"].long_samples == "truncate"


# --- which come when -----------------------------------------------------------------------------------------


class Recorder(LightningModule):
    """Records what each completed batch held, and the micro-batches of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int, int]] = []  # step, checksum, labels, tokens_in_step

    def training_step(self, batch, batch_idx):
        count = int((batch["labels"] != IGNORE_INDEX).sum())
        ids = batch["input_ids"].flatten()
        sum_of = int((ids * torch.arange(1, len(ids) + 1)).sum())
        self.seen.append((self.trainer.global_step, sum_of, count, int(batch.get("tokens_in_step", -1))))
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder, model, data, ckpt=None, **options):
    defaults = {"max_epochs": 2, "callbacks": [ExactResume(), AccumulationTail()]}
    trainer = quiet_trainer(default_root_dir=folder, **defaults | options)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return trainer


def check_steps(model: Recorder) -> set[int]:
    """Checks that each batch knows the targets of its step; returns the numbers of batches of the steps."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    for step, _, count, told in model.seen:
        by_step.setdefault(step, []).append((count, told))
    for window in by_step.values():
        assert {told for _, told in window} == {sum(count for count, _ in window)}
    return set(map(len, by_step.values()))


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("limit", [1.0, 5])
def test_each_batch_knows_the_targets_of_its_step(make, tmp_path, packing, limit):
    model = Recorder()
    data = make(sentences(90), packing=packing, long_samples="truncate")
    fit(tmp_path, model, data, accumulate_grad_batches=4, limit_train_batches=limit)
    batches = len(model.seen) // 2
    assert batches % 4  # the last window of an epoch is shorter
    assert check_steps(model) == {4, batches % 4}


def test_steps_that_grow_count_their_own_targets(make, tmp_path):
    from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize

    model = Recorder()
    growing = DynamicBatchSize(schedule={0: 4, "50%": 12, "1.5 epochs": 8}, max_micro_batch=4)
    fit(tmp_path, model, make(sentences(90)), callbacks=[growing])
    assert check_steps(model) >= {1, 2, 3}


def test_overfitting_takes_the_same_windows_each_epoch_in_their_order(make, tmp_path, recwarn):
    model = Recorder()
    fit(tmp_path, model, make(), overfit_batches=2)
    assert not [warning for warning in recwarn if "overfit" in str(warning.message)]
    assert len(model.seen) == 4
    assert [row[1:] for row in model.seen[:2]] == [row[1:] for row in model.seen[2:]]
    assert all(told == count for _, _, count, told in model.seen)


@pytest.mark.parametrize(("packing", "workers"), [("best_fit", 1), ("none", 0)])
def test_a_run_that_is_stopped_goes_on_with_the_next_window(make, tmp_path, packing, workers):
    options = {"packing": packing, "num_workers": workers, "long_samples": "truncate", "seed": 3}
    whole, cut, rest = Recorder(), Recorder(), Recorder()
    fit(tmp_path, whole, make(**options), accumulate_grad_batches=2)
    trainer = fit(tmp_path, cut, make(**options), accumulate_grad_batches=2, max_steps=3)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    fit(tmp_path, rest, make(**options), ckpt=str(tmp_path / "cut.ckpt"), accumulate_grad_batches=2)
    assert cut.seen + rest.seen == whole.seen
    assert 0 < len(cut.seen) < len(whole.seen) // 2
    epoch = len(whole.seen) // 2
    assert [row[1:3] for row in whole.seen[:epoch]] != [row[1:3] for row in whole.seen[epoch:]]


def test_other_data_in_mid_epoch_are_told_of(make, tmp_path):
    trainer = fit(tmp_path, Recorder(), make(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    with pytest.warns(UserWarning, match="differ from those of the"):
        fit(tmp_path, Recorder(), make(seq_len=40), ckpt=str(tmp_path / "cut.ckpt"))
    padded = make(packing="none", long_samples="truncate")
    trainer = fit(tmp_path, Recorder(), padded, max_steps=3)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    other = make(packing="none", long_samples="truncate", batch_size=2)
    trainer = quiet_trainer(default_root_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the files, the tokenizer")
        validated = make(packing="none", batch_size=2, val_fraction=0.3)
        trainer.validate(Recorder(), datamodule=validated, ckpt_path=str(tmp_path / "cut.ckpt"), verbose=False)
    with pytest.raises(DloError, match="batch_size must be 4, as in the interrupted epoch, got 2"):
        fit(tmp_path, Recorder(), other, ckpt=str(tmp_path / "cut.ckpt"))


def test_the_models_tokenizer_is_used_where_it_brings_one(make, tmp_path):
    data = make()
    data.setup("fit")
    data.tokenizer.add_tokens(["packed document"])
    data.tokenizer.save_pretrained(tmp_path / "model")
    model = Recorder()
    model.tokenizer_source = str(tmp_path / "model")
    other = make()
    fit(tmp_path, model, other, max_steps=1)
    assert len(other.tokenizer) == len(data.tokenizer)


@pytest.mark.parametrize("lengths", [None, np.arange(40) % 7 + 1])
def test_ranks_share_out_the_batches_of_one_process(lengths):
    one = list(sampler(lengths=lengths, accumulate=2))
    ranks = [list(sampler(4, rank, lengths=lengths, accumulate=2)) for rank in range(4)]
    for whole, *shares in zip(one, *ranks, strict=True):
        assert [draw.index for share in shares for draw in share] == [draw.index for draw in whole]
        assert {share.tokens_in_step for share in shares} == {whole.tokens_in_step}
        assert {share.length for share in shares} == {whole.length}
        if lengths is not None:
            assert whole.length == max(lengths[draw.index] for draw in whole)


def test_steps_that_are_planned_count_their_own_batches():
    planned = sampler(window_at=lambda at: Window(4, 1 + (at.samples >= 20)), accumulate=1)
    batches = list(planned)
    counts = [sum((draw.index + 1) ** 2 for draw in batch) for batch in batches]
    expected = [*counts[:5], *[sum(counts[5:7])] * 2, *[sum(counts[7:9])] * 2, counts[9]]
    assert [batch.tokens_in_step for batch in batches] == expected


def test_steps_whose_length_is_decided_later_are_not_guessed_at():
    unplanned = sampler(window_at=lambda at: Window(4, 1), accumulate=2)
    assert {batch.tokens_in_step for batch in unplanned} == {None}
    assert isinstance(unplanned.planned()[0].start, int)
    assert Position(0, 0, 40).epochs == 0


# TextData and its files: what is held out of them, what is kept of them, prompts to complete, and refusals


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
    message = "val_fraction must leave documents for training and for validation, got 0.0001 of 60 documents; set "
    with pytest.raises(DloError, match=message) as raised:
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
        with pytest.raises(DloError, match="predict_files must be set for prediction, got None"):
            ask(make())
    make(predict_files="prompts.txt").check_predict()


def test_a_document_too_long_is_named_by_its_line(make):
    with pytest.raises(DloError, match=r"texts\.jsonl:2: document must have at most 49 tokens .*raise seq_len by \d+"):
        make(["short", " ".join(WORDS * 9)], long_samples="error").setup("fit")


def test_data_without_anything_to_learn_are_refused(make, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    file = lines(tmp_path / "chats.jsonl", {"messages": [{"role": "user", "content": "the loss"}]})
    data = make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(DloError, match=r"at least one target, got none in the 1 of .*chats\.jsonl: .* 1 pieces"):
        data.setup("fit")


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


# --- several sources: proportions, exact resume on other ranks, processes that tokenise, refusals -------------------


MIX = [{"samples": 0, "weights": {"text": 0.5, "web": 0.5}}, {"samples": 400, "weights": {"text": 0.1, "web": 0.9}}]


@pytest.fixture
def mixed(tmp_path, cache):
    """Makes the datamodule of a text source and a tokenised one."""
    file = lines(tmp_path / "texts.jsonl", *({"text": text} for text in sentences(80)))
    write_megatron(tmp_path / "web", documents(400, 90))

    def made(**options) -> TextData:
        sources = {"text": {"files": str(file)}, "web": {"path": str(tmp_path / "web")}}
        defaults = {"sources": sources, "mix": MIX, "mix_ramp": "linear", "cache_dir": str(cache), "seq_len": 24}
        return TextData(
            **defaults
            | {"batch_size": 8, "vocab_size": 320, "corpus_bytes": 60_000, "val_fraction": 0.1, "epoch_samples": 200}
            | options
        )

    return made


def sources_of(data: TextData, index: np.ndarray) -> np.ndarray:
    dataset = data._datasets["train"]
    assert isinstance(dataset, JoinedWindows)
    return dataset.part_of(index)


def test_batches_mix_the_sources_by_weights_that_change(mixed, capsys):
    data = mixed()
    data.setup("fit")
    loader = data.train_dataloader()
    found = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        found += [draw.index for batch in loader.sampler for draw in batch]
    source = sources_of(data, np.array(found))
    assert len(source) == 800
    # linear from 0.5 to 0.1 over 400 samples, then 0.1
    assert (source[:400] == 0).sum() == pytest.approx(0.3 * 400, abs=1)
    assert (source[400:] == 0).sum() == pytest.approx(0.1 * 400, abs=1)
    assert (source[:40] == 0).mean() > 0.4
    assert "windows of 24 in 2 sources: text" in capsys.readouterr().out


def test_validation_has_windows_that_training_does_not(mixed):
    data = mixed()
    data.setup("fit")
    seen = {row.tobytes() for index in (0, 1) for row in all_rows(data._datasets["train"].parts[index])}
    held = [row.tobytes() for part in data._datasets["val"].parts for row in all_rows(part)]
    assert held
    assert not seen & set(held)
    batches = list(data.val_dataloader())
    assert sum(len(batch["labels"]) for batch in batches) == len(held)


def all_rows(part) -> list:
    return [part.fetch([Draw(index, 0, True)])["input_ids"].numpy() for index in range(len(part))]


def test_processes_tokenise_as_one_does(tmp_path, make):
    texts = sentences(1500)
    one, many = (
        make(texts, cache_dir=str(tmp_path / f"cache{n}"), tokenize_processes=n, tokenizer=None) for n in (1, 3)
    )
    stores = []
    for data in (one, many):
        data.prepare_data()
        stores.append(TokenStore(data.cache_dir / data._names["train"]))
    assert len(stores[0]) == 1500
    assert all(
        np.array_equal(getattr(stores[0], name), getattr(stores[1], name)) for name in ("bounds", "hashes", "rows")
    )
    assert np.array_equal(stores[0].read(slice(None))[0], stores[1].read(slice(None))[0])


def _pids(records):
    time.sleep(0.01)  # Else one process may do all before the others have run.
    return [os.getpid()] * len(records)


def _killed(records):
    os.kill(os.getpid(), signal.SIGKILL)


def _refuses(records):
    raise DloError("the third record is broken")


def test_several_processes_work_and_their_errors_arrive():
    assert set(tokenize_in_processes(range(1000), _pids, None, 1000)) == {os.getpid()}
    pids = set(tokenize_in_processes(range(20_000), _pids, 3, 0))
    assert os.getpid() not in pids
    assert len(pids) > 1
    with pytest.raises(DloError, match="the third record is broken"):
        list(tokenize_in_processes(range(2000), _refuses, 2, 0))
    with pytest.raises(DloError, match="3 processes must tokenise to the end, got one that was killed"):
        list(tokenize_in_processes(range(2000), _killed, 3, 0))


def test_missing_files_are_refused_before_the_run(mixed, tmp_path):
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsnl")}, "web": {"path": str(tmp_path / "web")}})
    with pytest.raises(DloError, match=r"sources.text.files must name files, got .*texts.jsnl"):
        data.check()
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsonl")}, "web": {"path": str(tmp_path / "wed")}})
    with pytest.raises(DloError, match=r"sources.web.path must name files, got .*wed, which does not exist"):
        data.check()


def test_the_standard_library_is_a_source(mixed, cache):
    data = mixed(sources={"json": {"files": "stdlib://json/*.py"}}, mix=None, epoch_samples=None, val_fraction=0.0)
    data.check()
    data.setup("fit")
    assert data.statistics["train"].samples == len(data.train_dataloader().dataset) > 100


# A mixture of tokenised shards: two ranks train as one process, and runs resume on other ranks and workers


CHANGING = [{"samples": 0, "weights": {"own": 0.8, "web": 0.2}}, {"samples": 60, "weights": {"own": 0.3, "web": 0.7}}]
#: Batches of 8 samples in an epoch, and where the run stops: in the middle of the first and the second epoch.
EPOCH, STOPS = 7, (3, 9, 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of dlo's own format and of Megatron-LM's, and the tokenizer's cache."""
    folder = tmp_path_factory.mktemp("mixture")
    own = documents(150, 90, seed=1)
    learned = (Document(ids, np.ones(len(ids), bool), number, 0, number) for number, ids in enumerate(own))
    write_store(folder / "tokens-own.bin", learned, 320)
    write_megatron(folder / "web", documents(200, 90, seed=2))
    mixture(folder)[1].prepare_data()
    return folder


def mixture(folder: Path, **options: Any) -> tuple[CausalLM, TextData]:
    sources = {"own": {"path": str(folder / "tokens-own.bin")}, "web": {"path": str(folder / "web")}}
    data = {
        "train_files": None,
        "sources": sources,
        "mix": CHANGING,
        "mix_ramp": "linear",
        "shuffle": "buffer",
        "shuffle_chunk": 8,
        "shuffle_buffer": 64,
        "epoch_samples": EPOCH * 8,
        **options,
    }
    return curricula_runs.texts(folder, data=data)


class Seen(Callback):
    """Samples that this rank has trained on."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, ...]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append([tuple(row) for row in batch["input_ids"].tolist()])


def _train(
    folder: Path, own: Path, strategy: str, ranks: int, steps: int, workers: int, before: Path | None
) -> tuple[list[float], list[list[tuple[int, ...]]]]:
    curricula_runs.seeded()
    own.mkdir(exist_ok=True)
    seen = Seen()
    losses, _ = curricula_runs.fit(
        own, mixture(folder, num_workers=workers), strategy, ranks, [seen],
        epochs=2, batches=EPOCH, max_steps=steps, ckpt_path=before, precision="64-true",
    )  # fmt: skip
    return losses, seen.rows


def _links(rank: int, world_size: int, folder: Path, own: Path) -> list[Any]:
    """Trains on one process, goes on with two ranks, and ends on one process; beside it the run of one process."""
    first, second, third = STOPS
    found: list[Any] = [None, None]
    if rank == 0:
        found[0] = _train(folder, own / "alone", "auto", 1, third, 0, None)
        found[1] = _train(folder, own / "1", "auto", 1, first, 2, None)
    found.append(_train(folder, own / "2", "zero3", 2, second, 1, own / "1" / "last.ckpt"))
    leave_group()
    if rank == 0:
        found.append(_train(folder, own / "3", "auto", 1, third, 3, own / "2" / "last.ckpt"))
    return found


@pytest.mark.timeout(300)
def test_a_run_resumes_in_mid_epoch_on_other_ranks_and_workers(folder: Path, tmp_path: Path) -> None:
    main, other = run_distributed(_links, 2, folder, tmp_path, timeout=250, backend=None)
    (losses, whole), *links = main
    assert [len(link[1]) for link in links] == [STOPS[0], STOPS[1] - STOPS[0], STOPS[2] - STOPS[1]]
    links[1] = links[1][0], [mine + others for mine, others in zip(links[1][1], other[2][1], strict=True)]
    assert [rows for link in links for rows in link[1]] == whole
    assert len({row for rows in whole for row in rows}) > 0.9 * sum(map(len, whole))
    assert [loss for link in links for loss in link[0]] == pytest.approx(losses, rel=1e-9)

"""Seq2SeqData: span corruption, padded and packed rows, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoModelForSeq2SeqLM

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling
from dlo_tasks.language.model_folders import write_folder
from dlo_tasks.language.seq2seq_data import Seq2SeqData
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from dlo_tasks.language.span_corruption import SpanCorruption, find_sentinels
from dlo_tasks.language.text_data import TextData
from support.seq2seq import seq2seq_config
from support.texts import lines, sentences
from support.trainers import quiet_trainer

PAIRS = [{"source": text, "target": text[::-1][: 5 + number % 20]} for number, text in enumerate(sentences(40, 8))]


@pytest.fixture
def make(tmp_path: Path, cache: Path) -> Any:
    """Makes the datamodule of some records."""

    def made(records: list[dict[str, Any]] | None = None, **options: Any) -> Seq2SeqData:
        file = lines(tmp_path / "pairs.jsonl", *(PAIRS if records is None else records))
        sizes = {"seq_len": 48, "target_len": 24, "batch_size": 4, "vocab_size": 320, "corpus_bytes": 60_000}
        return Seq2SeqData(**{"train_files": str(file), "cache_dir": str(cache), "val_fraction": 0.0} | sizes | options)

    return made


def batches(data: Seq2SeqData, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
    if not data._datasets:
        data.prepare_data()
        data.setup("fit")
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("length", [2, 3, 10, 97, 568])
def test_spans_are_cut_out_and_the_lengths_depend_on_the_length_alone(length: int) -> None:
    corruption, tokens = SpanCorruption(), np.arange(length)
    counts = corruption.count(np.array(length))
    for seed in range(5):
        source, target = corruption.corrupt(tokens, np.arange(1000, 1100), np.random.default_rng(seed))
        assert (len(source), len(target)) == (counts.source, counts.target)
        parts: dict[int, list[int]] = {}
        for token in target:
            parts.setdefault(int(token), []) if token >= 1000 else parts[list(parts)[-1]].append(int(token))
        assert list(parts) == [token for token in source if token >= 1000] == list(range(1000, 1000 + counts.spans))
        whole = [part for token in source for part in (parts[token] if token >= 1000 else [token])]
        assert whole == tokens.tolist()
        assert all(parts.values())
    assert counts.noise == max(1, round(0.15 * length))


def test_t5s_lengths() -> None:
    """A source of 512 and its target of 114 tokens, with their ends, as in the paper's code."""
    assert SpanCorruption().longest(512, 10_000, 100) == 568
    assert SpanCorruption().count(np.array(568)).target + 1 == 114


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_rows_have_all_pairs_and_their_targets_are_counted(make: Any, packing: str) -> None:
    data = make(packing=packing, batch_size=1)
    found, tokens = [], 0
    for batch in batches(data):
        source = batch.get("encoder_segment_ids", batch.get("attention_mask"))
        target = batch.get("decoder_segment_ids", (batch["labels"] != -100).long())
        tokens += int(batch["tokens_in_step"])
        assert int((batch["labels"] != -100).sum()) == int(batch["tokens_in_step"])
        for ids, labels, of, to in zip(batch["input_ids"], batch["labels"], source, target, strict=True):
            found += [(ids[of == n].tolist(), labels[to == n].tolist()) for n in range(1, int(of.max()) + 1)]
    texts = {tuple(data.tokenizer.decode(ids, skip_special_tokens=True) for ids in pair) for pair in found}
    assert texts == {(pair["source"], pair["target"]) for pair in PAIRS}
    assert all(ids[-1] == labels[-1] == data.tokenizer.eos_token_id for ids, labels in found)


def test_each_epoch_removes_other_spans_which_depend_on_the_draw_alone(make: Any) -> None:
    data = make([{"text": text} for text in sentences(60)], target_len=None)
    first, again, second = batches(data), batches(data), batches(data, epoch=1)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    sentinels = find_sentinels(data.tokenizer)
    assert sentinels.tolist() == list(range(len(data.tokenizer) - 100, len(data.tokenizer)))
    assert all(int(batch["tokens_in_step"]) == int((batch["labels"] != -100).sum()) for batch in (*first, *second))
    dataset = data._datasets["train"]
    rows = [dataset.fetch([Draw(1, seed, True)])["labels"] for seed in (7, 7, 8)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@default_dtype(torch.float64)
def test_packed_pairs_have_the_loss_that_they_have_alone(make: Any, attention: str) -> None:
    task = Seq2SeqLM(config=seq2seq_config("t5", vocab_size=450), attention=attention)
    task.configure_model()
    losses = []
    for packing in ("best_fit", "none"):
        found = [
            (task.training_step(batch, 0)["loss"], batch["tokens_in_step"])
            for batch in batches(make(packing=packing, batch_size=1))
        ]
        losses.append(sum(loss * tokens for loss, tokens in found) / sum(tokens for _, tokens in found))
    torch.testing.assert_close(*losses)


def test_a_model_with_learned_positions_gets_padded_rows(make: Any) -> None:
    data = make()
    quiet_trainer(max_steps=1).fit(Seq2SeqLM(config=seq2seq_config("bart", vocab_size=450)), datamodule=data)
    assert data.packing == "none"


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"source": "a", "target": "b"}, {"text": "c"}], {}, r"pairs.jsonl:2: records must all have 'source' and"),
        ([{"source": "a"}], {}, "record with 'source' must have 'target' too"),
        (None, {"long_samples": "error", "target_len": 2}, r"pairs.jsonl:\d+: source and target must have at most"),
        (None, {"long_samples": "split"}, "long_samples must be truncate, drop or error for pairs, got split"),
        (None, {"columns": {"prompt": "x"}}, "columns must rename source, target, text, got prompt"),
        (None, {"noise_density": 1.0}, "noise_density must be above 0 and below 1"),
    ],
)
def test_bad_data_are_refused(make: Any, records: Any, options: dict[str, Any], message: str) -> None:
    def run() -> None:
        data = make(records, **options)
        data.check()
        batches(data)

    with pytest.raises(DloError, match=message):
        run()


def test_data_of_another_kind_of_model_are_refused(make: Any) -> None:
    with pytest.raises(DloError, match=r"data must have targets for CausalLM, got those for Seq2SeqLM; set"):
        CausalLM(config={"model_type": "gpt2"}).check(make())
    with pytest.raises(DloError, match=r"data must have targets for Seq2SeqLM, got those for CausalLM; set"):
        Seq2SeqLM(config=seq2seq_config("t5")).check(TextData())


class SavesAt3(Seq2SeqLM):
    """Saves a checkpoint after the third step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "at_3.ckpt")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(make: Any, tmp_path: Path, family: str) -> None:
    """The spans of the rest of the epoch are those of the interrupted run; the folder has the weights."""
    config, weights = seq2seq_config(family), []
    del config["vocab_size"]
    for checkpoint in (None, tmp_path / "at_3.ckpt"):
        seed_everything(0, verbose=False)
        task = SavesAt3(config=config, schedule="constant")
        trainer = quiet_trainer(max_steps=5, default_root_dir=tmp_path)
        data = make([{"text": text} for text in sentences(60)], target_len=None)
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=False)
        weights.append(task.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    write_folder(torch.load(tmp_path / "end.ckpt", weights_only=False), tmp_path / "folder")
    read = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder")
    ids = torch.randint(3, 300, (2, 9))
    logits = [one.eval()(input_ids=ids, decoder_input_ids=ids).logits for one in (task.model, read)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert read.config.decoder_start_token_id == task.config.decoder_start_token_id


def test_targets_are_written_for_the_sources_of_a_file(make: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "sources.jsonl", {"source": "the loss"}, {"source": "a"})
    data = make(predict_files=str(file))
    task = Seq2SeqLM(config=seq2seq_config("bart", vocab_size=450), sampling=Sampling(max_new_tokens=4))
    found: Any = quiet_trainer().predict(task, datamodule=data)
    rows = data.prediction_rows([row for batch in found for row in batch])
    assert [row["prompt"] for row in rows] == ["the loss", "a"]
    assert all(1 <= len(row["tokens"]) <= 4 for row in found[0])

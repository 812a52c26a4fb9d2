"""TextData: what is in its batches, that documents are alone in them, and which come when."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from dlo_framework.data import Position, Window
from dlo_framework.errors import DloError
from dlo_framework.progress import AccumulationTail
from dlo_framework.run.resume import ExactResume
from dlo_tasks.language.batches import IGNORE_INDEX
from support.texts import CHATML, documents_in, lines, sampler, sentences
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
    assert {name: values.shape for name, values in batch.items()} == {
        "input_ids": (4, 48),
        "labels": (4, 48),
        "position_ids": (4, 48),
        "tokens_in_step": (),
    }
    assert all(values.dtype == torch.int64 for values in batch.values())
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
        assert "attention_mask" not in batch  # padding stands behind all that is real
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


# --- documents are alone -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, num_key_value_heads=2, max_position_embeddings=128, use_cache=False, **shape)
    return LlamaForCausalLM(config).eval()


def logits_of(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


def test_the_loss_of_a_packed_document_is_its_loss_alone(make, llama):
    data = make(sentences(60, longest=12), seq_len=128)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    documents = documents_in(batch)
    assert len(documents) > 4 * 2
    packed = F.cross_entropy(logits_of(llama, batch).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    packed = packed[batch["labels"].flatten() != IGNORE_INDEX]
    alone = []
    for ids, labels in documents:
        with torch.no_grad():
            logits = llama(input_ids=torch.tensor([ids])).logits[0]
        alone.append(F.cross_entropy(logits, torch.tensor(labels), reduction="none"))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


# --- which come when -----------------------------------------------------------------------------------------


class Recorder(LightningModule):
    """Records what each completed batch held, and the micro-batches of its step."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int, int]] = []  # step, checksum, labels, tokens_in_step
        self.stop_at = stop_at

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.stop_at:
            raise RuntimeError("power cut")
        count = int((batch["labels"] != IGNORE_INDEX).sum())
        sum_of = int(
            (batch["input_ids"] * torch.arange(1, batch["input_ids"].numel() + 1).view_as(batch["input_ids"])).sum()
        )
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

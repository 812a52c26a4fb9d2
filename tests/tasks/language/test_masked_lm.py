"""Models that predict masked tokens: masks, documents, losses, filled in texts, transformers' folder, and ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_tensors
from dlo_framework.frozen_model import default_dtype
from dlo_framework.models.attention import Attention, BSLongformer, Prefix, SlidingWindow, VariableSparsity
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import IGNORE_INDEX, FixedDraws
from dlo_tasks.language.masked_data import MaskedTextData, WordStarts
from dlo_tasks.language.masked_lm import MaskedLM
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.tokenizer import embedded_tokenizer
from support.causal_types import MASKED_REFUSED, MASKED_TYPES, tiny, tiny_masked
from support.divided_types import check_cut, check_divided
from support.strategies import STRATEGIES, named_cases
from support.trainers import quiet_trainer

TEXTS = ["the cat sat on the mat", "a dog", "unbelievable stories of the unforgettable", "one two three four five six"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """WordPiece, as BERT's: some words are of several tokens."""
    from transformers import BertTokenizerFast

    words = sorted({word for text in TEXTS for word in text.split() if not word.startswith("un")})
    parts = ["un", "##believ", "##able", "##forgettable"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *parts]
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def data_of(tokenizer: Path, texts: list[str] = TEXTS, **options: Any) -> MaskedTextData:
    path = tokenizer.parent / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = {"seq_len": 16, "batch_size": 2, "val_fraction": 0.0, **options}
    data = MaskedTextData(train_files=str(path), tokenizer=str(tokenizer), cache_dir=str(tokenizer.parent), **options)
    data.prepare_data()
    data.setup("fit")
    return data


def batch_of(data: MaskedTextData, seed: int = 1) -> dict[str, torch.Tensor]:
    samples = data._datasets["train"]
    return samples.fetch([Draw(index, seed + index, True) for index in range(len(samples))])


def restored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("whole_words", [False, True])
def test_a_row_has_masks_by_its_length_and_on_no_special_token(
    tokenizer: Path, packing: str, whole_words: bool
) -> None:
    data = data_of(tokenizer, packing=packing, mask_fraction=0.4, whole_words=whole_words)
    samples, batch = data._datasets["train"], batch_of(data)
    found = (batch["labels"] != IGNORE_INDEX).sum(1)
    special = restored(batch) < 5
    assert found.tolist() == samples.targets.tolist()
    assert found.tolist() == [max(1, int(0.4 * count + 0.5)) for count in (~special).sum(1).tolist()]
    assert not (special & (batch["labels"] != IGNORE_INDEX)).any()
    texts = [data.tokenizer.decode(row) for row in restored(batch)]
    assert all(any(f"[CLS] {text} [SEP]" in row for row in texts) for text in TEXTS)
    if packing == "best_fit":  # Each document, and the unused end of a row, begins at position 0.
        starts = batch["input_ids"] == data.tokenizer.cls_token_id
        assert (batch["position_ids"][starts] == 0).all()
        assert (batch["position_ids"] == 0).sum() >= starts.sum()
    else:
        assert (batch["attention_mask"] == (batch["input_ids"] != data.tokenizer.pad_token_id)).all()
    again, other = batch_of(data), batch_of(data, seed=9)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert torch.equal(restored(batch), restored(other))
    assert not torch.equal(batch["labels"], other["labels"])
    held = FixedDraws(samples)  # Each validation has the same masks.
    first, second = (held.fetch([Draw(0, seed, True)])["labels"] for seed in range(2))
    assert torch.equal(first, second)


def test_words_are_masked_whole_and_tokens_are_replaced_in_the_shares_of_bert(tokenizer: Path) -> None:
    data = data_of(tokenizer, ["unbelievable cat " * 100] * 8, seq_len=402, mask_fraction=0.15, whole_words=True)
    batch = batch_of(data)
    masked = batch["labels"] != IGNORE_INDEX
    word = data.tokenizer.convert_tokens_to_ids(["un", "##believ", "##able"])
    begins = restored(batch) == word[0]
    parts = torch.stack([masked.roll(-shift, 1)[begins] for shift in range(3)]).sum(0)
    assert ((parts == 0) | (parts == 3)).float().mean() > 0.97  # One word of a row may be cut to its number of masks.
    ids, labels = batch["input_ids"][masked], batch["labels"][masked]
    shares = [(ids == data.tokenizer.mask_token_id).float().mean(), (ids == labels).float().mean()]
    assert shares == pytest.approx([0.8, 0.1], abs=0.04)


def test_words_of_byte_level_tokens_begin_after_spaces_and_signs(tmp_path: Path) -> None:
    text = "for item in range(10):\n\tprint(item_name)\n"
    (tmp_path / "text.py").write_text(text * 9)
    tokenizer = embedded_tokenizer([tmp_path / "text.py"], 268, tmp_path)
    ids = np.array(tokenizer(text)["input_ids"])
    starts = np.flatnonzero(WordStarts(tokenizer).begin(ids))
    words = [tokenizer.decode(part).strip() for part in np.split(ids, starts)]
    assert [word for word in words if word.isalnum()] == ["for", "item", "in", "range", "10", "print", "item", "name"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "distilbert"])
def test_packed_documents_train_as_padded_ones_do_and_the_loss_is_transformers(tokenizer: Path, kind: str) -> None:
    torch.manual_seed(0)
    task = MaskedLM(config=tiny_masked(kind, dropout=False, pad_token_id=0))
    with default_dtype(torch.float64):
        task.configure_model()
    assert task.isolates_documents
    single = {"input_ids": torch.ones(1, 3).long(), "position_ids": torch.zeros(1, 3).long()}
    assert "attention_mask" in task.inputs(single)[1]  # Documents of one token too.
    packed, padded = (batch_of(data_of(tokenizer, packing=packing, seq_len=18)) for packing in ("best_fit", "none"))
    length = padded["input_ids"].shape[1]
    row, starts = packed["position_ids"].shape[0], (packed["input_ids"] == 2).nonzero().tolist()
    assert row < len(starts) == len(TEXTS)  # several in a row
    rows = [F.pad(packed["input_ids"][r, c:], (0, 40))[:length] for r, c in starts]
    own = [int((piece == 3).nonzero()[0]) + 1 if (piece == 3).any() else length for piece in rows]
    labels = [F.pad(packed["labels"][r, c:], (0, 40), value=-100)[:length] for r, c in starts]
    used = torch.arange(length) < torch.tensor(own)[:, None]
    alone = {
        "input_ids": torch.stack(rows).where(used, torch.tensor(0)),
        "labels": torch.stack(labels).where(used, torch.tensor(IGNORE_INDEX)),
        "attention_mask": used.long(),
    }

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        args, kwargs = task.inputs(batch)
        return task.loss(task(*args, **kwargs), batch)

    ours = loss_of(packed)
    logits = task.model(input_ids=alone["input_ids"], attention_mask=alone["attention_mask"]).logits
    theirs = F.cross_entropy(logits.flatten(0, 1), alone["labels"].flatten())
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    assert float(loss_of(alone)) == pytest.approx(float(theirs), rel=1e-9)
    gradients = torch.autograd.grad(ours, [p for p in task.model.parameters() if p.requires_grad], allow_unused=True)
    expected = torch.autograd.grad(theirs, [p for p in task.model.parameters() if p.requires_grad], allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_run_resumes_to_the_bit_fills_in_texts_and_its_folder_is_transformers(
    tokenizer: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    (tmp_path / "holes.txt").write_text("the [MASK] sat on the mat\na [MASK]\n")

    config = {name: value for name, value in tiny_masked("bert", dropout=False).items() if name != "vocab_size"}

    def trained(start: Path | None = None, *callbacks: Any) -> tuple[Any, MaskedLM, MaskedTextData]:
        data = data_of(tokenizer, TEXTS * 4, seq_len=12, val_fraction=0.3, predict_files=str(tmp_path / "holes.txt"))
        task = MaskedLM(config=config, lr=1e-2, schedule="constant")
        data.check()
        task.check(data)
        trainer = quiet_trainer(max_epochs=4, devices=1, callbacks=[*callbacks], enable_checkpointing=bool(callbacks))
        trainer.fit(task, datamodule=data, ckpt_path=start and str(start))
        return trainer, task, data

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    trainer, task, data = trained(None, saves)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    assert {"val_loss", "val_perplexity", "val_accuracy"} == {n for n in trainer.callback_metrics if "val" in n}
    _, again, _ = trained(tmp_path / "step=7.ckpt")
    for name, weight in task.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    rows = [row for rows in trainer.predict(task, datamodule=data) for row in rows]
    assert [len(row["tokens"]) for row in rows] == [1, 1]
    assert rows[0]["completion"].endswith("sat on the mat")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    MaskedLM.export_folder(checkpoint, tmp_path / "folder")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "folder")
    ids = data.tokenizer("the [MASK] sat on the mat", return_tensors="pt")["input_ids"]
    best = model(ids).logits[0][ids[0] == data.tokenizer.mask_token_id].argmax(-1)
    assert best.tolist() == rows[0]["tokens"]


def test_what_does_not_fit_is_refused_before_it_trains(tokenizer: Path, tmp_path: Path) -> None:
    task = MaskedLM(config=tiny_masked("bert"))
    with pytest.raises(DloError, match=r"set data\.class_path: MaskedTextData, or model\.class_path: CausalLM"):
        task.check(TextData())
    sparse = VariableSparsity(different_layout_per_head=True)
    for config, attention, message in (
        (tiny("bert"), None, r"config\.is_decoder: false, or train it as a CausalLM"),
        (tiny_masked("bert"), Attention("varlen"), "got varlen, which is causal"),
        (tiny_masked("bert"), Attention(mask=sparse), "per_head must be false for MaskedLM"),
        (tiny_masked("bert"), Attention(mask=Prefix(4)), "in a model that is not causal, got Prefix"),
    ):
        with pytest.raises(DloError, match=message):
            MaskedLM(config=config, attention=attention).configure_model()
    with pytest.raises(DloError, match="random_fraction and unchanged_fraction must be at most 1 together"):
        MaskedTextData(random_fraction=0.6, unchanged_fraction=0.6)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    with pytest.raises(DloError, match=r"chat.jsonl:1: record must have a text for MaskedTextData, got a messages"):
        MaskedTextData(train_files=str(tmp_path / "chat.jsonl")).check()
    (tmp_path / "holes.txt").write_text("a dog\n")
    data = data_of(tokenizer, predict_files=str(tmp_path / "holes.txt"))
    with pytest.raises(DloError, match=r"mask token \[MASK\] in each text, got 'a dog'"):
        data.setup("predict")


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_sparse_mask_sees_what_its_pattern_says_in_both_directions(kind: str) -> None:
    pattern = BSLongformer(block=4, num_sliding_window_blocks=3, global_block_indices=[0])
    config = tiny_masked(kind) | ({"layer_types": ["full_attention"] * 4} if kind == "modernbert" else {})
    sparse, plain = MaskedLM(config=config, attention=Attention("blocks", pattern)), MaskedLM(config=config)
    for task in (sparse, plain):
        task.configure_model()
        task.eval()
    plain.model.load_state_dict(sparse.model.state_dict())
    places = torch.arange(32)
    blocks = places // 4
    seen = ((blocks[:, None] - blocks).abs() <= 1) | (blocks == 0) | (blocks[:, None] == 0)
    packed = torch.cat([torch.arange(20), torch.arange(12)])[None]
    padded = (places < 25).long()[None]
    tokens = torch.randint(5, config["vocab_size"], (1, 32))
    for batch, same in (
        ({"position_ids": packed}, (places[:, None] < 20) == (places < 20)),
        ({"attention_mask": padded}, (padded > 0).expand(32, 32)),
    ):
        found = sparse(**sparse.inputs({"input_ids": tokens, **batch})[1])
        arguments = plain.inputs({"input_ids": tokens, **batch})[1]
        full = (seen & same)[None, None]
        own = arguments["attention_mask"]
        arguments["attention_mask"] = dict.fromkeys(own, full) if isinstance(own, dict) else full
        kept = padded[0] > 0 if "attention_mask" in batch else slice(None)
        torch.testing.assert_close(found[0, kept], plain(**arguments)[0, kept], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKED_TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_trains_on_padded_rows_with_the_loss_of_transformers_or_is_refused(kind: str) -> None:
    seed_everything(0, verbose=False)
    task = MaskedLM(config=tiny_masked(kind, dropout=False))
    if kind in MASKED_REFUSED:
        with pytest.raises(DloError, match=MASKED_REFUSED[kind]):
            task.configure_model()
        return
    task.configure_model()
    draw = torch.Generator().manual_seed(1)
    ids, lengths = torch.randint(3, 60, (4, 16), generator=draw), torch.tensor([16, 11, 7, 16])
    used = torch.arange(16) < lengths[:, None]
    chosen = used & (torch.rand(4, 16, generator=draw) < 0.3)
    batch = {"input_ids": ids * used, "attention_mask": used.long(), "labels": ids.where(chosen, torch.tensor(-100))}
    args, inputs = task.inputs(batch)
    loss = task.loss(task(*args, **inputs), batch)
    output: Any = task.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output[0] if isinstance(output, tuple) else output.logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert sum(float(one.grad.abs().sum()) for one in task.parameters() if one.grad is not None) > 0


def test_the_head_is_planned_for_the_datas_fraction_of_masks() -> None:
    task = MaskedLM(config=tiny_masked("bert"))
    for fraction, count in ((0.15, 10), (0.5, 32)):
        batch = task.example_batch(MaskedTextData(mask_fraction=fraction, seq_len=64))
        assert (batch["labels"] != IGNORE_INDEX).sum() == batch["tokens_in_step"] == count
        with fake_tensors():
            assert task._count_targets(torch.zeros(1, 64)) == count


# models that predict masked tokens train on two ranks as one process does, packed and padded, in double precision


def build(kind: str, packing: str = "best_fit", lora: int = 0, **options: Any) -> tuple[MaskedLM, MaskedTextData]:
    config = tiny_masked(kind, dropout=False) | {"vocab_size": 300, "pad_token_id": 1}
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = MaskedLM(config=config, lora=Lora(rank=lora) if lora else None, **more)
    data = MaskedTextData(seq_len=32, batch_size=4, vocab_size=300, corpus_bytes=12_000, packing=packing)
    return task, data


def cases(strategies: tuple[str, ...], **arguments: Any) -> list[Case]:
    single = [name for name in strategies if name.startswith("deepspeed")]  # It has no double precision.
    double = [name for name in strategies if name not in single]
    return named_cases(double, {"precision": "64-true"}, **arguments) + named_cases(single, **arguments)


def test_masked_tokens_are_learned_on_two_ranks_as_in_one_process() -> None:
    found = cases(("zero3", "pp"), kind="bert")
    found += cases(("tp",), kind="modernbert")
    found += cases(("ddp",), kind="deberta-v2", packing="none")
    assert_parity(build, found, steps=2, rtol=1e-9)


DATA = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp", "deepspeed_1", "deepspeed_2", "deepspeed_3")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_every_strategy_learns_masked_tokens_as_one_process(kind: str) -> None:
    found = cases(DATA, kind=kind) + cases(("fsdp", "zero3", "pp"), kind=kind, recompute=True)
    found += cases(("fsdp", "zero3", "tp"), kind=kind, lora=4)
    if kind == "bert":
        sparse = Attention("blocks", SlidingWindow(8, block=4))
        found += cases(("zero3", "fsdp", "tp", "pp"), kind=kind, attention=sparse)
    assert_parity(build, found, steps=2, rtol=1e-4)


@pytest.mark.slow
def test_masked_tokens_are_learned_on_four_ranks_as_in_one_process() -> None:
    found = cases(("zero3", "fsdp"), kind="bert") + cases(("copies x pp",), kind="modernbert")
    assert_parity(build, found, world_size=4, steps=2, rtol=1e-9)


def _fill(rank: int, world_size: int, tokenizer: Path, names: list[str]) -> list[dict[int, list[int]]]:
    """Returns the tokens that this rank fills in, by the text's number, under each strategy."""
    found = []
    for name in names:
        data = data_of(tokenizer, predict_files=str(tokenizer / "holes.txt"))
        trainer = quiet_trainer(devices=world_size, strategy=STRATEGIES[name](), precision="64-true")
        batches: Any = trainer.predict(MaskedLM(model=str(tokenizer / "model")), datamodule=data)
        found.append({row["index"]: row["tokens"] for rows in batches for row in rows})
    return found


@pytest.mark.slow
def test_masks_are_filled_in_on_two_ranks_as_in_one_process(tokenizer: Path) -> None:
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

    (tokenizer / "holes.txt").write_text("the [MASK] sat on the mat\na [MASK]\n[MASK] two [MASK] four\na [MASK] dog\n")
    size = len(AutoTokenizer.from_pretrained(tokenizer))
    config = AutoConfig.for_model(**tiny_masked("bert", initializer_range=0.4) | {"vocab_size": size})
    AutoModelForMaskedLM.from_config(config).save_pretrained(tokenizer / "model")
    (expected,) = _fill(0, 1, tokenizer, ["auto"])
    names = ["zero3", "fsdp", "tp"]
    ranks = run_distributed(_fill, 2, tokenizer, names, backend=None)
    for number, name in enumerate(names):
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found |= rank[number]
        assert found == expected, name


#: Types without tensor rules that can be proved.
NOT_DIVIDED = {"esmc", "ibert", "longformer", "reformer", "squeezebert"}
#: Types with one block, with blocks in several lists, and with blocks that use more of one another than a hidden state.
NOT_CUT = {"albert", "flaubert", "xlm", "funnel", "modernvbert", "reformer"}
DIVIDED = [kind for kind in MASKED_TYPES if kind not in MASKED_REFUSED]


def example(kind: str) -> tuple[MaskedLM, dict[str, torch.Tensor]]:
    task = MaskedLM(config=tiny_masked(kind, dropout=False))
    task.configure_model()
    ids, mask = torch.randint(5, 60, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    labels = ids.masked_fill(torch.rand(2, 16) > 0.3, IGNORE_INDEX)
    counted = (labels != IGNORE_INDEX).sum()
    return task.eval(), {"input_ids": ids, "attention_mask": mask, "labels": labels, "tokens_in_step": counted}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_types_divided_by_two_ranks_are_one_process() -> None:
    check_divided(example, DIVIDED, NOT_DIVIDED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_types_in_two_stages_are_one_process() -> None:
    check_cut(example, [kind for kind in DIVIDED if kind not in NOT_CUT])

"""CausalLM: what it builds, trains, measures, is asked and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.errors import DloError
from dlo_tasks.language import language_models
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import pad_left
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.chat import encode_prompts, encode_request, format_prompt, read_prompts
from dlo_tasks.language.evaluation import count_token_bytes
from dlo_tasks.language.generation import (
    Sampling,
    check_generation_length,
    check_windows,
    complete_ids,
    end_tokens,
    max_positions,
    position_table_size,
)
from support.causal_types import tiny
from support.texts import CHATML, lines, word_tokenizer
from support.token_batches import FAMILIES, SMALL, built_model
from support.trainers import quiet_trainer

TEXT = "def add(a, b):\n    return a + b\n\n\ndef größer(x):\n    return x > 0  # ≥ wäre 1\n"
LLAMA: dict[str, Any] = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
del LLAMA["vocab_size"]  # The data give it.


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 290 tokens."""
    bpe = Tokenizer(token_models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", **special)


class Text(LightningDataModule):
    """The text over and over, in rows of 16 tokens; the last row's second half is padding."""

    def __init__(self, tokenizer: Any = None, rows: int = 12) -> None:
        super().__init__()
        self.tokenizer = make_tokenizer() if tokenizer is None else tokenizer
        ids = torch.tensor(self.tokenizer(TEXT * 20)["input_ids"][: rows * 16 + 1])
        labels = ids[1:].clone().view(rows, 16)
        labels[-1, 8:] = -100
        self.batches = [
            {
                "input_ids": ids[:-1].view(rows, 16)[start : start + 4],
                "labels": labels[start : start + 4],
                "position_ids": torch.arange(16).expand(4, 16),
            }
            for start in range(0, rows, 4)
        ]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader

    def predict_dataloader(self) -> DataLoader:
        rows = [self.tokenizer(prompt)["input_ids"] for prompt in ("def ", "    return a")]
        ids, mask = pad_left([*rows, rows[0]], 0, torch.device("cpu"))
        batch = {"input_ids": ids, "attention_mask": mask, "index": torch.tensor([1, 0, -1])}
        return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]


def trainer_in(folder: Path, **options: Any) -> Trainer:
    return quiet_trainer(default_root_dir=folder, **{"num_sanity_val_steps": 0, **options})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder that save_pretrained wrote, with its tokenizer."""
    folder = tmp_path / "model"
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = language_models.read_config(None, {**LLAMA, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- training and measuring ------------------------------------------------------------------------------------


def test_it_learns_measures_and_shows_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed_everything(0, verbose=False)
    task = CausalLM(
        config=LLAMA, lr=1e-2, warmup_steps=3, prompts=["def add(", "def "], sampling=Sampling(max_new_tokens=12)
    )
    trainer = trainer_in(tmp_path, max_epochs=16, check_val_every_n_epoch=8, logger=TensorBoardLogger(tmp_path))
    trainer.fit(task, datamodule=Text())
    found = trainer.callback_metrics
    assert found["val_loss"] < 0.5
    assert found["val_accuracy"] > 0.8
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"]), rel=1e-5)
    assert task.samples[0].startswith("a, b):\n    return")
    assert "def add(⟶a, b):\n    return" in capsys.readouterr().out
    board = EventAccumulator(trainer.logger.log_dir).Reload()  # type: ignore[union-attr,arg-type]
    assert board.Tags()["tensors"] == ["samples/text_summary"]
    assert len(board.Tensors("samples/text_summary")) == 2


def test_measures_are_means_over_tokens_and_over_bytes(tmp_path: Path) -> None:
    task, data = CausalLM(config=LLAMA), Text()
    trainer = trainer_in(tmp_path)
    (found,) = trainer.validate(task, datamodule=data, verbose=False)
    losses, hits, text = [], [], []
    for batch in data.batches:
        logits = task.model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        labels = batch["labels"].flatten()
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        hits.append((logits.argmax(1) == labels).sum())
        text.append(data.tokenizer.decode(labels[labels >= 0]))
    tokens = 12 * 16 - 8
    total, number = sum(loss.item() for loss in losses), len("".join(text).encode(errors="replace"))
    assert found["val_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert found["val_accuracy"] == pytest.approx(int(sum(hits)) / tokens, rel=1e-5)
    assert found["val_bits_per_byte"] == pytest.approx(total / number / math.log(2), rel=0.02)  # characters cut in two
    assert found["val_perplexity_per_byte"] == pytest.approx(2 ** found["val_bits_per_byte"], rel=1e-5)


def test_positions_are_exact_in_half_precision(tmp_path: Path) -> None:
    task, single = CausalLM(config=LLAMA), CausalLM(config=LLAMA)
    trainer = trainer_in(tmp_path, precision="bf16-true", strategy=SingleProcessStrategy())
    trainer.validate(task, datamodule=Text(), verbose=False)
    trainer_in(tmp_path).validate(single, datamodule=Text(), verbose=False)
    names = task.full_precision_buffers()
    assert "model.model.rotary_emb.inv_freq" in names
    for name in names:
        assert torch.equal(task.get_buffer(name), single.get_buffer(name))


def test_the_bytes_of_a_texts_tokens_add_up_to_its_bytes() -> None:
    tokenizer = make_tokenizer()
    counts = count_token_bytes(tokenizer, len(tokenizer) + 5)
    assert int(counts[tokenizer(TEXT)["input_ids"]].sum()) == len(TEXT.encode())
    assert counts[tokenizer.eos_token_id] == 0
    words = Tokenizer(token_models.BPE(vocab={"▁größer": 0, "<0x0A>": 1, "▁": 2}, merges=[]))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert count_token_bytes(PreTrainedTokenizerFast(tokenizer_object=words), 3).tolist() == [9, 1, 1]


def test_the_loss_is_the_mean_over_the_tokens_of_the_step() -> None:
    task, batches = CausalLM(config=LLAMA), Text().batches
    task.config.vocab_size = 300
    task.configure_model()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return task.training_step(batch, 0)["loss"]

    last = batches[-1]
    alone = loss(last)
    assert alone.item() == pytest.approx(math.log(300), rel=0.1)
    tokens = (last["labels"] != -100).sum()
    assert loss({**last, "tokens_in_step": tokens}).item() == pytest.approx(alone.item())
    assert loss({**last, "tokens_in_step": 4 * tokens}).item() == pytest.approx(alone.item() / 4)
    nothing = {**last, "labels": torch.full_like(last["labels"], -100), "tokens_in_step": torch.tensor(0)}
    assert loss(nothing) == 0


@pytest.mark.parametrize("family", ["llama", "ctrl"])  # transformers itself has no recomputation for CTRL.
def test_recomputation_keeps_less_and_gives_the_same_gradients(family: str) -> None:
    found = []
    for recomputed in (False, True):
        seed_everything(0, verbose=False)
        task = CausalLM(config=tiny(family, dropout=False), recompute=recomputed)
        task.configure_model()
        ids, kept = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1)), 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.training_step({"input_ids": ids, "labels": ids}, 0)["loss"]
        loss.backward()
        found.append((kept, [parameter.grad for parameter in task.parameters()]))
    assert found[1][0] < 0.6 * found[0][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))  # type: ignore[arg-type]


def test_prompts_are_completed_in_batches_as_they_are_alone(tmp_path: Path, capsys: Any) -> None:
    task = CausalLM(config=LLAMA, sampling=Sampling(max_new_tokens=6))
    data = Text()
    (batch,) = trainer_in(tmp_path).predict(task, datamodule=data)  # type: ignore[misc]
    assert [row["index"] for row in batch] == [1, 0]  # type: ignore[index]
    assert "    return a" in capsys.readouterr().out
    for prompt, row in zip(("def ", "    return a"), batch, strict=True):
        assert row["prompt"] == prompt  # type: ignore[index]
        ids = data.tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(6):
            ids = torch.cat([ids, task.model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        assert row["tokens"] == ids[0, -6:].tolist()  # type: ignore[index]
        assert row["completion"] == data.tokenizer.decode(ids[0, -6:], skip_special_tokens=True)  # type: ignore[index]


@pytest.mark.parametrize("of_model", [[7, 9], 9, None], ids=["a list", "one", "none"])
@pytest.mark.parametrize("of_tokenizer", [8, None])
def test_a_text_ends_where_its_tokenizer_or_its_model_ends_it(of_model: Any, of_tokenizer: int | None) -> None:
    torch.manual_seed(0)
    model = built_model({**LLAMA, "vocab_size": 10, "eos_token_id": None, "pad_token_id": None})
    model.generation_config.eos_token_id = of_model
    tokenizer = None if of_tokenizer is None else SimpleNamespace(eos_token_id=of_tokenizer, pad_token_id=None)
    ends = {of_tokenizer, *(of_model if isinstance(of_model, list) else [of_model])} - {None}
    assert set(end_tokens(model, tokenizer)) == ends
    ids = torch.arange(10)[:, None].repeat(1, 2)
    sampling = Sampling(max_new_tokens=40, temperature=5.0)
    rows = complete_ids(model, ids, torch.ones_like(ids), sampling, tokenizer, False).tolist()
    firsts = [next((number for number, token in enumerate(row) if token in ends), None) for row in rows]
    for row, first in zip(rows, firsts, strict=True):
        rest = set() if first is None else set(row[first + 1 :])
        assert len(rest) <= 1  # padding, and nothing else
    assert any(first is not None and first < 39 for first in firsts) is bool(ends)


def test_drawing_samples_leaves_the_runs_random_numbers_alone(tmp_path: Path) -> None:
    task = CausalLM(config=LLAMA, prompts=["def "], sampling=Sampling(max_new_tokens=4, temperature=1.0, top_k=20))
    seed_everything(3, verbose=False)
    trainer, data, states = trainer_in(tmp_path), Text(), []
    trainer.validate(task, datamodule=data, verbose=False)
    first = task.samples
    for prompts in (["def "], []):
        task.prompts = prompts
        torch.manual_seed(4)
        trainer.validate(task, datamodule=data, verbose=False)
        states.append(torch.get_rng_state())
    assert task.samples == first
    assert torch.equal(*states)


# --- building --------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_with_its_weights_and_names_its_tokenizer(saved: Path) -> None:
    task = CausalLM(model=str(saved), dtype="bfloat16")
    assert task.tokenizer_source == str(saved)
    task.configure_model()
    assert task.model.dtype == torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in task.model.state_dict().items())


def test_random_weights_take_vocabulary_and_special_tokens_from_the_data(tmp_path: Path) -> None:
    task, data = CausalLM(config=LLAMA), Text(make_tokenizer(bos_token="<start>"))
    assert task.tokenizer_source is None
    trainer_in(tmp_path, max_steps=1).fit(task, datamodule=data)
    assert task.model.config.vocab_size == len(data.tokenizer) == 291
    assert task.model.config.bos_token_id == data.tokenizer.bos_token_id
    again = CausalLM(**task.hparams)
    again.configure_model()
    again.load_state_dict(task.state_dict())


def test_a_vocabulary_reaches_to_the_largest_id_where_ids_have_gaps() -> None:
    words = word_tokenizer({"<end>": 0, "a": 1, "b": 40})
    assert len(words) == 3
    config = language_models.read_config(None, LLAMA)
    language_models.fit_to_tokenizer(config, LLAMA, words)
    assert config.vocab_size == 41
    language_models.check_vocabulary(41, words, trained=True)
    with pytest.raises(DloError, match="must have a row for each token id, up to 40, got 40 rows"):
        language_models.check_vocabulary(40, words, trained=True)


def test_a_config_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "vocab_size": 77}))
    task = CausalLM(config=str(path))
    task.check(None)
    task.configure_model()
    assert task.model.get_input_embeddings().weight.shape == (77, 32)


def test_soft_capped_attention_is_computed_where_it_is_not_left_out() -> None:
    small = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "vocab_size": 50}
    task = CausalLM(config=small)
    task.configure_model()
    assert task.model.config._attn_implementation == "eager"
    other = CausalLM(config={**LLAMA, "vocab_size": 50})
    other.configure_model()
    assert other.model.config._attn_implementation == "sdpa"


# --- refusals --------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_does_not_match_is_refused(tmp_path: Path, saved: Path) -> None:
    small = CausalLM(config={**LLAMA, "vocab_size": 100})
    with pytest.raises(DloError, match=r"token id, up to 289, got 100 rows; set config.vocab_size=290"):
        trainer_in(tmp_path).validate(small, datamodule=Text())
    other = Text(make_tokenizer(bos_token="<start>"))
    with pytest.raises(DloError, match=r"token id, up to 290, got 290 rows; use the model's own tokenizer"):
        trainer_in(tmp_path).validate(CausalLM(model=str(saved)), datamodule=other)


def test_weights_in_a_pickle_are_refused_before_they_are_opened(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    fired = tmp_path / "fired"

    class Fires:
        def __reduce__(self) -> tuple[Any, ...]:
            return (fired.touch, ())

    torch.save(Fires(), saved / "pytorch_model.bin")
    with pytest.raises(DloError, match=r"safetensors, got the pickle .*pytorch_model.bin, which can run code"):
        CausalLM(model=str(saved))
    assert not fired.exists()


def test_a_folder_that_is_not_one_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DloError, match=r"got .*/models, which does not exist; did you mean '.*/model'\?"):
        CausalLM(model=str(tmp_path / "models"))
    (saved / "model.safetensors").unlink()
    with pytest.raises(DloError, match=r"model must be a folder with \*.safetensors"):
        CausalLM(model=str(saved))
    (saved / "config.json").unlink()
    with pytest.raises(DloError, match=r"model must be a folder with config.json"):
        CausalLM(model=str(saved))


def test_code_that_comes_with_a_model_is_not_run(saved: Path) -> None:
    ran = saved / "ran"
    (saved / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass C: pass\n")
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.C"}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(DloError, match="cannot read the config"):
        CausalLM(model=str(saved))
    assert not ran.exists()


def test_prompts_without_a_tokenizer_are_refused() -> None:
    task = CausalLM(config={**LLAMA, "vocab_size": 50}, prompts=["def "])
    task.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(DloError, match="prompts must be unset where the datamodule has no attribute 'tokenizer'"):
        task.configure_model()


@pytest.mark.parametrize(("family", "reads"), [("qwen3_moe", True), ("phi3", True), ("bert", False)])
def test_a_head_dim_is_a_setting_of_families_that_read_it(family: str, reads: bool) -> None:
    with contextlib.nullcontext() if reads else pytest.raises(DloError, match="settings of bert, got 'head_dim'"):
        CausalLM(config={"model_type": family, "head_dim": 16})


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_named_with_what_brings_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DloError, match=rf"needs {package}, which is not installed; pip install 'dlo_framework\[llm\]'"):
        CausalLM(config={**LLAMA, "vocab_size": 50}, lora=Lora()).check(None)


# --- prompts and what is written: models are asked as they were trained, and write what `sampling` says -------------


IDS = torch.tensor([[5, 9, 33, 2, 7]])


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    model = built_model(tiny("llama", eos_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the likeliest token is not the last one again
    return model


def written(model: Any, **sampling: Any) -> Tensor:
    options = Sampling(**{"max_new_tokens": 12, **sampling})
    return complete_ids(model, IDS, torch.ones_like(IDS), options, None, False)


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 5.0},
        {"suppress_tokens": list(range(0, 64, 2))},
        {"num_return_sequences": 2, "num_beams": 2},
        {"return_dict_in_generate": True},
        {"do_sample": True, "temperature": 5.0},
        {"max_length": 3},
    ],
    ids=lambda own: next(iter(own)),
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["likeliest", "drawn"])
def test_a_models_own_settings_change_nothing(model: Any, own: dict[str, Any], sampling: dict[str, Any]) -> None:
    expected = written(model, **sampling)
    settings = model.generation_config = GenerationConfig(**own)
    assert torch.equal(written(model, **sampling), expected)
    assert model.generation_config is settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eager_attention_writes_the_same_behind_padding_that_is_longer_than_the_window(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = built_model({"model_type": "gemma2", **FAMILIES["gemma2"], "initializer_range": 0.4}, dtype)
    options = Sampling(max_new_tokens=12, temperature=1.0, seed=2)
    padded, mask = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, dtype=torch.long)
    padded[:, 15:], mask[:, 15:] = IDS, 1
    found = complete_ids(model, padded, mask, options, None, False)
    assert torch.equal(found, complete_ids(model, IDS, torch.ones_like(IDS), options, None, False))


# --- prompts: that a model is asked as it was trained, and that it has positions for them and for its windows --------


WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
QUESTION = {"role": "user", "content": "the loss"}
TOOLS = "{% if tools %}[{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}]{% endif %}"


@pytest.fixture
def asked(make, tmp_path):
    """Returns the prompts of a file and how the model is asked them, as text."""

    def of(content: bytes | str, name: str = "prompts.txt", template: str = CHATML, **options):
        (tmp_path / "chat.jinja").write_text(template)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        data = make(predict_files=str(tmp_path / name), chat_template=str(tmp_path / "chat.jinja"), **options)
        data.setup("predict")
        return data.prompts, [data.tokenizer.decode(ids) for ids in data._datasets["predict"]._prompts]

    return of


def test_a_conversation_is_asked_with_its_tools(asked):
    rows = [{"messages": [QUESTION], "tools": WEATHER}, {"messages": [QUESTION], "tools": []}]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    prompts, texts = asked(content, "prompts.jsonl", TOOLS + CHATML)
    assert prompts == [[QUESTION]] * 2
    assert texts == ["[get_weather]<user>the loss</><assistant>", "<user>the loss</><assistant>"]


def test_prompts_of_a_config_are_texts_or_conversations():
    tokenizer = word_tokenizer({"<end>": 0, "the": 1, "loss": 2, "<user>": 3, "</>": 4, "<assistant>": 5})
    tokenizer.chat_template = CHATML
    assert encode_prompts(tokenizer, ["the loss", [QUESTION]]) == [
        [1, 2],
        encode_request(tokenizer, [QUESTION], None, ""),
    ]
    assert encode_prompts(tokenizer, [[QUESTION]]) != [[1, 2]], "the template's own tokens"
    assert format_prompt([QUESTION]) == "user: the loss\nassistant: "
    with pytest.raises(DloError, match=r"prompts, number 2: the role of message 1 must be one of .*, got 'bot'"):
        encode_prompts(tokenizer, ["the", [{"role": "bot", "content": "the"}]])


def test_plain_prompts_of_a_model_of_chats_are_warned_of(asked, make, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "the"}]}))
    told = "predict_files has plain texts, and the training records are conversations: the texts are completed without"
    with pytest.warns(UserWarning, match=told):
        asked("the loss", train_files=str(tmp_path / "chats.jsonl"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked(json.dumps({"messages": [QUESTION]}), "chat.jsonl", train_files=str(tmp_path / "chats.jsonl"))
        asked("the loss")


def test_columns_of_prompts_may_have_other_names(asked):
    rows = [{"question": "the loss", "prompt": "no"}, {"chat": [QUESTION], "functions": WEATHER}]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    columns = {"prompt": "question", "messages": "chat", "tools": "functions"}
    prompts, texts = asked(content, "prompts.jsonl", TOOLS + CHATML, columns=columns)
    assert prompts == ["the loss", [QUESTION]]
    assert texts == ["the loss", "[get_weather]<user>the loss</><assistant>"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "café\n".encode("latin1"), r"p\.txt must be UTF-8, got invalid continuation byte at byte 3; convert"),
        ("p.jsonl", b'{"messages": []}\n', r"p\.jsonl:1: record must have 'prompt' \(a string\) or 'messages', got"),
        ("p.txt", b" \n", r"predict_files must have at least one prompt, got none in .*p\.txt"),
    ],
)
def test_what_is_no_prompt_is_named(asked, name, content, message):
    with pytest.raises(DloError, match=message):
        asked(content, name)


def test_an_end_that_the_tokenizer_adds_itself_is_no_part_of_a_prompt(tmp_path):
    tokenizer = word_tokenizer({"<end>": 0, "the": 1, "loss": 2}, closes=True)
    assert tokenizer("the loss")["input_ids"] == [1, 2, 0]
    file = lines(tmp_path / "p.jsonl", {"prompt": "the loss"})
    assert read_prompts([file], tokenizer)[1] == [[1, 2]]
    assert encode_prompts(tokenizer, ["the loss"]) == [[1, 2]]


SHORT: dict[str, Any] = tiny("llama", max_position_embeddings=16)
GPT2: dict[str, Any] = tiny("gpt2", n_positions=16)


def check(config: dict[str, Any], seq_len: int | None, **options: Any) -> None:
    CausalLM(config=config, **options).check(SimpleNamespace(seq_len=seq_len))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [GPT2, tiny("opt", max_position_embeddings=16), tiny("gptj", n_positions=16)],
    ids=lambda config: config["model_type"],
)
def test_a_model_with_a_table_of_positions_has_no_more_than_its_rows(config: dict[str, Any]) -> None:
    model = built_model(config).eval()
    assert position_table_size(model) == max_positions(model.config) == 16
    ids = torch.ones(1, 17, dtype=torch.long)
    model(input_ids=ids[:, :16], use_cache=False)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    "config",
    [SHORT, tiny("xglm", max_position_embeddings=16), tiny("mamba")],
    ids=lambda config: config["model_type"],
)
def test_a_model_that_computes_its_positions_has_more(config: dict[str, Any]) -> None:
    model = built_model(config).eval()
    assert position_table_size(model) is None
    assert max_positions(model.config) == (None if config["model_type"] == "mamba" else 16)
    model(input_ids=torch.ones(1, 24, dtype=torch.long), use_cache=False)


def test_windows_longer_than_a_table_of_positions_are_refused_before_the_run() -> None:
    message = (
        r"seq_len must be at most the model's 16 positions \(n_positions\), got 17; set data\.init_args\.seq_len to"
        " at most 16"
    )
    with pytest.raises(DloError, match=message + ", or config.n_positions to 17"):
        check(GPT2, 17)
    with pytest.raises(DloError, match=message + "$"):
        check_windows(built_model(GPT2), 17, trained=True)
    check(GPT2, 16)
    check(GPT2, None)


def test_windows_beyond_what_a_model_is_made_for_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"seq_len 17 exceeds the 16 positions .* \(max_position_embeddings\); set data"
    ):
        check(SHORT, 17)


def test_what_is_written_has_to_fit_too() -> None:
    with pytest.raises(DloError, match=r"must be at most 16 after a prompt of 1 tokens, .* got 17; .* to at most 16"):
        check(GPT2, 16, prompts=["a"], sampling=Sampling(max_new_tokens=17))
    check(GPT2, 16, sampling=Sampling(max_new_tokens=17))
    check(SHORT, 16, prompts=["a"], sampling=Sampling(max_new_tokens=17))
    model, ids = built_model(GPT2), torch.ones(1, 12, dtype=torch.long)
    written = complete_ids(model, ids, torch.ones_like(ids), Sampling(max_new_tokens=5), None, False)
    assert written.shape == (1, 5)  # The last token is not read again.
    with pytest.raises(DloError, match=r"at most 5 after a prompt of 12 .* got 6; set .* to at most 5$"):
        complete_ids(model, ids, torch.ones_like(ids), Sampling(max_new_tokens=6), None, False)
    with pytest.raises(DloError, match=r"at most 0 after a prompt of 17 .*; shorten the prompt"):
        check_generation_length(model, 17, 1)


def test_prompts_that_leave_no_room_are_refused_when_the_model_is_built() -> None:
    task = CausalLM(config={**GPT2, "n_positions": 8}, prompts=["a", "a b a b"], sampling=Sampling(max_new_tokens=6))
    tokenizer = word_tokenizer({"<end>": 0, "a": 1, "b": 2})
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=tokenizer), strategy=strategy)
    task._trainer = trainer  # type: ignore[assignment]
    with pytest.raises(DloError, match="at most 5 after a prompt of 4 tokens, in a model with 8 positions, got 6"):
        task.configure_model()

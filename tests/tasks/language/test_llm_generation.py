"""Prompts and what is written: models are asked as they were trained, and write what `sampling` says."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from dlo_framework.errors import DloError
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.chat import encode_prompts, encode_request, format_prompt, read_prompts
from dlo_tasks.language.generation import (
    Sampling,
    check_generation_length,
    check_windows,
    complete_ids,
    max_positions,
    position_table_size,
)
from support.texts import CHATML, lines, word_tokenizer
from support.token_batches import FAMILIES, built_model

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 128, "eos_token_id": None}
IDS = torch.tensor([[5, 9, 33, 2, 7]])


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    model = built_model(LLAMA)
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


SIZES = {"vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
SHORT: dict[str, Any] = {"model_type": "llama", **SIZES, "intermediate_size": 8, "max_position_embeddings": 16}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 20, "n_layer": 1, "n_head": 2, "n_embd": 8}
GPT2 |= {"n_positions": 16}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 16}
GPT_J = {**GPT2, "model_type": "gptj", "rotary_dim": 4}
XGLM = {"model_type": "xglm", "vocab_size": 20, "num_layers": 1, "attention_heads": 2, "d_model": 8, "ffn_dim": 8}
MAMBA = {"model_type": "mamba", "vocab_size": 20, "num_hidden_layers": 1, "hidden_size": 8}


def check(config: dict[str, Any], seq_len: int | None, **options: Any) -> None:
    CausalLM(config=config, **options).check(SimpleNamespace(seq_len=seq_len))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [GPT2, OPT, GPT_J], ids=lambda config: config["model_type"])
def test_a_model_with_a_table_of_positions_has_no_more_than_its_rows(config: dict[str, Any]) -> None:
    model = built_model(config).eval()
    assert position_table_size(model) == max_positions(model.config) == 16
    ids = torch.ones(1, 17, dtype=torch.long)
    model(input_ids=ids[:, :16], use_cache=False)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    "config",
    [SHORT, {**XGLM, "max_position_embeddings": 16}, MAMBA],
    ids=lambda config: config["model_type"],
)
def test_a_model_that_computes_its_positions_has_more(config: dict[str, Any]) -> None:
    model = built_model(config).eval()
    assert position_table_size(model) is None
    assert max_positions(model.config) == (None if config is MAMBA else 16)
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

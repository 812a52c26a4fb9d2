"""Prompts of a file: which stand in it, and that a model is asked as it was trained."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_tasks.llm.chat import encode_request
from dlo_tasks.llm.generation import Sampling, complete_texts
from dlo_tasks.llm.prompts import encode_prompts, format_prompt, read_prompts
from support.texts import CHATML, lines, word_tokenizer

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
        (
            "p.jsonl",
            b'{"prompt": "a \\ud83d"}\n',
            r"p\.jsonl:1: prompt must be valid Unicode, got '\\ud83d', half of a surrogate pair",
        ),
        (
            "p.jsonl",
            b'{"messages": [{"content": "a"}]}\n',
            r"p\.jsonl:1: message must be an object with role and content",
        ),
        ("p.jsonl", b'{"messages": []}\n', r"p\.jsonl:1: record must have 'prompt' \(a string\) or 'messages', got"),
        ("p.jsonl", b'{"prompt": 3}\n', r"p\.jsonl:1: record must have 'prompt' \(a string\) or 'messages', got"),
    ],
)
def test_what_is_no_prompt_is_named(asked, name, content, message):
    with pytest.raises(DloError, match=message):
        asked(content, name)


def test_an_end_that_the_tokenizer_adds_itself_is_no_part_of_a_prompt(tmp_path, monkeypatch):
    from dlo_tasks.llm import generation

    tokenizer = word_tokenizer({"<end>": 0, "the": 1, "loss": 2}, closes=True)
    assert tokenizer("the loss")["input_ids"] == [1, 2, 0]
    file = lines(tmp_path / "p.jsonl", {"prompt": "the loss"})
    assert read_prompts([file], tokenizer)[1] == [[1, 2]]
    seen: list[list[list[int]]] = []

    def complete(model, ids, *rest):
        seen.append(ids.tolist())
        return ids

    monkeypatch.setattr(generation, "complete_ids", complete)
    complete_texts(SimpleNamespace(device=torch.device("cpu")), ["the loss"], Sampling(), tokenizer, False)  # type: ignore[arg-type]
    assert seen == [[[1, 2]]]

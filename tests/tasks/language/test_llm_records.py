"""Files of text: which records they hold, how these become tokens, tokenizers, and what is said of the rest."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dlo_framework.errors import DloError
from dlo_tasks.language.chat import assistant_spans, encode_conversation, encode_request
from dlo_tasks.language.records import content_hash, expand_patterns, read_records
from dlo_tasks.language.tokenization import encode_pairs, encode_texts
from dlo_tasks.language.tokenizer import (
    END,
    PADDING,
    PLAIN_CHAT_TEMPLATE,
    embedded_tokenizer,
    fingerprint,
    load_tokenizer,
    standard_library,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same, which says itself what the assistant writes.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Qwen3's: the last answer has thoughts before it, which earlier ones lose.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n"
    "\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As those families' templates are, without their tools.
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' +"
    " message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set role = message['role'] %}"
    "{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}{{ '<start_of_turn>' + role + '\n' +"
    " message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] +"
    " ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Five, größer, naïvely."},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    text = "What is two and two? Four. And three? Five, she said; the loss of a document alone.\n" * 3
    (folder / "text.txt").write_text(text)
    return embedded_tokenizer([folder / "text.txt"], 320, folder)


@pytest.fixture
def tokenizer(trained):
    from copy import deepcopy

    copy = deepcopy(trained)
    turns = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    copy.add_special_tokens({"additional_special_tokens": [*turns, "<start_of_turn>", "<end_of_turn>"]})
    copy.chat_template = CHATML
    return copy


def learned_text(tokenizer, ids, learned) -> str:
    return tokenizer.decode([token for token, flag in zip(ids, learned, strict=True) if flag])


# --- files ---------------------------------------------------------------------------------------------------


def test_globs_are_sorted_and_files_come_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = expand_patterns([str(tmp_path / "b.txt"), str(tmp_path / "**/*.txt")], "train_files")
    assert [file.name for file in found] == ["b.txt", "a.txt", "c.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.jsonl", r"train_files must match a file, got .*\*\.jsonl"),
        ("chats.json", r"train_files must name files, got .*chats\.json, .*; did you mean 'chats\.jsonl'\?"),
        ("", r"train_files must name files, got the folder .*; name its files, such as .*\*\.jsonl"),
        ("empty.txt", r"train_files must name files with content, got .*empty\.txt, which is empty; remove it"),
    ],
)
def test_what_names_no_file_with_content_is_refused(tmp_path, pattern, message):
    if "*" not in pattern:
        write(tmp_path / "chats.jsonl", {"text": "a"})
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DloError, match=message):
        expand_patterns(str(tmp_path / pattern), "train_files")


def test_records_of_every_kind_are_read_in_order_with_their_places(tmp_path):
    mixed = write(tmp_path / "a.jsonl", {"text": "one"}, "", {"prompt": "p", "completion": "c"}, {"messages": CHAT})
    whole = tmp_path / "b.py"
    whole.write_text("print()\n")
    told: list[int] = []
    records = list(read_records([mixed, whole], on_bytes=told.append))
    assert [(r.kind, r.file, r.row) for r in records] == [
        ("text", 0, 1),
        ("pair", 0, 3),
        ("messages", 0, 4),
        ("text", 1, 0),
    ]
    assert [r.content for r in records] == ["one", ("p", "c"), CHAT, "print()\n"]
    assert sum(told) == mixed.stat().st_size + whole.stat().st_size


def test_parquet_gives_the_records_that_json_lines_give(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": CHAT[:2]}, {"messages": [*CHAT[:3], {"role": "assistant", "content": "Five.", "name": "a"}]}]
    lines = write(tmp_path / "a.jsonl", *rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    one, other = (list(read_records([file])) for file in (lines, tmp_path / "a.parquet"))
    assert one == other
    assert [record.digest for record in one] == [record.digest for record in other]


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DloError, match=r"a\.parquet cannot be read as Parquet"):
        list(read_records([tmp_path / "a.parquet"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl:3: JSON is invalid, column 13: Expecting ',' delimiter"),
        ('["text"]', r"a\.jsonl:3: line must be a JSON object, got list"),
        ('{"test": "a"}', r"a\.jsonl:3: record must have 'messages', .* got 'test'; did you mean 'text'\?"),
        ('{"prompt": "a"}', r"a\.jsonl:3: a record with 'prompt' must have 'completion' too, got 'prompt'; add it"),
        ('{"text": 3}', r"a\.jsonl:3: text must be a string, got int: '3'"),
        ('{"messages": []}', r"a\.jsonl:3: messages must be a list with at least one message"),
        ('{"messages": [{"content": "a"}]}', r"a\.jsonl:3: message must be an object with role and content"),
        (
            '{"messages": [{"role": "bot", "content": "b"}]}',
            r"a\.jsonl:3: the role of message 1 .* got 'bot'; write ass",
        ),
        (
            '{"messages": [{"role": "user", "contents": "b"}]}',
            r"a\.jsonl:3: message 1 .* must have content, got 'role'",
        ),
        ('{"text": "a \\ud83d"}', r"a\.jsonl:3: text must be valid Unicode, got '\\ud83d', half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": [{"text": "\\ud83d"}]}]}',
            r"a\.jsonl:3: messages must be valid Uni",
        ),
        ('{"text": ' + "[" * 200_000, r"a\.jsonl:3: JSON is nested too deeply; correct or remove the line"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(DloError, match=message):
        list(read_records([file]))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo")
    assert [record.content for record in read_records([tmp_path / "a.txt"])] == ["one\ntwo"]
    assert content_hash([tmp_path / "a.txt"]) == content_hash([tmp_path / "b.txt"])


def test_the_hash_of_files_tells_their_contents_order_and_kind(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    assert content_hash([a, b]) != content_hash([b, a])
    assert content_hash([a]) == content_hash([write(tmp_path / "c.txt", "a")])
    assert content_hash([a]) != content_hash([write(tmp_path / "a.jsonl", "a")])
    before = content_hash([a, b])
    write(b, "c")
    assert content_hash([a, b]) != before


# --- tokens --------------------------------------------------------------------------------------------------


def test_a_text_ends_with_the_end_and_is_learned_whole(tokenizer):
    (ids, learned), (none, _) = encode_texts(tokenizer, ["two and two", ""])
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "two and two"
    assert learned.all()
    assert none == [tokenizer.eos_token_id]


def test_of_a_pair_the_completion_and_the_end_are_learned(tokenizer):
    ((ids, learned),) = encode_pairs(tokenizer, [("What is two?", " Four.")])
    assert learned_text(tokenizer, ids, learned) == f" Four.{END}"
    assert tokenizer.decode(ids) == f"What is two? Four.{END}"


def test_a_token_never_reaches_over_the_border_of_prompt_and_completion(tokenizer):
    word = next(word for word in sorted(tokenizer.vocab) if word.isalpha() and len(word) > 1)
    assert len(tokenizer(word)["input_ids"]) == 1
    ((ids, learned),) = encode_pairs(tokenizer, [(word[0], word[1:])])
    assert learned_text(tokenizer, ids, learned) == f"{word[1:]}{END}"
    assert ids[:1] == tokenizer(word[0])["input_ids"]


def test_an_end_that_the_tokenizer_adds_itself_comes_once_and_not_after_the_prompt(tokenizer):
    from tokenizers.processors import TemplateProcessing

    end = (END, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[end])
    ((ids, learned),) = encode_pairs(tokenizer, [("What is two?", " Four.")])
    assert tokenizer.decode(ids) == f"What is two? Four.{END}"
    assert learned_text(tokenizer, ids, learned) == f" Four.{END}"


# --- conversations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "Four.<|im_end|>Five, größer, naïvely.<|im_end|>"),
        (MARKED, "Four.<|im_end|>Five, größer, naïvely.<|im_end|>"),
        (THINKING, "Four.<|im_end|><think>\n\n</think>\n\nFive, größer, naïvely.<|im_end|>"),
        (LLAMA_3, "Four.<|eot_id|>Five, größer, naïvely.<|eot_id|>"),
        (GEMMA, "Four.<end_of_turn>Five, größer, naïvely.<end_of_turn>"),
        (MISTRAL, f" Four.{END} Five, größer, naïvely.{END}"),
    ],
    ids=["chatml", "generation", "thoughts", "llama 3", "gemma", "mistral"],
)
def test_the_assistants_tokens_alone_are_learned(tokenizer, template, expected):
    tokenizer.chat_template = template
    ids, learned = encode_conversation(tokenizer, CHAT, None, "a:1")
    assert learned_text(tokenizer, ids, learned) == expected
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_blanks_that_end_an_answer_without_a_special_token_are_learned():
    def render(messages, ask):
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + ("assistant: " if ask else "")

    text, spans = assistant_spans(render, CHAT, ["<|im_end|>"])
    assert [text[span.start : span.stop] for span in spans] == ["Four.\n", "Five, größer, naïvely.\n"]


def test_a_template_that_does_not_tell_is_an_error_with_its_fix(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DloError, match=r"chats\.jsonl:3: chat template does not show .*\{% generation %\}"):
        encode_conversation(tokenizer, CHAT, None, "chats.jsonl:3")


def test_a_template_that_refuses_is_an_error_with_its_reason(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DloError, match=r"a:1: chat template refuses the conversation: roles must alternate"):
        encode_conversation(tokenizer, CHAT, None, "a:1")


def test_the_template_of_dlos_own_tokenizer(trained):
    trained = copy.deepcopy(trained)
    trained.chat_template = PLAIN_CHAT_TEMPLATE
    chat = [
        {"role": "user", "content": "the loss?"},
        {"role": "assistant", "content": "is 3"},
        {"role": "user", "content": "why?"},
    ]
    ids, learned = encode_conversation(trained, chat, None, "a:1")
    assert trained.decode(ids) == f"user:\nthe loss?\nassistant:\nis 3{END}\nuser:\nwhy?\n"
    assert trained.decode(np.array(ids)[learned]) == f"is 3{END}"
    request = encode_request(trained, chat[:1], None, "a:1")
    assert request == ids[: len(request)], "an answer begins where a request ends"
    for tools, messages in [([{"type": "function"}], chat), (None, [chat[0], {**chat[1], "tool_calls": [{}]}])]:
        with pytest.raises(DloError, match=r"it has no place for tool.*set chat_template to a file with one that has"):
            encode_conversation(trained, messages, tools, "a:1")


@pytest.mark.parametrize(
    ("package", "load", "message"),
    [
        ("transformers", lambda folder: load_tokenizer("a"), "TextData needs transformers"),
        ("transformers", lambda folder: embedded_tokenizer([], 300, folder), "TextData needs transformers"),
        ("datasets", lambda folder: list(read_records([folder / "a.parquet"])), "Parquet needs the package datasets"),
    ],
)
def test_a_missing_package_is_an_error_with_its_fix(tmp_path, monkeypatch, package, load, message):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DloError, match=rf"{message}.*; pip install 'dlo_framework\[llm\]'"):
        load(tmp_path)


# --- tokenizers and the embedded text ------------------------------------------------------------------------


def test_a_tokenizer_is_loaded_with_another_chat_template(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "other.jinja").write_text(MARKED)
    loaded = load_tokenizer(str(tmp_path / "model"), str(tmp_path / "other.jinja"))
    assert loaded.chat_template == MARKED
    assert loaded("two and")["input_ids"] == tokenizer("two and")["input_ids"]
    assert fingerprint(loaded) != fingerprint(tokenizer)
    assert fingerprint(load_tokenizer(str(tmp_path / "model"))) == fingerprint(load_tokenizer(str(tmp_path / "model")))
    with pytest.raises(DloError, match=r"chat_template must be a file .*, got none\.jinja"):
        load_tokenizer(str(tmp_path / "model"), "none.jinja")


def test_a_missing_tokenizer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DloError, match=r"tokenizer must be a folder with one of tokenizer\.json.*set tokenizer to"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DloError, match=r"cannot be loaded: .*; set tokenizer to a folder"):
        load_tokenizer(str(tmp_path))


def test_the_embedded_tokenizer_writes_any_text_and_is_trained_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("for i in range(10):\n    print(i)\n" * 20)
    made = embedded_tokenizer([tmp_path / "a.txt"], 300, tmp_path / "cache")
    text = "for größe in 漢字:\n\t\0 pass"
    assert made.decode(made(text)["input_ids"]) == text
    assert len(made) <= 300
    assert (made.eos_token, made.pad_token) == (END, PADDING)
    monkeypatch.setattr("dlo_tasks.language.tokenizer._train", lambda *_: pytest.fail("trained again"))
    again = embedded_tokenizer([tmp_path / "a.txt"], 300, tmp_path / "cache")
    assert fingerprint(again) == fingerprint(made)


def test_an_embedded_tokenizer_that_is_damaged_is_trained_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    made = embedded_tokenizer([tmp_path / "a.txt"], 300, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(file.read_text()[:100])
    with pytest.warns(UserWarning, match="cannot be read"):
        again = embedded_tokenizer([tmp_path / "a.txt"], 300, tmp_path / "cache")
    assert fingerprint(again) == fingerprint(made)
    with pytest.raises(DloError, match="vocab_size must be at least 258"):
        embedded_tokenizer([tmp_path / "a.txt"], 257, tmp_path / "cache")


def test_the_standard_library_is_real_text_of_a_limited_size(tmp_path):
    files = standard_library(500_000)
    assert 300_000 < sum(file.stat().st_size for file in files) <= 500_000
    assert not any({"test", "tests", "site-packages"} & set(file.parts[-3:]) for file in files)
    initials = {file.name[0] for file in files}
    assert len(initials) > 5  # from all over the alphabet, not its beginning
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("pass\n")
    with pytest.raises(DloError, match="corpus_bytes must be large enough for a source file of Python's"):
        standard_library(1000, tmp_path)
    (tmp_path / "b.py").write_text("pass\n")
    assert standard_library(1000, tmp_path) == [tmp_path / "b.py"]


def test_it_does_not_look_into_what_is_installed(tmp_path, monkeypatch):
    """An environment has a hundred thousand files there, and each rank asks."""
    for name in ("a.py", "email/b.py", "email/__pycache__/b.py", "site-packages/torch/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    seen, look = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: seen.append(Path(folder)) or look(folder))
    assert standard_library(1000, tmp_path) == [tmp_path / "a.py", tmp_path / "email" / "b.py"]
    assert seen == [tmp_path, tmp_path / "email"]

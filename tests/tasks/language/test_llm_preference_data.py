"""PreferenceData: rows hold whole pairs, and bad records are refused with file and line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_tasks.language.preference_data import PreferenceData
from dlo_tasks.language.preference_records import style_preferences, with_quotes
from support.preferences import data, write_pairs, write_tokenizer
from support.texts import CHATML, lines

USER = {"role": "user", "content": "the loss"}
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("equals one", "no window"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def answers_in(batch: dict[str, Any], prefix: str = "") -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Returns whether each answer is preferred, its input tokens and its targets."""
    found = []
    for row, kinds in enumerate(batch["answers"].tolist()):
        for number, kind in enumerate(kinds):
            mask = batch[f"{prefix}sequence_ids"][row] == number
            if kind < 0:
                assert not mask.any()
                continue
            labels = batch[f"{prefix}labels"][row][mask]
            assert batch[f"{prefix}position_ids"][row][mask].tolist() == list(range(int(mask.sum())))
            inputs = batch[f"{prefix}input_ids"][row][mask]
            found.append((kind, tuple(inputs.tolist()), tuple(labels[labels != -100].tolist())))
    return found


def batches_of(made: PreferenceData) -> list[dict[str, Any]]:
    made.prepare_data()
    made.setup("fit")
    return list(made.train_dataloader())


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_each_pair_is_in_one_row_with_its_prompt_twice(folder: Path, packing: str) -> None:
    made = data(str(folder), packing=packing, batch_size=2)
    seen = 0
    for batch in batches_of(made):
        found = answers_in(batch)
        for (good, chosen, right), (bad, rejected, wrong) in zip(found[::2], found[1::2], strict=True):
            assert (good, bad) == (1, 0)
            prompt = len(chosen) + 1 - len(right)
            assert chosen[:prompt] == rejected[: len(rejected) + 1 - len(wrong)]  # cut answers keep the prompt
            assert (*chosen[prompt:], right[-1]) == right
            seen += 1
        assert int(batch["pairs_in_step"]) == len(found) // 2
        chosen_tokens = sum(len(inputs) for kind, inputs, _ in found if kind)
        assert int(batch["tokens_in_step"]) == chosen_tokens
        inside = batch["sequence_ids"] >= 0
        both = (batch["labels"] != -100) ^ (batch["context_labels"] != -100)
        assert torch.equal(inside, both)  # each position inside an answer has one kind of next token
    assert seen == made.statistics["train"].preferences if packing == "none" else seen > 20


def test_completions_have_a_mismatched_prompt(folder: Path) -> None:
    made = data(str(folder), unpaired=True, packing="none", batch_size=2, seq_len=30)
    rows = [
        row
        for batch in batches_of(made)
        for row in zip(answers_in(batch), answers_in(batch, "mismatched_"), strict=True)
    ]
    assert len(rows) == 96
    assert {kind for (kind, *_), _ in rows} == {0, 1}
    for (_, inputs, right), (_, crossed, wrong) in rows:
        prompt = inputs[: len(inputs) + 1 - len(right)]
        assert crossed == (*prompt, *wrong[:-1])
    # The mismatched completions are those of the data, each once, and of other prompts.
    assert sorted(right for (_, _, right), _ in rows) == sorted(wrong for _, (_, _, wrong) in rows)
    assert sum(wrong != right for (_, _, right), (_, _, wrong) in rows) > 80


def test_judged_completions_are_read(folder: Path) -> None:
    rows = [{"prompt": "the", "completion": "loss", "label": True}, {"prompt": "a", "completion": "of", "label": 0}]
    file = str(lines(folder / "judged.jsonl", *rows))
    batches = batches_of(data(str(folder), train_files=file, unpaired=True, packing="none", batch_size=1))
    vocabulary = data(str(folder))._load_tokenizer().get_vocab()
    found = sorted((kind, inputs[0], right[0]) for batch in batches for kind, inputs, right in answers_in(batch))
    words = [(0, "a", "of"), (1, "the", "loss")]
    assert found == [(kind, vocabulary[prompt], vocabulary[answer]) for kind, prompt, answer in words]


def test_conversations_are_rendered_and_only_the_last_answers_are_targets(folder: Path) -> None:
    (folder / "chat.jinja").write_text(CHATML)
    first = [USER, {"role": "assistant", "content": "of a packed document"}, {"role": "user", "content": "alone"}]
    rows = [
        {"prompt": first, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*first, *GOOD], "rejected": [*first, *BAD]},
    ]
    ids = {}
    for number, row in enumerate(rows):
        made = data(
            str(folder),
            train_files=str(lines(folder / f"chats{number}.jsonl", row)),
            tokenizer=None,
            chat_template=str(folder / "chat.jinja"),
            seq_len=200,
            batch_size=1,
            vocab_size=320,
            corpus_bytes=60_000,
        )
        (batch,) = batches_of(made)
        (good, bad) = answers_in(batch)
        assert made.tokenizer.decode(good[2]) == "equals one</>"
        assert made.tokenizer.decode(bad[2]) == "no window</>"
        ids[number] = (good, bad)
    assert ids[0] == ids[1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "the", "chosen": "loss"}, r":2: a pair must have 'rejected' beside 'chosen'"),
    ({"prompt": "the", "chosen": "loss", "rejcted": "x"}, r":2: .*did you mean 'rejcted'"),
    ({"prompt": "the", "chosen": " ", "rejected": "loss"}, r":2: chosen must not be empty"),
    ({"prompt": "the", "chosen": "of", "rejected": BAD}, r":2: chosen and rejected must both be strings, or both"),
    ({"prompt": [USER, *GOOD], "chosen": GOOD, "rejected": BAD}, r":2: the last message of the prompt must not be"),
    ({"prompt": [USER], "chosen": [USER], "rejected": BAD}, r":2: chosen must begin and end with an assistant's"),
    ({"chosen": GOOD, "rejected": BAD}, r":2: prompt must have at least one message"),
    ({"prompt": "the", "completion": "of", "label": True}, r":2: .* need objective: kto and data\.init_args\.unpaired"),
    ({"text": "the"}, r":2: record must have 'prompt', 'chosen' and 'rejected', got 'text'"),
    *(
        ({"prompt": "the", "completion": "loss", "label": label}, r":1: label must be true \(desirable\) or false")
        for label in (None, "good", 2)
    ),
]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_bad_records_are_refused_with_file_and_line(folder: Path, row: dict[str, Any], message: str) -> None:
    unpaired = message.startswith(":1")
    good = [] if unpaired else [{"prompt": "the", "chosen": "loss", "rejected": "of"}]
    file = lines(folder / "bad.jsonl", *good, row)
    with pytest.raises(DloError, match=rf"bad\.jsonl{message}") as found:
        batches_of(data(str(folder), train_files=str(file), unpaired=unpaired))
    assert "\n" not in str(found.value)


def test_a_prompt_that_fills_the_window_is_refused_or_dropped(folder: Path) -> None:
    rows = [{"prompt": "the", "chosen": "loss", "rejected": "of"}] * 5
    long = {"prompt": "the loss of a packed document", "chosen": "one", "rejected": "of"}
    file = str(lines(folder / "long.jsonl", *rows, long))
    for policy in ("truncate", "error"):
        with pytest.raises(DloError, match=r"long\.jsonl:6: prompt must have at most seq_len = 5 tokens.* got 6; set"):
            batches_of(data(str(folder), train_files=file, seq_len=5, long_samples=policy, batch_size=1))
    made = data(str(folder), train_files=file, seq_len=5, long_samples="drop", batch_size=1)
    batches_of(made)
    assert made.statistics["train"].preferences == 5


def test_an_answer_that_is_too_long_is_cut_or_refused(folder: Path) -> None:
    row = {"prompt": "the", "chosen": "loss of a packed document", "rejected": "of"}
    file = str(lines(folder / "long.jsonl", row))
    (batch,) = batches_of(data(str(folder), train_files=file, seq_len=4, batch_size=1))
    assert [len(inputs) for _, inputs, _ in answers_in(batch)] == [4, 2]
    with pytest.raises(DloError, match=r"long\.jsonl:1: prompt and answer must have at most seq_len \+ 1 = 5 tokens"):
        batches_of(data(str(folder), train_files=file, seq_len=4, batch_size=1, long_samples="error"))


def test_pairs_with_equal_answers_are_left_out_with_a_warning(folder: Path) -> None:
    good = {"prompt": "the", "chosen": "loss", "rejected": "of"}
    file = lines(folder / "equal.jsonl", good, good | {"rejected": "loss"}, good | {"chosen": "of"})
    made = data(str(folder), train_files=str(file), batch_size=1)
    with pytest.warns(UserWarning, match=r"equal\.jsonl:2: chosen and rejected are equal, as in 1 more pairs"):
        batches_of(made)
    assert made.statistics["train"].preferences == 1


def test_text_files_are_refused(folder: Path) -> None:
    (folder / "pairs.txt").write_text("the loss")
    with pytest.raises(DloError, match=r"pairs\.txt: preferences must be JSON lines or Parquet"):
        data(str(folder), train_files=str(folder / "pairs.txt")).check()


def test_parquet_and_other_column_names_are_read_alike(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"question": "the", "chosen": "loss", "rejected": "of"},
        {"question": "a", "chosen": "one", "rejected": "of"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "pairs.parquet"))
    json_file = lines(folder / "named.jsonl", *rows)
    found = []
    for file in (json_file, folder / "pairs.parquet"):
        made = data(str(folder), train_files=str(file), columns={"prompt": "question"}, batch_size=1)
        found.append([answers_in(batch) for batch in batches_of(made)])
    assert found[0] == found[1]


def test_embedded_pairs_differ_in_the_quotes_only(tmp_path: Path) -> None:
    source = "x = 'a'\ny = \"b\"\nz = '''c'''\nw = f'd'\nv = 'it\\'s'\n" + "u = 'e'\n" * 9
    assert with_quotes(source, '"').splitlines()[:5] == [
        'x = "a"',
        'y = "b"',
        "z = '''c'''",
        "w = f'd'",
        "v = 'it\\'s'",
    ]
    assert with_quotes("x = (", '"') == "x = ("
    (tmp_path / "a.py").write_text(source)
    (pair,) = style_preferences([tmp_path / "a.py"])
    assert pair.prompt == "".join(source.splitlines(keepends=True)[:6])
    assert (pair.chosen, pair.rejected) == ('u = "e"\n' * 4, "u = 'e'\n" * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(style_preferences([tmp_path / "a.py"], unpaired=True))) == 2

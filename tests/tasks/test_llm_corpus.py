"""The embedded text: the standard library, and the tokenizer that is trained on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlo_framework.errors import DloError
from dlo_tasks.llm.tokenizer import END, PADDING, embedded_tokenizer, fingerprint, standard_library


def test_the_embedded_tokenizer_writes_any_text_and_is_trained_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("for i in range(10):\n    print(i)\n" * 20)
    made = embedded_tokenizer([tmp_path / "a.txt"], 300, tmp_path / "cache")
    text = "for größe in 漢字:\n\t\0 pass"
    assert made.decode(made(text)["input_ids"]) == text
    assert len(made) <= 300
    assert (made.eos_token, made.pad_token) == (END, PADDING)
    monkeypatch.setattr("dlo_tasks.llm.tokenizer._train", lambda *_: pytest.fail("trained again"))
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

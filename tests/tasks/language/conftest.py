"""What the tests of language models' data share: a datamodule of some texts, and its cache."""

from pathlib import Path

import pytest

from support.texts import lines, sentences


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache that the tests share, so that the byte-level BPE is trained once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(tmp_path, cache):
    """Makes the datamodule of some texts."""

    from dlo_tasks.language.text_data import TextData

    def made(texts: list[str] | None = None, **options):
        file = lines(tmp_path / "texts.jsonl", *({"text": text} for text in texts or sentences(60)))
        defaults = {"train_files": str(file), "cache_dir": str(cache), "seq_len": 48, "batch_size": 4}
        return TextData(**defaults | {"vocab_size": 320, "corpus_bytes": 60_000, "val_fraction": 0.0} | options)

    return made

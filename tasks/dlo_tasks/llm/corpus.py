"""Provides the default corpus: the source files of Python's standard library, and a byte-level BPE trained on them.

Every Python has these files, so a language model can be trained without a download. The tokenizer is byte-level
byte-pair encoding as in GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; BPE:
Sennrich et al. 2016, arXiv:1508.07909), which can encode any text.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError, check_number
from dlo_framework.lock import build_once
from dlo_tasks.llm.cache_folder import cached_file
from dlo_tasks.llm.records import content_hash, read_text
from dlo_tasks.llm.tokenizer import require_transformers

#: End-of-text token, and padding token.
END, PADDING = "<|endoftext|>", "<|padding|>"
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_FORMAT = 1
_SMALLEST = 256 + 2  # the bytes and the two tokens above


def standard_library(max_bytes: int, root: Path | None = None) -> list[Path]:
    """Returns source files of the standard library, without tests and installed packages, sorted by name.

    If they exceed ``max_bytes`` together, files are left out at regular intervals, so that all parts of the library
    are represented.

    Args:
        max_bytes: Maximum size of all files, in bytes.
        root: Folder of the library; None for this Python's.

    Raises:
        DloError: If this Python comes without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = sorted(_sources(root))
    sizes = [path.stat().st_size for path in found]
    part = min(1.0, max_bytes / max(1, sum(sizes)))
    kept: list[Path] = []
    seen = taken = 0
    for path, size in zip(found, sizes, strict=True):
        seen += size
        if taken + size <= seen * part and _is_text(path):
            kept.append(path)
            taken += size
    if not kept:
        raise DloError(
            f"corpus_bytes must be large enough for a source file of Python's standard library, got {max_bytes} for"
            f" {root}; raise it, or set train_files"
        )
    return kept


def _sources(root: Path) -> Iterator[Path]:
    """Yields Python files; skips excluded folders, one of which may have a hundred thousand files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _is_text(path: Path) -> bool:
    """Returns whether a file is UTF-8 and not empty; a few of the library's have older encodings."""
    try:
        return bool(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False


def embedded_tokenizer(files: Sequence[Path], vocab_size: int, folder: Path) -> Any:
    """Returns a byte-level BPE of ``files``, trained at first use and cached in ``folder``.

    Args:
        files: Text files, in UTF-8.
        vocab_size: Number of tokens, with the 256 bytes and two special tokens; fewer if the text has no more merges.
        folder: Folder of the cache.

    Returns:
        Tokenizer, a ``PreTrainedTokenizerFast`` of transformers with an end-of-text and a padding token.

    Raises:
        DloError: If the vocabulary is smaller than the bytes, or the folder cannot be written to.
    """
    check_number("vocab_size", vocab_size, f"at least {_SMALLEST} (256 bytes, two special tokens)", "raise it")
    require_transformers()
    path = folder / f"bpe-{vocab_size}-{_FORMAT}-{content_hash(files)[:24]}.json"
    if path.is_file():
        try:
            return _wrap(path)
        except Exception as error:  # tokenizers raises plain Exceptions; the cache can be rebuilt.
            rank_zero_warn(f"{path}: the trained tokenizer cannot be read ({error}); it is trained again")
        path.unlink(missing_ok=True)

    def build() -> None:
        text = _train(files, vocab_size)
        with cached_file(path, "the trained tokenizer") as partial:
            partial.write_text(text, encoding="utf-8")

    build_once(path, build, "training the tokenizer")
    return _wrap(path)


def _wrap(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END, pad_token=PADDING)


def _train(files: Sequence[Path], vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(files), trainer, length=len(files))
    return str(tokenizer.to_str())


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        yield read_text(path)

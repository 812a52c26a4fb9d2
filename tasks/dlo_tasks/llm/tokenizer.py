"""Loads tokenizers, and tells them apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def need_transformers() -> None:
    """Raises DloError where transformers, which brings the tokenizers, is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise DloError(f"text needs transformers ({error}); pip install 'dlo_framework[llm]'") from error


def load_tokenizer(source: str, chat_template: str | None = None) -> Any:
    """Returns the fast tokenizer of a model; none of its code is run.

    Args:
        source: a folder, or a name on the Hugging Face hub.
        chat_template: a file with a Jinja template that takes the place of the tokenizer's own.

    Raises:
        DloError: if there is no tokenizer, or it has no fast implementation.
    """
    need_transformers()
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        raise DloError(
            f"{folder} holds no tokenizer (looked for {', '.join(_FILES)}); save it there with"
            " tokenizer.save_pretrained(folder), or set tokenizer to a folder or hub name that has one"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else source, trust_remote_code=False)
    except Exception as error:  # of many kinds: files that are damaged or missing, a hub that is out of reach
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DloError(
            f"the tokenizer {source!r} cannot be loaded: {reason[0]}; set tokenizer to a folder with tokenizer.json,"
            " or a hub name that can be reached"
        ) from error
    if not tokenizer.is_fast:
        raise DloError(
            f"the tokenizer {source!r} has no fast implementation (tokenizer.json), which knows where in the text each"
            " token lies; convert it with transformers, or use another"
        )
    return with_template(tokenizer, chat_template)


def with_template(tokenizer: Any, chat_template: str | None) -> Any:
    """Returns the tokenizer with the chat template that a file holds; as it is where ``chat_template`` is None.

    Raises:
        DloError: if there is no such file.
    """
    if chat_template is not None:
        path = Path(chat_template).expanduser()
        if not path.is_file():
            raise DloError(f"chat_template: there is no file {chat_template}; give a file with a Jinja template")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Returns a SHA-256 of all that decides how a fast tokenizer tokenises."""
    parts = [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.chat_template, sort_keys=True),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
    ]
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part.encode()).digest())
    return total.hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """Returns the largest of a tokenizer's ids and one more: where ids have gaps, that is more than it has tokens."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def filler_id(tokenizer: Any) -> int:
    """Returns the token that unused positions are filled with: padding, else the end of text, else token 0."""
    found = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    return int(next(token for token in found if token is not None))

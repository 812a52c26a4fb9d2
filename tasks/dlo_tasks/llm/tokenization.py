"""Tokenises records, and marks which tokens are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlo_tasks.llm.chat import encode_conversation
from dlo_tasks.llm.records import Record, format_location
from dlo_tasks.llm.token_cache import Document

_AT_ONCE = 256  # records per call: the tokenizer distributes them over the cores

Tokens = tuple[list[int], np.ndarray]


def tokenize_records(records: Iterable[Record], tokenizer: Any, files: Sequence[Path]) -> Iterator[Document]:
    """Yields the records as tokenised documents, in order.

    * Text: all tokens are targets. It ends with the tokenizer's end-of-text token, if there is one.
    * Prompt and completion: the completion and the end-of-text token are targets. The two are tokenised as one text;
      if a token would cross the boundary, each by itself, as prediction tokenises the prompt.
    * Conversation: the assistant's tokens are targets; the template ends the turns.

    Tokens that the tokenizer prepends (a beginning-of-text token) are kept.

    Args:
        records: Records to tokenise.
        tokenizer: Fast tokenizer.
        files: Files of the records, for error messages.

    Raises:
        DloError: If the chat template does not support a conversation.
    """
    coming = iter(records)
    while some := list(islice(coming, _AT_ONCE)):
        found: dict[int, Tokens] = {}
        texts = [number for number, record in enumerate(some) if record.kind == "text"]
        pairs = [number for number, record in enumerate(some) if record.kind == "pair"]
        found.update(zip(texts, encode_texts(tokenizer, [some[number].content for number in texts]), strict=True))
        found.update(zip(pairs, encode_pairs(tokenizer, [some[number].content for number in pairs]), strict=True))
        for number, record in enumerate(some):
            if record.kind == "messages":
                where = format_location(files, record.file, record.row)
                found[number] = encode_conversation(tokenizer, record.content, record.tools, where)
            ids, learned = found[number]
            yield Document(np.array(ids, dtype=np.int64), learned, record.digest, record.file, record.row)


def encode_texts(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Returns each text's token ids, with the end-of-text token; all are targets."""
    closed = [_closed(tokenizer, ids) for ids in encode_without_end(tokenizer, texts)]
    return [(ids, np.ones(len(ids), dtype=bool)) for ids in closed]


def encode_pairs(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Tokens]:
    """Returns the token ids of each prompt, completion and end-of-text token; the latter two are targets."""
    prompts = encode_without_end(tokenizer, [prompt for prompt, _ in pairs])
    wholes = encode_without_end(tokenizer, [prompt + completion for prompt, completion in pairs])
    found = []
    for (_, completion), prompt, whole in zip(pairs, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:
            alone = tokenizer([completion], add_special_tokens=False, verbose=False)["input_ids"][0]
            whole = prompt + alone
        ids = _closed(tokenizer, whole)
        found.append((ids, np.arange(len(ids)) >= len(prompt)))
    return found


def encode_without_end(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns each text's token ids, with tokens that the tokenizer prepends, without the end-of-text token."""
    if not texts:
        return []
    end = tokenizer.eos_token_id
    rows = tokenizer(texts, verbose=False)["input_ids"]
    return [ids[:-1] if ids and end is not None and ids[-1] == end else ids for ids in rows]


def _closed(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]

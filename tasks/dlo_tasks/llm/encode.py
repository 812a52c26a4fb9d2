"""Turns records into tokens, and says which of them are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlo_tasks.llm.chat import encode_conversation
from dlo_tasks.llm.records import Record, place
from dlo_tasks.llm.token_cache import Document

_AT_ONCE = 256  # records: the tokenizer spreads them over the cores

Tokens = tuple[list[int], np.ndarray]


def documents(records: Iterable[Record], tokenizer: Any, files: Sequence[Path]) -> Iterator[Document]:
    """Yields the records as tokens, in their order.

    * A text is learned whole. Its end is the tokenizer's end-of-text token, if it has one.
    * Of a prompt and its completion, the completion and the end are learned. The two are tokenised as one text; where
      a token would then reach over the border, each by itself, as the prompt is in prediction.
    * Of a conversation, what the assistant wrote is learned; the template says how turns end.

    What the tokenizer itself puts before a text (a beginning-of-text token) is there too.

    Args:
        records: to tokenise.
        tokenizer: a fast one.
        files: that the records are from, for messages.

    Raises:
        DloError: for a conversation that the chat template does not serve.
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
                where = place(files, record.file, record.row)
                found[number] = encode_conversation(tokenizer, record.content, record.tools, where)
            ids, learned = found[number]
            yield Document(np.array(ids, dtype=np.int64), learned, record.digest, record.file, record.row)


def encode_texts(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Returns each text's token ids, the end included; all are learned."""
    closed = [_closed(tokenizer, ids) for ids in encode_open(tokenizer, texts)]
    return [(ids, np.ones(len(ids), dtype=bool)) for ids in closed]


def encode_pairs(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Tokens]:
    """Returns the token ids of each prompt with its completion and the end; the latter two are learned."""
    prompts = encode_open(tokenizer, [prompt for prompt, _ in pairs])
    wholes = encode_open(tokenizer, [prompt + completion for prompt, completion in pairs])
    found = []
    for (_, completion), prompt, whole in zip(pairs, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:
            alone = tokenizer([completion], add_special_tokens=False, verbose=False)["input_ids"][0]
            whole = prompt + alone
        ids = _closed(tokenizer, whole)
        found.append((ids, np.arange(len(ids)) >= len(prompt)))
    return found


def encode_open(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns each text's token ids, with what the tokenizer puts before it, without an end."""
    if not texts:
        return []
    end = tokenizer.eos_token_id
    rows = tokenizer(texts, verbose=False)["input_ids"]
    return [ids[:-1] if ids and end is not None and ids[-1] == end else ids for ids in rows]


def _closed(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]

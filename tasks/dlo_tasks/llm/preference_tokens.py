"""Tokenises preferences into a token store: two documents each, the chosen and the rejected answer with the prompt.

A document's targets are the tokens of its answer. An answer that is missing, as of a completion that is judged by
itself, is a document without tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_tasks.llm.chat import encode_conversation, encode_request
from dlo_tasks.llm.preference_records import Preference
from dlo_tasks.llm.records import format_location
from dlo_tasks.llm.token_cache import Document
from dlo_tasks.llm.tokenization import Tokens, encode_pairs

_AT_ONCE = 256  # preferences per call: the tokenizer distributes them over the cores
_NONE: Tokens = ([], np.zeros(0, dtype=bool))


def tokenize_preferences(
    preferences: Iterable[Preference], tokenizer: Any, files: Sequence[Path]
) -> Iterator[Document]:
    """Yields each preference as two tokenised documents, in order.

    * Text: the answer and the tokenizer's end-of-text token are targets.
    * Messages: the assistant's tokens after the prompt are targets; the template ends the turns.

    Pairs with equal answers are left out, with a warning: a loss of their difference has no gradient.

    Args:
        preferences: Preferences to tokenise.
        tokenizer: Fast tokenizer.
        files: Files of the preferences, for error messages.

    Raises:
        DloError: If the chat template does not support a conversation, or an answer has no token.
    """
    coming = iter(preferences)
    equal: list[str] = []
    while some := list(islice(coming, _AT_ONCE)):
        for preference, answers in zip(some, _encode(some, tokenizer, files), strict=True):
            where = format_location(files, preference.file, preference.row)
            if answers[0] is not _NONE and answers[0][0] == answers[1][0]:
                equal.append(where)
                continue
            for name, (ids, learned) in zip(("chosen", "rejected"), answers, strict=True):
                if getattr(preference, name) is not None and not learned[1:].any():
                    raise DloError(f"{where}: {name} must have at least one token, got none; write the answer")
                yield Document(
                    np.array(ids, dtype=np.int64), learned, preference.digest, preference.file, preference.row
                )
    if equal:
        rank_zero_warn(
            f"{equal[0]}: chosen and rejected are equal"
            + (f", as in {len(equal) - 1} more pairs" if equal[1:] else "")
            + "; they show no preference, and are left out"
        )


def _encode(some: list[Preference], tokenizer: Any, files: Sequence[Path]) -> list[tuple[Tokens, Tokens]]:
    """Returns the token ids of each preference's two documents, and which are targets."""
    texts = [(p.prompt, answer) for p in some if p.kind == "text" for answer in (p.chosen, p.rejected) if answer]
    encoded = iter(encode_pairs(tokenizer, texts))
    found = []
    for preference in some:
        where = format_location(files, preference.file, preference.row)
        documents = []
        for answer in (preference.chosen, preference.rejected):
            if answer is None:
                documents.append(_NONE)
            elif preference.kind == "text":
                documents.append(next(encoded))
            else:
                documents.append(_encode_answer(tokenizer, preference, answer, where))
        found.append((documents[0], documents[1]))
    return found


def _encode_answer(tokenizer: Any, preference: Preference, answer: Any, where: str) -> Tokens:
    """Returns a conversation's token ids; the targets are the assistant's tokens after the prompt."""
    ids, learned = encode_conversation(tokenizer, [*preference.prompt, *answer], preference.tools, where)
    asked = encode_request(tokenizer, preference.prompt, preference.tools, where)
    shared = next((n for n, (one, other) in enumerate(zip(ids, asked, strict=False)) if one != other), len(asked))
    learned[:shared] = False
    return ids, learned

"""Preferences: a prompt with a chosen and a rejected answer, or with a judged one, read from files and tokenised.

Without files they are made of Python's standard library: the same code with string literals in double or in single
quotes. These need no download and no judge, and the result can be counted in what a model writes.

The token store has two documents for each preference, the chosen and the rejected answer with the prompt. A document's
targets are the tokens of its answer. An answer that is missing, as of a completion that is judged by itself, is a
document without tokens.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.language.chat import Message, encode_conversation, encode_request
from dlo_tasks.language.records import Record, check_conversation, check_text, format_location, read_rows, read_text
from dlo_tasks.language.token_cache import Document
from dlo_tasks.language.tokenization import Tokens, encode_pairs, in_calls

COLUMNS = ("prompt", "chosen", "rejected", "completion", "label", "tools")
_NO_BAR: Callable[[int], object] = lambda size: None


class Preference(NamedTuple):
    """A prompt with its answers.

    Attributes:
        kind: Type of prompt and answers: `messages`, lists of messages, or `text`, strings.
        prompt: Prompt.
        chosen: Preferred or desirable answer; None without one.
        rejected: Other or undesirable answer; None without one.
        tools: Argument `tools` of the chat template, or None.
        file: Index of the file.
        row: Line or row in the file, from 1.
    """

    kind: Literal["messages", "text"]
    prompt: Any
    chosen: Any
    rejected: Any
    tools: Any
    file: int
    row: int

    @property
    def digest(self) -> int:
        """Hash of the prompt, below 2**64: preferences with the same prompt are in the same split."""
        return Record("text", [self.prompt, self.tools], None, self.file, self.row).digest

    def take_apart(self) -> tuple[Preference, Preference]:
        """Returns a pair as a desirable and an undesirable completion."""
        return self._replace(rejected=None), self._replace(chosen=None)


def read_preferences(
    files: Sequence[Path],
    columns: Mapping[str, str] | None = None,
    *,
    unpaired: bool = False,
    on_bytes: Callable[[int], object] = _NO_BAR,
) -> Iterator[Preference]:
    """Yields the preferences of all files.

    Args:
        files: Files to read: ``.jsonl``, ``.ndjson`` or ``.json`` with one object per line, or ``.parquet``.
        columns: Other names of the columns: ``{chosen: answer_a}``.
        unpaired: Whether to yield single answers: records with `completion` and `label`, and each answer of a pair by
            itself.
        on_bytes: Callback for progress, called with the number of bytes read since its last call.

    Raises:
        DloError: If a record cannot be read; the message names the file and line.
    """
    for number, path in enumerate(files):
        rows = read_rows(path, on_bytes)
        if rows is None:
            raise DloError(
                f"{path}: preferences must be JSON lines or Parquet (.jsonl, .ndjson, .json, .parquet), got"
                f" '{path.suffix or path.name}'; write one object with prompt, chosen and rejected per line"
            )
        for row, values in rows:
            named = {name: values.get((columns or {}).get(name, name)) for name in COLUMNS}
            pair = named["chosen"], named["rejected"]
            if None not in pair:
                answers = {"chosen": named["chosen"], "rejected": named["rejected"]}
            elif named["completion"] is not None and pair == (None, None):
                answers = {"completion": named["completion"]}
            else:
                _refuse(named, values, f"{path}:{row}", unpaired)
            kind, prompt, read, tools = _read(named, answers, f"{path}:{row}")
            if "completion" not in read:
                preference = Preference(kind, prompt, read["chosen"], read["rejected"], tools, number, row)
                yield from preference.take_apart() if unpaired else (preference,)
                continue
            _check_label(named["label"], f"{path}:{row}", unpaired)
            chosen, rejected = (read["completion"], None) if named["label"] else (None, read["completion"])
            yield Preference(kind, prompt, chosen, rejected, tools, number, row)


def _refuse(named: dict[str, Any], values: dict[str, Any], where: str, unpaired: bool) -> NoReturn:
    given = ", ".join(map(repr, values)) or "no keys"
    for one, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if named[one] is not None:
            hint = did_you_mean(other, [name for name in values if name not in COLUMNS])
            raise DloError(
                f"{where}: a pair must have '{other}' beside '{one}', got {given}{hint}; add the {other} answer, or"
                " remove the line"
            )
    wanted = "'prompt', 'chosen' and 'rejected'" + (", or 'prompt', 'completion' and 'label'" if unpaired else "")
    hints = (did_you_mean(name, COLUMNS) for name in values if name not in COLUMNS)
    raise DloError(
        f"{where}: record must have {wanted}, got {given}{next(filter(None, hints), '')}; rename a key, or set columns,"
        " such as {chosen: answer}"
    )


def _check_label(label: Any, where: str, unpaired: bool) -> None:
    if not unpaired:
        raise DloError(
            f"{where}: record must have 'chosen' and 'rejected', got 'completion'; judged completions need objective:"
            " kto and data.init_args.unpaired: true"
        )
    if not isinstance(label, bool) and label not in (0, 1):
        raise DloError(
            f"{where}: label must be true (desirable) or false (undesirable), got {label!r}; judge each completion,"
            " or remove the line"
        )


def _read(
    named: dict[str, Any], answers: dict[str, Any], where: str
) -> tuple[Literal["messages", "text"], Any, dict[str, Any], Any]:
    """Returns the kind of a row, its prompt, its answers by name and its tools, checked."""
    prompt = named["prompt"]
    kinds = {isinstance(answer, list) for answer in answers.values()}
    if len(kinds) > 1:
        raise DloError(
            f"{where}: chosen and rejected must both be strings, or both lists of messages, got"
            f" {' and '.join(type(answer).__name__ for answer in answers.values())}; write them alike"
        )
    if kinds == {False}:
        prompt = _check_filled(prompt, "prompt", where)
        return "text", prompt, {name: _check_filled(text, name, where) for name, text in answers.items()}, None
    tools = named["tools"] or None
    answers = {name: check_conversation(turns, named["tools"], where)[0] for name, turns in answers.items()}
    if not isinstance(prompt, list) and len(answers) == 2:  # Both are full conversations, which begin with the prompt.
        shared = _shared(*answers.values())
        asked = answers["chosen"][:shared]
        answers = {name: turns[shared:] for name, turns in answers.items()}
        if not shared and isinstance(prompt, str):
            asked = [{"role": "user", "content": _check_filled(prompt, "prompt", where)}]
    else:
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": _check_filled(prompt, "prompt", where)}]
        asked, _ = check_conversation(prompt, None, where)
    _check_turns(asked, "prompt", where)
    for name, turns in answers.items():
        _check_turns(turns, name, where)
    return "messages", asked, answers, tools


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Returns the number of messages with which both conversations begin, up to the last that is not an answer."""
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        same += 1
    same = min(same, len(chosen) - 1, len(rejected) - 1)
    while same > 0 and chosen[same - 1]["role"] == "assistant":
        same -= 1
    return same


def _check_filled(value: Any, name: str, where: str) -> str:
    """Returns a prompt or an answer that is a text, checked."""
    if name == "prompt" and isinstance(value, list):
        raise DloError(
            f"{where}: prompt must be a string where the answers are strings, got a list; write the answers as messages"
            ' too, such as [{"role": "assistant", "content": "..."}]'
        )
    text = check_text(value, name, where)
    if not text.strip():
        raise DloError(f"{where}: {name} must not be empty, got {text!r}; write it, or remove the line")
    return text


def _check_turns(messages: list[Message], name: str, where: str) -> None:
    """Checks that a prompt ends with a question, and that an answer begins and ends with the assistant's turn.

    Raises:
        DloError: If it does not, or an answer is empty.
    """
    roles = [message["role"] for message in messages]
    if name == "prompt":
        if not roles:
            raise DloError(
                f"{where}: prompt must have at least one message, got none that chosen and rejected share; add prompt,"
                " or begin both conversations with the same messages"
            )
        if roles[-1] == "assistant":
            raise DloError(
                f"{where}: the last message of the prompt must not be the assistant's, got {', '.join(roles)}; move it"
                " to the answers"
            )
        return
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise DloError(
            f"{where}: {name} must begin and end with an assistant's message, got {', '.join(roles) or 'no message'};"
            " move the others to prompt"
        )
    if not any(
        str(message.get("content") or json.dumps(message.get("tool_calls") or "")).strip(' "') for message in messages
    ):
        raise DloError(f"{where}: {name} must not be empty, got {messages[-1]}; write the answer, or remove the line")


# --- preferences of Python's standard library ---------------------------------------------------------------------

#: Lines of a prompt and of an answer.
PROMPT_LINES, ANSWER_LINES = 6, 4
#: String literals that keep their meaning in other quotes: no prefix, no quotes and no backslashes inside.
_PLAIN = re.compile(r"""(?P<quote>["'])[^"'\\\n]+(?P=quote)""")


def style_preferences(
    files: Sequence[Path], on_bytes: Callable[[int], object] = _NO_BAR, *, unpaired: bool = False
) -> Iterator[Preference]:
    """Yields the preferences of Python files: a few lines as the prompt, the next ones as the answers.

    Args:
        files: Python files in UTF-8.
        on_bytes: Callback for progress, called with each file's size.
        unpaired: Whether to yield each answer by itself.
    """
    for number, path in enumerate(files):
        text = read_text(path)
        on_bytes(path.stat().st_size)
        lines = text.splitlines(keepends=True)
        double, single = (with_quotes(text, quote).splitlines(keepends=True) for quote in "\"'")
        if not len(lines) == len(double) == len(single):  # Form feeds, which Python does not count as line ends.
            continue
        step = PROMPT_LINES + ANSWER_LINES
        for first in range(0, len(lines) - step + 1, step):
            cut, past = first + PROMPT_LINES, first + step
            prompt = "".join(lines[first:cut])
            chosen, rejected = ("".join(styled[cut:past]) for styled in (double, single))
            if chosen != rejected and prompt.strip():
                preference = Preference("text", prompt, chosen, rejected, None, number, first + 1)
                yield from preference.take_apart() if unpaired else (preference,)


def with_quotes(text: str, quote: str) -> str:
    """Returns a Python source with its plain string literals in these quotes; unchanged if it cannot be parsed."""
    lines = text.splitlines(keepends=True)
    places: list[tuple[int, int, int]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING and _PLAIN.fullmatch(token.string):
                places.append((token.start[0] - 1, token.start[1], token.end[1] - 1))
    except (tokenize.TokenError, SyntaxError):
        return text
    for row, first, last in reversed(places):
        line = lines[row]
        lines[row] = line[:first] + quote + line[first + 1 : last] + quote + line[last + 1 :]
    return "".join(lines)


# --- their tokens -------------------------------------------------------------------------------------------------

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
    equal: list[str] = []
    for some in in_calls(preferences):
        texts = [(p.prompt, answer) for p in some if p.kind == "text" for answer in (p.chosen, p.rejected) if answer]
        encoded = iter(encode_pairs(tokenizer, texts))
        for preference in some:
            where = format_location(files, preference.file, preference.row)
            documents = []
            for name, answer in (("chosen", preference.chosen), ("rejected", preference.rejected)):
                ids, learned = _NONE
                if answer is not None:
                    is_text = preference.kind == "text"
                    ids, learned = next(encoded) if is_text else _encode_answer(tokenizer, preference, answer, where)
                    if not learned[1:].any():
                        raise DloError(f"{where}: {name} must have at least one token, got none; write the answer")
                digest, file, row = preference.digest, preference.file, preference.row
                documents.append(Document(np.array(ids, dtype=np.int64), learned, digest, file, row))
            if len(documents[0].ids) and np.array_equal(documents[0].ids, documents[1].ids):
                equal.append(where)
            else:
                yield from documents
    if equal:
        rank_zero_warn(
            f"{equal[0]}: chosen and rejected are equal"
            + (f", as in {len(equal) - 1} more pairs" if equal[1:] else "")
            + "; they show no preference, and are left out"
        )


def _encode_answer(tokenizer: Any, preference: Preference, answer: Any, where: str) -> Tokens:
    """Returns a conversation's token ids; the targets are the assistant's tokens after the prompt."""
    ids, learned = encode_conversation(tokenizer, [*preference.prompt, *answer], preference.tools, where)
    asked = encode_request(tokenizer, preference.prompt, preference.tools, where)
    shared = next((n for n, (one, other) in enumerate(zip(ids, asked, strict=False)) if one != other), len(asked))
    learned[:shared] = False
    return ids, learned

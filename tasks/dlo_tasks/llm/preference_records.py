"""Reads preferences from JSON lines and Parquet: a prompt with a chosen and a rejected answer, or with a judged one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.llm.chat import Message
from dlo_tasks.llm.records import Record, check_conversation, check_text, read_rows

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
            yield from _preferences(named, values, number, row, f"{path}:{row}", unpaired)


def _preferences(
    named: dict[str, Any], values: dict[str, Any], file: int, row: int, where: str, unpaired: bool
) -> Iterator[Preference]:
    """Yields the preferences of a row: one, or of a pair that is taken apart two."""
    if named["chosen"] is not None and named["rejected"] is not None:
        found = _pair(named, file, row, where)
        yield from found.take_apart() if unpaired else (found,)
    elif named["completion"] is not None and named["chosen"] is None and named["rejected"] is None:
        yield _judged(named, file, row, where, unpaired)
    else:
        _refuse(named, values, where, unpaired)


def _refuse(named: dict[str, Any], values: dict[str, Any], where: str, unpaired: bool) -> None:
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


def _pair(named: dict[str, Any], file: int, row: int, where: str) -> Preference:
    prompt, chosen, rejected = named["prompt"], named["chosen"], named["rejected"]
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise DloError(
            f"{where}: chosen and rejected must both be strings, or both lists of messages, got"
            f" {type(chosen).__name__} and {type(rejected).__name__}; write them alike"
        )
    if not isinstance(chosen, list):
        chosen, rejected = _answer(chosen, "chosen", where), _answer(rejected, "rejected", where)
        return Preference("text", _prompt(prompt, where), chosen, rejected, None, file, row)
    chosen, tools = check_conversation(chosen, named["tools"], where)
    rejected, _ = check_conversation(rejected, None, where)
    if isinstance(prompt, list):
        asked, _ = check_conversation(prompt, None, where)
    else:  # Both answers are full conversations, which begin with the prompt.
        shared = _shared(chosen, rejected)
        asked, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not shared and isinstance(prompt, str):
            asked = [{"role": "user", "content": _prompt(prompt, where)}]
    _check_turns(asked, "prompt", where)
    _check_turns(chosen, "chosen", where)
    _check_turns(rejected, "rejected", where)
    return Preference("messages", asked, chosen, rejected, tools, file, row)


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


def _judged(named: dict[str, Any], file: int, row: int, where: str, unpaired: bool) -> Preference:
    prompt, completion, label = named["prompt"], named["completion"], named["label"]
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
    kind: Literal["messages", "text"] = "text"
    tools = None
    if isinstance(completion, list):
        kind = "messages"
        completion, tools = check_conversation(completion, named["tools"], where)
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": _prompt(prompt, where)}]
        prompt, _ = check_conversation(prompt, None, where)
        _check_turns(prompt, "prompt", where)
        _check_turns(completion, "completion", where)
    else:
        prompt, completion = _prompt(prompt, where), _answer(completion, "completion", where)
    chosen, rejected = (completion, None) if label else (None, completion)
    return Preference(kind, prompt, chosen, rejected, tools, file, row)


def _prompt(value: Any, where: str) -> str:
    if isinstance(value, list):
        raise DloError(
            f"{where}: prompt must be a string where the answers are strings, got a list; write the answers as messages"
            ' too, such as [{"role": "assistant", "content": "..."}]'
        )
    text = check_text(value, "prompt", where)
    if not text.strip():
        raise DloError(f"{where}: prompt must not be empty, got {text!r}; write it, or remove the line")
    return text


def _answer(value: Any, name: str, where: str) -> str:
    text = check_text(value, name, where)
    if not text.strip():
        raise DloError(f"{where}: {name} must not be empty, got {text!r}; write the answer, or remove the line")
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

"""Prompts that a model completes: texts, and conversations, which the chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_tasks.llm.chat import encode_request
from dlo_tasks.llm.records import check_conversation, check_text, read_rows, read_text
from dlo_tasks.llm.tokenization import encode_without_end


def read_prompts(
    files: Sequence[Path], tokenizer: Any, columns: Mapping[str, str] | None = None
) -> tuple[list[Any], list[list[int]]]:
    """Returns the prompts of some files, as texts or messages, and as token ids.

    Args:
        files: Files to read: ``.jsonl`` or ``.parquet`` with a ``prompt``, or with ``messages`` and optional ``tools``,
            in each line or row; any other file has one prompt per line.
        tokenizer: Fast tokenizer.
        columns: Other names of the columns; see :func:`dlo_tasks.llm.records.read_records`.

    Raises:
        DloError: If a line has no prompt, a prompt has no token, or a file cannot be read.
    """
    prompts: list[Any] = []
    ids: list[list[int]] = []
    for path in files:
        for number, values in _rows(path):
            where = f"{path}:{number}"
            prompt, row = _prompt(values, columns or {}, tokenizer, where)
            if not row:
                raise DloError(
                    f"{where}: prompt must have at least one token, got {prompt!r}; write at least one character"
                )
            prompts.append(prompt)
            ids.append(row)
    if not prompts:
        raise DloError(
            f"predict_files must have at least one prompt, got none in {', '.join(map(str, files))}; write one per line"
        )
    return prompts, ids


def encode_prompts(tokenizer: Any, prompts: Sequence[str | list[dict[str, Any]]]) -> list[list[int]]:
    """Returns the token ids of prompts: texts as they are, conversations with the chat template's generation prompt.

    Raises:
        DloError: If a prompt has no token, or a conversation cannot be rendered.
    """
    rows: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        where = f"prompts, number {number}"
        if isinstance(prompt, str):
            rows += encode_without_end(tokenizer, [prompt])
        else:
            rows.append(encode_request(tokenizer, *check_conversation(prompt, None, where), where))
        if not rows[-1]:
            raise DloError(f"prompts must have at least one token each, got {prompt!r}; write at least one character")
    return rows


def format_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """Returns a prompt as a text to show: of a conversation a line for each message, and the role of the answer."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join([*(f"{turn['role']}: {turn.get('content') or ''}" for turn in prompt), "assistant: "])


def warn_of_plain_prompts(option: str, prompts: Sequence[Any]) -> None:
    """Warns of prompts without the chat template that all training records have.

    Args:
        option: Option with the prompts.
        prompts: Texts or conversations.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        rank_zero_warn(
            f"{option} has plain texts, and the training records are conversations: the texts are completed without the"
            " chat template; write [{role: user, content: ...}] in place of a text, in files under the key messages"
        )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields a file's numbered rows; for plain text its lines, split at line ends only."""
    rows = read_rows(path)
    if rows is not None:
        yield from rows
        return
    lines = read_text(path).split("\n")
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _prompt(
    values: dict[str, Any] | str, columns: Mapping[str, str], tokenizer: Any, where: str
) -> tuple[Any, list[int]]:
    """Returns a row's prompt, as text or messages, and as token ids."""
    if isinstance(values, str):
        return values, encode_without_end(tokenizer, [values])[0]
    wanted, of_messages, of_tools = (columns.get(name, name) for name in ("prompt", "messages", "tools"))
    prompt = values.get(wanted)
    if isinstance(prompt, str) and prompt:
        text = check_text(prompt, wanted, where)
        return text, encode_without_end(tokenizer, [text])[0]
    asked = prompt or values.get(of_messages)
    if not isinstance(asked, list) or not asked:
        raise DloError(
            f"{where}: record must have {wanted!r} (a string) or {of_messages!r}, got"
            f" {', '.join(map(repr, values)) or 'no keys'}; rename a key, or set columns, such as {{prompt: question}}"
        )
    messages, tools = check_conversation(asked, values.get(of_tools), where)
    return messages, encode_request(tokenizer, messages, tools, where)

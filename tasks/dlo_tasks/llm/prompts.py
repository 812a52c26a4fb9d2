"""Reads prompts to complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_tasks.llm.chat import encode_request
from dlo_tasks.llm.encode import encode_open
from dlo_tasks.llm.records import conversation_of, read_rows, text_of, whole_text


def read_prompts(
    files: Sequence[Path], tokenizer: Any, columns: Mapping[str, str] | None = None
) -> tuple[list[Any], list[list[int]]]:
    """Returns the prompts of some files, as they stand there and as token ids.

    Args:
        files: ``.jsonl`` or ``.parquet`` with a ``prompt``, or with ``messages`` to answer and ``tools`` where there
            are any, in each line or row; any other has a prompt a line.
        tokenizer: a fast one.
        columns: other names of the columns, as :func:`dlo_tasks.llm.records.read_records` takes them.

    Raises:
        DloError: for a line without a prompt, a prompt without a token, and files that cannot be read.
    """
    prompts: list[Any] = []
    ids: list[list[int]] = []
    for path in files:
        for number, values in _rows(path):
            where = f"{path}:{number}"
            prompt, row = _prompt(values, columns or {}, tokenizer, where)
            if not row:
                raise DloError(f"{where}: the prompt {prompt!r} has no token; write something to complete")
            prompts.append(prompt)
            ids.append(row)
    if not prompts:
        raise DloError(f"there is no prompt in {', '.join(map(str, files))}; write one a line")
    return prompts, ids


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields a file's numbered rows; of plain text its lines, which nothing but a line's end parts."""
    rows = read_rows(path)
    if rows is not None:
        yield from rows
        return
    lines = whole_text(path).split("\n")
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _prompt(
    values: dict[str, Any] | str, columns: Mapping[str, str], tokenizer: Any, where: str
) -> tuple[Any, list[int]]:
    """Returns a row's prompt, as it stands there and as token ids."""
    if isinstance(values, str):
        return values, encode_open(tokenizer, [values])[0]
    wanted, of_messages, of_tools = (columns.get(name, name) for name in ("prompt", "messages", "tools"))
    prompt = values.get(wanted)
    if isinstance(prompt, str) and prompt:
        text = text_of(prompt, wanted, where)
        return text, encode_open(tokenizer, [text])[0]
    asked = prompt or values.get(of_messages)
    if not isinstance(asked, list) or not asked:
        raise DloError(
            f"{where}: a line needs {wanted!r} (a text), or {of_messages!r}, but has"
            f" {', '.join(map(repr, values)) or 'nothing'}; other names are set by columns, such as"
            " {prompt: question}"
        )
    messages, tools = conversation_of(asked, values.get(of_tools), where)
    return messages, encode_request(tokenizer, messages, tools, where)

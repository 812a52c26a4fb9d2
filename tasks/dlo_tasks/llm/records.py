"""Reads training text: which files, and the records in them, each with the place it came from.

JSON lines are read here, line by line, for an error then knows its line, and a key that only some lines have is no
trouble. Parquet comes through Hugging Face's ``datasets``, streamed, so that no second copy is made of it.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dlo_framework.errors import DloError, did_you_mean

Kind = Literal["messages", "pair", "text"]

#: Who speaks, as chat templates know them; only the words of an assistant are learned.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
#: What an assistant's message may have without any content.
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking")
_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet",)
_BLOCK = 1 << 20
_NO_BAR: Callable[[int], object] = lambda size: None


class Record(NamedTuple):
    """One document as it stands in a file.

    Attributes:
        kind: what `content` is: a list of messages, a (prompt, completion) pair, or a text.
        content: of the document.
        tools: what a chat template is given as `tools`, if there are any.
        file: which of the files it stands in.
        row: and in which line or row, from 1; 0 where it is the whole file.
    """

    kind: Kind
    content: Any
    tools: Any
    file: int
    row: int

    @property
    def digest(self) -> int:
        """A hash of the content, below 2**64: the same wherever and by whatever tokenizer it is read."""
        plain = json.dumps([self.kind, self.content, self.tools], sort_keys=True, default=str)
        return int.from_bytes(hashlib.blake2b(plain.encode(errors="surrogatepass"), digest_size=8).digest())


def expand(patterns: str | Sequence[str], option: str) -> list[Path]:
    """Returns the files that paths and globs (``**`` included) stand for, each once, those of a glob sorted by name.

    Args:
        patterns: one or several.
        option: the argument's name, for the message.

    Raises:
        DloError: for a path that is no file, a glob that matches none, and a file without content.
    """
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            raise DloError(f"{option}: {pattern} is a folder; name its files, such as {path / '*.jsonl'}")
        elif glob.has_magic(pattern):
            matches = sorted(glob.glob(str(path), recursive=True))
            files = [file for match in matches if (file := Path(match)).is_file()]
            if not files:
                raise DloError(f"{option}: {pattern} matches no file (looked from {Path.cwd()})")
        else:
            near = path.parent.iterdir() if path.parent.is_dir() else []
            hint = did_you_mean(path.name, [file.name for file in near])
            raise DloError(f"{option}: there is no file {pattern} (looked from {Path.cwd()}){hint}")
        found.update(dict.fromkeys(files))
    if not found:
        raise DloError(f"{option} is an empty list; name at least one file, or leave it out")
    empty = next((file for file in found if not file.stat().st_size), None)
    if empty is not None:
        raise DloError(f"{empty} is empty; remove it from {option}")
    return list(found)


def content_hash(files: Sequence[Path]) -> str:
    """Returns a SHA-256 of the files' kinds and contents, in their order; a text's byte order mark is none of it."""
    total = hashlib.sha256()
    for path in files:
        kind = _kind_of_file(path)
        one = hashlib.sha256(kind.encode())
        with open(path, "rb") as file:
            if kind == "whole" and file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            while block := file.read(_BLOCK):
                one.update(block)
        total.update(one.digest())
    return total.hexdigest()


def place(files: Sequence[Path], file: int, row: int) -> str:
    """Returns ``path:line``, or the path where a document is the whole file."""
    return f"{files[file]}:{row}" if row else str(files[file])


def read_records(
    files: Sequence[Path], columns: Mapping[str, str] | None = None, on_bytes: Callable[[int], object] = _NO_BAR
) -> Iterator[Record]:
    """Yields the records of all files.

    Args:
        files: ``.jsonl``, ``.ndjson`` or ``.json`` with an object a line; ``.parquet``; any other is one text.
        columns: other names of the columns: ``{text: content}`` where the text stands in ``content``.
        on_bytes: told how many bytes of the files have been read since the last time.

    Raises:
        DloError: for what cannot be read, with the file and line.
    """
    for number, path in enumerate(files):
        rows = read_rows(path, on_bytes)
        if rows is None:
            yield Record("text", whole_text(path), None, number, 0)
            on_bytes(path.stat().st_size)
            continue
        for row, values in rows:
            yield _record(values, columns or {}, number, row, f"{path}:{row}")


def read_rows(path: Path, on_bytes: Callable[[int], object] = _NO_BAR) -> Iterator[tuple[int, dict[str, Any]]] | None:
    """Returns the numbered rows of JSON lines or Parquet, from 1; None for a file of another kind."""
    kind = _kind_of_file(path)
    if kind == "whole":
        return None
    return _json_lines(path, on_bytes) if kind == "lines" else _parquet_rows(path, on_bytes)


def _kind_of_file(path: Path) -> str:
    suffix = path.suffix.lower()
    return "lines" if suffix in _LINES else "parquet" if suffix in _PARQUET else "whole"


def whole_text(path: Path) -> str:
    """Returns a file's text, in UTF-8, without a byte order mark; lines end with ``\\n``, whatever they end with there.

    Raises:
        DloError: if it is no UTF-8, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DloError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}; convert or remove it") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DloError:
    return DloError(f"{path} cannot be read: {error.strerror or error}; mend that, or leave the file out")


def _json_lines(path: Path, on_bytes: Callable[[int], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                on_bytes(len(line))
                if line.strip():
                    yield number, _json_object(line, f"{path}:{number}")
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.strip())
    except RecursionError:
        raise DloError(f"{where}: the JSON is nested too deeply to be read; mend or remove the line") from None
    except ValueError as error:  # as JSONDecodeError and UnicodeDecodeError are
        what = getattr(error, "msg", None) or str(error)
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DloError(f"{where}: broken JSON{column}: {what}; mend or remove the line") from None
    if not isinstance(values, dict):
        raise DloError(
            f'{where}: a line must be one JSON object, such as {{"text": ...}}, but this is a {type(values).__name__}'
        )
    return values


def _parquet_rows(path: Path, on_bytes: Callable[[int], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise DloError(f"{path}: reading Parquet needs datasets; pip install 'dlo_framework[llm]'") from error
    import pyarrow

    size = path.stat().st_size
    try:
        rows: Any = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from enumerate(rows, 1)
    except (pyarrow.ArrowException, OSError, datasets.exceptions.DatasetsError) as error:
        raise DloError(f"{path} is no readable Parquet file: {str(error).splitlines()[0]}") from error
    on_bytes(size)


def _record(values: dict[str, Any], columns: Mapping[str, str], file: int, row: int, where: str) -> Record:
    """Returns a row's record, by which of the columns it has."""

    def of(name: str) -> Any:
        return values.get(columns.get(name, name))

    if of("messages") is not None:
        messages, tools = conversation_of(of("messages"), of("tools"), where)
        return Record("messages", messages, tools, file, row)
    if of("prompt") is not None and of("completion") is not None:
        pair = text_of(of("prompt"), "prompt", where), text_of(of("completion"), "completion", where)
        return Record("pair", pair, None, file, row)
    if of("text") is not None:
        return Record("text", text_of(of("text"), "text", where), None, file, row)
    wanted = [columns.get(name, name) for name in ("messages", "prompt", "completion", "text")]
    hint = next((did_you_mean(name, wanted) for name in values if did_you_mean(name, wanted)), "")
    raise DloError(
        f"{where}: a record needs {wanted[0]!r}, {wanted[1]!r} and {wanted[2]!r}, or {wanted[3]!r}, but has"
        f" {', '.join(map(repr, values)) or 'nothing'}{hint}; other names are set by columns, such as"
        " {text: content}"
    )


def conversation_of(messages: Any, tools: Any, where: str) -> tuple[list[dict[str, Any]], Any]:
    """Returns a conversation's messages and what a chat template is given as its tools, None if there are none.

    Args:
        messages: as they stand in a record.
        tools: likewise.
        where: the record's place, for messages.

    Raises:
        DloError: for what is no list of messages with a role, and for text that is none.
    """
    if not isinstance(messages, list) or not messages:
        raise DloError(f"{where}: messages must be a list with at least one message, not {str(messages)[:40]!r}")
    found = [_message(message, number, where) for number, message in enumerate(messages, 1)]
    _check_text(json.dumps([found, tools], ensure_ascii=False, default=str), "messages", where)
    return found, tools or None


def text_of(value: Any, column: str, where: str) -> str:
    """Returns a text that stands in a record.

    Raises:
        DloError: if it is something else, or holds what is no character.
    """
    if not isinstance(value, str):
        raise DloError(f"{where}: {column} must be a text, not {type(value).__name__}: {str(value)[:40]!r}")
    _check_text(value, column, where)
    return value


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DloError(
            f"{where}: a message is an object with role and content, such as"
            f' {{"role": "user", "content": "Hello"}}, not {str(message)[:60]!r}'
        )
    found = {name: value for name, value in message.items() if value is not None}  # which Arrow fills gaps with
    role = found["role"]
    if role not in _ROLES:
        raise DloError(
            f"{where}: the role of message {number} must be one of {', '.join(_ROLES)}, got {role!r}"
            f"{did_you_mean(role, _ROLES) or _instead(role)}"
        )
    if not any(found.get(name) for name in ("content", *_IN_PLACE_OF_CONTENT)) and found.get("content") != "":
        raise DloError(
            f"{where}: message {number} (role {role}) must have content, got {', '.join(map(repr, found))}"
            f"{did_you_mean('content', [name for name in found if name != 'role']) or '; write its text under content'}"
        )
    return found


def _instead(role: str) -> str:
    other = {"bot": "assistant", "gpt": "assistant", "model": "assistant", "ai": "assistant", "human": "user"}
    return f"; write {other[role.lower()]}" if role.lower() in other else ""


def _check_text(text: str, column: str, where: str) -> None:
    """Refuses half of a surrogate pair, which JSON can write (``\\ud83d``) and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DloError(
            f"{where}: {column} holds {text[error.start]!r}, half of a surrogate pair and no character; mend or remove"
            " the line"
        ) from None

"""Reads records of training text from JSON lines, Parquet and text files, each with its file and line.

JSON lines are read line by line, so that an error names its line and lines may have different keys. Hugging Face's
``datasets`` streams Parquet, so that it is not copied to a cache.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dlo_framework.errors import DloError, MissingInput, did_you_mean

Kind = Literal["messages", "pair", "text"]

#: Roles that chat templates know; only the assistant's tokens are targets.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
#: Keys that may replace `content` in an assistant's message.
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking")
_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet",)
_LIBRARY = "stdlib://"
_BLOCK = 1 << 20
_NO_BAR: Callable[[int], object] = lambda size: None


class Record(NamedTuple):
    """One document, before tokenisation.

    Attributes:
        kind: Type of `content`: a list of messages, a (prompt, completion) pair, or a text.
        content: Content of the document.
        tools: Argument `tools` of the chat template, or None.
        file: Index of the file.
        row: Line or row in the file, from 1; 0 where the document is the full file.
    """

    kind: Kind
    content: Any
    tools: Any
    file: int
    row: int

    @property
    def digest(self) -> int:
        """Hash of the content, below 2**64; it does not depend on the file or the tokenizer."""
        plain = json.dumps([self.kind, self.content, self.tools], sort_keys=True, default=str)
        return int.from_bytes(hashlib.blake2b(plain.encode(errors="surrogatepass"), digest_size=8).digest())


def expand_patterns(patterns: str | Sequence[str], option: str) -> list[Path]:
    """Returns the files that paths and globs (``**`` included) name, each once, those of a glob sorted by name.

    Args:
        patterns: Path or glob, or several. ``stdlib://`` is the folder of this Python's standard library.
        option: Name of the argument, for messages.

    Raises:
        DloError: If a path is not a file, a glob matches no file, or a file is empty.
    """
    paths: dict[Path, None] = {}
    for named in [patterns] if isinstance(patterns, str) else patterns:
        pattern = named
        if named.startswith(_LIBRARY):
            pattern = str(Path(sysconfig.get_path("stdlib"), named.removeprefix(_LIBRARY)))
        path = Path(pattern).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            raise DloError(
                f"{option} must name files, got the folder {pattern}; name its files, such as {path / '*.jsonl'}"
            )
        elif glob.has_magic(pattern):
            matches = sorted(glob.glob(str(path), recursive=True))
            files = [file for match in matches if (file := Path(match)).is_file()]
            if not files:
                where = f"which matches none from {Path.cwd()}; change the glob"
                raise MissingInput(f"{option} must match a file, got {pattern}, {where}", pattern)
        else:
            near = path.parent.iterdir() if path.parent.is_dir() else []
            hint = did_you_mean(path.name, [file.name for file in near])
            where = f"which does not exist (from {Path.cwd()}){hint}"
            raise MissingInput(f"{option} must name files, got {pattern}, {where}", pattern)
        paths.update(dict.fromkeys(files))
    if not paths:
        raise DloError(f"{option} must name at least one file, got an empty list; name one, or remove {option}")
    empty = next((file for file in paths if not file.stat().st_size), None)
    if empty is not None:
        raise DloError(f"{option} must name files with content, got {empty}, which is empty; remove it")
    return list(paths)


def content_hash(files: Sequence[Path]) -> str:
    """Returns a SHA-256 of the files' kinds and contents, in their order, without a text's byte order mark."""
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


def format_location(files: Sequence[Path], file: int, row: int) -> str:
    """Returns ``path:line``, or the path where a document is the full file."""
    return f"{files[file]}:{row}" if row else str(files[file])


def read_records(
    files: Sequence[Path], columns: Mapping[str, str] | None = None, on_bytes: Callable[[int], object] = _NO_BAR
) -> Iterator[Record]:
    """Yields the records of all files.

    Args:
        files: Files to read: ``.jsonl``, ``.ndjson`` or ``.json`` with one object per line; ``.parquet``; any other
            file is one text.
        columns: Other names of the columns: ``{text: content}`` where the text is in column ``content``.
        on_bytes: Callback for progress, called with the number of bytes read since its last call.

    Raises:
        DloError: If a record cannot be read; the message names the file and line.
    """
    for number, path in enumerate(files):
        rows = read_rows(path, on_bytes)
        if rows is None:
            yield Record("text", read_text(path), None, number, 0)
            on_bytes(path.stat().st_size)
            continue
        for row, values in rows:
            yield _record(values, columns or {}, number, row, f"{path}:{row}")


def read_rows(path: Path, on_bytes: Callable[[int], object] = _NO_BAR) -> Iterator[tuple[int, dict[str, Any]]] | None:
    """Returns the rows of JSON lines or Parquet, numbered from 1, or None for a file of another kind."""
    kind = _kind_of_file(path)
    if kind == "whole":
        return None
    return _json_lines(path, on_bytes) if kind == "lines" else _parquet_rows(path, on_bytes)


def _kind_of_file(path: Path) -> str:
    suffix = path.suffix.lower()
    return "lines" if suffix in _LINES else "parquet" if suffix in _PARQUET else "whole"


def read_text(path: Path) -> str:
    """Returns a UTF-8 file's text, without a byte order mark and with all line ends as ``\\n``.

    Raises:
        DloError: If the file is not UTF-8, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DloError(
            f"{path} must be UTF-8, got {error.reason} at byte {error.start}; convert or remove it"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DloError:
    return DloError(f"{path} cannot be read: {error.strerror or error}; make it readable, or remove it from the files")


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
        raise DloError(f"{where}: JSON is nested too deeply; correct or remove the line") from None
    except ValueError as error:  # as JSONDecodeError and UnicodeDecodeError are
        if line.lstrip(codecs.BOM_UTF8).strip() in (b"[", b"[{", b"{"):
            raise _not_lines(where) from None
        what = f", column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
        raise DloError(f"{where}: JSON is invalid{what}; correct or remove the line") from None
    if isinstance(values, list) and all(isinstance(value, dict) for value in values):
        raise _not_lines(where)
    if not isinstance(values, dict):
        raise DloError(
            f"{where}: line must be a JSON object, got {type(values).__name__}; write an object, such as"
            ' {"text": ...}'
        )
    return values


def _not_lines(where: str) -> DloError:
    path = where.rpartition(":")[0]
    lines = Path(path).with_suffix(".jsonl")
    target = lines if str(lines) != path else lines.with_stem(f"{lines.stem}_lines")
    return DloError(
        f"{path} must have one JSON object on each line, got one JSON value over the file; convert it, for example with"
        f" `jq -c '.[]' {path} > {target}`"
    )


def _parquet_rows(path: Path, on_bytes: Callable[[int], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise DloError(f"{path}: Parquet needs the package datasets; pip install 'dlo_framework[llm]'") from error
    import pyarrow

    size = path.stat().st_size
    try:
        rows: Any = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from enumerate(rows, 1)
    except (pyarrow.ArrowException, OSError, datasets.exceptions.DatasetsError) as error:
        raise DloError(
            f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}; write it again, or remove it"
        ) from error
    on_bytes(size)


def _record(values: dict[str, Any], columns: Mapping[str, str], file: int, row: int, where: str) -> Record:
    """Returns the record of a row; its columns decide the kind."""

    def of(name: str) -> Any:
        return values.get(columns.get(name, name))

    if of("messages") is not None:
        messages, tools = check_conversation(of("messages"), of("tools"), where)
        return Record("messages", messages, tools, file, row)
    if of("prompt") is not None and of("completion") is not None:
        pair = check_text(of("prompt"), "prompt", where), check_text(of("completion"), "completion", where)
        return Record("pair", pair, None, file, row)
    if of("text") is not None:
        return Record("text", check_text(of("text"), "text", where), None, file, row)
    for one, other in (("prompt", "completion"), ("completion", "prompt")):
        if of(one) is not None:
            has, lacks = columns.get(one, one), columns.get(other, other)
            raise DloError(
                f"{where}: a record with {has!r} must have {lacks!r} too, got {', '.join(map(repr, values))}; add it,"
                " write the conversation under 'messages', or remove the line"
            )
    _refuse_known_layout(values, where)
    wanted = [columns.get(name, name) for name in ("messages", "prompt", "completion", "text")]
    missing = [name for name in wanted if name not in values]
    hints = (did_you_mean(name, missing) for name in values if name not in wanted)
    hint = next(filter(None, hints), "")
    raise DloError(
        f"{where}: record must have {wanted[0]!r}, {wanted[1]!r} and {wanted[2]!r}, or {wanted[3]!r}, got"
        f" {', '.join(map(repr, values)) or 'no keys'}{hint}; rename a key, or set columns, such as {{text: content}}"
    )


#: Columns of common data sets, and the option `columns` that reads them.
_LAYOUTS = [
    *((f"{{prompt: {one}, completion: {other}}}", {one, other}) for one, other in (
        ("question", "answer"), ("instruction", "output"), ("instruction", "response"), ("query", "response"),
        ("input", "output"), ("prompt", "response"), ("prompt", "answer"),
    )),
    *((f"{{text: {name}}}", {name}) for name in ("content", "body", "document", "raw_content")),
]  # fmt: skip


def _refuse_known_layout(values: Mapping[str, Any], where: str) -> None:
    """Raises an error with the fix for columns that common data sets have; returns for others."""
    turns = values.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        if "from" not in turns[0]:
            fix = "set data.init_args.columns to {messages: conversations}"
        else:
            path = where.rpartition(":")[0]
            roles = '({human: "user", gpt: "assistant"}[.from] // .from)'
            turn = f"{{role: {roles}, content: .value}}"
            fix = f"`jq -c '{{messages: [.conversations[] | {turn}]}}' {path} > chats.jsonl` makes it of yours"
        raise DloError(f"{where}: record must have 'messages' with 'role' and 'content', got 'conversations'; {fix}")
    for option, names in _LAYOUTS:
        if names <= set(values):
            joined = "input" not in names and values.get("input")
            option += ", and join 'input' to the prompt, which is left out otherwise" if joined else ""
            raise DloError(
                f"{where}: record must have 'messages', 'prompt' and 'completion', or 'text', got"
                f" {', '.join(map(repr, values))}; set data.init_args.columns to {option}"
            )


def check_conversation(messages: Any, tools: Any, where: str) -> tuple[list[dict[str, Any]], Any]:
    """Returns a conversation's messages, checked, and its tools, or None without any.

    Args:
        messages: Value of the record's messages.
        tools: Value of the record's tools.
        where: File and line of the record, for error messages.

    Raises:
        DloError: If `messages` is not a list of messages with a role, or their text is not valid Unicode.
    """
    if not isinstance(messages, list) or not messages:
        raise DloError(f"{where}: messages must be a list with at least one message, got {str(messages)[:40]!r}")
    checked = [_message(message, number, where) for number, message in enumerate(messages, 1)]
    _check_text(json.dumps([checked, tools], ensure_ascii=False, default=str), "messages", where)
    return checked, tools or None


def check_text(value: Any, column: str, where: str) -> str:
    """Returns a record's text, checked.

    Raises:
        DloError: If it is not a string, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise DloError(f"{where}: {column} must be a string, got {type(value).__name__}: {str(value)[:40]!r}")
    _check_text(value, column, where)
    return value


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DloError(
            f"{where}: message must be an object with role and content, got {str(message)[:60]!r}; write, for example,"
            ' {"role": "user", "content": "Hello"}'
        )
    # Arrow fills missing keys with None.
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields["role"]
    if role not in _ROLES:
        raise DloError(
            f"{where}: the role of message {number} must be one of {', '.join(_ROLES)}, got {role!r}"
            f"{did_you_mean(role, _ROLES) or _instead(role)}"
        )
    if not any(fields.get(name) for name in ("content", *_IN_PLACE_OF_CONTENT)) and fields.get("content") != "":
        hint = did_you_mean("content", [name for name in fields if name != "role"])
        raise DloError(
            f"{where}: message {number} (role {role}) must have content, got {', '.join(map(repr, fields))}"
            f"{hint or '; write its text under content'}"
        )
    return fields


def _instead(role: str) -> str:
    other = {"bot": "assistant", "gpt": "assistant", "model": "assistant", "ai": "assistant", "human": "user"}
    return f"; write {other[role.lower()]}" if role.lower() in other else ""


def _check_text(text: str, column: str, where: str) -> None:
    """Refuses half of a surrogate pair, which JSON can contain (``\\ud83d``) and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DloError(
            f"{where}: {column} must be valid Unicode, got {text[error.start]!r}, half of a surrogate pair; correct or"
            " remove the line"
        ) from None

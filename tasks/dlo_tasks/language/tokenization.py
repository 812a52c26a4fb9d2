"""Tokenises records, marks which tokens are targets, and caches the result once for all processes and nodes.

A cache is named by a hash of its inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tqdm import tqdm

from dlo_framework.data import ignore_stop_signals
from dlo_framework.data.module import usable_cores
from dlo_framework.errors import DloError
from dlo_framework.lock import build_once
from dlo_tasks.language.chat import encode_conversation, encode_without_end
from dlo_tasks.language.records import Record, content_hash, format_location, read_records
from dlo_tasks.language.token_cache import FORMAT, DamagedTokenCache, Document, verify_checksum, write_store
from dlo_tasks.language.tokenizer import fingerprint, vocabulary_size

Tokens = tuple[list[int], np.ndarray]


_Item = TypeVar("_Item")


def in_calls(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yields items in lists of 256: a tokenizer distributes those of a call over the cores."""
    coming = iter(items)
    while some := list(islice(coming, 256)):
        yield some


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
    for some in in_calls(records):
        encoded: dict[int, Tokens] = {}
        texts = [number for number, record in enumerate(some) if record.kind == "text"]
        pairs = [number for number, record in enumerate(some) if record.kind == "pair"]
        encoded.update(zip(texts, encode_texts(tokenizer, [some[number].content for number in texts]), strict=True))
        encoded.update(zip(pairs, encode_pairs(tokenizer, [some[number].content for number in pairs]), strict=True))
        for number, record in enumerate(some):
            if record.kind == "messages":
                where = format_location(files, record.file, record.row)
                encoded[number] = encode_conversation(tokenizer, record.content, record.tools, where)
            ids, learned = encoded[number]
            yield Document(np.array(ids, dtype=np.int64), learned, record.digest, record.file, record.row)


def encode_texts(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Returns each text's token ids, with the end-of-text token; all are targets."""
    closed = [_closed(tokenizer, ids) for ids in encode_without_end(tokenizer, texts)]
    return [(ids, np.ones(len(ids), dtype=bool)) for ids in closed]


def encode_pairs(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Tokens]:
    """Returns the token ids of each prompt, completion and end-of-text token; the latter two are targets."""
    prompts = encode_without_end(tokenizer, [prompt for prompt, _ in pairs])
    wholes = encode_without_end(tokenizer, [prompt + completion for prompt, completion in pairs])
    encoded = []
    for (_, completion), prompt, whole in zip(pairs, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:
            alone = tokenizer([completion], add_special_tokens=False, verbose=False)["input_ids"][0]
            whole = prompt + alone
        ids = _closed(tokenizer, whole)
        encoded.append((ids, np.arange(len(ids)) >= len(prompt)))
    return encoded


def _closed(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]


# --- processes ----------------------------------------------------------------------------------------------------

#: Function that tokenises records, in order.
Tokenize = Callable[[Iterable[Any]], Iterable[Document]]

#: Number of tasks per process that wait.
_WAITING = 2
#: Size of the files from which several processes are the default: each takes a second to start.
_LARGE = 64 << 20


def tokenize_in_processes(
    records: Iterable[Any], tokenize: Tokenize, processes: int | None, total_bytes: int
) -> Iterator[Document]:
    """Yields the tokenised records, in order; memory holds a few hundred per process.

    Args:
        records: Records, which this process reads.
        tokenize: Function that tokenises some of them; it depends on each record alone.
        processes: Number of processes; 1 tokenises in this one, whose tokenizer uses threads. None for all cores for
            more than 64 MiB and one for less.
        total_bytes: Size of the files.

    Raises:
        DloError: If a record cannot be tokenised, or a process is killed.
    """
    if processes is None:
        cores = usable_cores()
        processes = 1 if total_bytes < _LARGE else cores
    if processes == 1:
        yield from tokenize(records)
        return
    forks = "fork" in multiprocessing.get_all_start_methods()  # A spawned process would import transformers again.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork" if forks else "spawn"),
        initializer=_start_process,
        initargs=(tokenize,),
    )
    waiting: deque[Future[list[Document]]] = deque()
    try:
        for some in in_calls(records):
            waiting.append(pool.submit(_tokenize_some, some))
            if len(waiting) > _WAITING * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DloError(
            f"{processes} processes must tokenise to the end, got one that was killed, perhaps for want of memory; set"
            " tokenize_processes to a smaller number"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenize: list[Tokenize] = []


def _start_process(tokenize: Tokenize) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One thread per process; a fork must not use its parent's threads.
    ignore_stop_signals()
    _tokenize[:] = [tokenize]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_some(records: list[Any]) -> list[Document]:
    return list(_tokenize[0](records))


# --- the cache ----------------------------------------------------------------------------------------------------

#: Function that makes documents; it gets a callback for progress, in bytes read.
MakeDocuments = Callable[[Callable[[int], object]], Iterable[Document]]


def cached_tokens(
    files: Sequence[Path],
    tokenizer: Any,
    folder: Path,
    columns: Mapping[str, str] | None = None,
    processes: int | None = None,
) -> str:
    """Returns the name of the cache file in ``folder`` with the tokens of some files; writes it if it does not exist.

    Args:
        files: Files to tokenise, in this order.
        tokenizer: Fast tokenizer; see :func:`cached_documents`.
        folder: Folder of the cache.
        columns: Other names of the columns; see :func:`dlo_tasks.language.records.read_records`.
        processes: Number of processes; None for all cores if the files are large.

    Raises:
        DloError: If records cannot be read or tokenised, or the folder cannot be written to.
    """

    def documents(on_bytes: Callable[[int], object]) -> Iterable[Document]:
        tokenize = partial(tokenize_records, tokenizer=tokenizer, files=files)
        records = read_records(files, columns, on_bytes)
        return tokenize_in_processes(records, tokenize, processes, total_size(files))

    return cached_documents(files, tokenizer, folder, documents, [sorted((columns or {}).items())])


def cached_documents(
    files: Sequence[Path], tokenizer: Any, folder: Path, documents: MakeDocuments, options: list[Any]
) -> str:
    """Returns the name of the cache file in ``folder`` with documents of some files; writes it if it does not exist.

    The name is a hash of the files' contents, the tokenizer, the options and the format. A damaged cache is written
    again, with a warning. Terminals show a progress bar. One process writes, of all nodes that share the folder; the
    others wait for it, and take over if it dies.

    Args:
        files: Files of the documents, in this order.
        tokenizer: Fast tokenizer. It distributes the work over the cores, unless ``TOKENIZERS_PARALLELISM=false`` is
            in the environment. An unset variable is set to true, because each worker forked later would otherwise
            write a warning.
        folder: Folder of the cache.
        documents: Function that makes the documents.
        options: Settings that change the documents.

    Raises:
        DloError: If documents cannot be made, or the folder cannot be written to.
    """
    made_of = [FORMAT, content_hash(files), fingerprint(tokenizer), *options]
    size = vocabulary_size(tokenizer)
    if size != len(tokenizer):  # Ids with gaps: earlier caches, which used len, hold other tokens.
        made_of.append(size)
    name = f"tokens-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]}.bin"
    path = folder / name
    if path.is_file():
        try:
            verify_checksum(path)
            return name
        except DamagedTokenCache as error:
            rank_zero_warn(f"{error.path}: the token cache {error.what}; it is written again")
            with contextlib.suppress(OSError):
                path.unlink()

    def build() -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        bytes_of = total_size(files)
        with tqdm(total=bytes_of, desc="tokenise", unit="B", unit_scale=True, leave=False, disable=None) as bar:
            write_store(path, documents(bar.update), size)

    build_once(path, build, "tokenising")
    return name


def total_size(files: Sequence[Path]) -> int:
    """Returns the size of some files together, in bytes."""
    return sum(file.stat().st_size for file in files)

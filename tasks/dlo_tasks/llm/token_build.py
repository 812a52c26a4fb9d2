"""Tokenises files once for all processes and nodes, into a cache named by a hash of its inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tqdm import tqdm

from dlo_framework.lock import build_once
from dlo_tasks.llm.records import content_hash, read_records
from dlo_tasks.llm.token_cache import FORMAT, DamagedTokenCache, Document, verify_checksum, write_store
from dlo_tasks.llm.tokenization import tokenize_records
from dlo_tasks.llm.tokenize_processes import choose_processes, tokenize_in_processes
from dlo_tasks.llm.tokenizer import fingerprint, vocabulary_size

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
        columns: Other names of the columns; see :func:`dlo_tasks.llm.records.read_records`.
        processes: Number of processes; None for all cores if the files are large.

    Raises:
        DloError: If records cannot be read or tokenised, or the folder cannot be written to.
    """

    def documents(on_bytes: Callable[[int], object]) -> Iterable[Document]:
        tokenize = partial(tokenize_records, tokenizer=tokenizer, files=files)
        records = read_records(files, columns, on_bytes)
        return tokenize_in_processes(records, tokenize, choose_processes(processes, total_size(files)))

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

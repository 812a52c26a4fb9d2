"""Tokenises files once, into a cache that is found again by what it was made of."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tqdm import tqdm

from dlo_tasks.llm.encode import documents
from dlo_tasks.llm.records import content_hash, read_records
from dlo_tasks.llm.token_cache import FORMAT, BadCache, verify, write_store
from dlo_tasks.llm.tokenizer import fingerprint, vocabulary_size


def cached_tokens(files: Sequence[Path], tokenizer: Any, folder: Path, columns: Mapping[str, str] | None = None) -> str:
    """Returns the name of the cache file in ``folder`` with the tokens of some files; makes it if need be.

    The name is made of the files' contents, the tokenizer, the columns and the format: what any of them changes is
    another cache. A cache that is damaged is made anew, and a warning says so. A progress bar is shown on terminals.

    Args:
        files: to tokenise, in this order.
        tokenizer: a fast one. It spreads the work over the cores; ``TOKENIZERS_PARALLELISM=false`` in the environment
            forbids that, and is set to true if it is not set, without which workers that are forked later would each
            write a warning.
        folder: of the cache.
        columns: see :func:`dlo_tasks.llm.records.read_records`.

    Raises:
        DloError: for records that cannot be read or tokenised, and a folder that cannot be written to.
    """
    made_of = [FORMAT, content_hash(files), fingerprint(tokenizer), sorted((columns or {}).items())]
    size = vocabulary_size(tokenizer)
    if size != len(tokenizer):  # Ids with gaps: caches that took the one for the other hold other tokens.
        made_of.append(size)
    name = f"tokens-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]}.bin"
    path = folder / name
    if path.is_file():
        try:
            verify(path)
            return name
        except BadCache as error:
            rank_zero_warn(f"{error.path}: the token cache {error.what}; it is made anew")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, desc="tokenise", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        write_store(path, documents(read_records(files, columns, bar.update), tokenizer, files), size)
    return name

"""Cache folder for tokens and trained tokenizers, with atomic writes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dlo_framework.atomic_file import PARTIAL, open_atomic
from dlo_framework.errors import DloError


def cache_folder(cache_dir: str | None) -> Path:
    """Returns the folder for tokens and trained tokenizers: ``cache_dir``, or ``dlo/llm`` in the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo" / "llm"


#: Age, in seconds, after which a temporary file is assumed to be abandoned.
_ABANDONED = 2 * 24 * 3600


@contextlib.contextmanager
def cached_file(path: Path, what: str) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to ``path`` on success; deletes it on failure.

    Args:
        path: Path of the file; its folder is created.
        what: Description of the file, for messages.

    Raises:
        DloError: If the folder cannot be written to.
    """
    try:
        with open_atomic(path, shared=True) as partial:
            _clear(path.parent)
            yield partial
    except OSError as error:
        raise DloError(
            f"{what} cannot be written to {path.parent}: {error}; set cache_dir to a writable folder with enough space"
        ) from error


def _clear(folder: Path) -> None:
    """Removes abandoned temporary files of killed processes."""
    for left in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):  # Another process may have removed it.
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()

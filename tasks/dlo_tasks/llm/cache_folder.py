"""The folder of what is made once: where it is, and files in it that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dlo_framework.errors import DloError
from dlo_framework.whole_file import PARTIAL, whole_file


def cache_folder(cache_dir: str | None) -> Path:
    """Returns where tokens and trained tokenizers are kept: ``cache_dir``, else ``dlo/llm`` in the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlo" / "llm"


#: Seconds after which an unfinished file is taken for one whose writer was killed.
_ABANDONED = 2 * 24 * 3600


@contextlib.contextmanager
def cached_file(path: Path, what: str) -> Iterator[Path]:
    """Gives a path to write to beside ``path``, which takes its place at the end; nothing is left of an attempt.

    Args:
        path: of the file; its folder is made.
        what: the file is, for the message.

    Raises:
        DloError: if the folder cannot be written to.
    """
    try:
        with whole_file(path, shared=True) as partial:
            _clear(path.parent)
            yield partial
    except OSError as error:
        raise DloError(
            f"{what} cannot be written to {path.parent}: {error}; set cache_dir to a folder that can be written to and"
            " has enough room"
        ) from error


def _clear(folder: Path) -> None:
    """Removes what writers that were killed have left."""
    for left in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):  # another process clears too
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()

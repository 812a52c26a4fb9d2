"""A store of checkpoints in this process's memory, used in place of a remote one."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from dlo_framework.checkpoint import CheckpointStore
from dlo_framework.checkpoint.store import FileStatus


class MemoryStore(CheckpointStore):
    #: Content of files, None for folders.
    files: ClassVar[dict[Path, bytes | None]] = {}
    #: Writing operations, in order, with the names of their paths.
    log: ClassVar[list[tuple[str, ...]]] = []

    def status(self, path: Path) -> FileStatus | None:
        if path not in self.files:
            return None
        content = self.files[path]
        return FileStatus(content is None, len(content or b""), 0.0)

    def list(self, folder: Path) -> list[str]:
        return [path.name for path in self.files if path.parent == folder]

    def open(self, path: Path) -> BinaryIO:
        content = self.files.get(path)
        if content is None:
            raise FileNotFoundError(2, "No such file", str(path))
        return io.BytesIO(content)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        assert path.parent in self.files, f"{path.parent} does not exist"
        file = io.BytesIO()
        yield file
        self.files[path] = file.getvalue()
        self.log.append(("create", path.name))

    def make_folder(self, path: Path) -> None:
        if path in self.files:
            raise FileExistsError(17, "File exists", str(path))
        self.files |= dict.fromkeys([path, *path.parents])
        self.log.append(("make_folder", path.name))

    def rename(self, source: Path, target: Path) -> None:
        if source not in self.files:
            raise FileNotFoundError(2, "No such file", str(source))
        assert self.files.get(target, b"") is not None, f"{target} is a folder"
        moved = {path: path.relative_to(source) for path in self.files if path.is_relative_to(source)}
        for path, rest in moved.items():
            self.files[target / rest] = self.files.pop(path)
        self.log.append(("rename", source.name, target.name))

    def remove(self, path: Path) -> None:
        for gone in [other for other in self.files if other.is_relative_to(path)]:
            del self.files[gone]

    def sync(self, folder: Path) -> None:
        self.log.append(("sync", folder.name))

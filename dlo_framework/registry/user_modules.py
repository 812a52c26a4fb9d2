"""Import of the user's own modules and files, named under ``plugins:`` in a config.

A file is imported under a name by which any other process can import it too: its dotted path below the working
directory (``./nets/plugin.py`` is ``nets.plugin``), or else below its own folder. That folder goes to the *end* of
``sys.path``, where it shadows nothing. multiprocessing passes ``sys.path`` to the workers that it spawns, so that a
dataset defined in such a file can be unpickled in a worker, and two files called ``plugin.py`` are two modules. Saved
configs contain the names, which stay valid when the project's folder moves.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import keyword
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.registry.class_source import find_spec

#: Number of folders above a file to try as the root of its name.
_LONGEST_NAME = 4


def import_user_module(spec: str) -> ModuleType:
    """Imports a module or a file.

    Args:
        spec: Module, ``my_pkg.mod``, or path of a file, ``./file.py``, relative to the working directory.

    Raises:
        DloError: if the module or file does not exist, or raises.
    """
    importlib.invalidate_caches()  # The file may be newer than Python's cache of its folder.
    if spec.endswith(".py") or "/" in spec or os.sep in spec:
        file = _existing_file(spec)
        name = module_name(file)
        if name is None:
            return _import_alone(spec, file)
    else:
        name = _existing_module(spec)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise DloError(f"plugins: '{spec}' failed to import: {type(error).__name__}: {error}") from error


def _existing_file(spec: str) -> Path:
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.is_dir():
        raise DloError(f"plugins: '{spec}' must be a file, got a folder; name a file, '{spec.rstrip('/')}/NAME.py'")
    if path.is_file():
        raise DloError(f"plugins: the name of a file must end in .py, got '{spec}'; rename the file")
    if not path.parent.is_dir():
        raise DloError(f"plugins: no file '{spec}': the folder {path.parent.absolute()} does not exist")
    names = {file.name for file in path.parent.glob("*.py")}
    hint = did_you_mean(path.name, names)
    raise DloError(f"plugins: no file '{spec}' in {path.parent.absolute()}{hint}")


def _existing_module(spec: str) -> str:
    parts = spec.split(".")
    if not _importable(parts):
        raise DloError(
            f"plugins: an entry must be a module (my_pkg.mod) or a file (./file.py), got '{spec}'; write './{spec}.py'"
            " for a file"
        )
    if spec in sys.modules or find_spec(spec) is not None:
        return spec
    folder = os.getcwd()
    sys.path.append(folder)
    if find_spec(spec) is not None:
        return spec
    sys.path.remove(folder)
    file = Path(*parts).with_suffix(".py")
    if Path(spec).with_suffix(".py").is_file() or file.is_file():
        raise DloError(f"plugins: no module '{spec}'; to name the file, write './{file}'")
    parent = find_spec(".".join(parts[:-1])) if len(parts) > 1 else None
    folders = parent.submodule_search_locations if parent else [folder]
    names = {file.stem for place in folders or [] for file in Path(place).glob("*.py")}
    raise DloError(f"plugins: no module '{spec}'{did_you_mean(parts[-1], names)}")


def module_name(file: Path) -> str | None:
    """Returns the name by which a file can be imported, and adds a folder to ``sys.path`` if that needs it.

    Args:
        file: Absolute path of the file.

    Returns:
        Dotted name; None where no folder above the file gives it one, because a part of the path cannot be an
        identifier, or another module has the name.
    """
    for root in _roots(file):
        parts = list(file.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        if not parts or not _importable(parts):
            continue
        if _imports_file(name, file):
            return name
        sys.path.append(str(root))
        if _imports_file(name, file):
            return name
        sys.path.pop()
    return None


def _roots(file: Path) -> Iterator[Path]:
    """Yields the folders that may be the root of a file's dotted name, the best first, none inside a package."""
    cwd = Path.cwd().resolve()
    outer = next(folder for folder in file.parents if not (folder / "__init__.py").exists())
    if cwd == outer or cwd in outer.parents:
        yield cwd
    yield outer
    yield from list(outer.parents)[: _LONGEST_NAME - 1]


def _imports_file(name: str, file: Path) -> bool:
    """Returns whether importing ``name`` imports ``file``."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        spec = find_spec(name)
        origin = spec.origin if spec and spec.has_location else None
    return origin is not None and Path(origin).resolve() == file


def _importable(parts: list[str]) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _import_alone(spec: str, file: Path) -> ModuleType:
    """Imports a file without an importable name, such as ``my-plugin.py``, under a name made from its path.

    A worker that is spawned, not forked, cannot import it.
    """
    relative = os.path.relpath(file, Path.cwd().resolve())
    stem = "".join(char if f"_{char}".isidentifier() else "_" for char in file.stem)
    name = f"user_{stem}_{hashlib.sha256(relative.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    created = importlib.util.spec_from_file_location(name, file)
    assert created is not None
    assert created.loader is not None
    module = importlib.util.module_from_spec(created)
    sys.modules[name] = module
    try:
        created.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise DloError(f"plugins: '{spec}' failed to import: {type(error).__name__}: {error}") from error
    return module

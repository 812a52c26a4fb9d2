"""``dlo plugins new``: writes a working plug-in of a kind, with a test that passes.

The folder ``templates/`` has both files of each kind. They are examples to learn from: arguments are typed and
documented (``dlo plugins show`` prints them), and the constructor checks their values, with the fix in the message.
"""

from __future__ import annotations

import keyword
import os
import re
from importlib import resources
from pathlib import Path
from string import Template

from dlo_framework.cli.snippet import format_yaml_snippet
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.registry import KINDS, Registry
from dlo_framework.registry.class_source import find_spec, read_class_in_file


def write_plugin(kind: str, name: str, folder: Path, registry: Registry) -> str:
    """Writes ``NAME.py`` and ``test_NAME.py``.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Name of the module, in snake_case; the class has the same name in CamelCase.
        folder: Folder to write to; created if it does not exist.
        registry: Registry of the installed plug-ins, whose names are taken.

    Returns:
        Text that tells the user the next steps.

    Raises:
        DloError: If the kind is unknown, the name is not in snake_case or is taken, or a file exists.
    """
    if kind not in KINDS:
        raise DloError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS) or ';'} available: {', '.join(KINDS)}")
    class_name = _check_name(name, registry)
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    for file in files:
        if file.exists():
            raise DloError(f"NAME must name a new file, got {file}, which exists; choose another NAME or --dir")
    if find_spec(name) is not None:
        raise DloError(f"NAME must differ from installed modules, got '{name}'; try '{name}_{kind}'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, fill_templates(kind, name, class_name), strict=True):
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as error:
        raise DloError(f"cannot write to {folder}: {error.strerror}; --dir writes elsewhere") from error
    return _format_next_steps(kind, class_name, *files)


def fill_templates(kind: str, name: str, class_name: str) -> list[str]:
    """Returns the text of a plug-in, and of its test."""
    folder = resources.files("dlo_framework.cli") / "templates"
    texts = [(folder / f"{prefix}{kind}.py.tmpl").read_text(encoding="utf-8") for prefix in ("", "test_")]
    return [Template(text).substitute(name=name, class_name=class_name) for text in texts]


def _check_name(name: str, registry: Registry) -> str:
    """Returns the class's name; raises a DloError for a name that cannot be a module and a plug-in."""
    fixed = _snake_case(name)
    if name != fixed or keyword.iskeyword(name):
        fix = f"my_{fixed.strip('_')}" if keyword.iskeyword(fixed) or not fixed[:1].isalpha() else fixed
        raise DloError(f"NAME must be in snake_case, as for Python modules, got '{name}'; try '{fix}'")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    if class_name in registry.names():
        taken = registry.get(class_name)
        raise DloError(f"NAME must give a new plug-in name, got '{class_name}', taken by {taken}; try 'my_{name}'")
    return class_name


def _snake_case(name: str) -> str:
    """Returns the nearest snake_case name: ``MyThing``, ``my-thing`` and ``my thing.py`` give one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removesuffix(".py"))
    fixed = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return fixed if fixed[:1].isalpha() else f"my_{fixed}".rstrip("_")


def _format_next_steps(kind: str, class_name: str, file: Path, test: Path) -> str:
    written, tested = _format_path(file), _format_path(test)
    snippet = format_yaml_snippet(kind, class_name, read_class_in_file(file, class_name).parameters)
    install = "pip install pytest\n  " if find_spec("pytest") is None else ""
    return (
        f"wrote {written} and {tested}\n\n"
        f"Run the test:\n\n  {install}pytest {tested}\n\n"
        f"Switch it on in a config:\n\nplugins: [{written}]\n{snippet}"
    )


def _format_path(file: Path) -> str:
    """Returns a path as a user would type it: ``./file.py``, or the absolute path for a file elsewhere."""
    relative = os.path.relpath(file)
    return str(file.absolute()) if relative.startswith("..") else f"./{relative}"

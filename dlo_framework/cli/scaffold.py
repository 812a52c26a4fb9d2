"""``dlo plugins new``: writes a working plug-in of a kind, with a test that passes."""

from __future__ import annotations

import keyword
import os
import re
from pathlib import Path
from string import Template

from dlo_framework.cli.scaffold_templates import TEMPLATES
from dlo_framework.cli.snippet import yaml_snippet
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.registry import KINDS, Registry
from dlo_framework.registry.source import find_spec, read_class_in_file


def write_plugin(kind: str, name: str, folder: Path, registry: Registry) -> str:
    """Writes ``NAME.py`` and ``test_NAME.py``.

    Args:
        kind: one of :data:`dlo_framework.registry.KINDS`.
        name: the module's name, in snake_case; the class has the same in CamelCase.
        folder: where to write them; made if it does not exist.
        registry: the installed plug-ins, whose names are taken.

    Returns:
        What to do next, for the user to read.

    Raises:
        DloError: if the kind is unknown, the name is no snake_case identifier or is taken, or a file exists.
    """
    if kind not in KINDS:
        raise DloError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS) or ';'} available: {', '.join(KINDS)}")
    class_name = _check_name(name, registry)
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    for file in files:
        if file.exists():
            raise DloError(f"{file} exists, and is not overwritten; choose another name, or --dir another folder")
    if find_spec(name) is not None:
        raise DloError(f"a module called '{name}' is installed already; try '{name}_{kind}'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, template in zip(files, TEMPLATES[kind], strict=True):
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(Template(template).substitute(name=name, class_name=class_name))
    except OSError as error:
        raise DloError(f"cannot write to {folder}: {error.strerror}; --dir writes elsewhere") from error
    return _next_steps(kind, class_name, *files)


def _check_name(name: str, registry: Registry) -> str:
    """Returns the class's name; refuses what cannot be both a module's and a plug-in's."""
    fixed = _snake_case(name)
    if name != fixed or keyword.iskeyword(name):
        fix = f"my_{fixed.strip('_')}" if keyword.iskeyword(fixed) or not fixed[:1].isalpha() else fixed
        raise DloError(f"a plug-in's file is named in snake_case, as Python modules are, not '{name}'; try '{fix}'")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    if class_name in registry.names():
        taken = registry.get(class_name)
        raise DloError(f"plug-in name '{class_name}' is taken by {taken}; try 'my_{name}'")
    return class_name


def _snake_case(name: str) -> str:
    """Returns the nearest snake_case name: ``MyThing``, ``my-thing`` and ``my thing.py`` give one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removesuffix(".py"))
    fixed = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return fixed if fixed[:1].isalpha() else f"my_{fixed}".rstrip("_")


def _next_steps(kind: str, class_name: str, file: Path, test: Path) -> str:
    written, tested = _as_typed(file), _as_typed(test)
    snippet = yaml_snippet(kind, class_name, read_class_in_file(file, class_name).parameters)
    return (
        f"wrote {written} and {tested}\n\n"
        f"Run the test:\n\n  pytest {tested}\n\n"
        f"Switch it on in a config:\n\nplugins: [{written}]\n{snippet}"
    )


def _as_typed(file: Path) -> str:
    """Returns a path as a user would type it here: ``./file.py``, or the whole of it for a file elsewhere."""
    relative = os.path.relpath(file)
    return str(file.absolute()) if relative.startswith("..") else f"./{relative}"

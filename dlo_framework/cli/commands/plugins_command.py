"""``dlo plugins``: lists the plug-ins, shows one, or writes a new one, without importing plug-ins or torch.

``dlo plugins new`` writes a plug-in of a kind, with a test that passes, from the folder ``templates/``. They are
examples to learn from: arguments are typed and documented (``dlo plugins show`` prints them), and the constructor
checks their values, with the fix in the message. With ``--in-tree`` it writes a plug-in of dlo's own, with its entry
point and its section in the documentation.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import keyword
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, ClassVar

import yaml

from dlo_framework.cli.config_scan import CommandParser, parse_plugin_list
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.extensions import format_origin, list_extensions
from dlo_framework.registry import GROUP_PREFIX, KINDS, Plugin, Registry, kind_of
from dlo_framework.registry.class_source import (
    Parameter,
    SourceNotFoundError,
    find_spec,
    plain,
    read_class,
    read_class_in_file,
)
from dlo_framework.units import format_table

COMMANDS = ("show", "new")


def main(argv: list[str]) -> int:
    """Runs ``dlo plugins``."""
    first = argv[0] if argv else ""
    if first and not first.startswith("-") and first not in COMMANDS:
        raise DloError(_unknown_command(first))
    given = _parser().parse_args(argv)
    if given.command == "show":
        registry = Registry()
        _show(registry, _find(registry, given.name, parse_plugin_list(given.plugins)), as_json=given.json)
    elif given.command == "new" and given.in_tree:
        print(write_in_tree(given.kind, given.name, given.in_tree, Registry()))
    elif given.command == "new":
        print(write_plugin(given.kind, given.name, Path(given.dir), Registry()))
    else:
        _list(Registry(), as_json=given.json)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("dlo plugins", description="List every installed plug-in, by kind, and other extensions.")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="print one plug-in's parameters, defaults and docs, and its YAML",
        description="Show one plug-in.",
    )
    show.add_argument("name", metavar="NAME", help="its short name, such as WeightEMA, or its class path")
    show.add_argument("--plugins", nargs="+", metavar="FILE", help="modules and files of your own that have it")
    show.add_argument("--json", action="store_true", help="print JSON, for machines")
    new = commands.add_parser("new", help="write a working plug-in with a test", description="Write a new plug-in.")
    new.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    new.add_argument("name", metavar="NAME", help="the file's name, in snake_case: my_thing")
    place = new.add_mutually_exclusive_group()
    place.add_argument("--dir", default=".", help="where to write it (default: here)")
    place.add_argument(
        "--in-tree",
        metavar="FEATURE",
        help="in a clone of dlo: write it into this feature's folder, such as gradients,"
        " with its test, its section in docs/plugins and its line in setup.cfg",
    )
    return parser


def _unknown_command(word: str) -> str:
    hint = did_you_mean(word, COMMANDS)
    if word in Registry().names():
        hint = f"; did you mean 'dlo plugins show {word}'?"
    return f"unknown command 'dlo plugins {word}'{hint or ';'} available: {', '.join(COMMANDS)}"


def _list(registry: Registry, *, as_json: bool) -> None:
    plugins = registry.plugins()
    if as_json:
        print(json.dumps([_to_json(registry, plugin) for plugin in plugins], indent=2))
        return
    kinds = [kind for kind in KINDS if any(plugin.kind == kind for plugin in plugins)]
    for kind in kinds:
        chosen = [plugin for plugin in plugins if plugin.kind == kind]
        rows = [[", ".join(plugin.names), plugin.summary, plugin.origin] for plugin in chosen]
        _print_table(kind, ("name", "what it does", "from"), rows)
    missing = [kind for kind in KINDS if kind not in kinds]
    if missing:
        print(f"no plug-ins of kind: {', '.join(missing)}\n")
    extensions = itertools.groupby(list_extensions(), key=lambda point: point.group)
    for group, points in extensions:
        rows = [[point.name, point.value, format_origin(point)] for point in points]
        _print_table(f"{group} (entry points)", ("name", "what it names", "from"), rows)
    conflicts = dict.fromkeys(conflict for plugin in plugins if (conflict := registry.conflict(plugin)))
    for problem in (*conflicts, *registry.problems):
        print(f"warning: {problem}")
    print("More: dlo plugins show NAME. Your own: dlo plugins new KIND NAME.")


def _to_json(registry: Registry, plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "kind": plugin.kind,
        "aliases": list(plugin.aliases),
        "description": plugin.summary,
        "class_path": plugin.class_path,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "conflict": registry.conflict(plugin),
    }


def _find(registry: Registry, name: str, modules: Sequence[str]) -> Plugin:
    """Returns a plug-in: an installed one, the user's own, or a callback of every run or of Lightning.

    Raises:
        DloError: If there is none of that name.
    """
    module, _, short = name.rpartition(".")
    for spec in [*modules, *([module] if module else [])]:
        registry.load_user_module(spec)
    if short not in registry.names():
        for home in ("dlo_framework.defaults", "lightning.pytorch.callbacks"):
            cls = getattr(importlib.import_module(home), short, None)
            if inspect.isclass(cls) and kind_of(cls) == "callback":
                return Plugin(short, "callback", f"{cls.__module__}:{short}", home.partition(".")[0], "")
    return registry.get(short)


def _show(registry: Registry, plugin: Plugin, *, as_json: bool) -> None:
    try:
        source = read_class(plugin.target)
    except SourceNotFoundError as error:
        raise DloError(f"plugin '{plugin.name}' ({plugin.origin}): {error}; reinstall {plugin.distribution}") from error
    snippet = format_yaml_snippet(plugin.kind, plugin.name, source.parameters)
    if not plugin.version and plugin in registry.plugins():  # The user's own.
        snippet = f"plugins: [{plugin.distribution}]\n{snippet}"
    place = f"{source.path}:{source.line}"
    # Every installed plug-in is a name of `dlo_framework`.
    imported = f"from {'dlo_framework' if plugin.version else plugin.module} import {plugin.name}"
    if as_json:
        parameters = [vars(parameter) for parameter in source.parameters]
        more = {"doc": source.doc, "parameters": parameters, "yaml": snippet, "import": imported}
        print(json.dumps({**_to_json(registry, plugin), "defined_in": place, **more}, indent=2))
        return
    print(f"{plugin.name}: {plugin.kind} from {plugin.origin}")
    if plugin.aliases:
        print(f"also called {', '.join(plugin.aliases)}")
    print(f"defined in {place}\n\n{plain(_remove_arguments(source.doc))}\n")
    rows = [[p.name, p.type, "required" if p.default is None else p.default, p.doc] for p in source.parameters]
    if rows:
        _print_table("parameters", ("name", "type", "default", "meaning"), rows)
    else:
        print("It has no parameters.\n")
    print(f"From Python: {imported}\n")
    print(f"To use it, paste this into a config:\n\n{snippet}")


def _remove_arguments(doc: str) -> str:
    """Returns a docstring without its ``Args:`` section, which the table of parameters shows."""
    kept: list[str] = []
    skipping = False
    for line in doc.splitlines():
        if line.rstrip() == "Args:":
            skipping = True
        elif line and not line[0].isspace():
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept).strip()


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: drawn and wrapped on a terminal, one row per line elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for number, column in enumerate(header):
            table.add_column(column, style="cyan" if number == 0 else "", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    print(title, *(f"  {line}" for line in format_table([header, *rows])[1:]), "", sep="\n")


def write_plugin(kind: str, name: str, folder: Path, registry: Registry) -> str:
    """Writes ``NAME.py`` and ``test_NAME.py``.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Name of the module, in snake_case; the class has the same name in CamelCase.
        folder: Folder to write to; created if it does not exist.
        registry: Registry of the installed plug-ins, whose names are taken.

    Returns:
        Text with the next steps for the user.

    Raises:
        DloError: If the kind is unknown, the name is not in snake_case or is taken, or a file exists.
    """
    class_name = _check_name(kind, name, registry)
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    if find_spec(name) is not None:
        raise DloError(f"NAME must differ from installed modules, got '{name}'; try '{name}_{kind}'")
    _write_new(files, fill_templates(kind, name, class_name))
    return _format_next_steps(kind, class_name, *files)


def write_in_tree(kind: str, name: str, feature: str, registry: Registry) -> str:
    """Writes a plug-in of dlo's own, in the root of its tree.

    These are its module, a test, which for a callback compares it with one process under every strategy, a section on
    the page of its feature, and its entry point in ``setup.cfg``.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Name of the module, in snake_case; the class has the same name in CamelCase.
        feature: Folder of the feature in a package of plug-ins or of tasks: ``gradients``.
        registry: Registry of the installed plug-ins, whose names are taken.

    Returns:
        Text with what is written and the next steps.

    Raises:
        DloError: If the working directory is not dlo's tree, it has no such feature with a page, the kind is unknown,
            the name is not in snake_case or is taken, a file exists, or ruff is missing.
    """
    class_name = _check_name(kind, name, registry)
    homes = [*Path("plugins").glob("dlo_*"), *Path("tasks").glob("dlo_*")]
    folders = {file.parent.relative_to(home).as_posix(): file.parent for home in homes for file in home.rglob("*/*.py")}
    if not folders:
        raise DloError(f"--in-tree must be used in the root of a clone of dlo, got {Path.cwd()}; use --dir elsewhere")
    if feature not in folders:
        known = sorted(folders)
        hint = did_you_mean(feature, known) or ";"
        raise DloError(f"--in-tree must name a feature's folder, got '{feature}'{hint} available: {', '.join(known)}")
    package = ".".join(folders[feature].parts[1:])
    mentions = {page: page.read_text().count(f"::: {package}.") for page in Path("docs/plugins").glob("*.md")}
    page = max(sorted(mentions), key=mentions.__getitem__)
    if not mentions[page]:
        raise DloError(f"--in-tree must name a feature with a page in docs/plugins, got '{feature}'; write one first")
    if find_spec("ruff") is None:
        raise DloError("--in-tree needs ruff, got none; pip install -e '.[dev]'")
    tests = Path("tests") / folders[feature].parts[0] / feature
    files = [folders[feature] / f"{name}.py", tests / f"test_{name}.py"]
    code, test = fill_templates(kind, name, class_name)
    test = test.partition("\n\n\ndef test_dlo_accepts_it")[0] + "\n"
    if kind == "callback":
        imports = "import pytest\nfrom composition.page import check_callback, every_strategy\n"
        test = test.replace("import pytest\n", imports) + _EVERY_STRATEGY.format(class_name)
    _write_new(files, [code, test.replace(f"from {name} import", f"from {package}.{name} import")])
    for command in (["check", "--fix"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--quiet", *map(str, files)], check=True)
    source = read_class_in_file(files[0], class_name)
    snippet = format_yaml_snippet(kind, class_name, source.parameters)
    first = source.doc.partition("\n\n")[0]
    with open(page, "a", encoding="utf-8") as stream:
        stream.write(f"\n## {class_name}\n\n{first}\n\n```yaml\n{snippet}\n```\n\n::: {package}.{name}.{class_name}\n")
    lines = Path("setup.cfg").read_text(encoding="utf-8").splitlines(keepends=True)
    start = lines.index(f"{GROUP_PREFIX}{kind} =\n") + 1
    group = list(itertools.takewhile(lambda line: line.startswith(" "), lines[start:]))
    same = [number for number, line in enumerate(group, 1) if f"= {package}." in line]
    lines.insert(start + max(same, default=len(group)), f"    {class_name} = {package}.{name}:{class_name}\n")
    Path("setup.cfg").write_text("".join(lines), encoding="utf-8")
    return (
        f"wrote {files[0]} and {files[1]}, a section of {page}, and a line of setup.cfg\n\n"
        f"Install the line, and run the test:\n\n  pip install -e .\n  pytest -n0 -m '' {files[1]}"
    )


#: What a test in dlo's tree has instead of a look at the file.
_EVERY_STRATEGY = """

@every_strategy
def test_it_works_as_in_one_process_or_is_refused(strategy: str, tmp_path: Path) -> None:
    check_callback("{}", strategy, tmp_path)
"""


def _write_new(files: Sequence[Path], texts: Sequence[str]) -> None:
    """Writes files that must not exist, all or none."""
    for file in files:
        if file.exists():
            raise DloError(f"NAME must name a new file, got {file}, which exists; choose another NAME or --dir")
    try:
        for file, text in zip(files, texts, strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as error:
        raise DloError(f"cannot write to {file.parent}: {error.strerror}; --dir writes elsewhere") from error


def fill_templates(kind: str, name: str, class_name: str) -> list[str]:
    """Returns the text of a plug-in, and of its test."""
    folder = resources.files("dlo_framework.cli") / "templates"
    texts = [(folder / f"{prefix}{kind}.py.tmpl").read_text(encoding="utf-8") for prefix in ("", "test_")]
    return [Template(text).substitute(name=name, class_name=class_name) for text in texts]


def _check_name(kind: str, name: str, registry: Registry) -> str:
    """Returns the class's name; raises a DloError for an unknown kind, and for a bad or taken name."""
    if kind not in KINDS:
        raise DloError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS) or ';'} available: {', '.join(KINDS)}")
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


# --- YAML that switches a plug-in on -----------------------------------------------------------------------------

#: Place of a plug-in of a kind in a config, one key per level; ``-`` is an item of a list.
_PLACES = {
    "strategy": ("trainer:", "strategy:"),
    "callback": ("trainer:", "callbacks:", "-"),
    "task": ("model:",),
    "data": ("data:",),
    "applier": ("trainer:", "strategy:", "class_path: {strategy}", "init_args:", "appliers:", "-"),
}


def format_yaml_snippet(kind: str, name: str, parameters: Sequence[Parameter]) -> str:
    """Returns YAML to paste into a config.

    Each parameter has its default as its value. A required one has its type in angle brackets, to be
    replaced; one whose default YAML cannot express is a comment.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Short name of the plug-in.
        parameters: Parameters of its constructor.
    """
    lines: list[str] = []
    indent = ""
    for key in _PLACES[kind]:
        if key == "-":
            break
        lines.append(indent + key.format(strategy=find_applying_strategy()))
        indent += "" if key.startswith("class_path") else "  "
    item = _PLACES[kind][-1] == "-"
    lines.append(f"{indent}{'- ' if item else ''}class_path: {name}")
    indent += "  " if item else ""
    arguments = [_format_argument(parameter) for parameter in parameters]
    if arguments:
        # A mapping with only comments in it would be null.
        said = any(not line.startswith("#") for line in arguments)
        lines.append(f"{indent}{'' if said else '# '}init_args:")
        lines += [f"{indent}  {line}" for line in arguments]
    return "\n".join(lines)


def find_applying_strategy() -> str:
    """Returns the first installed strategy that takes appliers; a placeholder if there is none."""
    for plugin in Registry().plugins("strategy"):
        with contextlib.suppress(SourceNotFoundError):
            if any(parameter.name == "appliers" for parameter in read_class(plugin.target).parameters):
                return plugin.name
    return "<a strategy with appliers>"


def _format_argument(parameter: Parameter) -> str:
    if parameter.default is None:
        return f"{parameter.name}: <{parameter.type or 'value'}>  # required"
    try:
        return f"{parameter.name}: {format_yaml_value(ast.literal_eval(parameter.default))}"
    except (ValueError, SyntaxError, yaml.YAMLError):
        return f"# {parameter.name}: {parameter.default}"


class _LiteralDumper(yaml.SafeDumper):
    """SafeDumper that refuses sets and bytes, which need tags in YAML."""

    yaml_representers: ClassVar = {
        kind: function for kind, function in yaml.SafeDumper.yaml_representers.items() if kind not in (set, bytes)
    }


def format_yaml_value(value: Any) -> str:
    """Returns a Python literal as YAML on one line.

    Raises:
        yaml.YAMLError: If plain YAML has no such value, such as a set or bytes.
    """
    text: str = yaml.dump(
        value,
        Dumper=_LiteralDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("...\n").rstrip("\n")

"""Fills the pages with tables made from the code.

A line ``<!-- dlo: NAME ARGUMENTS -->`` in a page is replaced by the result of the function of that name when mkdocs
builds the site. That is for long lists; other tables are in the pages, where ``fill.py`` puts them.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from markup import to_markdown

ROOT = Path(__file__).resolve().parents[1]
GROUP = "dlo_framework.plugins."

_DIRECTIVE = re.compile(r"^<!-- dlo: (.+) -->$", re.MULTILINE)
_CLASS = re.compile(r"^::: (\S+)$(?!\n    options:)", re.MULTILINE)
_PARAMETERS_ALONE = """    options:
      members: false
      show_bases: false
      show_root_heading: false
      show_root_toc_entry: false"""


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Returns a page with its directives replaced, and on plug-ins' pages with the options of classes' parameters."""
    filled = _DIRECTIVE.sub(lambda match: expand(*match.group(1).split()), markdown)
    if not page.file.src_uri.startswith("plugins/"):
        return filled
    return _CLASS.sub(lambda match: f"**Options of {_class_name(match)}**\n\n{match[0]}\n{_PARAMETERS_ALONE}", filled)


def _class_name(match: re.Match[str]) -> str:
    return match[1].rpartition(".")[2]


def expand(name: str, *arguments: str) -> str:
    """Returns the Markdown of one directive."""
    directives: dict[str, Callable[..., str]] = {
        "kinds": kind_table,
        "pages": page_table,
        "plugins": plugin_table,
        "recipe_list": recipe_list,
        "recipes": recipes,
        "scaffold": scaffold,
        "tags": tag_table,
    }
    return directives[name](*arguments)


# --- plug-ins ----------------------------------------------------------------------------------------------


def entry_points() -> dict[str, tuple[str, str]]:
    """Returns the plug-ins in setup.cfg: name to (kind, ``module:Class``)."""
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # Names keep their case.
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {}
    for group, lines in parser["options.entry_points"].items():
        if group.startswith(GROUP):
            for line in lines.strip().splitlines():
                name, target = line.split("=", 1)
                found[name.strip()] = (group.removeprefix(GROUP), target.strip())
    return found


def places() -> dict[str, str]:
    """Returns where each class is on the plug-ins' pages: ``module:Class`` to ``schedules.md#onecycle``."""
    found = {}
    for page in sorted((ROOT / "docs" / "plugins").glob("*.md")):
        targets = _CLASS.findall(page.read_text(encoding="utf-8"))
        for target in targets:
            module, _, name = target.rpartition(".")
            found[f"{module}:{name}"] = f"{page.name}#{name.lower()}" if len(targets) > 1 else page.name
    return found


def page_table() -> str:
    """Returns a table for each group of plug-in pages in the navigation: page, first sentence."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = next(item["Plug-ins"] for item in nav if "Plug-ins" in item)
    lines: list[str] = []
    for group in (item for item in groups if isinstance(item, dict)):
        ((title, pages),) = group.items()
        lines += ["", f"## {title}", "", "| page | what for |", "|---|---|"]
        for entry in pages:
            ((label, page),) = entry.items()
            lines.append(f"| [{label}]({page.removeprefix('plugins/')}) | {first_sentence(ROOT / 'docs' / page)} |")
    return "\n".join(lines[1:])


def plugin_table() -> str:
    """Returns a table of the registered plug-ins, each with its place on the pages and its docstring's beginning."""
    from dlo_framework.registry.class_source import read_summary

    where = places()
    rows = [
        f"| [{name}]({where[target]}) | {kind} | {to_markdown(read_summary(target))} |"
        for name, (kind, target) in sorted(entry_points().items(), key=lambda item: item[0].lower())
        if target.endswith(f":{name}")
    ]
    return "\n".join(["| plug-in | kind | what it does |", "|---|---|---|", *rows])


def first_sentence(page: Path) -> str:
    """Returns the first sentence below a page's title, without links."""
    paragraph = page.read_text(encoding="utf-8").split("\n\n")[1]
    text = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0].rstrip(".:")


def kind_table() -> str:
    """Returns the table of kinds, each with its entry-point group and base class."""
    from dlo_framework.registry import BASES, GROUP_PREFIX, KINDS

    rows = [f"| {kind} | `{GROUP_PREFIX}{kind}` | `{BASES[kind]}` |" for kind in KINDS]
    return "\n".join(["| kind | entry-point group | a subclass of |", "|---|---|---|", *rows])


def scaffold(kind: str, name: str, *which: str) -> str:
    """Returns the plug-in that ``dlo plugins new KIND NAME`` writes, or its test for ``test``."""
    from dlo_framework.cli.commands.plugins_command import fill_templates

    plugin, test = fill_templates(kind, name, "".join(part.capitalize() for part in name.split("_")))
    code, title = (test, f"test_{name}.py") if which == ("test",) else (plugin, f"{name}.py")
    return f'```python title="{title}"\n{code.strip()}\n```'


def tag_table() -> str:
    """Returns the table in RunMonitor's docstring."""
    from dlo_framework.registry.class_source import read_class

    doc = to_markdown(read_class("dlo_framework.watch.monitor:RunMonitor").doc)
    return "\n".join(line.strip() for line in doc.splitlines() if line.strip().startswith("|"))


# --- recipes -----------------------------------------------------------------------------------------------


@dataclass
class Header:
    """Contents of a config's opening comment.

    Attributes:
        title: First line.
        fields: Lines that begin with a word and two spaces: ``paper``, ``expected``, ``time``, ...
        commands: Lines with commands.
        text: All other lines.
    """

    title: str
    fields: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


def read_header(config: str) -> Header:
    """Reads a config's opening comment."""
    lines = []
    for line in config.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[2:].rstrip())
    header = Header(lines[0])
    current = ""
    for line in lines[1:]:
        start = re.fullmatch(r"([a-z]+)  +(\S.*)", line)
        if start:
            current = start.group(1)
            header.fields[current] = start.group(2)
        elif line.strip().startswith("dlo "):
            header.commands.append(line.strip())
        elif current and line.startswith(" "):
            header.fields[current] += " " + line.strip()
        elif line.strip():
            header.text.append(line.strip())
    command = header.fields.pop("command", None)
    if command:
        header.commands.append(command)
    return header


def recipe_list() -> str:
    """Returns the names of the shipped configs, by folder."""
    folder = ROOT / "configs"
    names: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path.as_posix())):
        names.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path.stem)
    return "\n".join(f"- `{name if name != '.' else 'configs'}/`: {', '.join(found)}" for name, found in names.items())


def recipes() -> str:
    """Returns a section for each shipped config: its header as a table, its command, and the file itself."""
    folder = ROOT / "configs"
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path.name))
    return "\n\n".join(_recipe(path, path.relative_to(folder).with_suffix("").as_posix()) for path in paths)


def _recipe(path: Path, name: str) -> str:
    config = path.read_text(encoding="utf-8")
    header = read_header(config)
    parts = [f"## {name}", header.title]
    if header.commands:
        parts.append("\n".join(["```console", *(f"$ {command}" for command in header.commands), "```"]))
    if header.fields:
        rows = [f"| **{key}** | {_linked(text)} |" for key, text in header.fields.items()]
        parts.append("\n".join(["| | from the config's opening comment |", "|---|---|", *rows]))
    parts += [_linked(text) for text in header.text]
    body = "\n".join(f"    {line}".rstrip() for line in config.rstrip().splitlines())
    parts.append(f'??? note "configs/{name}.yaml"\n\n    ```yaml\n{body}\n    ```')
    return "\n\n".join(parts)


def _linked(text: str) -> str:
    """Returns text with arXiv numbers as links, and names with underscores as code."""
    text = re.sub(r"(?<![\w`/])([\w/.-]*_[\w./-]*\w)", r"`\1`", text)
    return re.sub(r"arXiv:? ?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)

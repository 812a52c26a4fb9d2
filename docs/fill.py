"""Fills blocks of the pages with code and tables from the tree, so that pages read where they are, also without a site.

    python docs/fill.py            rewrites the pages
    python docs/fill.py --check    exits with code 1 if a page is out of date

A block is what is between ``<!-- fill: NAME ARGUMENTS -->`` and ``<!-- end of fill -->``. NAME is a directive of
``hooks.py``, or ``code``, whose arguments are files, or sections of files: ``examples/own_data.py:model``. Sections
are between the marks ``# --8<-- [start:model]`` and ``# --8<-- [end:model]``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

BLOCK = re.compile(r"^<!-- fill: (.+?) -->\n.*?^<!-- end of fill -->$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^ *# --8<-- \[\w+:\w+\]\n", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def fill(page: str) -> str:
    """Returns a page with its blocks filled."""
    return BLOCK.sub(_block, page)


def _block(match: re.Match[str]) -> str:
    name, *arguments = match[1].split()
    if name == "code":
        content = code(*arguments)
    else:
        from hooks import expand

        content = expand(name, *arguments)
        if name == "scaffold":  # Formatted for the lines of a user's project, which are shorter than this one's.
            content = f"<!-- fmt:off -->\n\n{content}\n\n<!-- fmt:on -->"
    return f"<!-- fill: {match[1]} -->\n\n{content}\n\n<!-- end of fill -->"


def code(*sources: str) -> str:
    """Returns a fenced block of files or sections of files, two empty lines apart.

    Args:
        sources: Paths from the root, each with ``:SECTION`` or without; all of one file.

    Raises:
        ValueError: If a file has no such section.
    """
    parts = []
    for source in sources:
        path, _, section = source.partition(":")
        text = (ROOT / path).read_text(encoding="utf-8")
        if section:
            marks = rf"\[start:{section}\]\n(.*?)^ *# --8<-- \[end:{section}\]"
            found = re.search(marks, text, re.MULTILINE | re.DOTALL)
            if found is None:
                raise ValueError(f"{path} must have a section {section}, got none; mark its start and its end")
            text = textwrap.dedent(found[1])
        # A mark alone between two empty lines leaves both.
        parts.append(re.sub(r"\n{3,}(?=[ ])", "\n\n", _MARK.sub("", text)).strip("\n"))
    file = Path(sources[0].partition(":")[0])
    title = file.relative_to("plugins/example_pack") if file.parts[0] == "plugins" else file.name
    return f'```{_LANGUAGES[file.suffix]} title="{title}"\n' + "\n\n\n".join(parts) + "\n```"


def llms_txt() -> str:
    """Returns ``docs/llms.txt``: every page by its title, in the order of the navigation (https://llmstxt.org)."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    lines = ["# dlo", "", "> Plug-ins for training large models on Lightning, each switched on by one line of YAML."]
    for item in nav:
        ((section, pages),) = item.items()
        lines += ["", f"## {section}", ""]
        lines += [_link(page) for page in _pages(pages)]
    return "\n".join(lines) + "\n"


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(item)


def _link(page: str) -> str:
    """Returns the line of a page: its title, and its first sentence if it begins with one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    paragraphs = [part for part in re.split(r"\n{2,}", text) if part.strip()]
    title = paragraphs[0].splitlines()[0].removeprefix("# ")
    first = " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""
    if not re.match(r"[A-Za-z\[]|`[^`]", first):
        return f"- [{title}]({page})"
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", first))[0].rstrip(".:")
    return f"- [{title}]({page}): {sentence}"


def main() -> int:
    """Fills the pages, or checks them; returns the exit code."""
    stale = []
    pages = {page: fill(page.read_text(encoding="utf-8")) for page in sorted(DOCS.rglob("*.md"))}
    for page, filled in {**pages, DOCS / "llms.txt": llms_txt()}.items():
        if not page.is_file() or filled != page.read_text(encoding="utf-8"):
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv[1:]:
                page.write_text(filled, encoding="utf-8")
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page} is out of date; run python docs/fill.py")
        return 1 if stale else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

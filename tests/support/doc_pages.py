"""Pages of the documentation without what ``docs/fill.py`` has written into them, and the plug-ins of setup.cfg."""

import configparser
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from dlo_framework.registry import GROUP_PREFIX, KINDS

ROOT = Path(__file__).resolve().parents[2]
_FILLED = re.compile(r"^<!-- fill: .+? -->\n.*?^<!-- end of fill -->$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Fenced block of a page.

    Attributes:
        line: Number of its first line below the fence, from 1.
        language: Language of the fence.
        note: Comment on the line before: ``after CONFIG`` (what a config changes) or ``checked only: REASON``.
        text: Content, without the fence's indentation.
    """

    line: int
    language: str
    note: str
    text: str


def read_page(path: Path) -> str:
    """Returns a page's own text: code and tables that are copied from the tree have tests where they come from."""
    return _FILLED.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))


def read_blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a page's own text."""
    text = read_page(path)
    return [
        Block(text.count("\n", 0, match.start(4)) + 1, match[3], match[1] or "", textwrap.dedent(match[4]))
        for match in _FENCE.finditer(text)
    ]


def entry_points() -> dict[str, tuple[str, str]]:
    """Returns the plug-ins that setup.cfg registers, without aliases: name to kind and class path."""
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "setup.cfg")
    groups = parser["options.entry_points"]
    lines = [(kind, line) for kind in KINDS for line in groups.get(GROUP_PREFIX + kind, "").strip().splitlines()]
    split = [(kind, *(part.strip() for part in line.split("=", 1))) for kind, line in lines]
    split = [(kind, name, target) for kind, name, target in split if target.endswith(f":{name}")]  # no aliases
    return {name: (kind, target.replace(":", ".")) for kind, name, target in split}

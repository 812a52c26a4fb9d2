"""Pages of the documentation without what ``docs/fill.py`` has written into them, and the plug-ins of setup.cfg."""

import configparser
import re
from pathlib import Path

from dlo_framework.registry import GROUP_PREFIX, KINDS

ROOT = Path(__file__).resolve().parents[2]
_FILLED = re.compile(r"^<!-- fill: .+? -->\n.*?^<!-- end of fill -->$", re.MULTILINE | re.DOTALL)


def read_page(path: Path) -> str:
    """Returns a page's own text: code and tables that are copied from the tree have tests where they come from."""
    return _FILLED.sub("", path.read_text(encoding="utf-8"))


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

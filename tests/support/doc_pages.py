"""Pages of the documentation, without what ``docs/fill.py`` has written into them."""

import re
from pathlib import Path

_FILLED = re.compile(r"^<!-- fill: .+? -->\n.*?^<!-- end of fill -->$", re.MULTILINE | re.DOTALL)


def read_page(path: Path) -> str:
    """Returns a page's own text: code and tables that are copied from the tree have tests where they come from."""
    return _FILLED.sub("", path.read_text(encoding="utf-8"))

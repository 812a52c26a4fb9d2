"""``dlo configs``: lists the shipped configs, or prints one of them."""

from __future__ import annotations

from pathlib import Path

from dlo_framework.cli.config_scan import CommandParser, list_shipped_configs, resolve_config


def main(argv: list[str]) -> int:
    """Lists the shipped configs, each with the first line of its opening comment, or prints the one that is named."""
    parser = CommandParser("dlo configs", description="List the shipped configs, or print one.")
    parser.add_argument("name", nargs="?", help="print this config: dlo configs quickstart > my.yaml")
    name = parser.parse_args(argv).name
    if name:
        print(Path(resolve_config(name)).read_text(), end="")
        return 0
    configs = list_shipped_configs()
    width = max(map(len, configs), default=0)
    for key, path in configs.items():
        print(f"{key:<{width}}  {read_first_comment(path)}")
    return 0


def read_first_comment(path: Path) -> str:
    """Returns the first line of a config's opening comment, without its ``#``."""
    line = path.read_text().split("\n", 1)[0]
    return line.lstrip("# ") if line.startswith("#") else ""

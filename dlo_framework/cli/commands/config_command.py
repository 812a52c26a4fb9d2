"""``dlo config``: compares two configs; installed packages add further commands to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.command_table import installed_commands, load_command
from dlo_framework.cli.config_difference import ABSENT, compare_configs
from dlo_framework.cli.config_scan import read_config
from dlo_framework.cli.shipped_configs import resolve_config
from dlo_framework.cli.snippet import format_yaml_value
from dlo_framework.registry import Registry

DESCRIPTION = """Print the keys in which two configs differ; exit code 1 if there are any.

A short name equals its class path, and a key with its default value equals an unset one, so that a config can be
compared with the config.yaml of a run:

  dlo config diff quickstart runs/quickstart/version_0/config.yaml"""


def main(argv: list[str]) -> int:
    """Prints the difference of two configs, and returns 1 if there is one; or runs an installed command."""
    installed = [name.split()[1] for name in installed_commands() if name.startswith("config ")]
    if argv and argv[0] in installed:
        return load_command(f"config {argv[0]}")(argv[1:]) or 0
    more = f" Further commands: {', '.join(installed)}." if installed else ""
    parser = CommandParser("dlo config", description=f"Compare two configs.{more}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)
    diff = commands.add_parser("diff", help="print the keys in which two configs differ", description=DESCRIPTION)
    diff.add_argument("first", metavar="A", help="a path, or a name that `dlo configs` lists")
    diff.add_argument("second", metavar="B", help="the same")
    given = parser.parse_args(argv or ["--help"])
    first, second = (read_config(resolve_config(name)) for name in (given.first, given.second))
    names = [(config.get("run") or {}).get("name") for config in (first, second)]
    for name, config, other in zip((given.first, given.second), (first, second), reversed(names), strict=True):
        if other == Path(name).stem:  # The default, which only a run's own config writes down.
            config.setdefault("run", {}).setdefault("name", other)
    differences = compare_configs(first, second, Registry())
    for key, one, other in differences:
        if other is ABSENT:
            print(f"- {key}: {_show(one)}")
        elif one is ABSENT:
            print(f"+ {key}: {_show(other)}")
        else:
            print(f"  {key}: {_show(one)} -> {_show(other)}")
    return 1 if differences else 0


def _show(value: Any) -> str:
    return format_yaml_value(value)

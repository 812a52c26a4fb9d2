"""``dlo completion``: prints a script that completes commands, options and names in a shell."""

from __future__ import annotations

from typing import Any

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.shell_completion import make_parser, make_preamble
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry

SHELLS = ("bash", "zsh")
DESCRIPTION = """Print a script that completes commands, options, plug-ins and configs in a shell.

  bash: dlo completion bash > ~/.local/share/bash-completion/completions/dlo
  zsh:  dlo completion zsh > FOLDER/_dlo, for a folder of your $fpath

Make it again when you have installed other plug-ins."""


def main(argv: list[str]) -> int:
    """Prints the script."""
    parser = CommandParser("dlo completion", description=DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")
    shell = parser.parse_args(argv or ["--help"]).shell
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise DloError(
            "dlo completion needs the package shtab, which is not installed; pip install 'dlo_framework[completion]'"
        ) from error
    preamble: Any = make_preamble()  # By shell; shtab's (1.13) annotation has one for all.
    print(shtab.complete(make_parser(Registry()), shell, preamble=preamble))
    return 0

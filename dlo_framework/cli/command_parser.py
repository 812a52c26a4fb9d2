"""Parser of a command's arguments: errors are :class:`DloError`, and the options of ``dlo fit`` can follow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.errors import DloError


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser for a command of ``dlo``.

    Args:
        prog: Words that call the command, such as ``dlo hello``.
        options: Other options of ``argparse.ArgumentParser``; line breaks in texts are kept.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Raises a :class:`DloError`, where argparse would print its usage and exit."""
        raise DloError(f"{message}; see '{self.prog} --help'")

    def parse_with_run(self, argv: Sequence[str]) -> tuple[argparse.Namespace, ConfigScan]:
        """Parses the command's own options, and scans all others as those of ``dlo fit``.

        Returns:
            The command's options, and the rest with its configs.

        Raises:
            DloError: If an option is invalid, or no ``--config`` is given.
        """
        self.allow_abbrev = False  # An abbreviation could be meant for `dlo fit`.
        options, words = self.parse_known_args(argv)
        found = scan(["fit", *words])
        if not found.configs:
            raise DloError(
                f"{self.prog.removeprefix('dlo ')}: --config must name a config, got none; add --config x.yaml"
            )
        return options, found

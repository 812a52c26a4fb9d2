"""``dlo lr-find``: tries learning rates before a training, and suggests one."""

from __future__ import annotations

from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.cli.run import train


def main(argv: list[str]) -> int:
    """Try learning rates before a training, and suggest one.

    Example:
        dlo lr-find --config my.yaml

    Args:
        argv: Arguments after ``lr-find``, those of ``dlo fit``.

    Returns:
        Exit code.

    Raises:
        DloError: If the input is invalid.
    """

    def build(found: ConfigScan) -> None:
        from dlo_plugins.commands.lr_find_cli import LRFindCLI

        LRFindCLI(found)

    return train(scan(["fit", *argv]), build)

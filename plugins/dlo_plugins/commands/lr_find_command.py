"""``dlo lr-find``: tries learning rates before a training, and suggests one."""

from __future__ import annotations

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.run import train


def main(argv: list[str]) -> int:
    """Try learning rates before a training, and suggest one.

    Example:
        dlo lr-find --config my.yaml
    """
    found = scan(["fit", *argv])

    def build() -> None:
        from dlo_plugins.commands.lr_find_cli import LRFindCLI

        LRFindCLI(found)

    return train(found, build)

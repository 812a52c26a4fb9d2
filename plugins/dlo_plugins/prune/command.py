"""``dlo prune``: makes a smaller model from a trained one, without some of its heads, hidden units or blocks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError
from dlo_framework.units import parse_fraction

_HELP = """Make a smaller model from a checkpoint: remove the heads, hidden units of MLPs, channels or blocks with the
smallest weights. The output folder gets pruned.ckpt, and config.yaml to train the smaller model from it."""

_EPILOG = """All other options are those of `dlo fit`: --config and --ckpt_path (a path, last or best) are needed.

exit codes: 0, or 2 for bad input"""


def main(argv: list[str]) -> int:
    """Make a smaller model from a trained one: fewer heads, hidden units, channels or blocks.

    Example:
        dlo prune --config my.yaml --ckpt_path best --heads 25% --hidden 50%
    """
    parser = CommandParser("dlo prune", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--heads", help="part of each block's heads to remove, such as 25%%")
    parser.add_argument("--hidden", help="part of each MLP's hidden units to remove")
    parser.add_argument("--channels", help="part of the inner channels of convolutional blocks to remove")
    parser.add_argument("--blocks", help="part of the blocks to remove, or their numbers from 0, such as 3,5")
    parser.add_argument("--output", help="new folder (default: runs/CONFIG/pruned)")
    options, config_scan = parser.parse_with_run(argv)
    if not any((options.heads, options.hidden, options.channels, options.blocks)):
        raise DloError("prune: --heads, --hidden, --channels or --blocks must be set, got none; add --hidden 50%")
    if not any(word.partition("=")[0] == "--ckpt_path" for word in config_scan.argv):
        raise DloError("prune: --ckpt_path must name a checkpoint to prune, got none; add --ckpt_path best")
    amounts = _amounts(options)
    output = Path(options.output or Path("runs") / Path(next(iter(config_scan.configs))).stem / "pruned")
    if output.exists() and any(output.iterdir()):
        raise DloError(f"prune: --output must be a new or empty folder, got {output}; choose another")
    with prepared_process(config_scan):
        from dlo_plugins.prune.structured import PrunedRun

        run = PrunedRun(config_scan)
        print(run.write(amounts, output))
    return 0


def _amounts(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fraction of each kind of unit to remove; for blocks, their numbers where these are given."""
    amounts: dict[str, Any] = {}
    for key in ("heads", "hidden", "channels", "blocks"):
        text = getattr(options, key)
        if text is None:
            continue
        if key == "blocks" and all(part.strip().isdigit() for part in text.split(",")):
            amounts[key] = [int(part) for part in text.split(",")]
            continue
        amounts[key] = parse_fraction(text, f"prune: --{key}")
    return amounts

"""``dlo mesh``: draws the mesh of a config without starting a process."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, NoReturn

from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import contract_of

if TYPE_CHECKING:
    from dlo_framework.cli.mesh_cli import MeshCLI

_HELP = """Draw the mesh of a config: the coordinates of each rank on the axes, and its shards of the model.

No process is started, and no weights or data are read: the model is built on the meta device."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override, such as
--trainer.strategy.init_args.tp 4.

exit codes: 0, or 2 for bad input, such as a mesh that does not fit the model or the ranks"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DloError(f"mesh: {message}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="dlo mesh",
        description=_HELP,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, help="number of ranks (default: trainer.devices x trainer.num_nodes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo mesh``.

    Args:
        argv: Arguments after ``mesh``.

    Returns:
        Exit code, 0.

    Raises:
        DloError: If the input is invalid, the strategy has no mesh, or the mesh does not fit.
    """
    options, words = _parser().parse_known_args(argv)
    if options.ranks is not None and options.ranks < 1:
        raise DloError(f"mesh: --ranks must be at least 1, got {options.ranks}")
    found = scan(["fit", *words])
    if not found.configs:
        raise DloError("mesh: --config must name a config, got none; add --config x.yaml")
    cli = _build_cli(found, options.ranks)
    strategy = cli.trainer.strategy
    description = contract_of(strategy).describe(cli.model, cli.datamodule)
    if description is None:
        raise DloError(
            f"mesh: strategy must be MeshStrategy or FSDPStrategy, got {type(strategy).__name__}; set"
            " --trainer.strategy mesh, fsdp or hsdp"
        )
    print(json.dumps(description.to_json(), indent=1) if options.json else description.text())
    return 0


def _build_cli(found: ConfigScan, ranks: int | None) -> MeshCLI:
    """Returns the command line after its parts are built and checked.

    Raises:
        DloError: If the parser, the trainer or the strategy refuses the config.
    """
    from dlo_framework.cli.run import prepare_process

    registry = prepare_process(found)
    from dlo_framework.cli.lightning_cli import ParseError
    from dlo_framework.cli.mesh_cli import MeshCLI
    from dlo_framework.cli.parse_errors import explain_parse_error

    try:
        return MeshCLI(found, ranks)
    except ParseError as error:
        raise explain_parse_error(error, found, registry) from None

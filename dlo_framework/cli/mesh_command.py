"""``dlo mesh``: the mesh of a config, drawn without starting a process."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, NoReturn

from dlo_framework.cli.scan import Scan, scan
from dlo_framework.contract import contract_of
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from dlo_framework.cli.mesh_cli import MeshCLI

_HELP = """Draw the mesh of a config: which rank lies where on the axes, and what it holds of the model.

No process is started, and neither weights nor data are read: the model is built without memory."""

_EPILOG = """All other options are those of `dlo fit`: --config, more than once if need be, and any override, such as
--trainer.strategy.init_args.tp 4.

exit codes: 0, or 2 for bad input, a mesh that the model or the ranks do not fit among it"""


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
    parser.add_argument("--ranks", type=int, help="ranks (default: the config's trainer.devices x trainer.num_nodes)")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo mesh``.

    Args:
        argv: the words after ``mesh``.

    Returns:
        The exit code, 0.

    Raises:
        DloError: on bad input, a strategy without a mesh, and a mesh that does not fit.
    """
    options, words = _parser().parse_known_args(argv)
    if options.ranks is not None and options.ranks < 1:
        raise DloError(f"mesh: --ranks is at least 1, but was {options.ranks}")
    found = scan(["fit", *words])
    if not found.configs:
        raise DloError("mesh: no --config; name the one whose mesh is to be drawn: --config x.yaml")
    cli = _open(found, options.ranks)
    strategy = cli.trainer.strategy
    description = contract_of(strategy).describe(cli.model, cli.datamodule)
    if description is None:
        raise DloError(
            f"strategy must be MeshStrategy or FSDPStrategy, got {type(strategy).__name__}; `dlo mesh` draws only"
            " those: --trainer.strategy mesh, fsdp or hsdp"
        )
    print(json.dumps(description.to_json(), indent=1) if options.json else description.text())
    return 0


def _open(found: Scan, ranks: int | None) -> MeshCLI:
    """Returns the command line with its parts built and checked.

    Raises:
        DloError: on what the parser, the trainer or the strategy refuses.
    """
    from dlo_framework.cli.run import prepare

    registry = prepare(found)
    from dlo_framework.cli.lightning_cli import ParseError
    from dlo_framework.cli.mesh_cli import MeshCLI
    from dlo_framework.cli.messages import explain

    try:
        return MeshCLI(found, ranks)
    except ParseError as error:
        raise explain(error, found, registry) from None

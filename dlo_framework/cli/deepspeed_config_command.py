"""``dlo deepspeed-config``: the DeepSpeed JSON of a config, and the config of a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from dlo_framework.cli.launched import BRIDGE
from dlo_framework.cli.scan import Scan, scan
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry

_HELP = """Translate between a config and a DeepSpeed JSON.

  dlo deepspeed-config --config x.yaml   prints the JSON that the run would use
  dlo deepspeed-config ds.json           prints the JSON as a config

For a strategy other than DeepSpeedBridge the JSON is the nearest one: zero2 is stage 2. No process is started."""

_EPILOG = """All other options are those of `dlo fit`: --config, more than once if need be, and any override.

exit codes: 0, or 2 for bad input"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DloError(f"deepspeed-config: {message}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="dlo deepspeed-config",
        description=_HELP,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, help="ranks (default: what the config, or the JSON's batch sizes, say)")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo deepspeed-config``.

    Args:
        argv: the words after ``deepspeed-config``.

    Returns:
        The exit code, 0.

    Raises:
        DloError: on bad input.
    """
    options, words = _parser().parse_known_args(argv)
    if options.ranks is not None and options.ranks < 1:
        raise DloError(f"deepspeed-config: --ranks is at least 1, but was {options.ranks}")
    files = [word for word in words if word.endswith((".json", ".hjson"))]
    if len(words) == 1 and not words[0].startswith("-"):
        print(_bridge().to_yaml(words[0], options.ranks), end="")
        return 0
    found = scan(["fit", *words])
    if not found.configs:
        given = f", and of {' and '.join(files)} one" if files else ""
        raise DloError(
            "deepspeed-config: give a config, --config x.yaml, for its JSON, or one JSON file, ds.json, for its config"
            f"{given}"
        )
    for path, content in found.configs.items():
        if "zero_optimization" in content:
            raise DloError(
                f"deepspeed-config: {path} is a DeepSpeed JSON, not a config; `dlo deepspeed-config {path}` prints its"
                " config"
            )
    print(_to_json(found, options.ranks))
    return 0


def _bridge() -> Any:
    """Returns the class of the bridge, which knows both languages."""
    return Registry().load(BRIDGE, "strategy")


def _to_json(found: Scan, ranks: int | None) -> str:
    from dlo_framework.cli.run import prepare

    registry = prepare(found)
    from dlo_framework.cli.lightning_cli import ParseError
    from dlo_framework.cli.mesh_cli import MeshCLI
    from dlo_framework.cli.messages import explain

    try:
        cli = MeshCLI(found, ranks, "deepspeed-config")
    except ParseError as error:
        raise explain(error, found, registry) from None
    text: str = registry.load(BRIDGE, "strategy").to_json(cli.trainer, cli.trainer_arguments, cli.datamodule)  # type: ignore[attr-defined]
    if json.loads(text)["train_batch_size"] == "auto":
        print(
            'batch sizes are "auto", which `dlo fit` fills in: what this data loads at once is not known yet;'
            " for DeepSpeed by itself, write numbers",
            file=sys.stderr,
        )
    return text

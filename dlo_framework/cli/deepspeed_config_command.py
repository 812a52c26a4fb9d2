"""``dlo deepspeed-config``: translates a config to a DeepSpeed JSON, and a DeepSpeed JSON to a config."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.cli.launcher_args import BRIDGE
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry

_HELP = """Translate between a config and a DeepSpeed JSON.

  dlo deepspeed-config --config x.yaml   prints the JSON that the run would use
  dlo deepspeed-config ds.json           prints the JSON as a config

For a strategy other than DeepSpeedBridge the JSON is the nearest equivalent: zero2 gives stage 2. No process starts."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

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
    parser.add_argument("--ranks", type=int, help="number of ranks (default: from the config or the JSON)")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo deepspeed-config``.

    Args:
        argv: Arguments after ``deepspeed-config``.

    Returns:
        Exit code, 0.

    Raises:
        DloError: If the input is invalid.
    """
    options, words = _parser().parse_known_args(argv)
    if options.ranks is not None and options.ranks < 1:
        raise DloError(f"deepspeed-config: --ranks must be at least 1, got {options.ranks}")
    files = [word for word in words if word.endswith((".json", ".hjson"))]
    if len(words) == 1 and not words[0].startswith("-"):
        print(_load_bridge().to_yaml(words[0], options.ranks), end="")
        return 0
    found = scan(["fit", *words])
    if not found.configs:
        got = " ".join(files) or "neither"
        raise DloError(
            "deepspeed-config: the input must be a config (--config x.yaml), to print its JSON, or one JSON file"
            f" (ds.json), to print its config; got {got}"
        )
    for path, content in found.configs.items():
        if "zero_optimization" in content:
            raise DloError(
                f"deepspeed-config: --config must be a config, got the DeepSpeed JSON {path}; to print its config, run"
                f" `dlo deepspeed-config {path}`"
            )
    print(_to_json(found, options.ranks))
    return 0


def _load_bridge() -> Any:
    """Returns the DeepSpeedBridge class, which translates in both directions."""
    return Registry().load(BRIDGE, "strategy")


def _to_json(found: ConfigScan, ranks: int | None) -> str:
    from dlo_framework.cli.run import prepare_process

    registry = prepare_process(found)
    from dlo_framework.cli.lightning_cli import ParseError
    from dlo_framework.cli.mesh_cli import MeshCLI
    from dlo_framework.cli.parse_errors import explain_parse_error

    try:
        cli = MeshCLI(found, ranks, "deepspeed-config")
    except ParseError as error:
        raise explain_parse_error(error, found, registry) from None
    text: str = registry.load(BRIDGE, "strategy").to_json(cli.trainer, cli.trainer_arguments, cli.datamodule)  # type: ignore[attr-defined]
    if json.loads(text)["train_batch_size"] == "auto":
        print(
            'batch sizes are "auto", which `dlo fit` fills in: the batch size of this data is not known yet; to use the'
            " JSON with DeepSpeed alone, write numbers",
            file=sys.stderr,
        )
    return text

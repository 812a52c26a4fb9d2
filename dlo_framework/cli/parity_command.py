"""``dlo parity``: the user's own config on several ranks beside one process, step by step."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from dlo_framework.cli.scan import Scan, scan
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from dlo_framework.cli.parity_cli import ParityCLI
    from dlo_framework.testing.comparison import Comparison
    from dlo_framework.testing.record import Record

_HELP = """Train a config on several ranks and as one process, on the same global batches, and compare the two.

Losses and gradient norms are compared step by step, and the weights at the end. Dropout is switched off, and what else
is random is made equal: the report says what. Validation, logs and checkpoints are off; nothing is written."""

_EPILOG = """All other options are those of `dlo fit`: --config, more than once if need be, and any override, such as
--trainer.strategy ddp or --model.init_args.model NAME.

exit codes: 0 the two agree, 1 they do not, 2 bad input"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DloError(f"parity: {message}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="dlo parity",
        description=_HELP,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=int, help="ranks (default: the config's trainer.devices, or 2)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument(
        "--rtol", type=float, help="relative difference to allow (default: 1e-5; half precisions: more)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that the ranks may take (default: 1800)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo parity``.

    Args:
        argv: the words after ``parity``.

    Returns:
        The exit code: 0 on parity, 1 without.

    Raises:
        DloError: on bad input.
    """
    options, words = _parser().parse_known_args(argv)
    for name in ("steps", "devices", "rtol", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise DloError(f"parity: --{name} is more than 0, but was {value:g}")
    found = scan(["fit", *words])
    if not found.configs:
        raise DloError("parity: no --config; name the one whose training is to be compared: --config x.yaml")
    cli = _open(found)
    devices = options.devices or cli.devices()
    comparison = _compare(cli, words, devices, options)
    if options.json:
        from dlo_framework.testing.comparison import to_json

        print(json.dumps({"strategy": cli.strategy_name(), "ranks": devices, **to_json(comparison)}, indent=1))
    else:
        from dlo_framework.testing.report import report

        print(report(comparison))
    return 0 if comparison.ok else 1


def _open(found: Scan) -> ParityCLI:
    """Returns the parsed command line, its plug-ins imported; nothing is built yet.

    Raises:
        DloError: on what the parser refuses.
    """
    from dlo_framework.cli.run import prepare

    registry = prepare(found)
    from dlo_framework.cli.lightning_cli import ParseError
    from dlo_framework.cli.messages import explain
    from dlo_framework.cli.parity_cli import ParityCLI

    try:
        return ParityCLI(found)
    except ParseError as error:
        raise explain(error, found, registry) from None


def _compare(cli: ParityCLI, words: list[str], devices: int, options: argparse.Namespace) -> Comparison:
    """Trains on ranks, then in this process; once more in this process if rounding may be why they differ."""
    from dlo_framework.testing import RankFailed, run_distributed
    from dlo_framework.testing.compare import compare, default_rtol
    from dlo_framework.testing.record import merge
    from dlo_framework.testing.training import Setting

    with _stdout_to_stderr():
        cli.check(devices)
    name = f"{cli.strategy_name()} on {devices} ranks"
    on_ranks = Setting(options.steps, cli.seed(), ranks=devices)
    _say(f"training {options.steps} steps on {devices} ranks ({cli.strategy_name()}) ...")
    threads = max(1, (os.cpu_count() or 1) // devices)
    try:
        records = run_distributed(
            _train_rank, devices, words, on_ranks, timeout=options.timeout, backend=None, threads=threads
        )
    except RankFailed as error:
        if error.user_error is not None:
            raise DloError(error.user_error) from error
        raise
    ranks: Record = merge(records)
    rtol = default_rtol(cli.precision()) if options.rtol is None else options.rtol
    alone = Setting(options.steps, cli.seed(), shares=ranks.place[1])
    with _stdout_to_stderr():
        _say("training as one process ...")
        one = cli.train(alone)
        comparison = compare(name, one, ranks, rtol=rtol)
        if not comparison.ok and one.drew is None:
            _say("training as one process again, with each batch's samples in the opposite order ...")
            turned = Setting(alone.steps, alone.seed, shares=alone.shares, reverse=True)
            comparison = compare(name, one, ranks, rtol=rtol, control=cli.train(turned))
    return comparison


def _train_rank(rank: int, world_size: int, words: list[str], setting: Any) -> Record:
    """Trains the config on one rank; what it prints goes to standard error, for the report alone is the output."""
    os.dup2(2, 1)
    record = _open(scan(["fit", *words])).train(setting)
    if rank != 0:
        record.weights = {}
    return record


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _say(line: str) -> None:
    print(f"parity: {line}", file=sys.stderr, flush=True)

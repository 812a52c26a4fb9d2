"""``dlo parity``: compares a training of the user's config on several ranks with one process, step by step."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from dlo_framework.cli.lightning_cli import DloCLI
    from dlo_framework.testing.comparison import Comparison
    from dlo_framework.testing.record import Record
    from dlo_framework.testing.training import Setting

_HELP = """Train a config on several ranks and as one process, on the same global batches, and compare the two.

Losses and gradient norms are compared at each step; weights, optimizer state and validation metrics at the end.
Dropout is switched off, and other randomness is made equal; the report lists it. If the runs differ by more than
--rtol, further runs tell a fault from rounding. Logs and checkpoints are off; nothing is written."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override, such as
--trainer.strategy ddp or --model.init_args.model NAME.

exit codes: 0 the two agree, 1 they differ, 2 bad input"""


def _parser() -> CommandParser:
    parser = CommandParser("dlo parity", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--devices", type=int, help="number of ranks (default: the config's trainer.devices, or 2)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--rtol", type=float, help="allowed relative difference (default: 1e-5; half precisions: more)")
    parser.add_argument("--timeout", type=float, default=1800, help="time limit in seconds (default: 1800)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Runs ``dlo parity``; returns 1 if the runs differ, else 0."""
    options, found = _parser().parse_with_run(argv)
    for name in ("steps", "devices", "rtol", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise DloError(f"parity: --{name} must be more than 0, got {value:g}")
    cli = _parse(found)
    devices = options.devices or _devices(cli.options.trainer.devices)
    comparison = _compare(cli, found, devices, options)
    if options.json:
        from dlo_framework.testing.comparison import to_json

        print(json.dumps({"strategy": _strategy_name(cli), "ranks": devices, **to_json(comparison)}, indent=1))
    else:
        from dlo_framework.testing.report import report

        print(report(comparison))
    return 0 if comparison.ok else 1


def _parse(found: ConfigScan) -> DloCLI:
    """Returns the parsed command line; nothing is built yet."""
    with prepared_process(found):
        from dlo_framework.cli.lightning_cli import DloCLI
        from dlo_framework.run_setup import check_strategy
        from dlo_framework.testing.training import silence_lightning

        silence_lightning()
        cli = DloCLI(found, "dlo parity")
        if cli.options.ckpt_path:
            raise DloError("parity: --ckpt_path must be unset; remove it: both runs start from the config's weights")
        check_strategy(cli.options.trainer.strategy)
        return cli


def _devices(devices: Any) -> int:
    """Returns the number of ranks that a config asks for, at least 2."""
    if isinstance(devices, list):
        return max(2, len(devices))
    return max(2, int(devices)) if str(devices).isdigit() else 2


def _strategy_name(cli: DloCLI) -> str:
    """Returns the short name of the config's strategy."""
    strategy = cli.options.trainer.strategy
    return strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]


def _seed(cli: DloCLI) -> int:
    """Returns the config's seed, or the default seed where the config asks for none or a random one."""
    from dlo_framework.cli.lightning_cli import DEFAULT_SEED

    seed = cli.options.seed_everything
    return DEFAULT_SEED if isinstance(seed, bool) or seed is None else int(seed)


def _check(cli: DloCLI, ranks: int) -> None:
    """Builds the run of some ranks in this process, so that errors show before ranks take seconds to start.

    Raises:
        DloError: If the trainer or a part refuses its options.
    """
    from dlo_framework.run_setup import check_data, check_parts, check_run
    from dlo_framework.testing.training import Setting, trainer_options
    from dlo_framework.trainer import CheckedTrainer

    cli.build()
    check_data(cli.model, cli.datamodule, "fit")
    check_parts(cli.model, cli.datamodule)
    setting = Setting(steps=1, seed=_seed(cli), ranks=ranks)
    options = trainer_options(cli.trainer_options, setting, cli.trainer_options["strategy"])
    trainer = cli.make_trainer(CheckedTrainer, **options | {"callbacks": None})
    check_run(trainer, cli.model, cli.datamodule, command="fit", ckpt_path=None)


def _train(cli: DloCLI, setting: Setting) -> Record:
    """Builds model, data and trainer again, trains, and returns the record of the training.

    Raises:
        DloError: If the trainer or a part refuses its options.
    """
    from lightning.pytorch import seed_everything
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.testing.training import record_training
    from dlo_framework.trainer import CheckedTrainer

    seed_everything(setting.seed, workers=True, verbose=False)
    cli.build()
    options = cli.trainer_options
    strategy = options["strategy"] if setting.ranks is not None else "auto"
    make = lambda options: cli.make_trainer(CheckedTrainer, **options)
    try:
        return record_training(cli.model, cli.datamodule, options, setting, strategy, make)
    except MisconfigurationException as error:
        raise DloError(str(error)) from error


def _compare(cli: DloCLI, found: ConfigScan, devices: int, options: argparse.Namespace) -> Comparison:
    """Trains on ranks and in this process, as often as the verdict asks for."""
    from dlo_framework.testing.compare import default_rtol
    from dlo_framework.testing.training import Setting
    from dlo_framework.testing.verdict import verdict

    with contextlib.redirect_stdout(sys.stderr):
        _check(cli, devices)
    precision = cli.options.trainer.precision
    runs = verdict(
        f"{_strategy_name(cli)} on {devices} ranks",
        Setting(options.steps, _seed(cli), ranks=devices),
        precision=precision,
        rtol=default_rtol(precision) if options.rtol is None else options.rtol,
    )
    wanted, shares = next(runs), 1
    while True:
        records: list[Any] = []
        for setting in wanted:
            if records and isinstance(records[-1], str):  # The ranks refused double precision.
                records.append(records[-1])
                continue
            print(f"parity: {_describe_run(setting, _strategy_name(cli))}", file=sys.stderr, flush=True)
            try:
                if setting.ranks is None:
                    with contextlib.redirect_stdout(sys.stderr):
                        records.append(_train(cli, dataclasses.replace(setting, shares=shares)))
                else:
                    records.append(_train_ranks(found, setting, options.timeout))
                    shares = records[-1].place[1]
            except Exception as error:
                if not setting.double:
                    raise
                records.append(str(error).strip().splitlines()[-1])
        try:
            wanted = runs.send(records)
        except StopIteration as end:
            comparison: Comparison = end.value
            return comparison


def _describe_run(setting: Setting, strategy: str) -> str:
    """Returns the description of a run, to print while the user waits."""
    where = f"on {setting.ranks} ranks ({strategy})" if setting.ranks is not None else "as one process"
    how = " in double precision" if setting.double else ""
    how += f" with other rounding ({setting.control})" if setting.control else ""
    return f"training {setting.steps} steps {where}{how} ..."


def _train_ranks(found: ConfigScan, setting: Setting, timeout: float) -> Record:
    """Trains on several ranks and returns their merged record.

    Raises:
        DloError: If a rank raises one.
    """
    from dlo_framework.testing import RankFailed, run_distributed
    from dlo_framework.testing.record import merge_records

    assert setting.ranks is not None
    threads = max(1, (os.cpu_count() or 1) // setting.ranks)
    try:
        records = run_distributed(
            _train_rank, setting.ranks, found, setting, timeout=timeout, backend=None, threads=threads
        )
    except RankFailed as error:
        if error.user_error is not None:
            raise DloError(error.user_error) from error
        raise
    return merge_records(records)


def _train_rank(rank: int, world_size: int, found: ConfigScan, setting: Any) -> Record:
    """Trains the config on one rank, with its stdout redirected to stderr: stdout is for the report only."""
    os.dup2(2, 1)
    record = _train(_parse(found), setting)
    if rank != 0:
        record.weights, record.optimizer = {}, {}
    return record

"""``dlo parity``: compares a training of the user's config on several ranks with one process, step by step."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.config_scan import CommandParser, ConfigScan
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from dlo_framework.cli.lightning_cli import DloCLI
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
    options, config_scan = _parser().parse_with_run(argv)
    for name in ("steps", "devices", "rtol", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise DloError(f"parity: --{name} must be more than 0, got {value:g}")
    cli = _parse(config_scan)
    from dlo_framework.testing.compare import default_rtol, report, to_json
    from dlo_framework.testing.parity import Trial, judge
    from dlo_framework.testing.spawn import RankFailed
    from dlo_framework.testing.training import Setting

    devices = options.devices or _devices(cli.options.trainer.devices)
    strategy, precision = cli.options.trainer.strategy, cli.options.trainer.precision
    name = strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]
    setting = Setting(options.steps, _seed(cli), ranks=devices)
    with contextlib.redirect_stdout(sys.stderr):
        _check(cli, setting)
    rtol = default_rtol(precision) if options.rtol is None else options.rtol
    trial = Trial(f"{name} on {devices} ranks", config_scan, precision, rtol)
    threads, announce = max(1, (os.cpu_count() or 1) // devices), functools.partial(_announce, name)
    try:
        (comparison,) = judge(_train, [trial], setting, timeout=options.timeout, threads=threads, announce=announce)
    except RankFailed as error:
        if error.user_error is not None:
            raise DloError(error.user_error) from error
        raise
    if options.json:
        print(json.dumps({"strategy": name, "ranks": devices, **to_json(comparison)}, indent=1))
    else:
        print(report(comparison))
    return 0 if comparison.ok else 1


def _announce(strategy: str, setting: Setting) -> None:
    """Prints what is trained, while the user waits."""
    where = f"on {setting.ranks} ranks ({strategy})" if setting.ranks is not None else "as one process"
    how = " in double precision" if setting.double else ""
    how += f" with other rounding ({setting.control})" if setting.control else ""
    print(f"parity: training {setting.steps} steps {where}{how} ...", file=sys.stderr, flush=True)


def _parse(config_scan: ConfigScan) -> DloCLI:
    """Returns the parsed command line; nothing is built yet."""
    with prepared_process(config_scan):
        from dlo_framework.cli.lightning_cli import DloCLI
        from dlo_framework.run_setup import check_strategy
        from dlo_framework.testing.training import silence_lightning

        silence_lightning()
        cli = DloCLI(config_scan, "dlo parity")
        if cli.options.ckpt_path:
            raise DloError("parity: --ckpt_path must be unset; remove it: both runs start from the config's weights")
        check_strategy(cli.options.trainer.strategy)
        return cli


def _devices(devices: Any) -> int:
    """Returns the number of ranks that a config asks for, at least 2."""
    if isinstance(devices, list):
        return max(2, len(devices))
    return max(2, int(devices)) if str(devices).isdigit() else 2


def _seed(cli: DloCLI) -> int:
    """Returns the config's seed, or the default seed where the config asks for none or a random one."""
    from dlo_framework.cli.lightning_cli import DEFAULT_SEED

    seed = cli.options.seed_everything
    return DEFAULT_SEED if isinstance(seed, bool) or seed is None else int(seed)


def _check(cli: DloCLI, setting: Setting) -> None:
    """Builds the run on ranks in this process, so that errors show before ranks take seconds to start.

    Raises:
        DloError: If the trainer or a part refuses its options.
    """
    from dlo_framework.run_setup import check_data, check_parts, check_run
    from dlo_framework.testing.training import trainer_options
    from dlo_framework.trainer import CheckedTrainer

    cli.build()
    check_data(cli.model, cli.datamodule, "fit")
    check_parts(cli.model, cli.datamodule)
    options = trainer_options(cli.trainer_options, setting, cli.trainer_options["strategy"])
    trainer = cli.make_trainer(CheckedTrainer, **options | {"callbacks": None})
    check_run(trainer, cli.model, cli.datamodule, command="fit", ckpt_path=None)


def _train(config_scan: ConfigScan, setting: Setting) -> Record:
    """Trains the config in a rank, and returns the record; its stdout is the parent's stderr, as that has the report.

    Raises:
        DloError: If the trainer or a part refuses its options.
    """
    import torch
    from lightning.pytorch import seed_everything
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.testing.training import record_training
    from dlo_framework.trainer import CheckedTrainer

    os.dup2(2, 1)
    if setting.ranks is None and not setting.control:  # No other process trains at the same time.
        torch.set_num_threads(os.cpu_count() or 1)
    cli = _parse(config_scan)
    seed_everything(setting.seed, workers=True, verbose=False)
    cli.build()
    options = cli.trainer_options
    strategy = options["strategy"] if setting.ranks is not None else "auto"
    make = lambda options: cli.make_trainer(CheckedTrainer, **options)
    try:
        return record_training(cli.model, cli.datamodule, options, setting, strategy, make)
    except MisconfigurationException as error:
        raise DloError(str(error)) from error

"""``dlo quantise``: quantises a trained checkpoint, and reports accuracy, bytes and CPU latency before and after."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from dlo_framework.cli.config_scan import CommandParser, ConfigScan, scan
from dlo_framework.cli.run import train
from dlo_framework.errors import DloError
from dlo_framework.run import runs

_HELP = """Quantise a trained checkpoint, and report accuracy, bytes and CPU latency before and after.

It runs in one process. Static activations are calibrated on the config's training data."""

_EPILOG = """All other options are those of `dlo validate`: --config, --ckpt_path (a path, best or last), and overrides.

exit codes: 0, or 2 for bad input"""


def main(argv: list[str]) -> int:
    """Quantise a trained checkpoint, and report accuracy, bytes and latency.

    Example:
        dlo quantise --config quickstart --ckpt_path best --scheme int8 --export model.onnx

    Raises:
        DloError: If the input is invalid.
    """
    parser = CommandParser("dlo quantise", description=_HELP, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--scheme", default="int8", help="int8, int8_static, int8_weights, int4_weights or fp8")
    parser.add_argument("--group-size", type=int, help="input features that share a scale, for int4_weights: 32 to 128")
    parser.add_argument("--skip", action="append", default=[], help="pattern of modules to leave in float; may repeat")
    parser.add_argument("--calibration-batches", type=int, default=8, help="training batches for int8_static")
    parser.add_argument(
        "--export",
        action="append",
        default=[],
        help="NAME.pt2, NAME.onnx, or a folder for transformers; may repeat (default: the faster file on this CPU)",
    )
    parser.add_argument("--output", help="folder of report and exports (default: quantised-SCHEME in the run's folder)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options, words = parser.parse_known_args(argv)
    config_scan = scan(["validate", *words])
    if not config_scan.configs:
        raise DloError("quantise: --config must name a config, got none; add --config x.yaml")
    return train(config_scan, lambda: _quantise(config_scan, options))


def _quantise(config_scan: ConfigScan, options: argparse.Namespace) -> None:
    """Converts the model in one process, whatever the config's strategy, writes the report, and prints it."""
    from dlo_framework.cli.lightning_cli import DloCLI
    from dlo_framework.run_setup import check_data, check_parts, check_run, find_start_checkpoint
    from dlo_framework.trainer import CheckedTrainer
    from dlo_plugins.quantise.callback import Quantise, write_report
    from dlo_plugins.quantise.post_training import EvaluationData, PostTraining

    callback = Quantise(  # It checks the options as in a run's config.
        options.scheme,
        skip=options.skip,
        group_size=options.group_size,
        calibration_batches=options.calibration_batches,
        export=options.export,
    )
    cli = DloCLI(config_scan, "dlo quantise")
    cli.find_checkpoint()
    path, _ = find_start_checkpoint(cli.options.ckpt_path, cli.runs, trains=False)
    cli.options["trainer.strategy"] = "auto"
    cli.build()
    check_data(cli.model, cli.datamodule, cli.command)
    check_parts(cli.model, cli.datamodule)
    one = {"devices": 1, "num_nodes": 1, "callbacks": [callback], "precision": "32-true"}
    bare = {"logger": False, "enable_checkpointing": False, "profiler": None}
    trainer = cli.make_trainer(CheckedTrainer, **one, **bare)
    check_run(trainer, cli.model, cli.datamodule, command=cli.command, ckpt_path=path)
    callback.check_run(trainer, cli.model, cli.datamodule)
    checkpoint, limit = Path(path) if path else None, cli.options.trainer.limit_val_batches
    in_run = checkpoint is not None and checkpoint.parent.name == runs.CHECKPOINTS
    run = checkpoint.parent.parent if checkpoint is not None and in_run else cli.runs()
    folder = Path(options.output) if options.output else run / f"quantised-{options.scheme}"
    asked = replace(callback.options, exports_faster=True)
    if limit is not None:
        asked = asked.with_limit(limit)
    # Lightning's lines, and the model's own, must not be among the JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        conversion = PostTraining(asked, EvaluationData(cli.datamodule), trainer.strategy.root_device)
        report = conversion.run(cli.model, checkpoint, callback.when, folder)
    write_report(report, folder)
    text = f"\n{report.table()}\n\nreport: {folder / 'report.json'}{report.files(folder)}"
    print(json.dumps(asdict(report)) if options.json else text)

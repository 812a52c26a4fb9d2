"""Command line of ``dlo validate`` for ``dlo quantise``: converts the checkpoint's model in one process."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from dlo_framework import runs
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_plugins.callbacks.quantise import Quantise, write_report
from dlo_plugins.quantisation.post_training import EvaluationData, PostTraining


class QuantiseCLI(DloCLI):
    """``dlo validate`` in one process, before and after the conversion of the model.

    Args:
        found: Scanned command line, with ``validate`` as its command.
        options: The command's own options.

    Raises:
        DloError: If an option is invalid, or the model cannot be converted.
    """

    prog = "dlo quantise"

    def __init__(self, found: ConfigScan, options: argparse.Namespace) -> None:
        self._options = options
        #: Checks the options as in a run's config.
        self._callback = Quantise(
            options.scheme,
            skip=options.skip,
            group_size=options.group_size,
            calibration_batches=options.calibration_batches,
            export=options.export,
        )
        super().__init__(found)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds a trainer of one process, whatever the config's strategy, with no callback but the checks."""
        self._check_parts({**self._get(self.config_init, "trainer"), "strategy": "auto"})
        kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto", "callbacks": [self._callback]}
        kwargs |= {"logger": False, "enable_checkpointing": False, "profiler": None, "precision": "32-true"}
        trainer = self._build_trainer(kwargs)
        self._callback.check_run(trainer, self.model, self.datamodule)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Converts the model, writes the report, and prints it."""
        config = self.config[self.command]
        checkpoint = Path(config.ckpt_path) if config.ckpt_path else None
        folder = self._folder(checkpoint)
        options, device = self._callback.options, self.trainer.strategy.root_device
        limit = config.trainer.limit_val_batches
        options = options if limit is None else options.with_limit(limit)
        # Lightning's lines, and the model's own, must not be among the JSON.
        with contextlib.redirect_stdout(sys.stderr) if self._options.json else contextlib.nullcontext():
            conversion = PostTraining(options, EvaluationData(self.datamodule), device)
            report = conversion.run(self.model, checkpoint, self._callback.when, folder)
        write_report(report, folder)
        files = ", ".join(str(folder / name) for name in report.exported)
        exported = f"\nexported: {files}" if files else ""
        text = f"\n{report.table()}\n\nreport: {folder / 'report.json'}{exported}"
        print(json.dumps(report.as_json()) if self._options.json else text)

    def _folder(self, checkpoint: Path | None) -> Path:
        """Returns the folder of the report: in the run's folder of the checkpoint, unless an option names another."""
        if self._options.output:
            return Path(self._options.output)
        in_run = checkpoint is not None and checkpoint.parent.name == runs.CHECKPOINTS
        run = checkpoint.parent.parent if checkpoint is not None and in_run else self._runs()
        return run / f"quantised-{self._options.scheme}"

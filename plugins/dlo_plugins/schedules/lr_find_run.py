"""The run of ``dlo lr-find``: a sweep of learning rates, and no training."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.short_run import ShortTrainer, open_run, train_briefly
from dlo_framework.errors import OrderlyEnd
from dlo_framework.watch.summary import RunRecord
from dlo_plugins.schedules.lr_finder import LRFinder


def find_lr(found: ConfigScan) -> None:
    """Runs the learning-rate sweep of a config, and no training.

    Args:
        found: Scanned command line, with ``fit`` as its command.
    """
    reasons = {"fast_dev_run": "a sweep has about 100 steps", "ckpt_path": "a sweep starts from the config's weights"}
    cli = open_run(found, "lr-find", reasons)
    callbacks = cli.callbacks()
    finders = [callback for callback in callbacks if isinstance(callback, LRFinder)] or [LRFinder()]
    for finder in finders:
        finder.apply = False
    others = [callback for callback in callbacks if callback not in finders]
    train_briefly(cli, "lr-find", callbacks if len(others) < len(callbacks) else [*others, *finders], _SweepTrainer)


class _SweepTrainer(ShortTrainer):
    """Trainer that ends after the sweep, and writes no summary."""

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        every = super()._run_callbacks(users, run_folder, model, config)
        record = next(callback for callback in every if isinstance(callback, RunRecord))
        every[every.index(record)] = _ConfigRecord(record.folder, record.config, record.monitor)
        return [*every, _End()]


class _ConfigRecord(RunRecord):
    """Writes the config, and no summary: there was no training."""

    def on_exception(self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes nothing."""


class _End(Callback):
    """Ends the run at the start of the first epoch; the sweep ran in an earlier callback."""

    def on_train_epoch_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Raises an :class:`OrderlyEnd`: ``trainer.should_stop`` would still call the hooks of the epoch's end."""
        raise OrderlyEnd("the sweep is done")

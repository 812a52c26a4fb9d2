"""Command line of ``dlo fit`` for ``dlo lr-find``: the learning-rate sweep without the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework import runs
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError, OrderlyEnd
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.summary import RunRecord
from dlo_plugins.callbacks.lr_finder import LRFinder

#: Folder among a config's runs that holds its sweeps.
SWEEPS = "lr-find"


class LRFindCLI(DloCLI):
    """``dlo fit`` with a sweep instead of training, without validation and checkpoints."""

    prog = "dlo lr-find"
    description = "Try learning rates before a training, and suggest one; the options are those of `dlo fit`."

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer as ``dlo fit`` does.

        Raises:
            DloError: If an option rules out a sweep.
        """
        if self._get(self.config_init, "trainer").get("fast_dev_run"):
            raise DloError("lr-find: trainer.fast_dev_run must be off for a sweep of about 100 steps; remove it")
        if self.config[self.command].ckpt_path:
            raise DloError("lr-find: --ckpt_path must be unset; remove it: a sweep starts from the config's weights")
        return super().instantiate_trainer(**kwargs)

    def _new_run(self) -> Path:
        """Creates a folder for the sweep under ``lr-find``, so that the first run is still ``version_0``."""
        return runs.new_run(self._runs() / SWEEPS)

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Builds a trainer that sweeps and then ends: callbacks that save are removed, validation is off."""
        saves = [each for each in kwargs["callbacks"] if isinstance(each, Checkpoint | EndCheckpoint)]
        stop = [each for each in saves if isinstance(each, GracefulStop)]
        callbacks = [each for each in kwargs["callbacks"] if each not in saves and not isinstance(each, RunRecord)]
        record = next(callback for callback in kwargs["callbacks"] if isinstance(callback, RunRecord))
        finders = [callback for callback in callbacks if isinstance(callback, LRFinder)]
        if not finders:
            finders = [LRFinder()]
            callbacks += finders
        for finder in finders:
            finder.apply = False
        kwargs["callbacks"] = [*callbacks, _ConfigRecord(record.folder, record.config, record.monitor), _End(), *stop]
        # GracefulStop is a Checkpoint callback, but saves nothing before the first step.
        kwargs |= {"enable_checkpointing": bool(stop), "num_sanity_val_steps": 0, "limit_val_batches": 0}
        return super()._build_trainer(kwargs)


class _ConfigRecord(RunRecord):
    """Writes the config, and no summary: there was no training."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes nothing."""


class _End(Callback):
    """Ends the run at the start of the first epoch; the sweep ran in an earlier callback."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises an :class:`OrderlyEnd`: ``trainer.should_stop`` would still call the hooks of the epoch's end."""
        raise OrderlyEnd("the sweep is done")

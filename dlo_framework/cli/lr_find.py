"""``dlo lr-find``: the learning-rate sweep of ``dlo fit``, and no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser

from dlo_framework import runs
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.cli.scan import Scan
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError, OrderlyEnd
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.summary import RunRecord

#: The plug-in that sweeps, by its registered name: the core does not import plug-ins.
FINDER = "LRFinder"
#: The folder in a config's runs that holds its sweeps.
SWEEPS = "lr-find"


class SweepDone(OrderlyEnd):
    """The sweep is over, and there is no more to do."""


class LRFindCLI(DloCLI):
    """``dlo fit`` with the sweep in place of the training: no validation, no checkpoints.

    Args:
        found: the scanned command line, with ``fit`` as its command.
        finder: the plug-in's class.
    """

    description = "Try learning rates before a training, and suggest one; the options are those of `dlo fit`."

    def __init__(self, found: Scan, finder: type) -> None:
        self.finder = finder
        super().__init__(found)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, under the command's own name."""
        self._subcommand_parsers[self.command].prog = "dlo lr-find"
        super().parse_arguments(parser, args)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer as ``dlo fit`` does.

        Raises:
            DloError: on options under which there is no sweep.
        """
        if self._get(self.config_init, "trainer").get("fast_dev_run"):
            raise DloError("lr-find sweeps over a hundred steps or so; remove trainer.fast_dev_run")
        if self.config[self.command].ckpt_path:
            raise DloError("lr-find begins with the weights that the config names; remove --ckpt_path")
        return super().instantiate_trainer(**kwargs)

    def _new_run(self) -> Path:
        """Makes the sweep's own folder, beside the runs: their first stays ``version_0``."""
        return runs.new_run(self._runs() / SWEEPS)

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Takes out what saves and validates, puts the sweep in unless the config names it, and ends after it."""
        saves = [each for each in kwargs["callbacks"] if isinstance(each, Checkpoint | EndCheckpoint)]
        stop = [each for each in saves if isinstance(each, GracefulStop)]
        callbacks = [each for each in kwargs["callbacks"] if each not in saves and not isinstance(each, RunRecord)]
        record = next(callback for callback in kwargs["callbacks"] if isinstance(callback, RunRecord))
        finders: list[Any] = [callback for callback in callbacks if isinstance(callback, self.finder)]
        if not finders:
            finders = [self.finder()]
            callbacks += finders
        for finder in finders:
            finder.apply = False
        kwargs["callbacks"] = [*callbacks, _ConfigRecord(record.folder, record.config, record.monitor), _End(), *stop]
        # GracefulStop counts as what saves, and saves nothing before the first step.
        kwargs |= {"enable_checkpointing": bool(stop), "num_sanity_val_steps": 0, "limit_val_batches": 0}
        return super()._build_trainer(kwargs)


class _ConfigRecord(RunRecord):
    """Writes the config, and no summary of a training that there was not."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes nothing."""


class _End(Callback):
    """Ends the run where the first epoch begins: the sweep has taken its place before all other callbacks."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises :class:`SweepDone`: a run that stopped by itself would call the hooks of an epoch's end."""
        raise SweepDone

"""Runs of ``dlo lr-find`` and ``dlo profile``: some steps of a config, in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError, OrderlyEnd
from dlo_framework.stop import GracefulStop
from dlo_framework.trainer import Trainer
from dlo_framework.watch.summary import RunRecord
from dlo_plugins.callbacks.lr_finder import LRFinder
from dlo_plugins.profiling.energy_callback import Energy
from dlo_plugins.profiling.profile_callback import Profile


class ShortTrainer(Trainer):
    """Trainer without validation and checkpoints; GracefulStop stays, which saves nothing before the first step."""

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        every = super()._run_callbacks(users, run_folder, model, config)
        stop = [each for each in every if isinstance(each, GracefulStop)]
        return [*(each for each in every if not isinstance(each, Checkpoint | EndCheckpoint)), *stop]


def open_run(found: ConfigScan, name: str, reasons: dict[str, str]) -> DloCLI:
    """Builds the parts of a short run.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        name: Name of the command.
        reasons: Why ``fast_dev_run`` and ``ckpt_path`` must be unset.

    Raises:
        DloError: An option rules the run out.
    """
    cli = DloCLI(found, f"dlo {name}", f"The options of `dlo {name}` are those of `dlo fit`.")
    fast, path = cli.options.trainer.fast_dev_run, cli.options.ckpt_path
    for option, value in (("trainer.fast_dev_run", fast), ("--ckpt_path", path)):
        if value:
            reason = reasons[option.rpartition(".")[2].removeprefix("--")]
            raise DloError(f"{name}: {option} must be unset; remove it: {reason}")
    cli.build()
    return cli


def train_briefly(
    cli: DloCLI, name: str, callbacks: list[Callback], cls: type[ShortTrainer] = ShortTrainer, **options: Any
) -> Path:
    """Trains in a folder under the command's name, so that the config's first run is still ``version_0``.

    Args:
        cli: Command line that :func:`open_run` returned.
        name: Name of the command.
        callbacks: Callbacks in place of the config's.
        cls: Class of the trainer.
        options: Arguments of the trainer in place of the config's.

    Returns:
        The run's folder.
    """
    callbacks = [each for each in callbacks if not isinstance(each, Checkpoint)]
    cli.runs()  # Sets the name.
    options |= {"run_name": f"{cli.options.run.name}/{name}", "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = cli.make_trainer(cls, callbacks=callbacks, **options)
    trainer.fit(cli.model, datamodule=cli.datamodule)
    assert trainer.run_folder is not None
    return trainer.run_folder


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


def profile(found: ConfigScan, steps: int, active: int, machine: str | None) -> Path:
    """Profiles the last of some steps of a config's training; returns the run's folder.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        steps: Number of optimizer steps.
        active: Number of steps that are recorded.
        machine: Machine of the roofline; None to measure.
    """

    reasons = {"fast_dev_run": f"a profile has {steps} steps", "ckpt_path": "time does not depend on the weights"}
    cli = open_run(found, "profile", reasons)
    callbacks = cli.callbacks()
    given = next((each for each in callbacks if isinstance(each, Profile)), None)
    searched = given is None or given.waits
    warmup = min(2, steps - active - 3)
    own = Profile(
        wait=steps - active - warmup - searched,
        warmup=warmup,
        active=active,
        ranks=given.ranks if given is not None else None,
        formats=given.formats if given is not None else None,
        waits=searched,
        machine=machine or (given.machine if given is not None else None),
    )
    callbacks = [own, *(each for each in callbacks if each is not given)]
    if not any(isinstance(each, Energy) for each in callbacks):
        callbacks.insert(0, Energy())
    # Each epoch has a step, so that max_steps ends the run; points in percent need a number of epochs.
    epochs = max(cli.options.trainer.max_epochs or 0, steps)
    return train_briefly(cli, "profile", callbacks, max_steps=steps, max_epochs=epochs, max_time=None)

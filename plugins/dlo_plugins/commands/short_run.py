"""Command line of ``dlo fit`` for ``dlo lr-find`` and ``dlo profile``: some steps, in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework import runs
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError, OrderlyEnd
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.summary import RunRecord
from dlo_plugins.callbacks.lr_finder import LRFinder
from dlo_plugins.profiling.energy_callback import Energy
from dlo_plugins.profiling.profile_callback import Profile

#: Function of the run's callbacks but those that save, and of the trainer's config: changes the callbacks, and returns
#: arguments of the trainer.
Prepare = Callable[[list[Callback], dict[str, Any]], dict[str, Any]]


class ShortRun(DloCLI):
    """``dlo fit`` without validation and checkpoints, whose folder is under the command's name among the config's runs.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        name: Name of the command and of the folder.
        reasons: Why ``fast_dev_run`` and ``ckpt_path`` must be unset.
        prepare: Function that changes callbacks and arguments of the trainer.

    Raises:
        DloError: An option rules the run out.
    """

    def __init__(self, found: ConfigScan, name: str, reasons: dict[str, str], prepare: Prepare) -> None:
        self.prog, self.description = f"dlo {name}", f"The options of `dlo {name}` are those of `dlo fit`."
        self._name, self._reasons, self._prepare = name, reasons, prepare
        super().__init__(found)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer as ``dlo fit`` does, if no option rules the run out."""
        fast, path = self._get(self.config_init, "trainer").get("fast_dev_run"), self.config[self.command].ckpt_path
        for option, value in (("trainer.fast_dev_run", fast), ("--ckpt_path", path)):
            if value:
                reason = self._reasons[option.rpartition(".")[2].removeprefix("--")]
                raise DloError(f"{self._name}: {option} must be unset; remove it: {reason}")
        return super().instantiate_trainer(**kwargs)

    def _new_run(self) -> Path:
        """Creates the folder, so that the first run of the config is still ``version_0``."""
        return runs.new_run(self._runs() / self._name)

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Builds a trainer without callbacks that save and without validation."""
        saves = [each for each in kwargs["callbacks"] if isinstance(each, Checkpoint | EndCheckpoint)]
        # GracefulStop is a Checkpoint callback, but saves nothing before the first step.
        stop = [each for each in saves if isinstance(each, GracefulStop)]
        callbacks = [each for each in kwargs["callbacks"] if each not in saves]
        kwargs |= {"enable_checkpointing": bool(stop), "num_sanity_val_steps": 0, "limit_val_batches": 0}
        kwargs |= self._prepare(callbacks, self._get(self.config_init, "trainer"))
        return super()._build_trainer(kwargs | {"callbacks": [*callbacks, *stop]})


def find_lr(found: ConfigScan) -> None:
    """Runs the learning-rate sweep of a config, and no training.

    Args:
        found: Scanned command line, with ``fit`` as its command.
    """
    reasons = {"fast_dev_run": "a sweep has about 100 steps", "ckpt_path": "a sweep starts from the config's weights"}
    ShortRun(found, "lr-find", reasons, _sweep_only)


def _sweep_only(callbacks: list[Callback], trainer: dict[str, Any]) -> dict[str, Any]:
    record = next(callback for callback in callbacks if isinstance(callback, RunRecord))
    callbacks.remove(record)
    if not any(isinstance(callback, LRFinder) for callback in callbacks):
        callbacks.append(LRFinder())
    for callback in callbacks:
        if isinstance(callback, LRFinder):
            callback.apply = False
    callbacks += [_ConfigRecord(record.folder, record.config, record.monitor), _End()]
    return {}


class _ConfigRecord(RunRecord):
    """Writes the config, and no summary: there was no training."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes nothing."""


class _End(Callback):
    """Ends the run at the start of the first epoch; the sweep ran in an earlier callback."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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

    def prepare(callbacks: list[Callback], trainer: dict[str, Any]) -> dict[str, Any]:
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
        # Before dlo's own callbacks, like the user's.
        callbacks[:] = [own, *(each for each in callbacks if each is not given)]
        if not any(isinstance(each, Energy) for each in callbacks):
            callbacks.insert(0, Energy())
        # Each epoch has a step, so that max_steps ends the run; points in percent need a number of epochs.
        return {"max_steps": steps, "max_epochs": max(trainer.get("max_epochs") or 0, steps), "max_time": None}

    reasons = {"fast_dev_run": f"a profile has {steps} steps", "ckpt_path": "time does not depend on the weights"}
    run = ShortRun(found, "profile", reasons, prepare)
    assert run.run_folder is not None
    return run.run_folder

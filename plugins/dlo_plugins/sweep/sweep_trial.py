"""Trial of a sweep: reports the metric of each validation to the sweep's worker, and stops where it answers so."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.callback import PluginCallback
from dlo_framework.errors import OrderlyEnd
from dlo_framework.watch.monitor import RunMonitor, check_logged, check_validates, is_tensorboard
from dlo_plugins.sweep.trial_process import ask_worker, open_connection


class SweepTrial(PluginCallback):
    """Reports the metric of each validation to `dlo sweep`, and stops a trial that the search prunes.

    `dlo sweep` adds the callback to the config of each trial. After a validation, rank 0 sends the value to the
    worker that has started the trial, and broadcasts its answer, so that all ranks stop after the same step.
    A run without a worker, such as a trial's config that you run again, says so, reports nothing and runs to its end.

    TensorBoard gets the sampled values as hyperparameters `sweep/KEY`.

    Args:
        metric: Name of the validation metric that is reported.
        number: Number of the trial.
        values: Sampled values by key of the config.
        checkpoint: Path of a checkpoint that is saved before each report, for population-based training; None saves
            none.
        restarts_optimizer: Whether a run that starts from a checkpoint keeps the config's learning rate, weight decay
            and other options of the optimizer, in place of the checkpoint's; schedules keep their progress.

    Raises:
        DloError: If the run has no validation, or validation does not log the metric.
    """

    example = "{metric: val_loss}"

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "SweepTrial"

    def __init__(
        self,
        metric: str,
        number: int = 0,
        values: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        restarts_optimizer: bool = False,
    ) -> None:
        self.metric, self.number, self.values = metric, number, values or {}
        self.checkpoint, self.restarts_optimizer = checkpoint, restarts_optimizer
        self._options: list[list[dict[str, Any]]] = []
        self._validations = 0
        self._worker: Connection | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of validations so far."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the number of validations."""
        self._validations = state_dict["validations"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connects rank 0 with the worker, and adds the values to TensorBoard's hyperparameters."""
        if stage != "fit":
            return
        check_validates("SweepTrial", self.metric, trainer)
        if not trainer.is_global_zero:
            return
        self._worker = open_connection()
        if self._worker is None:
            rank_zero_info("SweepTrial: no sweep has started this run, so that nothing is reported")
        for logger in trainer.loggers:
            if is_tensorboard(logger):
                shown = {f"sweep/{key}": _scalar(value) for key, value in self.values.items()}
                logger.hparams.update({"sweep/trial": self.number, **shown})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the optimizers' options, which the config has set; a checkpoint is loaded after this."""
        if self.restarts_optimizer:
            self._options = [
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in trainer.optimizers
            ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the config's options, each learning rate scaled by its schedule's progress."""
        for optimizer, options in zip(trainer.optimizers, self._options, strict=False):
            for group, own in zip(optimizer.param_groups, options, strict=True):
                restart_group(group, own)
        bases = [[own.get("initial_lr", own["lr"]) for own in each] for each in self._options]
        for config, rates in zip(trainer.lr_scheduler_configs if bases else [], bases, strict=False):
            config.scheduler.base_lrs = rates
        self._options = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports the metric, and stops the run on all ranks if the worker answers so."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validations += 1
        check_logged("SweepTrial", self.metric, trainer)
        if self.checkpoint is not None:
            trainer.save_checkpoint(self.checkpoint)
        answer = {"stop": False}
        if self._worker is not None:
            answer = ask_worker(self._worker, self._report(trainer))
        answer = trainer.strategy.broadcast(answer)
        if answer.get("lost"):
            raise OrderlyEnd("the sweep's worker has died; another one continues the trial")
        if answer["stop"]:
            rank_zero_info(f"SweepTrial: pruned after validation {self._validations}")
            trainer.should_stop = True

    def _report(self, trainer: Trainer) -> dict[str, Any]:
        monitors = [one for one in trainer.callbacks if isinstance(one, RunMonitor)]  # type: ignore[attr-defined]
        samples, seconds, _ = monitors[0].totals() if monitors else (0, 0.0, None)
        return {
            "step": self._validations,
            "value": float(trainer.callback_metrics[self.metric]),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "samples": samples,
            "seconds": seconds,
        }


def restart_group(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Sets an optimizer's group to other options in place; the part of its learning rate that a schedule sets stays.

    Args:
        group: Group of the optimizer's parameters, as the checkpoint has it.
        options: Options of the same group, as the config sets them.
    """
    before, base = group["lr"], group.get("initial_lr", group["lr"])
    group.update(options)
    if base:
        group["lr"] = group.get("initial_lr", options["lr"]) * before / base


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)

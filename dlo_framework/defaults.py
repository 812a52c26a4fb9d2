"""Callbacks that every ``dlo fit`` has by default; one of the same kind in the config replaces a default."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from dlo_framework import runs
from dlo_framework.accelerator import AcceleratorSettings
from dlo_framework.accumulation import AccumulationTail
from dlo_framework.distributed.equal_batches import EqualBatches
from dlo_framework.distributed.grace import GRACE
from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss
from dlo_framework.resume import ExactResume, logged_metrics, same_metrics
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.bar import RunBar
from dlo_framework.watch.monitor import RunMonitor
from dlo_framework.watch.state_bytes import StateReport
from dlo_framework.watch.step_traffic import TrafficReport
from dlo_framework.watch.summary import RunRecord

#: Default metric and mode of the best checkpoint, for a model without ``best_metric``.
ASSUMED_METRIC = ("val_loss", "min")


def add_default_callbacks(
    callbacks: list[Callback],
    *,
    run_folder: Path,
    model: LightningModule,
    config: str = "",
    progress_bar: bool = True,
    checkpoints: bool = True,
    stop_grace: float = GRACE,
    cudnn_benchmark: bool = True,
) -> list[Callback]:
    """Returns ``callbacks`` with dlo's own beside them.

    Args:
        callbacks: Callbacks of the user; one of the same class replaces a default.
        run_folder: Folder of the run.
        model: Model whose ``best_metric = ("val_acc1", "max")`` names the metric of the best checkpoint.
        config: Resolved config as YAML, saved with the run.
        progress_bar: Whether to draw a bar.
        checkpoints: Whether to save any.
        stop_grace: Seconds without progress that a run which was asked to stop may take.
        cudnn_benchmark: Whether to let cuDNN measure its algorithms.

    Raises:
        DloError: The folder of the run, or that of a ModelCheckpoint, begins with a scheme, such as ``s3:``.
    """
    check_on_file_system("run.dir", run_folder)
    check_checkpoint_folders(callbacks)
    monitor = next((callback for callback in callbacks if isinstance(callback, RunMonitor)), RunMonitor())
    state, traffic = StateReport(), TrafficReport()
    # Before the user's: a callback that clips gradients, or adds noise to them, must get the corrected gradient.
    first: list[Callback] = []
    if not any(isinstance(callback, AccumulationTail) for callback in callbacks):
        first.append(AccumulationTail())
    defaults: list[Callback] = [EqualBatches(), monitor, ExactResume(), state, traffic]
    defaults.append(RunRecord(run_folder, config, monitor, state, traffic))
    for callback in callbacks:
        if isinstance(callback, AcceleratorSettings):
            callback.cudnn_benchmark &= cudnn_benchmark
    if not any(isinstance(callback, AcceleratorSettings) for callback in callbacks):
        defaults.append(AcceleratorSettings(cudnn_benchmark=cudnn_benchmark))
    if not any(isinstance(callback, FiniteLoss) for callback in callbacks):
        defaults.append(FiniteLoss())
    if progress_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        defaults.append(RunBar())
    if checkpoints:
        folder = run_folder / runs.CHECKPOINTS
        own = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in own:
            # Lightning's own default is the first logger's folder, where `last`, `best` and `auto` do not look.
            callback.dirpath = callback.dirpath or os.path.realpath(folder)
        if not own:
            defaults += best_checkpoint(run_folder, model)
        last = next((callback for callback in own if callback.save_last and _is_same(callback.dirpath, folder)), None)
        if last is None:
            last = LastCheckpoint(folder)
            defaults.append(last)
        defaults.append(GracefulStop(folder, stop_grace))
        first.append(EndCheckpoint(last))
    return [*first, *callbacks, *(callback for callback in defaults if callback not in callbacks)]


def check_checkpoint_folders(callbacks: Iterable[Callback]) -> None:
    """Checks that the folder of each ModelCheckpoint is on a file system.

    Raises:
        DloError: The folder begins with a scheme, such as ``s3:``.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            check_on_file_system(f"dirpath of {type(callback).__name__}", callback.dirpath)


def check_on_file_system(option: str, path: str | Path) -> None:
    """Checks that a folder of a run has no scheme, which would be taken for the name of a local folder.

    Args:
        option: Option that sets the folder, for the error.
        path: Folder.

    Raises:
        DloError: The path has a scheme, such as ``s3:``.
    """
    scheme = next((part for part in Path(path).parts if part.endswith(":")), None)
    if scheme is not None:
        raise DloError(
            f"{option} must be on a file system, got {path} with the scheme {scheme}; mount the storage, or copy"
            " finished checkpoints to it"
        )


def best_checkpoint(run_folder: Path, model: LightningModule) -> list[Callback]:
    """Returns the ModelCheckpoint that saves a run's best checkpoint; none if the model's ``best_metric`` is None.

    For a model without the attribute the best checkpoint is that of the lowest ``val_loss``, if it is logged.
    """
    metric, mode = getattr(model, "best_metric", ASSUMED_METRIC) or (None, "min")
    if metric is None:
        return []
    kind = ModelCheckpoint if hasattr(model, "best_metric") else BestIfLogged
    checkpoint = kind(
        dirpath=run_folder / runs.CHECKPOINTS,
        filename=f"epoch={{epoch}}-step={{step}}-{metric}={{{metric}:.4f}}",
        auto_insert_metric_name=False,
        monitor=metric,
        mode=mode,
        save_top_k=1,
    )
    return [checkpoint]


class _SavesAtEnds(ModelCheckpoint):
    """ModelCheckpoint that saves after validations and epochs alone, without Lightning's (2.6.6) work at each step."""

    @functools.cached_property
    def state_key(self) -> str:
        """The key of its state, which every hook of every step reads."""
        return super().state_key

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


class BestIfLogged(_SavesAtEnds):
    """Saves the best checkpoint by a metric that the model may not log, and warns once if it does not."""

    monitor_is_optional = True
    _said = False

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves if the metric was logged; Lightning's (2.6.6), which it overrides, raises an error without it."""
        is_logged = self.monitor in monitor_candidates
        if not self._said:
            name = type(trainer.lightning_module).__name__
            choose = f"set best_metric = (name, 'min' or 'max') on {name} to take another metric"
            rank_zero_info(
                f"the best checkpoint is that of the lowest {self.monitor}; {choose}"
                if is_logged
                else f"no best checkpoint is kept: {name} logs no {self.monitor}; {choose}"
            )
            self._said = True
        if is_logged:
            super()._save_topk_checkpoint(trainer, monitor_candidates)


class LastCheckpoint(_SavesAtEnds):
    """Writes ``last.ckpt`` after each validation, or each epoch without one; on by default.

    ``save_last`` of the class above is not enough: it writes only when the best has improved. It is a separate class
    because Lightning distinguishes the states of two ModelCheckpoints that save at the same times by their classes
    alone, and a user's config may contain such a one.

    Args:
        folder: Folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(runs.LAST).stem,
            monitor=None,
            save_top_k=1,
            enable_version_counter=False,
        )

    def save_now(self, trainer: Trainer) -> None:
        """Saves the current state."""
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class EndCheckpoint(Callback):
    """Saves ``last.ckpt`` when training ends, unless it already holds that state; on by default.

    Training may end at any step: by ``max_steps`` or ``max_time`` in mid-epoch, by a target, by a callback that stops
    it. This one precedes all other callbacks, so that it saves the state of a run that can continue: callbacks that
    average weights leave the average in the module when training ends.

    Args:
        last: Callback that writes ``last.ckpt``.
    """

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "EndCheckpoint"

    def __init__(self, last: ModelCheckpoint) -> None:
        self.last = last
        self._metrics: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Records the metrics that the checkpoint holds."""
        self._metrics = logged_metrics(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, if steps have been done or metrics logged since the last save."""
        options: Any = trainer
        if options.fast_dev_run or trainer.global_step == 0 or self.last not in options.callbacks:
            return
        is_saved = self.last._last_global_step_saved == trainer.global_step
        if is_saved and same_metrics(self._metrics or {}, logged_metrics(trainer)):
            return
        if isinstance(self.last, LastCheckpoint):
            self.last.save_now(trainer)
        else:
            _save_last(self.last, trainer)


def _save_last(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Makes a user's ModelCheckpoint write its last checkpoint now.

    Lightning (2.6.6) has no public method for it; with ``save_last: link`` it would link to the last saved one.
    """
    callback._last_checkpoint_saved = ""
    callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))


def _is_same(path: str | Path | None, folder: Path) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(folder)

"""The callbacks that every ``dlo fit`` has, unless the config brings its own of the same kind."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar

from dlo_framework import runs
from dlo_framework.accumulation import AccumulationTail
from dlo_framework.distributed.equal_batches import EqualBatches
from dlo_framework.finite import FiniteLoss
from dlo_framework.resume import ExactResume
from dlo_framework.stop import GracefulStop
from dlo_framework.watch.bar import RunBar
from dlo_framework.watch.monitor import RunMonitor
from dlo_framework.watch.state_bytes import StateReport
from dlo_framework.watch.summary import RunRecord


def add_default_callbacks(
    callbacks: list[Callback],
    *,
    run_folder: Path,
    model: LightningModule,
    config: str = "",
    progress_bar: bool = True,
    checkpoints: bool = True,
) -> list[Callback]:
    """Returns ``callbacks`` with dlo's own beside them.

    Args:
        callbacks: the user's; one of the same class as a default takes its place.
        run_folder: where the run keeps its files.
        model: names the metric that tells the best checkpoint, by ``best_metric = ("val_acc1", "max")``.
        config: the resolved config as YAML, to be kept with the run.
        progress_bar: whether to draw a bar.
        checkpoints: whether to save any.
    """
    monitor = next((callback for callback in callbacks if isinstance(callback, RunMonitor)), RunMonitor())
    state = StateReport()
    defaults: list[Callback] = [EqualBatches(), monitor, ExactResume(), state]
    defaults.append(RunRecord(run_folder, config, monitor, state))
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
        if not any(callback.save_last and _is_same(callback.dirpath, folder) for callback in own):
            defaults.append(LastCheckpoint(folder))
        defaults.append(GracefulStop(folder))
    # Before the user's: what clips gradients, or adds noise to them, is to find the gradient of the step as it is.
    first = [] if any(isinstance(callback, AccumulationTail) for callback in callbacks) else [AccumulationTail()]
    return [*first, *callbacks, *(callback for callback in defaults if callback not in callbacks)]


def best_checkpoint(run_folder: Path, model: LightningModule) -> list[Callback]:
    """Returns Lightning's ModelCheckpoint that keeps a run's best checkpoint, if the model says what is best."""
    metric, mode = getattr(model, "best_metric", None) or (None, "min")
    if metric is None:
        return []
    checkpoint = ModelCheckpoint(
        dirpath=run_folder / runs.CHECKPOINTS,
        filename=f"epoch={{epoch}}-step={{step}}-{metric}={{{metric}:.4f}}",
        auto_insert_metric_name=False,
        monitor=metric,
        mode=mode,
        save_top_k=1,
    )
    return [checkpoint]


class LastCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after each validation, or each epoch without one; on by default.

    ``save_last`` of the one above would not do: it writes only when the best has improved. It is a class of its own
    because Lightning tells the states of two ModelCheckpoints that save at the same times apart by their classes alone,
    and one of a config may do that.

    Args:
        folder: where it is written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(runs.LAST).stem,
            monitor=None,
            save_top_k=1,
            enable_version_counter=False,
        )


def _is_same(path: str | Path | None, folder: Path) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(folder)

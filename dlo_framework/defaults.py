"""Callbacks that every ``dlo fit`` has by default; one of the same kind in the config replaces a default."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from dlo_framework.accelerator import AcceleratorSettings
from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.collectives import collectives_begun
from dlo_framework.distributed.equal_batches import EqualBatches
from dlo_framework.distributed.signals import GRACE
from dlo_framework.errors import DloError, OrderlyEnd, first_line, is_agreed
from dlo_framework.finite import FiniteLoss
from dlo_framework.progress import AccumulationTail
from dlo_framework.random_streams import raw_random_state, restore_raw_random_state
from dlo_framework.run import resume, runs
from dlo_framework.stop import SAVE_MINUTES, GracefulStop
from dlo_framework.strategy_abilities import Pipelined
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.bar import RunBar
from dlo_framework.watch.monitor import RunMonitor
from dlo_framework.watch.state_bytes import StateReport, TrafficReport
from dlo_framework.watch.summary import RunRecord

#: Default metric and mode of the best checkpoint, for a model without ``best_metric``.
ASSUMED_METRIC = ("val_loss", "min")
#: Classes of defaults that a callback of the user replaces.
_REPLACEABLE = (AccumulationTail, AcceleratorSettings, FiniteLoss, ProgressBar)


def add_default_callbacks(
    callbacks: list[Callback],
    *,
    run_folder: Path,
    model: LightningModule,
    config: str = "",
    progress_bar: bool = True,
    checkpoints: bool = True,
    stop_grace: float = GRACE,
    save_minutes: float = SAVE_MINUTES,
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
        save_minutes: Minutes after the last checkpoint when ``last.ckpt`` is saved; 0 for never.
        cudnn_benchmark: Whether to let cuDNN measure its algorithms.

    Raises:
        DloError: The folder of the run, or that of a ModelCheckpoint, begins with a scheme, such as ``s3:``.
    """
    check_on_file_system("run.dir", run_folder)
    run_folder = run_folder.absolute()  # A script may change the directory.
    check_checkpoint_folders(callbacks)
    monitor = next((callback for callback in callbacks if isinstance(callback, RunMonitor)), RunMonitor())
    state, traffic = StateReport(), TrafficReport()
    # Before the user's: a callback that clips gradients, or adds noise to them, must get the corrected gradient.
    first: list[Callback] = [AccumulationTail()]
    defaults: list[Callback] = [EqualBatches(), monitor, resume.ExactResume(), state, traffic]
    defaults.append(RunRecord(run_folder, config, monitor, state, traffic))
    defaults += [AcceleratorSettings(cudnn_benchmark=cudnn_benchmark), FiniteLoss()]
    if progress_bar:
        defaults.append(RunBar())
    for callback in callbacks:
        if isinstance(callback, AcceleratorSettings):
            callback.cudnn_benchmark &= cudnn_benchmark
    if checkpoints:
        folder = run_folder / runs.CHECKPOINTS
        here = os.path.realpath(folder)
        own = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in own:
            # Lightning's own default is the first logger's folder, where `last`, `best` and `auto` do not look.
            callback.dirpath = callback.dirpath or here
        if not any(callback.monitor for callback in own):
            defaults += best_checkpoint(run_folder, model)
        last = next((one for one in own if one.save_last and os.path.realpath(one.dirpath or "") == here), None)
        if last is None:
            last = LastCheckpoint(folder)
            defaults.append(last)
        stop = GracefulStop(folder, stop_grace, save_minutes)
        defaults.append(stop)
        first.append(EndCheckpoint(last, stop))
    replaced = tuple(kind for kind in _REPLACEABLE if any(isinstance(callback, kind) for callback in callbacks))
    first = [callback for callback in first if not isinstance(callback, replaced)]
    defaults = [callback for callback in defaults if callback not in callbacks and not isinstance(callback, replaced)]
    return [*first, *callbacks, *defaults]


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


def find_best_metric(model: LightningModule) -> tuple[str, str] | None:
    """Returns the metric of a model's best checkpoint and its mode; None for a model that keeps none."""
    return getattr(model, "best_metric", ASSUMED_METRIC)


def best_checkpoint(run_folder: Path, model: LightningModule) -> list[Callback]:
    """Returns the ModelCheckpoint that saves a run's best checkpoint; none if the model's ``best_metric`` is None.

    For a model without the attribute the best checkpoint is that of the lowest ``val_loss``, if it is logged.
    """
    metric, mode = find_best_metric(model) or (None, "min")
    if metric is None:
        return []
    checkpoint = BestIfLogged(
        assumed=find_best_metric(model) is ASSUMED_METRIC,
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
    """Saves the best checkpoint by a metric that the run may not log, and says so once if it does not.

    A metric that the model names must be logged where there is a validation.

    Args:
        assumed: Whether the metric is dlo's assumption.
        **options: Arguments of ModelCheckpoint.
    """

    _said = False

    def __init__(self, *, assumed: bool, **options: Any) -> None:
        super().__init__(**options)
        self.monitor_is_optional = assumed

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves if the metric was logged; Lightning's (2.6.6), which it overrides, raises an error without it."""
        is_logged = self.monitor in monitor_candidates
        if not is_logged and not self.monitor_is_optional and trainer.enable_validation:
            super()._save_topk_checkpoint(trainer, monitor_candidates)  # Raises.
        if not self._said and (not is_logged or self.monitor_is_optional):
            name = type(trainer.lightning_module).__name__
            choose = f"set best_metric = (name, 'min' or 'max') on {name} to take another metric"
            rank_zero_info(
                f"the best checkpoint is that of the lowest {self.monitor}; {choose}"
                if is_logged
                else f"no best checkpoint is kept: {name} has logged no {self.monitor}; {choose}"
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


class EndCheckpoint(PluginCallback):
    """Saves ``last.ckpt`` when training ends or raises, unless it already holds that state; on by default.

    Training may end at any step: by ``max_steps`` or ``max_time`` in mid-epoch, by a target, by a callback that stops
    it. This one precedes all other callbacks, so that it saves the state of a run that can continue: callbacks that
    average weights leave the average in the module when training ends.

    After an exception it saves the state before the batch that raised, if it is whole: not if weights or gradients may
    have changed in part (in the optimizer's step; in backward where gradients accumulate), and on several ranks only if
    all of them raise at the same moment, since otherwise the others are in the middle of a collective.

    Args:
        last: Callback that writes ``last.ckpt``.
        stop: Callback that notes which step has begun.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "EndCheckpoint"

    def __init__(self, last: ModelCheckpoint, stop: GracefulStop) -> None:
        self.last, self.stop = last, stop
        self._metrics: dict[str, Any] = {}
        self._statistics: list[Tensor] = []  # of batch norms, which a forward pass changes
        self._torchmetrics: dict[str, Any] = {}
        self._before: _BatchStart | None = None
        self._had_backward = False  # since the batch began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds what a forward pass changes."""
        self._before, self._torchmetrics = None, resume.metrics_of(pl_module)
        norms = (module for module in pl_module.modules() if isinstance(module, _NormBase))
        self._statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copies what the batch changes besides weights."""
        self._had_backward = False
        statistics = [each.clone() for each in self._statistics]
        metrics = resume.training_metrics(trainer, self._torchmetrics)
        # A resumed run takes the batch from its loader again.
        states = (each.before_batch for each in resume.replayed_loaders(trainer) if each.before_batch is not None)
        random = next(states, None) or raw_random_state()
        self._before = _BatchStart(trainer.global_step, random, statistics, metrics)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Notes that gradients change."""
        self._had_backward = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Records the metrics that the checkpoint holds; if this save fails, another one would."""
        self._metrics, self._before = resume.logged_metrics(trainer), None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, if steps have been done or metrics logged since the last save."""
        if self._saves(trainer) and not (
            self._is_saved(trainer) and resume.same_metrics(self._metrics, resume.logged_metrics(trainer))
        ):
            self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the state before the batch that raised; an error in doing so does not hide the first one."""
        ends_itself = not isinstance(exception, Exception) or isinstance(exception, OrderlyEnd)
        together = trainer.world_size == 1 or is_agreed(exception)
        if ends_itself or not together or not self._can_save(trainer):
            return
        self._rewind(trainer)
        path = runs.shown(Path(self.last.dirpath or "") / runs.LAST)
        try:
            self._save(trainer)
            what = f"saved the state before the error, of step {trainer.global_step}: {path}"
            what += "; go on with --ckpt_path last"
        except Exception as error:  # A full disk, or an accelerator that has failed.
            what = f"the state before the error could not be saved: {first_line(error)}"
        if trainer.is_global_zero:
            print(f"dlo: {what}", file=sys.stderr, flush=True)

    def moment_of_error(self, trainer: Trainer) -> str:
        """Returns how far this rank has come; ranks where that is the same may save together. Empty if it cannot save.

        It has the counters of Lightning's (2.6) loops, and the number of collectives that this rank has begun in each
        process group: otherwise those of a save would pair with others.
        """
        begun = collectives_begun()
        if (
            begun is None
            or contract_of(trainer.strategy).find_ability(Pipelined) is not None
            or not self._can_save(trainer)
        ):
            return ""
        loop = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress, loop.val_loop.batch_progress, loop.automatic_optimization.optim_progress
        return f"epoch {trainer.current_epoch}, step {trainer.global_step}, {progress}, {begun}"

    def _can_save(self, trainer: Trainer) -> bool:
        """Returns whether there is an unsaved state that is whole but for what :meth:`_rewind` takes back."""
        before = self._before
        if before is None or not self._saves(trainer) or self._is_saved(trainer):
            return False
        if not _is_in_batch(trainer):
            return True
        by_batch = trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches == 1
        has_begun = self.stop.stepping == trainer.global_step
        return not has_begun and trainer.global_step == before.step and (by_batch or not self._had_backward)

    def _rewind(self, trainer: Trainer) -> None:
        """Takes back what an unfinished batch has changed."""
        before, self._before = self._before, None
        if before is None or not _is_in_batch(trainer):
            return
        restore_raw_random_state(before.random)
        for buffer, value in zip(self._statistics, before.statistics, strict=True):
            buffer.copy_(value)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, resume.ExactResume):
                callback.set_metrics(before.metrics)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        for batches in (progress.total, progress.current):
            # The loader has handed it out: its position is that before a batch that has started.
            batches.ready, batches.started = batches.completed, batches.completed + 1
        progress.is_last_batch = False

    def _saves(self, trainer: Trainer) -> bool:
        options: Any = trainer
        return not options.fast_dev_run and trainer.global_step > 0 and self.last in options.callbacks

    def _is_saved(self, trainer: Trainer) -> bool:
        return self.last._last_global_step_saved == trainer.global_step

    def _save(self, trainer: Trainer) -> None:
        candidates = self.last._monitor_candidates(trainer)
        if isinstance(self.last, LastCheckpoint):
            self.last._save_topk_checkpoint(trainer, candidates)
        else:
            # Lightning (2.6.6) has no public method for it; with `save_last: link` it would link to the last saved one.
            self.last._last_checkpoint_saved = ""
            self.last._save_last_checkpoint(trainer, candidates)


def _is_in_batch(trainer: Trainer) -> bool:
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return batch.ready != batch.processed


class _BatchStart(NamedTuple):
    """State before a batch, apart from weights and gradients: steps, random state, running statistics, metrics."""

    step: int
    random: tuple[Any, ...]
    statistics: list[Tensor]
    metrics: dict[str, Any]

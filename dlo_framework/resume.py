"""Exact resuming: a run that is stopped and resumed has the same losses, bit for bit, as one that is not stopped.

Lightning restores weights, optimizer, schedules and counters; dlo's loaders restore the position in the data. This
module restores the rest: the random state of Python, NumPy and torch on each rank; gradients that are half-accumulated
in a checkpoint; the logged metrics; and the loop counters of a run that ended in mid-epoch.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from dlo_framework.data.distributed_loader import DistributedEvalLoader
from dlo_framework.strategy_contract import contract_of

KEY = "dlo"


class ExactResume(Callback):
    """Saves and restores the state that Lightning leaves out; on by default.

    Validation runs on a copy of the random state, so that the number of validations does not change training.
    """

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "ExactResume"

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        self._validates_last_step = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the random state of every rank and half-accumulated gradients to the checkpoint."""
        state = self._before_validation or random_state()
        checkpoint[KEY] = {
            "random_state": _gather(state),
            "gradients": contract_of(trainer.strategy).accumulated_gradients() if mid_accumulation(trainer) else None,
            "delayed": _delayed(trainer),
            "metrics": logged_metrics(trainer),
        }
        if "loops" in checkpoint:
            _reopen_epoch(trainer, checkpoint["loops"]["fit_loop"])
            _keep_next_validation(trainer, checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the random state, so that loaders that shuffle with it draw the same order.

        If the checkpoint holds averaged weights and this run does not average, loads the trained ones.
        """
        _load_trained_weights(trainer, pl_module, checkpoint)
        _drop_replaced_schedule(trainer, checkpoint)
        if "loops" in checkpoint:
            _complete_epoch(trainer, checkpoint["loops"]["fit_loop"])
            self._validates_last_step = _is_before_last_validation(trainer, checkpoint)
            if trainer.strategy.restore_checkpoint_after_setup:
                self._enter_last_validation(trainer)
        self._loaded = checkpoint.get(KEY)
        if self._loaded is not None:
            restore_random_state(_own_state(self._loaded["random_state"], trainer))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets a run that was killed before its last validation validate."""
        self._enter_last_validation(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the random state and the gradients: after this, the next batch is the first to use them."""
        _set_loader_generators(trainer)
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        # A scheduler, a callback or the run's summary may read a metric before it is logged again.
        for name, value in loaded.get("metrics", {}).items():
            trainer.callback_metrics.setdefault(name, value.to(pl_module.device))
        # A loader that keeps its own position draws nothing from the global stream when it is restarted. Any other has
        # drawn its shuffle from it by now, as it would have in the run that was not stopped.
        if hasattr(trainer.train_dataloader, "load_state_dict"):
            restore_random_state(_own_state(loaded["random_state"], trainer))
        if loaded["gradients"] is not None:
            contract_of(trainer.strategy).restore_gradients(loaded["gradients"])
        if loaded.get("delayed") is not None:
            contract_of(trainer.strategy).restore_delayed_gradients(**loaded["delayed"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the random state of training."""
        self._before_validation = random_state()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the random state of training."""
        if self._before_validation is not None:
            restore_random_state(self._before_validation)
            self._before_validation = None
        if self._validates_last_step:
            self._validates_last_step = False
            trainer.fit_loop.epoch_loop.max_steps -= 1

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drops the stored state of a validation that did not end."""
        self._before_validation = None

    def _enter_last_validation(self, trainer: Trainer) -> None:
        """Makes Lightning's loop (2.6) begin, which does nothing for a checkpoint of the last of `max_steps`.

        The loop's limit is one step higher until the validation that it begins with has ended, and is set when
        optimizers and schedules exist, since they read it.
        """
        if self._validates_last_step:
            trainer.fit_loop.epoch_loop.max_steps += 1


def _delayed(trainer: Trainer) -> dict[str, Any] | None:
    """Returns what the next step of a run with delayed gradients applies; None for other runs."""
    found = contract_of(trainer.strategy).delayed_gradients() if trainer.state.fn == "fit" else None
    return None if found is None else {"saved": found[0], "loss": found[1]}


def _load_trained_weights(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Loads the trained weights of a checkpoint whose own are their average, in a fit that has none.

    ``state_dict`` and ``current_model_state`` are the layout of WeightEMA and Lightning. The optimizer's state, which
    is loaded too, belongs to the trained weights.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averages = any(isinstance(c, WeightAveraging) or getattr(c, "loads_trained_weights", False) for c in callbacks)
    if "current_model_state" not in checkpoint or averages or trainer.state.fn != "fit":
        return
    trained = {**checkpoint, "state_dict": checkpoint["current_model_state"]}
    trainer.strategy.load_model_state_dict(trained, strict=pl_module.strict_loading)
    rank_zero_info(
        "the checkpoint is of a run that averages its weights, which this one does not: training goes on from the"
        " trained weights, and the average is dropped; to keep it, add WeightEMA (of a task: ema_decay)"
    )


def _drop_replaced_schedule(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Drops the module's LR schedule where StochasticWeightAveraging had replaced it when the checkpoint was saved.

    The callback does so in ``on_fit_start`` if its state is loaded by then. Strategies that load checkpoints after
    their setup load it later, and the state of its schedule would be loaded into the module's.
    """
    if not trainer.strategy.restore_checkpoint_after_setup:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            saved = checkpoint.get("callbacks", {}).get(callback.state_key, {})
            if saved.get("scheduler_state") is not None:
                trainer.strategy.lr_scheduler_configs.clear()


def _set_loader_generators(trainer: Trainer) -> None:
    """Gives torch's validation loaders a generator: without one, each pass draws its seed from training's stream.

    It does so before any hook could store training's random state.
    """
    for number, loader in enumerate(tree_leaves(trainer.val_dataloaders)):
        is_torchs = isinstance(loader, DataLoader | DistributedEvalLoader)
        drawing: list[Any] = [loader, loader.sampler] if is_torchs else []
        for draws in drawing:
            if getattr(draws, "generator", number) is None:
                draws.generator = torch.Generator().manual_seed(number)


def logged_metrics(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns the metrics that the run has logged, in the form of a checkpoint."""
    return {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()}


def same_metrics(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Returns whether two sets of metrics are equal; NaN equals NaN."""
    if one.keys() != other.keys():
        return False
    pairs = [(float(value), float(other[name])) for name, value in one.items()]
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def random_state() -> dict[str, Any]:
    """Returns the state of the random generators of Python, NumPy, torch and the current accelerator.

    It holds plain numbers and tensors only, so that its checkpoint loads with ``weights_only=True``.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(internal, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets the random generators to a state of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def mid_accumulation(trainer: Trainer) -> bool:
    """Returns whether gradients of the current window are waiting for more micro-batches."""
    loop = trainer.fit_loop.epoch_loop
    ready = loop.batch_progress.current.ready
    window_ended = ready % trainer.accumulate_grad_batches == 0 or loop.batch_progress.is_last_batch
    return trainer.state.fn == "fit" and ready > 0 and not window_ended


def _gather(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's state, by rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def _own_state(states: list[dict[str, Any]], trainer: Trainer) -> dict[str, Any]:
    """Returns this rank's saved state; if the run had fewer ranks when it was saved, the ranks reuse them in turn."""
    return states[trainer.global_rank % len(states)]


def _reopen_epoch(trainer: Trainer, fit_loop: dict[str, Any]) -> None:
    """Corrects a checkpoint's loop counters so that a resumed run knows whether the epoch is finished.

    When ``max_steps`` or ``max_time`` ends a run in mid-epoch, Lightning counts the epoch as processed before its last
    checkpoint is saved, and a resumed run would silently skip the rest of the epoch's data. If the run ended with an
    epoch, a checkpoint saved in ``on_train_end`` still counts that epoch's batches, and a run limited by steps, not
    epochs, continues after them when it is resumed (2.6): the counters are reset.
    """
    progress = fit_loop["epoch_progress"]
    finished = trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches
    if finished or fit_loop["epoch_loop.batch_progress"]["is_last_batch"]:
        if progress["total"]["completed"] == progress["total"]["ready"]:
            _reset_batches(fit_loop)
        return
    for span in ("total", "current"):
        started, counts = progress[span]["started"], progress[span]
        if counts["processed"] == started and started > 0:
            counts["processed"] = started - 1
            counts["completed"] = min(counts["completed"], started - 1)


def _keep_next_validation(trainer: Trainer, fit_loop: dict[str, Any]) -> None:
    """Corrects a checkpoint saved right before a validation, so that a resumed run begins with that validation.

    A checkpoint saved in ``on_train_batch_end`` does not count the batch as completed. Lightning (2.6,
    ``_TrainingEpochLoop.advance``) then takes the validation that follows as done: its metrics, the best checkpoint
    and the hooks of the epoch's end would be missing from the run. The counters become those of a run that has
    completed the batch and has started the validation.
    """
    loop = trainer.fit_loop.epoch_loop
    batches, validation = fit_loop["epoch_loop.batch_progress"], fit_loop["epoch_loop.val_loop.batch_progress"]
    total = batches["total"]
    in_batch_end = total["ready"] == total["processed"] == total["completed"] + 1
    data = trainer.fit_loop._data_fetcher
    if not in_batch_end or data is None or not trainer.enable_validation or not loop._should_check_val_fx(data):
        return
    for span in ("total", "current"):
        batches[span]["completed"] = batches[span]["processed"]
        validation[span] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    validation["is_last_batch"] = False


def _is_before_last_validation(trainer: Trainer, checkpoint: dict[str, Any]) -> bool:
    """Returns whether a checkpoint is of the last of `max_steps`, and the validation after it has not run."""
    validation = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]
    pending = validation["ready"] == validation["started"] == 1 and not validation["processed"]
    is_last = 0 <= trainer.max_steps <= checkpoint["global_step"]
    return trainer.state.fn == "fit" and trainer.enable_validation and pending and is_last


def _complete_epoch(trainer: Trainer, fit_loop: dict[str, Any]) -> None:
    """Corrects the loop counters of a checkpoint saved at an epoch's end, so that they count the epoch as completed.

    ``ModelCheckpoint`` saves in ``on_train_epoch_end``, when the epoch counts as processed and not yet as completed. A
    run limited by steps (``max_steps``) that resumes from there ends the epoch a second time, and so counts one that
    never was: the next epoch's data would be missing, and with ``max_epochs`` beside it the run would be an epoch
    shorter. A run limited by epochs does not (Lightning 2.6, the setter of ``_FitLoop.restarting``).
    """
    progress = fit_loop["epoch_progress"]
    counts = progress["total"]
    ended = fit_loop["epoch_loop.batch_progress"]["is_last_batch"] and counts["processed"] == counts["ready"]
    if trainer.max_steps != -1 and ended and counts["completed"] < counts["processed"]:
        for span in progress.values():
            span["completed"] = span["processed"]
        _reset_batches(fit_loop)


def _reset_batches(fit_loop: dict[str, Any]) -> None:
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["current"], batches["is_last_batch"] = dict.fromkeys(batches["current"], 0), False

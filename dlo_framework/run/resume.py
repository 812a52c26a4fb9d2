"""Exact resuming: a run that is stopped and resumed has the same losses, bit for bit, as one that is not stopped.

Lightning restores weights, optimizer, schedules and counters; dlo's loaders restore the position in the data. This
module restores the rest: the random state of Python, NumPy and torch on each rank; gradients that are half-accumulated
in a checkpoint; the logged metrics; and the loop counters of a run that ended in mid-epoch.

torch's DataLoader has no position. It draws an epoch's order when it is iterated, from the global generators or its
own. So the state of the generators at that moment is kept, a resumed run iterates from it, and skips the batches that
were seen. Of metrics Lightning (2.6) saves neither its sums for the means over an epoch nor the states of torchmetrics,
so that a mean over a resumed epoch would be of its rest alone. Both are of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric, MetricCollection

from dlo_framework.batches import tree_leaves, tree_map_only
from dlo_framework.callback import PluginCallback, callbacks_of, traits_of
from dlo_framework.data.description import LoaderDescription
from dlo_framework.data.evaluation import DistributedEvalLoader
from dlo_framework.data.loader import ResumableLoader
from dlo_framework.random_streams import random_state, raw_random_state, restore_random_state, restore_stream
from dlo_framework.strategy_abilities import ArrangesRanks, DelayedGradients
from dlo_framework.strategy_contract import contract_of, data_share

KEY = "dlo"


class ExactResume(PluginCallback):
    """Saves and restores the state that Lightning leaves out; on by default.

    Validation runs on a copy of the random state, so that the number of validations does not change training. Each data
    share has its own; with another number of ranks than the checkpoint's, new ones follow from rank 0's.
    """

    #: The same as Lightning's property, which every hook of every step reads.
    state_key = "ExactResume"

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        #: Random state of training, in a validation and after the fit.
        self._training: dict[str, Any] | None = None
        self._metrics: dict[str, Any] | None = None  # of training, where a validation or the epoch's end resets them
        self._has_extra_step = False
        self._replaced: dict[str, Any] = {}  # the Trainer's options, of which others are set until the next batch
        #: Whether the epoch's last batch was done, where the run ends with the resumed epoch; None where it does not.
        self._stops: bool | None = None

    def set_metrics(self, metrics: dict[str, Any]) -> None:
        """Sets the metrics of checkpoints until the next batch: those before a batch that raised."""
        self._metrics = metrics

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the position in the run, the random state and the metrics of every rank, and open gradients."""
        position: dict[str, Any] = {}
        if "loops" in checkpoint:
            in_validation = trainer.validating and self._training is not None
            position = _set_position(trainer, checkpoint["loops"]["fit_loop"], in_validation)
        state: dict[str, Any] = {
            "random_state": self._training or random_state(),
            "stream": _random_stream(trainer),
            "logged": logged_metrics(trainer),
        }
        if trainer.state.fn == "fit":
            results = trainer.fit_loop.epoch_loop._results
            is_between = position.get("stage") == "epoch"
            ended = {"sums": {}, "metrics": metric_states(metrics_of(pl_module), results)} if is_between else None
            state |= ended or self._metrics or training_metrics(trainer)
            state["loaders"] = [loader.state_dict() for loader in replayed_loaders(trainer)]
        states = gather_states(tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), state))
        checkpoint[KEY] = {
            "random_state": [each.pop("random_state") for each in states],
            "streams": [each.pop("stream") for each in states],
            "ranks": states,
            "gradients": _open_gradients(trainer),
            "delayed": _delayed(trainer),
            "metrics": states[0]["logged"],
            "position": position,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the random state, so that loaders that shuffle with it draw the same order.

        If the checkpoint holds averaged weights and this run does not average, loads the trained ones.
        """
        _load_trained_weights(trainer, pl_module, checkpoint)
        _drop_replaced_schedule(trainer, checkpoint)
        self._loaded = checkpoint.get(KEY)
        if self._loaded is None:
            return
        if trainer.state.fn != "fit" or trainer.strategy.restore_checkpoint_after_setup:
            self._restore_stream(trainer)  # Else the strategy's setup comes first.
        stage = self._loaded.get("position", {}).get("stage")
        pending = stage == "end" or (stage == "validation" and trainer.enable_validation)
        is_last = 0 <= trainer.max_steps <= checkpoint["global_step"]
        self._has_extra_step = trainer.state.fn == "fit" and pending and is_last
        if trainer.strategy.restore_checkpoint_after_setup:
            self._add_step(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the random state of a checkpoint, or of this trainer's last fit, which goes on.

        Lets a run that was killed between its last step and its end go on to its end.
        """
        ended, self._training = self._training, None
        if self._loaded is None and ended is not None:
            restore_random_state(ended)
        self._restore_stream(trainer)
        self._add_step(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the rest of the state: after this, the next batch is the first to use it."""
        for loader in tree_leaves(trainer.val_dataloaders):
            give_generator(loader)  # Strategies of others have not.
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        states = loaded.get("ranks", ())
        own = states[trainer.global_rank] if len(states) == trainer.world_size else {}
        # A scheduler, a callback or the run's summary may read a metric before it is logged again.
        for name, value in own.get("logged", loaded.get("metrics", {})).items():
            trainer.callback_metrics.setdefault(name, value.to(pl_module.device))
        if loaded.get("position"):
            self._resume_at(trainer, pl_module, loaded)
        restore_stream(loaded, _random_stream(trainer))
        if loaded["gradients"] is not None:
            contract_of(trainer.strategy).restore_gradients(loaded["gradients"])
        if loaded.get("delayed") is not None:
            delayed = contract_of(trainer.strategy).find_ability(DelayedGradients)
            if delayed is not None:
                delayed.restore_delayed_gradients(**loaded["delayed"])
            else:
                rank_zero_info(
                    "the checkpoint is of a run that applies gradients one step later, which this one does not: the"
                    " gradients of its last batch are dropped"
                )

    def _resume_at(self, trainer: Trainer, pl_module: LightningModule, loaded: dict[str, Any]) -> None:
        """Restores metrics and orders, and makes Lightning's loops (2.6) go on at the position of the checkpoint."""
        fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        stage, plateau, batches = (loaded["position"][name] for name in ("stage", "plateau", "batches"))
        for callback in callbacks_of(trainer):
            if isinstance(callback, GradientAccumulationScheduler) and stage != "epoch":
                # It does so when an epoch starts, which this one has.
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        own = loaded["ranks"][trainer.global_rank % len(loaded["ranks"])]
        if len(loaded["ranks"]) == trainer.world_size:
            restore_metric_states(pl_module, own["metrics"])
            restore_logged_sums(trainer, own["sums"])
        if plateau is not None:
            _step_plateau_schedules(trainer, plateau)
        if "loaded" in loaded["position"]:  # Else the epochs until loaders are made again count from this one.
            train, validation = loaded["position"]["loaded"]
            if stage != "epoch":  # An epoch that has begun keeps its loader.
                train = max(train, trainer.current_epoch + 1 - trainer.reload_dataloaders_every_n_epochs)  # type: ignore[attr-defined]
            fit_loop._last_train_dl_reload_epoch, loop.val_loop._last_val_dl_reload_epoch = train, validation
        decided = any(
            isinstance(c, EarlyStopping) and (c.stopping_reason.value or c.stopped_epoch) for c in callbacks_of(trainer)
        )
        if loaded["position"]["should_stop"] and decided:
            # An epoch that has begun ends first: Lightning's loop would do nothing at all.
            ends_epoch = stage != "epoch" and fit_loop._can_stop_early
            self._stops = loop.batch_progress.is_last_batch if ends_epoch else None
            trainer.should_stop |= not ends_epoch
        has_begun = stage != "epoch" or trainer.current_epoch == 0  # The first is iterated before it starts.
        for loader, state in zip(replayed_loaders(trainer), own["loaders"], strict=False):
            loader.replay(state, batches if has_begun else None)
        if has_begun and own["loaders"] and not _has_foreign_state(trainer):
            iter(fit_loop._data_fetcher)  # type: ignore[arg-type]
        if stage == "epoch":
            for each in (fit_loop, loop, loop.val_loop):
                each.on_iteration_done()  # Nothing is to be taken up: the next epoch starts as any other.
            fit_loop._resuming_from_checkpoint = _has_foreign_state(trainer)
            return
        trainer._logger_connector._first_loop_iter = True
        loop.val_loop._has_run = stage == "end" or not trainer.enable_validation
        if stage == "validation" and self._stops is not None:
            self._replace(trainer, "val_check_batch", 1)  # It may come because the run ends.
        elif self._stops is not None:
            loop.batch_progress.is_last_batch = loop.val_loop._has_run = True
        elif stage == "batch":  # Lightning asks first whether a validation follows the last batch, which it has.
            self._replace(trainer, "limit_val_batches", 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restores the Trainer's options."""
        if self._metrics is not None or self._replaced:
            self._restore_options(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the random state and the metrics of training."""
        if trainer.state.fn == "fit":
            self._training = random_state()
        self._metrics = training_metrics(trainer) if trainer.state.fn == "fit" else None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the random state of training."""
        if trainer.state.fn == "fit" and self._training is not None:
            restore_random_state(self._training)
            self._training = None
        trainer.should_stop |= self._stops is not None
        self._drop_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the resumed epoch as any other, and keeps the metrics of one that ends before its last batch."""
        self._restore_options(trainer)
        self._drop_step(trainer)
        if self._stops is not None:
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self._stops
            self._stops, trainer.should_stop = None, True
        trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop._restarting = False
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._metrics = training_metrics(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drops what belongs to a run that did not end, and stores the random state of training."""
        self._stops = None
        self._restore_options(trainer)
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the random state of training, which a checkpoint after the fit holds."""
        self._training = self._training or random_state()

    def _restore_stream(self, trainer: Trainer) -> None:
        if self._loaded is not None:
            restore_stream(self._loaded, _random_stream(trainer))

    def _replace(self, trainer: Trainer, option: str, value: Any) -> None:
        self._replaced[option] = getattr(trainer, option)
        setattr(trainer, option, value)

    def _restore_options(self, trainer: Trainer) -> None:
        self._metrics = None
        while self._replaced:
            setattr(trainer, *self._replaced.popitem())

    def _add_step(self, trainer: Trainer) -> None:
        """Makes Lightning's loop (2.6) begin, which does nothing for a checkpoint of the last of `max_steps`.

        The loop's limit is one step higher until the validation or the epoch that it begins with has ended, and is set
        when optimizers and schedules exist, since they read it.
        """
        if self._has_extra_step:
            trainer.fit_loop.epoch_loop.max_steps += 1

    def _drop_step(self, trainer: Trainer) -> None:
        if self._has_extra_step:
            self._has_extra_step = False
            trainer.fit_loop.epoch_loop.max_steps -= 1


def training_metrics(trainer: Trainer, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the metrics of this rank's training, without those of a validation that is over.

    Args:
        trainer: Trainer of the run.
        metrics: Torchmetrics of its module; None to look for them.
    """
    ended = trainer.fit_loop.epoch_loop.val_loop._results if trainer.validating else {}
    metrics = metrics_of(trainer.lightning_module) if metrics is None else metrics
    return {"sums": logged_sums(trainer), "metrics": metric_states(metrics, ended)}


def _random_stream(trainer: Trainer) -> list[int]:
    """Returns this rank's share of the samples, their number, its pipeline stage and their number, which name a stream.

    Stages draw the random numbers of their own blocks. Other ranks of one share draw the same.
    """
    mesh, stage = contract_of(trainer.strategy).find_ability(ArrangesRanks), (0, 1)
    if mesh is not None:
        spec = mesh.mesh_spec()
        stage = (spec.coordinates(trainer.global_rank).pp, spec.pp)
    return [*data_share(trainer.strategy), *stage]


def _open_gradients(trainer: Trainer) -> Any:
    """Returns gradients that wait for more micro-batches; None if there are none.

    In manual optimization any gradient may: those that the module has not zeroed are returned.
    """
    if trainer.state.fn != "fit" or not (
        mid_accumulation(trainer) or not trainer.lightning_module.automatic_optimization
    ):
        return None
    return contract_of(trainer.strategy).accumulated_gradients() or None


def _step_plateau_schedules(trainer: Trainer, interval: str) -> None:
    """Steps ReduceLROnPlateau where it had not been when the checkpoint was saved, by the metrics of that moment."""
    epochs, is_over = trainer.fit_loop.epoch_progress.current, interval == "epoch"
    epochs.completed -= is_over  # The schedule's frequency counts from the epoch that is over.
    trainer.fit_loop.epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
    epochs.completed += is_over


def _has_foreign_state(trainer: Trainer) -> bool:
    """Whether a training loader of another library restores its own position, by its first iteration."""
    combined: Any = trainer.fit_loop._combined_loader
    own = replayed_loaders(trainer)
    return any(
        isinstance(each, _Stateful) and not isinstance(each, ResumableLoader) and each not in own
        for each in combined.flattened
    )


def replayed_loaders(trainer: Trainer) -> list[Any]:
    """Returns the training loaders that go on by a replay (:class:`~dlo_framework.run.resume.ReplayedLoader`)."""
    combined: Any = trainer.fit_loop._combined_loader
    return [] if combined is None else [each for each in combined.flattened if isinstance(each, ReplayedLoader)]


def _delayed(trainer: Trainer) -> dict[str, Any] | None:
    """Returns what the next step of a run with delayed gradients applies; None for other runs."""
    ability = contract_of(trainer.strategy).find_ability(DelayedGradients)
    delayed = ability.delayed_gradients() if ability is not None and trainer.state.fn == "fit" else None
    return None if delayed is None else {"saved": delayed[0], "loss": delayed[1]}


def _load_trained_weights(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Loads the trained weights of a checkpoint whose own are their average, in a fit that has none.

    ``state_dict`` and ``current_model_state`` are the layout of WeightEMA and Lightning. The optimizer's state, which
    is loaded too, belongs to the trained weights.
    """
    averages = any(traits_of(callback).loads_trained_weights for callback in callbacks_of(trainer))
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
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            saved = checkpoint.get("callbacks", {}).get(callback.state_key, {})
            if saved.get("scheduler_state") is not None:
                trainer.strategy.lr_scheduler_configs.clear()


def logged_metrics(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns the metrics that the run has logged, in the form of a checkpoint."""
    return {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()}


def same_metrics(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Returns whether two sets of metrics are equal; NaN equals NaN."""
    return one.keys() == other.keys() and all(
        torch.allclose(value.double(), other[name].double(), rtol=0, atol=0, equal_nan=True)
        for name, value in one.items()
    )


def mid_accumulation(trainer: Trainer) -> bool:
    """Returns whether gradients of the current window are waiting for more micro-batches."""
    loop = trainer.fit_loop.epoch_loop
    ready = loop.batch_progress.current.ready
    window_ended = ready % trainer.accumulate_grad_batches == 0 or loop.batch_progress.is_last_batch
    return trainer.state.fn == "fit" and ready > 0 and not window_ended


def gather_states(state: Any) -> list[Any]:
    """Returns every rank's state, by rank; called on all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def _set_position(trainer: Trainer, fit_loop: dict[str, Any], in_validation: bool) -> dict[str, Any]:
    """Sets the loop counters of a checkpoint to one of four positions, and returns it.

    Lightning (2.6) saves its counters as they are in the hook that saves, and tells from them what was done by then,
    not always correctly: work after that hook, or an epoch, would be missing. So the work that is left of a batch or an
    epoch is either counted as done, and the resumed run does it before its first batch, or not yet begun.

    Args:
        trainer: Trainer, in a fit or after one.
        fit_loop: State of Lightning's loops; it is changed.
        in_validation: Whether a validation has begun and not ended.

    Returns:
        ``stage``: what comes next, ``epoch``, ``batch``, ``validation`` or the ``end`` of an epoch. ``plateau``:
        interval of the ReduceLROnPlateau that is to be stepped before; None for none. ``batches``: number of the
        epoch's batches that are done. ``should_stop``: whether a callback has asked for the run's end. ``loaded``:
        epochs in which the loaders of training and of validation were made.
    """
    loop, plateau = trainer.fit_loop.epoch_loop, None
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    epoch, batch = epochs["current"], batches["current"]
    in_batch = batch["ready"] > batch["processed"]
    is_over = not in_batch and (batch["ready"] >= trainer.num_training_batches or batches["is_last_batch"])
    stage, has_ended = "end" if is_over else "batch", epoch["processed"] == epoch["started"]
    if epoch["ready"] > epoch["started"] or (has_ended and (is_over or not batch["ready"])):
        stage = "epoch"
        plateau = "epoch" if epoch["completed"] < epoch["processed"] else None
    elif not has_ended and not in_batch:
        in_batch_end = batch["processed"] > batch["completed"]
        data = trainer.fit_loop._data_fetcher
        if in_validation or (
            in_batch_end and data is not None and trainer.enable_validation and loop._should_check_val_fx(data)
        ):
            stage = "validation"
        elif (in_batch_end or trainer.validating) and not loop._should_accumulate():
            plateau = "step"
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for span in epochs.values():
        span["ready"] = span["started"]
        span["processed"] = span["completed"] = span["started"] - (stage != "epoch")
    for span in batches["total"], batch:
        span.update(dict.fromkeys(span, span["processed"]))
    if stage == "epoch":
        batch.update(dict.fromkeys(batch, 0))
    batches["is_last_batch"] = is_over and stage != "epoch"
    begun = int(stage == "validation")
    counts = {"ready": begun, "started": begun, "processed": 0, "completed": 0}
    fit_loop["epoch_loop.val_loop.batch_progress"] = {"total": counts, "current": dict(counts), "is_last_batch": False}
    return {
        "stage": stage,
        "plateau": plateau,
        "batches": batch["processed"],
        "should_stop": trainer.should_stop,
        "loaded": [trainer.fit_loop._last_train_dl_reload_epoch, loop.val_loop._last_val_dl_reload_epoch],
    }


# --- states of metrics ---------------------------------------------------------------------------------------


#: Fields of Lightning's description of a logged value that are plain data.
_FIELDS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_REDUCTIONS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    "python's sum": sum,
    "python's max": max,
    "python's min": min,
}


def logged_sums(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Returns what was logged in the current training epoch, in the form of a checkpoint.

    It is what Lightning (2.6) keeps in the private ``_results`` of its loop. Values that are reduced over a process
    group of the user's (``sync_dist_group``), which a checkpoint cannot name, are left out.
    """
    return {
        key: {
            "fields": {name: getattr(metric.meta, name) for name in _FIELDS},
            "reduction": next(name for name, reduce in _REDUCTIONS.items() if reduce is metric.meta.reduce_fx),
            "sync": {"_should": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only},
            "states": _states(metric) if metric.is_tensor else None,
            "last": _copy(metric._forward_cache),
        }
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
        if not metric.has_reset and metric.meta.sync.group is None
    }


def restore_logged_sums(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Restores what :func:`logged_sums` returned."""
    module = trainer.lightning_module
    for key, entry in saved.items():
        meta = _Metadata(**entry["fields"], reduce_fx=_REDUCTIONS[entry["reduction"]])
        meta.sync = _Sync(fn=trainer.strategy.reduce, **entry["sync"])
        metric = _ResultMetric(meta, is_tensor=entry["states"] is not None)
        if metric.is_tensor:
            _restore(metric, entry["states"], module.device)
        else:
            metric.value = module.get_submodule(str(meta.metric_attribute))
        metric._forward_cache = None if entry["last"] is None else entry["last"].to(module.device)
        trainer.fit_loop.epoch_loop._results[key] = metric


def metrics_of(module: LightningModule) -> dict[str, Metric | MetricCollection]:
    """Returns a module's torchmetrics by name, and the collections that hold some of them."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric | MetricCollection)}


def metric_states(metrics: Mapping[str, Metric | MetricCollection], without: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of torchmetrics by name.

    Args:
        metrics: Result of :func:`metrics_of`.
        without: Collection of logged values, whose metrics are left out.
    """
    reset = {id(metric.value) for metric in without.values() if not metric.is_tensor}
    for collection in metrics.values():
        if isinstance(collection, MetricCollection):
            collection.items(copy_state=False)  # Metrics that share a state get it from the one that is updated.
    return {
        name: _states(metric)
        for name, metric in metrics.items()
        if isinstance(metric, Metric) and metric.update_called and id(metric) not in reset
    }


def restore_metric_states(module: LightningModule, saved: Mapping[str, Any]) -> None:
    """Restores what :func:`metric_states` returned, of the metrics that the module still has."""
    for name, metric in metrics_of(module).items():
        if name in saved and isinstance(metric, Metric):
            _restore(metric, saved[name], module.device)


def _states(metric: Metric) -> dict[str, Any]:
    """Returns a metric's states and its count of updates, under torchmetrics' own names (1.0 to 1.9)."""
    return {"count": metric._update_count, **{name: _copy(getattr(metric, name)) for name in metric._defaults}}


def _restore(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    metric._update_count, metric._computed = saved["count"], None
    for name in metric._defaults:
        value = saved[name]
        setattr(metric, name, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))


def _copy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(value)  # Items, one a batch, are not written to.
    return value.detach().clone() if isinstance(value, Tensor) else value


# --- loaders that are replayed -------------------------------------------------------------------------------


class ReplayedLoader(DataLoader):
    """DataLoader that keeps the state from which an epoch is drawn, and iterates from it again."""

    _begun: dict[str, Any] | None = None
    _replay: tuple[dict[str, Any], int] | None = None
    #: Random state before the last batch, where the dataset draws from the generators of this process.
    before_batch: tuple[Any, ...] | None = None

    def __iter__(self) -> Any:
        replay, self._replay = self._replay, None
        if replay is not None:
            return self._again(*replay)
        self._begun = {
            "random_state": random_state(),
            "generators": self._generator_states(),
            "has_workers": self._iterator is not None,
            "batch_size": self.batch_size,
        }
        iterator = super().__iter__()
        # Lightning takes batches in advance from loaders without a length.
        return iterator if self.num_workers > 0 or sized_len(self) is None else self._watched(iterator)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.before_batch = raw_random_state()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators when the epoch began, and of the loader's own now."""
        return {"begun": self._begun, "generators": self._generator_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: Lightning loads the state of rank 0. :class:`~dlo_framework.run.resume.ExactResume` replays."""

    def replay(self, state: dict[str, Any], batches: int | None) -> None:
        """Makes the next iteration go on.

        Args:
            state: State of :meth:`state_dict`.
            batches: Number of batches of the epoch to skip; None for a new epoch.
        """
        self._set_generators(state["generators"])
        if batches is not None and state["begun"] is not None:
            length = sized_len(self)
            if length is not None and batches > length:  # Beside a longer loader it is iterated more than once.
                batches = (batches - 1) % length + 1
            self._begun, self._replay = state["begun"], (state["begun"], batches)

    def _again(self, begun: dict[str, Any], batches: int) -> Iterator[Any]:
        """Yields the rest of an epoch; begins at the first request, when Lightning has told the sampler the epoch."""
        now = random_state()
        if self.persistent_workers:
            self._iterator = None
            if begun["has_workers"]:  # Their seed was drawn in an earlier epoch.
                super().__iter__()
        restore_random_state(begun["random_state"])
        self._set_generators(begun["generators"])
        iterator = iter(self)
        states = []
        for _ in range(batches):
            next(iterator, None)
            states.append(torch.get_rng_state())
        if isinstance(self.dataset, IterableDataset) and any(not torch.equal(states[0], each) for each in states):
            _warn("its IterableDataset draws from the global generator while it is iterated")
        if self.batch_size != begun["batch_size"]:
            _warn(f"its batch_size was {begun['batch_size']} and is {self.batch_size}")
        restore_random_state(now)
        yield from iterator

    def _own_generators(self) -> list[torch.Generator]:
        places = (self, self.sampler, self.batch_sampler, LoaderDescription(self.batch_sampler).sampler)
        generators = [LoaderDescription(place).generator for place in places]
        return list({id(each): each for each in generators if each is not None}.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._own_generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._own_generators(), states, strict=False):
            generator.set_state(state)


def as_replayed(loader: Any) -> Any:
    """Returns a loader that can be replayed if it is torch's DataLoader, or of a class derived from it.

    The object stays: its class becomes :class:`ReplayedLoader`, or one that also derives from it.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader, _Stateful):
        kind: Any = type(loader)
        loader.__class__ = _replayed_class(kind)
    return loader


def give_generator(loader: Any) -> None:
    """Gives a DataLoader that validates in a fit a generator, if it has none.

    Without one, each pass draws its seed from training's stream, before any hook could store that stream's state.
    """
    if isinstance(loader, DataLoader | DistributedEvalLoader):
        drawing: list[Any] = [loader, loader.sampler]
        for draws in drawing:
            if getattr(draws, "generator", loader) is None:
                draws.generator = torch.Generator().manual_seed(0)


@functools.cache
def _replayed_class(kind: type[DataLoader]) -> type[DataLoader]:
    if kind is DataLoader:
        return ReplayedLoader
    return type(kind.__name__, (ReplayedLoader, kind), {"__module__": kind.__module__})


def _warn(reason: str) -> None:
    rank_zero_warn(
        f"the rest of this epoch is not that of the run that was stopped: the training loader's order cannot be drawn"
        f" again, because {reason}; the next epochs are complete"
    )

"""States of logged metrics: Lightning's sums for the means over an epoch, and the states of torchmetrics.

Lightning (2.6) saves neither, so that a mean over a resumed epoch would be of its rest alone. Both are of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric, MetricCollection

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

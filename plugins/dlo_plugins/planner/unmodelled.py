"""Says what of a config is not in a plan's figures: callbacks, appliers and optimizers that change time or memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dlo_plugins.planner.optimizer_state import OptimizerState
from dlo_plugins.planner.plan_config import find_part, strategy_options


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _is_aware(options: Mapping[str, Any]) -> bool:
    return options.get("when") == "aware"


#: Parts of a config: their class, when they count, and what the figures lack.
_PARTS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    ("LowPrecision", _always, "products in 8 bits; they have the rate of the Trainer's precision"),
    ("Quantise", _is_aware, "the rounding of weights and inputs in training"),
    ("GradientCompression", _always, "compression: gradients are reduced in full, and its buffers take no memory"),
    ("WeightEMA", _always, "the average of the weights: another copy of each rank's trained parameters"),
    ("DiLoCo", _always, "outer steps: ranks are taken to reduce gradients each step, and its copies take no memory"),
    ("Prune", _always, "masks and removed weights; the model is the one before pruning"),
    ("Freeze", _always, "parameters that are frozen in part of the run; all are taken to train"),
    ("LayerDrop", _always, "blocks that are left out; all of them run"),
    ("StochasticDepthSchedule", _always, "branches that are left out; all of them run"),
    ("TokenDrop", _always, "tokens that are left out; all of them are computed"),
    ("SequenceLength", _always, "shorter sequences in part of the run; rows have the data's full length"),
    ("ProgressiveResizing", _always, "smaller images in part of the run; they have their full size"),
    ("DynamicBatchSize", _always, "other batch sizes in part of the run"),
    ("MicroBatchFinder", _always, "its own choice of the micro-batch, which replaces the plan's; leave it out"),
)


def find_unmodelled(config: dict[str, Any], optimizer: OptimizerState, second_models: int = 0) -> list[str]:
    """Returns a sentence for each part of a run that the figures lack.

    Args:
        config: Config of the user.
        optimizer: State of the run's optimizer.
        second_models: Number of second models, such as a teacher.
    """
    found = []
    for name, counts, what in _PARTS:
        options = find_part(config, name)
        if options is not None and counts(options):
            found.append(f"{name}: {what}")
    strategy = strategy_options((config.get("trainer") or {}).get("strategy"))
    if strategy.get("async_tp"):
        found.append("async_tp: communication of tp that overlaps computation; all of it is exposed")
    if second_models:
        found.append("the second model, such as a teacher: its parameters take memory, and its forward time")
    if optimizer.error:
        found.append(
            f"the optimizer, which could not be built without a trainer ({optimizer.error}): Adam's two moments"
        )
    if optimizer.kind != "elementwise":
        found.append(
            f"{optimizer.name}: computation beyond what it reads and writes, full gradients for its step, and"
            " uneven shares: under sharding each rank steps full tensors"
        )
    return found

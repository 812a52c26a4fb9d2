"""Predicted memory of a run's ranks, for `dlo fit --dry-run`: on tensors without values, before any rank starts."""

from __future__ import annotations

import copy
from typing import Any

from dlo_framework.task import Task
from dlo_plugins.planner.machine import load_machine
from dlo_plugins.planner.plan_report import profile_run, run_state
from dlo_plugins.planner.rank_memory import MemoryModel
from dlo_plugins.planner.run_layout import read_dtypes, read_layout
from dlo_plugins.planner.step_time import TimeModel


def predict_rank_memory(
    config: dict[str, Any], model: Any, datamodule: Any, ranks: int, device: str
) -> dict[str, float]:
    """Returns the bytes of the rank that needs most, by part; parts of no bytes are left out.

    Args:
        config: Config as the user means it, without Lightning's defaults.
        model: Task or LightningModule of the config.
        datamodule: Datamodule of the config, or None.
        ranks: Number of ranks.
        device: Type of device.

    Raises:
        DloError: The strategy, the precision or the model is not predicted.
    """
    layout = read_layout(config, ranks)
    if isinstance(model, Task) and getattr(model, "recompute", False) and not model.has_model:
        model = copy.copy(model)
        model.recompute = False  # The layout has it.
    state, _ = run_state(config, model, *read_dtypes(config, device))
    machine = load_machine("h100" if device == "cuda" else "cpu")
    profile = profile_run(model, datamodule, state, machine.device)
    found = MemoryModel(TimeModel(profile, machine, state)).largest(layout)
    return {name: size for name, size in vars(found).items() if size > 0}

"""Trainers for tests: one that prints, logs and saves nothing."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

#: Options of a run on a CPU that prints, logs and saves nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**options: Any) -> Trainer:
    """Returns a trainer on a CPU that prints, logs and saves nothing, but for what the options say."""
    return Trainer(**QUIET | options)

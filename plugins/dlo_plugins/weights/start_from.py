"""Starts a run from the weights of a checkpoint, without its optimizer state and counters."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from dlo_framework.callback import PluginCallback
from dlo_framework.checkpoint import check, load
from dlo_framework.strategy_contract import loads_checkpoint


class StartFrom(PluginCallback):
    """Starts a new run from the weights of a checkpoint, under any strategy.

    Only the model's weights and buffers are loaded: the optimizer, the schedule and the position in the data begin at
    zero, unlike with `--ckpt_path`, which continues a run and takes precedence. `dlo prune` writes it into its config.

    Args:
        checkpoint: Checkpoint of a model with the same names and shapes; of one with an average of the weights, the
            average.

    Raises:
        DloError: If the checkpoint does not exist, or is of another model.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that the checkpoint exists, before any process starts.

        Raises:
            DloError: If it does not.
        """
        check(self.checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the weights, unless the run continues from a checkpoint of its own."""
        if not loads_checkpoint(trainer):
            content = load(self.checkpoint, level="size")
            trainer.strategy.load_model_state_dict(content, strict=True)

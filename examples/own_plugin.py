"""A callback of your own, in a file: it remembers the largest gradient of a run, and the step that it came in.

dlo fit --config quickstart --plugins '[./own_plugin.py]' --trainer.callbacks+ LargestGradient
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from dlo_framework import DloError
from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.step_primitives import agreed_gradient_norm


class LargestGradient(PluginCallback):
    """Prints the largest gradient norm of a run at its end, with the step; the same under every strategy.

    Args:
        ignore: Number of first steps that are not looked at.

    Raises:
        DloError: If ``ignore`` is negative.
    """

    def __init__(self, ignore: int = 10) -> None:
        if ignore < 0:
            raise DloError(f"ignore must be at least 0, got {ignore}; 0 looks at all steps")
        self.ignore = ignore
        self.norm, self.step = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run goes on."""
        return {"norm": self.norm, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it."""
        self.norm, self.step = state_dict["norm"], state_dict["step"]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Looks at the norm over all ranks, before clipping."""
        norm = float(agreed_gradient_norm(trainer, optimizer))
        if trainer.global_step >= self.ignore and norm > self.norm:
            self.norm, self.step = norm, trainer.global_step + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints it once."""
        if trainer.is_global_zero:
            print(f"the largest gradient norm was {self.norm:.3g}, in step {self.step}")

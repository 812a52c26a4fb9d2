"""Callback `SkipSpikes`: leaves out steps whose gradient is far larger than those before."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.step_primitives import agreed_gradient_norm, skip_step, torch_optimizer
from dlo_framework.errors import check_number
from dlo_framework.watch.media import is_logged, log_scalars
from dlo_plugins.parallel.stepped_gradients import check_reachable


class SkipSpikes(PluginCallback):
    """Skips each step whose gradient norm exceeds ``threshold`` times the median of the last ``window`` norms.

    A loss that jumps up in the training of a large model often begins with one batch whose gradient is far too large.
    PaLM (arXiv 2204.02311) went back to a checkpoint and left out such batches; this leaves out the step before it is
    taken. No weight and no state of the optimizer changes; the step counts, and learning-rate schedules go on.

    The norm is that of the full gradient, unscaled, before clipping, and the same under every strategy. The norms of
    skipped steps are in the median too: if all gradients stay large, steps go on after half a window. Nothing is
    skipped until the first window is full. A norm that is NaN or infinite is left to FiniteLoss. To read the norm, the
    host waits once a step for the device.

    It logs the number of skipped steps as ``optim/skipped_spikes``, every ``trainer.log_every_n_steps``.

    Args:
        threshold: Largest ratio of a norm to the median that is not skipped.
        window: Number of norms in the median, in optimizer steps.

    Raises:
        DloError: A value is out of range, or gradients are not in memory before a step.
    """

    example = "{threshold: 1.001, window: 2}"

    def __init__(self, threshold: float = 4.0, window: int = 100) -> None:
        check_number("SkipSpikes: threshold", threshold, "above 1", "4 skips what is four times as large")
        check_number("SkipSpikes: window", window, "at least 2", "100 has the norms of 100 steps")
        self.threshold, self.window = threshold, window
        self.skipped = 0
        self._norms: dict[int, deque[float]] = {}  # by the number of the optimizer

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps, and the norms of the window."""
        return {"skipped": self.skipped, "norms": {number: list(norms) for number, norms in self._norms.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores both."""
        self.skipped = state_dict["skipped"]
        self._norms = {number: deque(norms, self.window) for number, norms in state_dict["norms"].items()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy."""
        if stage == "fit":
            check_reachable("SkipSpikes", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Skips the step if its norm is a spike."""
        norm = float(agreed_gradient_norm(trainer, optimizer))
        norms = self._norms.setdefault(trainer.optimizers.index(torch_optimizer(optimizer)), deque(maxlen=self.window))
        usual = median(norms) if len(norms) == self.window else math.inf
        if math.isfinite(norm):
            norms.append(norm)
            if norm > self.threshold * usual:
                skip_step(trainer, optimizer)
                self.skipped += 1
                rank_zero_info(
                    f"SkipSpikes: step {trainer.global_step + 1} is skipped: its gradient norm {norm:.3g} is"
                    f" {norm / usual:.1f} times the median of the last {self.window} steps; {self.skipped} skipped"
                )
        if is_logged(trainer, trainer.global_step):
            log_scalars(trainer, {"optim/skipped_spikes": float(self.skipped)})

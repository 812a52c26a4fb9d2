"""Measures the gradient noise scale on a run, from gradients that the run computes anyway."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from dlo_plugins.batch_plan import NoiseEstimate, noise_and_signal


class NoiseMeter:
    """Compares the gradient of a step's first micro-batch on each rank with that of the whole step.

    Sums stay on the device; they are read, and averaged over ranks, once in a while by :meth:`take`.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.estimate = NoiseEstimate()
        self._small: Tensor | None = None  # of the step that is under way
        self._sums = torch.zeros(3, dtype=torch.float64)  # of noise, of signal, of steps

    def after_first_micro_batch(self, trainer: Trainer, parameters: list[Tensor], batches: int) -> None:
        """Measures the gradient of one micro-batch; ``batches`` is what its loss was divided by."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 1.0
        self._small = squared_norm(parameters) * (batches / scale) ** 2

    def before_step(self, parameters: list[Tensor], sizes: tuple[float, float]) -> None:
        """Measures the gradient of the whole step, already unscaled.

        Args:
            parameters: whose gradients.
            sizes: samples of the micro-batch on one rank, and of the step.
        """
        if self._small is None:
            return
        large = squared_norm(parameters)
        noise, signal = noise_and_signal(self._small.to(large.device), large, sizes)
        self._sums = self._sums.to(large.device)
        found = torch.stack([noise, signal, torch.ones_like(signal)]).double()
        # A step whose gradients overflowed tells nothing; the scaler will skip it.
        self._sums += torch.where(found.isfinite().all(), found, torch.zeros_like(found))
        self._small = None

    def gather(self, trainer: Trainer) -> None:
        """Makes the sums the mean over ranks, so that any rank's will do."""
        sums = self._sums.to(trainer.strategy.root_device)
        self._sums = trainer.strategy.reduce(sums, reduce_op="mean")

    def take(self, trainer: Trainer) -> None:
        """Adds what the ranks have measured since the last call to the estimate."""
        self.gather(trainer)
        noise, signal, steps = self._sums.tolist()
        if steps:
            self.estimate.add(noise / steps, signal / steps, self.smoothing)
        self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Estimate and open sums, as plain numbers and tensors."""
        estimate = self.estimate
        return {
            "estimate": [estimate.noise, estimate.signal, estimate.weight],
            "sums": self._sums.cpu(),
            "small": None if self._small is None else self._small.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self.estimate = NoiseEstimate(*state["estimate"])
        self._sums, self._small = state["sums"], state["small"]


def squared_norm(parameters: list[Tensor]) -> Tensor:
    """Returns the squared 2-norm of the parameters' gradients, a scalar on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(gradients).float().square()

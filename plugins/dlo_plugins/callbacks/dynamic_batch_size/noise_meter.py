"""Measurement of the gradient noise scale from gradients that training computes anyway."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from dlo_plugins.callbacks.dynamic_batch_size.batch_plan import NoiseEstimate, noise_and_signal


class NoiseMeter:
    """Compares the gradient of a step's first micro-batch on each rank with the gradient of the full step.

    Sums stay on the device; :meth:`update_estimate` averages them over the ranks and reads them.

    Args:
        smoothing: Weight of the old means in the estimate at each update.

    Attributes:
        estimate: Running means of noise and signal.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.estimate = NoiseEstimate()
        self._small: Tensor | None = None  # squared norm of the current step's first micro-batch gradient
        self._sums = torch.zeros(3, dtype=torch.float64)  # sums of noise, signal, steps

    def after_first_micro_batch(self, trainer: Trainer, parameters: list[Tensor], batches: int) -> None:
        """Measures the gradient of one micro-batch; ``batches`` is the divisor of its loss."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 1.0
        self._small = squared_norm(parameters) * (batches / scale) ** 2

    def before_step(self, parameters: list[Tensor], sizes: tuple[float, float]) -> None:
        """Measures the gradient of the full step, after unscaling.

        Args:
            parameters: Parameters with gradients.
            sizes: Samples of the micro-batch on one rank, and samples of the step.
        """
        if self._small is None:
            return
        large = squared_norm(parameters)
        noise, signal = noise_and_signal(self._small.to(large.device), large, sizes)
        self._sums = self._sums.to(large.device)
        found = torch.stack([noise, signal, torch.ones_like(signal)]).double()
        # A step whose gradients overflowed is left out; the scaler will skip it.
        self._sums += torch.where(found.isfinite().all(), found, torch.zeros_like(found))
        self._small = None

    def average_sums(self, trainer: Trainer) -> None:
        """Averages the sums over the ranks, so that they are equal on all of them."""
        sums = self._sums.to(trainer.strategy.root_device)
        self._sums = trainer.strategy.reduce(sums, reduce_op="mean")

    def update_estimate(self, trainer: Trainer) -> None:
        """Adds the measurements of all ranks since the last call to the estimate."""
        self.average_sums(trainer)
        noise, signal, steps = self._sums.tolist()
        if steps:
            self.estimate.add(noise / steps, signal / steps, self.smoothing)
        self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the estimate and the sums, as plain numbers and tensors."""
        estimate = self.estimate
        return {
            "estimate": [estimate.noise, estimate.signal, estimate.weight],
            "sums": self._sums.cpu(),
            "small": None if self._small is None else self._small.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`."""
        self.estimate = NoiseEstimate(*state["estimate"])
        self._sums, self._small = state["sums"], state["small"]


def squared_norm(parameters: list[Tensor]) -> Tensor:
    """Returns the squared 2-norm of the parameters' gradients, a scalar on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(gradients).float().square()

"""Callbacks that change gradients between the backward pass and the optimizer step: adaptive clipping, and noise.

Lightning clips by norm and by value (``trainer.gradient_clip_val`` and ``gradient_clip_algorithm``). This module has

- adaptive gradient clipping: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without
  Normalization", 2021 (arXiv 2102.06171);
- gradient noise: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks", 2015
  (arXiv 1511.06807).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn

from dlo_framework.data.hashing import hash64
from dlo_framework.distributed.norms import shards_state
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, match_names
from dlo_framework.task import Task

_NOISE = 3  # number of the hash's random stream


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the 2-norm of each unit of a parameter or its gradient, in a shape that broadcasts with it.

    A unit is the slice of the parameter that computes one output feature: a row of a linear layer's weight, a filter of
    a convolution. A vector, such as a bias or the gain of a norm, is one unit. Half precision is summed in float32.
    """
    dim = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=tensor.ndim > 1, dtype=dtype)


def agc_scales(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], clip_factor: float, eps: float
) -> list[Tensor]:
    """Returns the factor on each unit's gradient: at most 1, and less if its norm is too large for its weights.

    With ``w`` a unit's weights and ``g`` its gradient, it is ``min(1, clip_factor * max(|w|, eps) / |g|)``.

    Args:
        parameters: Parameters of any shapes.
        gradients: Gradients of the same shapes.
        clip_factor: Largest |g| / |w| that is not clipped.
        eps: Lower bound of |w|, so that weights that start at zero can move.
    """
    limits = [unit_norms(parameter) for parameter in parameters]
    torch._foreach_clamp_min_(limits, eps)
    torch._foreach_mul_(limits, clip_factor)
    # A gradient of zero gives infinity, and so 1.
    torch._foreach_div_(limits, [unit_norms(gradient) for gradient in gradients])
    torch._foreach_clamp_max_(limits, 1.0)
    return limits


def noise_deviation(step: int, eta: float, gamma: float) -> float:
    """Returns the standard deviation of the noise at a step, counted from 0: sqrt(eta / (1 + step)^gamma)."""
    return math.sqrt(eta / (1 + step) ** gamma)


def add_noise_(gradients: Sequence[Tensor], deviation: float, seed: int, step: int) -> None:
    """Adds Gaussian noise to gradients in place: a pure function of seed and step, whatever was drawn before.

    Args:
        gradients: Gradients on any devices; each device draws with a generator of its own.
        deviation: Standard deviation of the noise.
        seed: Seed, equal on all ranks, so that replicas stay equal.
        step: Number of the optimizer step.
    """
    mixed = int(hash64(np.array([step]), seed, _NOISE)[0] >> np.uint64(1))
    generators: dict[torch.device, torch.Generator] = {}
    noise = []
    for gradient in gradients:
        device = gradient.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(mixed)
        drawn = torch.randn(gradient.shape, generator=generators[device], device=device, dtype=gradient.dtype)
        noise.append(drawn)
    torch._foreach_add_(list(gradients), noise, alpha=deviation)


class AdaptiveGradientClipping(Callback):
    """Clips each unit's gradient to a fraction of the norm of its weights (AGC, arXiv 2102.06171).

    A step then changes each unit by at most a fraction of its norm, whatever the loss, the batch size or the depth, so
    networks without normalisation train at large batches. It runs after accumulation, unscaling and averaging over
    ranks, and before Lightning's own clipping. It is equal to ``timm.utils.agc.adaptive_clip_grad``, and faster.

    It logs the fraction of clipped units as ``optim/agc_clipped``, every ``trainer.log_every_n_steps``.

    Args:
        clip_factor: Largest ratio of a gradient's norm to its weights' norm that is not clipped. The paper tries 0.01
            to 0.16; larger batches need smaller values, and 0.01 is for batches of 4096.
        eps: Lower bound of the weights' norm, so that units that start at zero can move.
        exclude: Patterns of parameters that are not clipped, named as in a checkpoint, where ``*`` is one name between
            dots: ``[model.head, "**.bias"]``. None excludes the last linear layer, as the paper does: the last one of
            the parallel plan's head in a Task, the last registered one in other modules. ``[]`` clips all.

    Raises:
        DloError: If a value is out of range, a pattern matches no parameter, or the strategy shards parameters, as the
            norm of a shard is not the norm of its unit.
    """

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3, exclude: list[str] | None = None) -> None:
        if clip_factor <= 0 or eps <= 0:
            raise DloError(
                f"AdaptiveGradientClipping: clip_factor and eps must be above 0, got {clip_factor} and {eps}; the paper"
                " has 0.01 and 0.001"
            )
        self.clip_factor = clip_factor
        self.eps = eps
        self.exclude = exclude
        self._excluded: set[int] = set()
        self._clipped: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the excluded parameters."""
        refuse_sharded("AdaptiveGradientClipping", trainer, pl_module)
        names = dict(pl_module.named_parameters())
        self._excluded = {id(names[name]) for name in excluded_names(pl_module, self.exclude)}
        self._clipped = None  # It may be left from a fit that raised in a step.

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clips the gradients."""
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) not in self._excluded
        ]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        scales = agc_scales(parameters, gradients, self.clip_factor, self.eps)
        torch._foreach_mul_(gradients, scales)
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._clipped = torch.cat([(scale < 1).float().flatten() for scale in scales]).mean()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the fraction of units that were clipped."""
        clipped, self._clipped = self._clipped, None
        if clipped is not None:
            for logger in trainer.loggers:
                logger.log_metrics({"optim/agc_clipped": float(clipped)}, step=trainer.global_step)


class GradientNoise(Callback):
    """Adds Gaussian noise to the gradients, with a variance that falls over training (arXiv 1511.06807).

    The variance at step t is ``eta / (1 + t)^gamma``. It helps very deep or badly conditioned networks to leave a poor
    initialisation. The noise depends only on the seed and the step: all ranks add the same noise, a resumed run
    continues with the noise of the uninterrupted one, and no other random number of the run changes. It is added after
    accumulation, unscaling and averaging over ranks, and before Lightning's own clipping.

    Args:
        eta: Variance at the first step; the paper tries 0.01, 0.3 and 1.0. 0 adds no noise.
        gamma: Exponent of the variance's decay.
        seed: Seed of the noise; None uses that of ``seed_everything``.

    Raises:
        DloError: If a value is out of range, or the strategy shards parameters.
    """

    def __init__(self, eta: float = 0.01, gamma: float = 0.55, seed: int | None = None) -> None:
        if eta < 0 or gamma < 0:
            raise DloError(
                f"GradientNoise: eta and gamma must be at least 0, got {eta} and {gamma}; 0.01 and 0.55 are usual"
            )
        self.eta = eta
        self.gamma = gamma
        self.seed = seed
        self._seed: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed: a resumed run draws the noise of the uninterrupted run."""
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the seed of the resumed run."""
        self._seed = state_dict["seed"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the seed, the same on all ranks."""
        refuse_sharded("GradientNoise", trainer, pl_module)
        if self._seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
            self._seed = int(trainer.strategy.broadcast(seed))

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Adds the step's noise."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.eta and gradients:
            assert self._seed is not None
            step = trainer.global_step
            add_noise_(gradients, noise_deviation(step, self.eta, self.gamma), self._seed, step)


def excluded_names(pl_module: LightningModule, patterns: list[str] | None) -> list[str]:
    """Returns the names of the parameters that are not clipped.

    Args:
        pl_module: Module with its model built.
        patterns: Patterns as in :class:`AdaptiveGradientClipping`.

    Raises:
        DloError: If a pattern matches no parameter.
    """
    names = [name for name, _ in pl_module.named_parameters()]
    if patterns is None:
        last = last_linear(pl_module)
        return [name for name in names if last is not None and name.startswith(f"{last}.")]
    known = [*names, *(name for name, _ in pl_module.named_modules() if name)]
    return match_names(
        patterns, names, known, "AdaptiveGradientClipping: each pattern of exclude must match a parameter"
    )


def last_linear(pl_module: LightningModule) -> str | None:
    """Returns the name of the output layer: the last linear one, in the plan's head if it has any."""
    linear = [name for name, module in pl_module.named_modules() if isinstance(module, nn.Linear)]
    head: list[str] = []
    if isinstance(pl_module, Task):
        try:
            plan = pl_module.parallel_plan()
        except DloError:  # The plan has no blocks, and so no head.
            plan = ParallelPlan()
        head = [name for name in linear if "head" in plan.owners(name.removeprefix("model."))]
    return next(reversed(head or linear), None)


def refuse_sharded(callback: str, trainer: Trainer, pl_module: LightningModule) -> None:
    """Raises a DloError if a rank holds only shards of parameters or their gradients."""
    sharded = isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy) or shards_state(trainer.strategy)
    if not sharded and torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        sharded = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
    if sharded:
        raise DloError(
            f"{callback}: strategy must keep full parameters and gradients on each rank, got"
            f" {type(trainer.strategy).__name__}, which shards them; set strategy ddp, or leave the callback out"
        )

"""Callbacks that change gradients between the backward pass and the optimizer step: adaptive clipping, and noise.

Lightning clips by norm and by value (``trainer.gradient_clip_val`` and ``gradient_clip_algorithm``). This module has

- adaptive gradient clipping: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without
  Normalization", 2021 (arXiv 2102.06171);
- gradient noise: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks", 2015
  (arXiv 1511.06807).

Noise is drawn by global index. A tensor is divided in chunks of at most :data:`CHUNK` consecutive elements, by its
shape alone. Each chunk has a generator of its own, seeded by the run's seed, the step, the tensor's name and the
chunk's number. A rank draws the chunks that its slices overlap, one at a time: a slice of columns draws full rows, and
drops the others' elements.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dlo_framework.callback import PluginCallback
from dlo_framework.data.sampler import hash64
from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.errors import check_number
from dlo_framework.optimizers import multiply_all
from dlo_framework.shards import Box, Shard, held_boxes
from dlo_framework.strategy_abilities import mesh_groups
from dlo_framework.strategy_contract import contract_of, plain_name
from dlo_framework.watch.media import is_logged, log_scalars
from dlo_plugins.parallel.stepped_gradients import (
    SteppedGradient,
    UnitNorms,
    check_reachable,
    is_divided,
    scale_of,
    stepped_gradients,
    unit_norms,
)
from dlo_plugins.prune.layers import match_or_last

_NOISE = 3  # number of the hash's random stream


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
    return norm_scales(
        [unit_norms(parameter) for parameter in parameters],
        [unit_norms(gradient) for gradient in gradients],
        clip_factor,
        eps,
    )


def norm_scales(weights: list[Tensor], gradients: list[Tensor], clip_factor: float, eps: float) -> list[Tensor]:
    """Returns :func:`agc_scales` from the units' norms, which it overwrites."""
    torch._foreach_clamp_min_(weights, eps)
    multiply_all(weights, clip_factor)
    # A gradient of zero gives infinity, and so 1.
    torch._foreach_div_(weights, gradients)
    torch._foreach_clamp_max_(weights, 1.0)
    return weights


def noise_deviation(step: int, eta: float, gamma: float) -> float:
    """Returns the standard deviation of the noise at a step, counted from 0: sqrt(eta / (1 + step)^gamma)."""
    return math.sqrt(eta / (1 + step) ** gamma)


def add_noise_(gradients: Mapping[str, Shard], deviation: float, seed: int, step: int) -> None:
    """Adds Gaussian noise to gradients in place: a function of seed, step, name and index of an element alone.

    Args:
        gradients: Gradients by the parameter's name, full or in shards, on any devices.
        deviation: Standard deviation of the noise.
        seed: Seed, equal on all ranks.
        step: Number of the optimizer step.
    """
    noise = IndexedNoise(seed, step)
    for name, gradient in gradients.items():
        noise.add_(name, gradient, deviation)


class AdaptiveGradientClipping(PluginCallback):
    """Clips each unit's gradient to a fraction of the norm of its weights (AGC, arXiv 2102.06171).

    A step then changes each unit by at most a fraction of its norm, whatever the loss, the batch size or the depth, so
    networks without normalisation train at large batches. It runs after accumulation, unscaling and averaging over
    ranks, and before Lightning's own clipping. It is equal to ``timm.utils.agc.adaptive_clip_grad``, and faster.

    Under strategies that shard parameters, or cut them along a dim, a unit's norm is that of the full unit: each rank
    adds up the squares of its elements, and one all-reduce of two numbers a unit completes the sums.

    It logs the fraction of clipped units as ``optim/agc_clipped``, every ``trainer.log_every_n_steps``.

    Args:
        clip_factor: Largest ratio of a gradient's norm to its weights' norm that is not clipped. The paper tries 0.01
            to 0.16; larger batches need smaller values, and 0.01 is for batches of 4096.
        eps: Lower bound of the weights' norm, so that units that start at zero can move.
        exclude: Patterns of parameters that are not clipped, named as in a checkpoint, where ``*`` is one name between
            dots: ``[model.head, "**.bias"]``. None excludes the last linear layer, as the paper does: the last one of
            the parallel plan's head in a Task, the last registered one in other modules. ``[]`` clips all.

    Raises:
        DloError: If a value is out of range, a pattern matches no parameter, or gradients are not in memory before a
            step.
    """

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3, exclude: list[str] | None = None) -> None:
        check_number("AdaptiveGradientClipping: clip_factor", clip_factor, "above 0", "the paper has 0.01")
        check_number("AdaptiveGradientClipping: eps", eps, "above 0", "the paper has 0.001")
        self.clip_factor = clip_factor
        self.eps = eps
        self.exclude = exclude
        self._excluded: set[str] = set()
        self._norms: dict[int, UnitNorms] = {}  # of divided parameters, by optimizer
        self._clipped: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy."""
        if stage == "fit":
            check_reachable("AdaptiveGradientClipping", trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the excluded parameters."""
        check_reachable("AdaptiveGradientClipping", trainer)
        names = [name for name, _ in pl_module.named_parameters()]
        rule = "AdaptiveGradientClipping: each pattern of exclude must match a parameter"
        self._excluded = {plain_name(name) for name in match_or_last(self.exclude, names, pl_module, rule)}
        self._norms = {}
        self._clipped = None  # It may be left from a fit that raised in a step.

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clips the gradients."""
        logs = is_logged(trainer, trainer.global_step + 1)
        stepped = [one for one in stepped_gradients(trainer.strategy, optimizer) if one.name not in self._excluded]
        if is_divided(trainer.strategy, stepped):
            self._clip_divided(trainer.strategy, optimizer, stepped, logs)
            return
        gradients: Any = [one.gradient for one in stepped if one.gradient is not None]
        weights: Any = [one.weight for one in stepped if one.gradient is not None]
        if gradients:
            scales = agc_scales(weights, gradients, self.clip_factor * scale_of(trainer.strategy), self.eps)
            multiply_all(gradients, scales)
            if logs:
                self._clipped = torch.cat([(scale < 1).float().flatten() for scale in scales]).mean()

    def _clip_divided(self, strategy: Any, optimizer: Any, stepped: list[SteppedGradient], logs: bool) -> None:
        """Clips gradients of which ranks have slices; called on all ranks."""
        inner = torch_optimizer(optimizer)
        names = [name for group in contract_of(strategy).group_names(inner) for name in group]
        names = [name for name in dict.fromkeys(names) if name not in self._excluded]
        norms = self._norms.get(id(inner))
        if norms is None or norms.names != names:  # Parameter groups may be added during a run.
            mesh = mesh_groups(contract_of(strategy))
            group = mesh.replica_group if mesh is not None and mesh.separate_copies else None
            self._norms[id(inner)] = norms = UnitNorms(names, stepped, strategy.root_device, group)
        weights, gradients, is_used = norms.measure(stepped)
        (scales,) = norm_scales([weights], [gradients], self.clip_factor * scale_of(strategy), self.eps)
        norms.scale_(stepped, scales)
        if logs:
            self._clipped = (scales < 1)[is_used].float().mean()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Logs the fraction of units that were clipped."""
        clipped, self._clipped = self._clipped, None
        if clipped is not None:
            log_scalars(trainer, {"optim/agc_clipped": float(clipped)})


class GradientNoise(PluginCallback):
    """Adds Gaussian noise to the gradients, with a variance that falls over training (arXiv 1511.06807).

    The variance at step t is ``eta / (1 + t)^gamma``. It helps very deep or badly conditioned networks to leave a poor
    initialisation. The noise of an element depends only on the seed, the step, the parameter's name and the element's
    index. So every strategy adds the noise of one process, a resumed run adds the noise of a run without a stop, and no
    other random number of the run changes. The noise is added after accumulation, unscaling and averaging over ranks,
    and before Lightning's own clipping.

    Args:
        eta: Variance at the first step; the paper tries 0.01, 0.3 and 1.0. 0 adds no noise.
        gamma: Exponent of the variance's decay.
        seed: Seed of the noise; None uses that of ``seed_everything``.

    Raises:
        DloError: If a value is out of range, or gradients are not in memory before a step.
    """

    example = "{seed: 1}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    needs_equal_copies = True

    def __init__(self, eta: float = 0.01, gamma: float = 0.55, seed: int | None = None) -> None:
        check_number("GradientNoise: eta", eta, "at least 0", "0.01 is usual")
        check_number("GradientNoise: gamma", gamma, "at least 0", "0.55 is usual")
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy."""
        if stage == "fit":
            check_reachable("GradientNoise", trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the seed, the same on all ranks."""
        check_reachable("GradientNoise", trainer)
        if self._seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
            self._seed = int(trainer.strategy.broadcast(seed))

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Adds the step's noise."""
        if not self.eta:
            return
        assert self._seed is not None
        step = trainer.global_step
        deviation = noise_deviation(step, self.eta, self.gamma) * scale_of(trainer.strategy)
        stepped = stepped_gradients(trainer.strategy, optimizer)
        gradients = {one.name: one.gradient for one in stepped if one.gradient is not None}
        add_noise_(gradients, deviation, self._seed, step)


#: Most elements of a chunk: 4 MB in single precision. The noise depends on it.
CHUNK = 1 << 20


class IndexedNoise:
    """Standard Gaussian noise that is a function of seed, step, name and index.

    Numbers are drawn in single precision. Another type of device draws other numbers.

    Args:
        seed: Seed of the run.
        step: Number of the optimizer step.
    """

    def __init__(self, seed: int, step: int) -> None:
        self._mixed = int(hash64(np.array([step]), seed, _NOISE)[0] >> np.uint64(1))
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def add_(self, name: str, shard: Shard, deviation: float) -> None:
        """Adds noise to a shard in place.

        Args:
            name: Name of the full tensor.
            shard: Shard of the tensor.
            deviation: Standard deviation.
        """
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
        drawn: tuple[int, Tensor] | None = None  # A flat slice's boxes may share a chunk.
        for box, view in held_boxes(shard):
            for number, shape, inside, part in overlaps(tuple(shard.shape), box):
                if drawn is None or drawn[0] != number:
                    drawn = number, self._draw(key, number, shape, view)
                noise, target = drawn[1], view
                for dim, (start, size) in enumerate(zip(inside.offsets, inside.sizes, strict=True)):
                    noise = noise.narrow(dim, start, size)
                for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                    target = target.narrow(dim, start, size)
                target.add_(noise.reshape(target.shape), alpha=deviation)

    def _draw(self, key: int, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        seed = int(hash64(np.array([number]), self._mixed ^ key, _NOISE)[0] >> np.uint64(1))
        generator = self._generators[device].manual_seed(seed)
        dtype = torch.complex64 if like.is_complex() else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def overlaps(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, tuple[int, ...], Box, Box]]:
    """Yields the chunks of a tensor that a box overlaps, in row-major order.

    A chunk is a range along the first dim whose later dims are at most :data:`CHUNK` elements; the dims before have one
    index each.

    Args:
        shape: Shape of the tensor.
        box: Box in the tensor.

    Yields:
        The chunk's number, its shape, the overlap in the chunk, and the overlap in the box.
    """
    if not shape:
        yield 0, (1,), Box((0,), (1,)), Box((), ())
        return
    if box.numel == 0:
        return
    along = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= CHUNK)
    inner = shape[along + 1 :]
    length = max(1, CHUNK // max(1, math.prod(inner)))
    per_index = -(-shape[along] // length)  # chunks of one index of the dims before
    first, last = box.offsets[along], box.offsets[along] + box.sizes[along]
    for outer in np.ndindex(*box.sizes[:along]):
        place = 0
        for dim, at in enumerate(outer):
            place = place * shape[dim] + box.offsets[dim] + at
        for chunk in range(first // length, (last - 1) // length + 1):
            start, stop = max(first, chunk * length), min(last, (chunk + 1) * length)
            size = min(length, shape[along] - chunk * length)
            inside = Box((start - chunk * length, *box.offsets[along + 1 :]), (stop - start, *box.sizes[along + 1 :]))
            part = Box(
                (*outer, start - first, *(0 for _ in inner)),
                (*(1 for _ in outer), stop - start, *box.sizes[along + 1 :]),
            )
            yield place * per_index + chunk, (size, *inner), inside, part

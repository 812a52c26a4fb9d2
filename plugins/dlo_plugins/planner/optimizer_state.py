"""Measures the state of a task's optimizer: the bytes that it keeps for each trained parameter.

The optimizer takes a step on tensors like the parameters: fake tensors of their shapes, or where it does not run on
those, such as one whose state is quantised, real tensors of smaller shapes. So it is right for a user's own optimizer.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.batches import tree_leaves
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensorMode
from dlo_plugins.sharding.optimizer_probe import Kind, probe_optimizer, shrink_shape, step_trial

#: Moments of Adam, each of the parameter's size.
_MOMENTS = 2.0


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer.

    Attributes:
        name: Class name of the optimizer.
        moments: Bytes of the state for each byte of trained parameters; 2 for Adam.
        kind: Kind of the optimizer, as the probe of a strategy finds it.
        error: Why the optimizer could not be built, so that Adam is assumed; empty where it could.
    """

    name: str = "Adam"
    moments: float = _MOMENTS
    kind: Kind = "elementwise"
    error: str = ""


def measure_optimizer(module: Any, dtype: torch.dtype) -> OptimizerState:
    """Returns the state of a module's optimizer.

    Args:
        module: Task or LightningModule with its model on the meta device.
        dtype: Dtype of the stored parameters.

    Raises:
        DloError: The optimizer cannot take a step on tensors like the parameters.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizers = list(_find_optimizers(module.configure_optimizers()))
    except DloError:
        raise
    except Exception as error:
        return OptimizerState(error=f"{type(error).__name__}: {error}")
    if not optimizers:
        return OptimizerState(error=f"configure_optimizers of {type(module).__name__} returned none")
    stored = kept = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            shapes = Counter(tuple(p.shape) for p in group["params"] if p.requires_grad and p.numel())
            for shape, count in shapes.items():
                size = math.prod(shape) * dtype.itemsize
                stored += count * size
                kept += count * size * _moments(optimizer, group, shape, dtype)
    kinds = {probe_optimizer(optimizer) for optimizer in optimizers}
    kind: Kind = next((kind for kind in ("all", "tensor") if kind in kinds), "elementwise")
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return OptimizerState(" and ".join(names), kept / stored if stored else 0.0, kind)


def _find_optimizers(found: Any) -> Iterator[Optimizer]:
    """Yields the optimizers in what `configure_optimizers` returns."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, dict):
        yield from _find_optimizers(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for entry in found:
            yield from _find_optimizers(entry)


def _moments(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Returns the bytes of the state for each byte of a parameter."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # torch prints the traceback of each operator that fails.
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _step(optimizer, group, shape, dtype)
    except Exception:
        try:
            return _step(optimizer, group, shrink_shape(shape), dtype)
        except Exception as error:
            raise DloError(
                f"optimizer must take a step on a tensor of shape {list(shape)} to be planned, got"
                f" {type(error).__name__} from {type(optimizer).__name__}: {error}; use another optimizer"
            ) from error
    finally:
        log.setLevel(level)


def _step(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    weight = torch.ones(shape, dtype=dtype)
    trial, (parameter,) = step_trial(optimizer, group, [weight], [[torch.ones(shape, dtype=dtype)]])
    held = [trial, *(value for value in vars(trial).values() if isinstance(value, Optimizer))]
    return sum(_state_bytes(one, parameter) for one in held) / parameter.nbytes


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    state: Any = optimizer.state if isinstance(optimizer.state, defaultdict | dict) else {}
    leaves = tree_leaves(dict(state.get(parameter, {})))
    return sum(_bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 1)


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; of a subclass those of the tensors that it is made of, but for its levels."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    names = [name for name in tensor.__tensor_flatten__()[0] if name != "qmap"]
    return sum(_bytes(getattr(tensor, name)) for name in names)

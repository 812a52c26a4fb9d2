"""Gradients that an optimizer is about to step with, as shards of the parameters, under every strategy.

A strategy says which tensors its optimizers step on this rank, and which slices of the parameters they are. A callback
that changes gradients by unit or by element writes to these slices; nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.errors import DloError
from dlo_framework.shards import Shard
from dlo_framework.strategy_contract import ForeignStrategy, contract_of


@dataclass(frozen=True)
class SteppedGradient:
    """This rank's shards of a parameter and of its gradient.

    Attributes:
        name: Name of the parameter.
        weight: Shard that the optimizer steps.
        gradient: Shard of the gradient, which the optimizer steps with; None for a parameter without one.
    """

    name: str
    weight: Shard
    gradient: Shard | None


def stepped_gradients(strategy: Any, optimizer: Any) -> list[SteppedGradient]:
    """Returns the shards that an optimizer steps on this rank, to be called before a step.

    Args:
        strategy: Strategy of the run.
        optimizer: Optimizer of the run.
    """
    contract, found = contract_of(strategy), []
    for name, tensor in contract.optimizer_tensors(torch_optimizer(optimizer)).items():
        gradient = None if tensor.grad is None else contract.as_shard(name, tensor, tensor.grad)
        found.append(SteppedGradient(name, contract.as_shard(name, tensor, tensor.detach()), gradient))
    return found


def is_divided(strategy: Any, stepped: list[SteppedGradient]) -> bool:
    """Returns whether ranks step slices of the parameters; the same on all ranks."""
    if (contract_of(strategy).zero_stage or 0) > 0:
        return True
    return any(isinstance(one.weight, DTensor) or not isinstance(one.weight, Tensor) for one in stepped)


def check_reachable(callback: str, trainer: Trainer) -> None:
    """Checks that a callback can read and change the gradients that the strategy steps with.

    Raises:
        DloError: The strategy is one of Lightning's that joins parameters in flat tensors, or keeps gradients where no
            callback can change them.
    """
    strategy = trainer.strategy
    contract, name = contract_of(strategy), type(trainer.strategy).__name__
    if isinstance(contract, ForeignStrategy) and isinstance(strategy, FSDPStrategy | DeepSpeedStrategy):
        raise DloError(
            f"{callback}: strategy must say which slices of the parameters a rank steps, got {name} of Lightning, which"
            " joins parameters in flat tensors; use ddp, zero1 to zero3, fsdp, MeshStrategy or DeepSpeedBridge"
        )
    if contract.gradient_scale() is None:
        raise DloError(
            f"{callback}: gradients must be in memory before a step, got {name} with offload_optimizer: nvme, which"
            " keeps them on the disk; set offload_optimizer: cpu, or leave the callback out"
        )


def scale_of(strategy: Any) -> float:
    """Returns the factor by which the gradients are scaled that callbacks see before a step."""
    scale = contract_of(strategy).gradient_scale()
    assert scale is not None, "check_reachable comes first"
    return scale


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which a device sums norms over ranks: double precision where it has it."""
    return torch.float32 if device.type == "mps" else torch.float64

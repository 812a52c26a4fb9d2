"""Abilities of strategies: what callbacks, tasks and commands ask of some strategies, each a class to derive from.

``strategy.ability(Replicas)`` returns the strategy, or the engine behind it, or raises an error with the reason and the
fix; ``strategy.find_ability(Replicas)`` returns None instead. See :mod:`dlo_framework.ability`.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.ability import Ability, HasAbilities
from dlo_framework.mesh import MeshSpec
from dlo_framework.norms import total_norm


class Replicas(Ability):
    """Copies of parameters and optimizer state that can train by themselves, as DiLoCo's do."""

    feature = "training copies apart"
    missing = "it averages the gradients of all ranks itself; use ddp, or mesh with dp_replicate of 2 or more"
    #: Reason and fix of a strategy whose ranks hold one copy.
    one_copy = (
        "its ranks hold one copy of the model together; set dp_replicate of mesh (replicate of fsdp) to 2 or more, or"
        " use ddp"
    )
    #: Whether each copy trains by itself.
    separates = False

    def separate_copies(self) -> None:
        """Makes each copy train by itself: gradients are averaged over a copy's ranks. Called before setup."""
        self.separates = True

    def replica_norm(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the 2-norm over a copy's ranks of tensors laid out as parameters, each element counted once.

        Args:
            values: Tensors in the shape of this rank's shards of parameters, by parameter name; called on all ranks.
        """
        return total_norm(values.values())


class ArrangesRanks(Ability):
    """Ranks along the axes of a mesh."""

    feature = "a mesh of ranks"
    missing = "its ranks have no axes; use mesh, fsdp or hsdp"

    @property
    @abstractmethod
    def groups(self) -> Any:
        """Process groups of the mesh (:class:`~dlo_framework.distributed.groups.MeshGroups`)."""

    @abstractmethod
    def mesh_spec(self) -> MeshSpec:
        """Returns the mesh of the run, also before its ranks start."""

    @abstractmethod
    def describe(self, module: Any, datamodule: Any = None, *, dtype: torch.dtype | None = None) -> Any:
        """Returns a description of each rank's shards for ``dlo mesh``; nothing is started or allocated.

        Args:
            module: LightningModule of the run.
            datamodule: Datamodule of the run; None without one.
            dtype: Dtype of the floating-point parameters; None for that of the Trainer's precision.
        """

    @abstractmethod
    def check_predict(self, module: Any) -> None:
        """Checks that a model can predict on the mesh, before any process starts.

        Raises:
            DloError: It cannot.
        """

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        spec = self.mesh_spec()
        return spec.data_size * spec.cp

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the model."""
        spec = self.mesh_spec()
        return spec.world_size // spec.dp_replicate


class SeparateParameters(Ability):
    """Parameters, or shards of them, that the optimizer steps by name; modules are as the user wrote them."""

    feature = "access to parameters by name"
    missing = "it joins parameters in flat tensors, or wraps modules; use ddp, zero1 to zero3, fsdp or mesh"


class SeparateSteps(Ability):
    """Optimizer that steps each parameter by itself, all groups at once, and may write to it between steps."""

    feature = "a step of each parameter by itself"
    missing = "its engine steps copies of its own, joined in flat tensors; use ddp, zero1 to zero3, fsdp or mesh"


class BlocksInPlace(Ability):
    """Blocks whose parameters stay in place while a block runs, in any order and also outside of steps."""

    feature = "a block that runs by itself"
    missing = "it gathers a block's parameters layer by layer, in the order of the first step; use zero3 or fsdp"


class StepsInBackward(Ability):
    """Gradients that are complete one after the other, and can be stepped and dropped during backward."""

    feature = "a step in backward"
    missing = "nothing says when a parameter's gradient is complete; use ddp, zero1 to zero3, or fsdp"

    @abstractmethod
    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in each backward with tensors that the optimizer steps, when their gradients are complete.

        Args:
            ready: Function of stepped tensors that have gradients, averaged over the ranks; it drops the gradients.
                None ends the calls.
        """


class DelayedGradients(Ability):
    """Steps that apply the gradients of the step before, and return its loss, the same on all ranks."""

    feature = "a delay of gradients"
    missing = "each step applies its own gradients; use a schedule that delays them, such as PipeDream2BW"

    @abstractmethod
    def delayed_gradients(self) -> tuple[Mapping[str, Any] | None, float] | None:
        """Returns the gradients that the next step applies, in a checkpoint's form, and the loss of the last batch.

        None before the first step; no gradients in the first accumulation. Called on all ranks.
        """

    @abstractmethod
    def restore_delayed_gradients(self, saved: Mapping[str, Any] | None, loss: float) -> None:
        """Restores the gradients that the next step applies.

        Args:
            saved: Gradients of a checkpoint, by parameter name; None in the first accumulation of a run.
            loss: Loss of the last batch.
        """


class Pipelined(Ability):
    """Model that is cut into a pipeline's stages."""

    feature = "a forward through stages"
    missing = "it has no pipeline; use mesh with pp of 2 or more"
    #: Engine of the stages, with their schedule.
    pipeline: Any
    #: Number of micro-batches of each rank's batch.
    micro_batches: int
    #: Number of stages that this rank runs in a forward.
    stages_per_rank: int

    @abstractmethod
    def run_on_all_ranks(self, part: Any, forward: Callable[[Any], Tensor]) -> Tensor:
        """Runs a forward through the stages, without gradients; returns its output on all ranks of the pipeline.

        Args:
            part: Tensors of one micro-batch, the same on all ranks, whose shapes decide those of hidden states.
            forward: Function that calls the model on the micro-batch and returns a tensor, which each stage runs up to
                its end.
        """

    @abstractmethod
    def register_loss_hook(self, hook: Callable[[Tensor], None]) -> bool:
        """Calls a function with each micro-batch's loss on the rank that computes it.

        Args:
            hook: Function of a scalar on the device, in the graph; it must not wait for the device.

        Returns:
            Whether it does; False where the loss that a step returns is that of the gradients which it applies.
        """


class CommunicationHooks(Ability):
    """Full gradients on each rank, which torch's DistributedDataParallel reduces by a communication hook."""

    feature = "compression of full gradients"
    missing = "its ranks have shards of the gradients, or Lightning reduces them; use ddp, or method: bf16"


class HalfPrecisionGradients(Ability):
    """Gradients that the strategy reduces itself, and can send in a half precision."""

    feature = "sending gradients in half precision"
    missing = "its gradients are not reduced by dlo; use ddp, zero1 to zero3, fsdp or mesh"

    @abstractmethod
    def send_gradients_in(self, dtype: torch.dtype) -> None:
        """Makes data-parallel ranks send their gradients in a half precision; called before the strategy's setup.

        Args:
            dtype: Dtype of what is sent; gradients are summed in it, and kept in their own.

        Raises:
            DloError: An option of the strategy sets another dtype.
        """


class SplitsSequences(Ability):
    """Sequences whose tokens are divided among ranks."""

    feature = "a division of sequences"
    missing = "each rank has full sequences; use mesh with cp of 2 or more"

    @property
    @abstractmethod
    def sequence_parallel(self) -> bool:
        """Whether ranks of tensor parallelism share the tokens between their layers."""

    @abstractmethod
    def sequence_multiple(self) -> int:
        """Returns the number of which a sequence's length must be a multiple: 1 where no ranks share sequences."""

    @abstractmethod
    def full_sequences(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the model takes full sequences, also where ranks share those of the steps."""


def mesh_spec(strategy: HasAbilities) -> MeshSpec | None:
    """Returns the mesh of a strategy, also before its ranks start; None without one."""
    mesh = strategy.find_ability(ArrangesRanks)
    return None if mesh is None else mesh.mesh_spec()


def mesh_groups(strategy: HasAbilities) -> Any:
    """Returns the process groups of a strategy's mesh; None without one."""
    mesh = strategy.find_ability(ArrangesRanks)
    return None if mesh is None else mesh.groups


def full_sequences(strategy: HasAbilities) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a strategy's model takes full sequences."""
    split = strategy.find_ability(SplitsSequences)
    return contextlib.nullcontext() if split is None else split.full_sequences()


class CanonicalCheckpoints(Ability):
    """Checkpoints of dlo's, with the state of model and optimizers by parameter name."""

    feature = "optimizer state by parameter name"
    missing = "Lightning keeps the state and writes the checkpoints; use dlo's ddp, zero1 to zero3, fsdp or mesh"
    #: Whether checkpoints are written in the background while training goes on; ``--run.async_checkpoints`` sets it.
    async_checkpoints = False
    #: ``canonical``, or ``lightning``: a single file that rank 0 writes, as Lightning's own strategies do;
    #: ``--run.checkpoint_format`` sets it.
    checkpoint_format = "canonical"

    @abstractmethod
    def check_checkpoints(self, loggers: Iterable[Logger] = ()) -> None:
        """Checks that checkpoints of the chosen format can be written, and uploaded by the run's loggers."""

    @abstractmethod
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint, whose files the ranks share out to check them; called on all ranks."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state: ``{"state": {name: {key: value}}, "param_groups": [...]}``."""

    @abstractmethod
    def saving_in_background(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose checkpoints are written in the background, where their format can be."""

    @property
    @abstractmethod
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""


class ExplainsNaN(Ability):
    """Causes of a NaN loss that lie in how the strategy gathers weights."""

    feature = "a hint at the cause of a NaN"
    missing = "it has no cause of its own"

    @property
    @abstractmethod
    def nan_hint(self) -> str:
        """Cause and fix for an error message; empty if none is known."""

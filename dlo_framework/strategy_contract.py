"""The contract of a strategy: every question that the framework asks one, with the answer of a strategy that has none.

dlo's strategies implement it (:class:`~dlo_framework.distributed.checkpointing.CanonicalStrategy`). Lightning's own,
and yours that derive from those, know nothing of it: :func:`contract_of` wraps each once in :class:`ForeignStrategy`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.ability import Ability, HasAbilities
from dlo_framework.local_memory import state_bytes
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.placed_model import PlacedModel
from dlo_framework.shards import Shard
from dlo_framework.strategy_abilities import BlocksInPlace, Replicas, SeparateParameters, SeparateSteps, mesh_groups


class PlacesSecondModel(Ability):
    """Second model beside the run's: by default each rank has the full one."""

    feature = "a second model"
    missing = "it has no place for one; use ddp, zero, fsdp or mesh"

    def check_frozen(self, task: Any, datamodule: Any = None) -> None:
        """Checks that the strategy can place a frozen task beside the run's model, before any process starts.

        Args:
            task: Task with its model on the meta device.
            datamodule: Datamodule of the run; None without one.

        Raises:
            DloError: if it cannot; the message computes the nearest options that work.
        """

    def place_frozen(
        self, task: Any, *, dtype: torch.dtype | None = None, offload: bool = False, loads_weights: bool = False
    ) -> PlacedModel:
        """Places a frozen task beside the run's model; called on all ranks, after the run's model has been set up.

        The default gives each rank the full model.

        Args:
            task: Task with its model, in evaluation mode, without a trainer and without trainable parameters; on the
                meta device if the strategy builds models there.
            dtype: Dtype of its parameters and inputs, in which it computes; None for the Trainer's precision.
            offload: Whether its parameters are in CPU memory, and are copied to the device for each forward.
            loads_weights: Whether :meth:`PlacedModel.load` follows, so that no initial values are needed.
        """
        strategy = _strategy_of(self)
        context = strategy.precision_plugin.forward_context if dtype is None else contextlib.nullcontext
        return PlacedModel(task, strategy.root_device, context=context, offload=offload)

    def place_own(self) -> PlacedModel:
        """Returns the run's own model for forwards outside of steps, such as those of an average of its weights."""
        strategy = _strategy_of(self)
        context = strategy.precision_plugin.forward_context
        return PlacedModel(_module_of(self), strategy.root_device, context=context, moved=True)


class StrategyContract(HasAbilities, PlacesSecondModel, SeparateParameters, SeparateSteps, BlocksInPlace):
    """Questions that callbacks, tasks, checkpoints and commands ask of a strategy.

    The defaults are those of a strategy that leaves each rank a full copy of parameters, gradients and optimizer state
    in the module's own tensors. `None` means "not known": the caller then works it out from those, or leaves it out.
    """

    # --- what is divided, and among whom -------------------------------------------------------------------

    #: Stage of the ZeRO paper (arXiv 1910.02054) of what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3
    #: parameters too; None if unknown.
    zero_stage: int | None = None
    #: Whether parameters are in half precision, with sharded master weights in single precision.
    has_master_weights = False
    #: Whether a forward outside of a step must be called on all ranks: parameters may be gathered for it.
    forward_needs_all_ranks = False
    #: Whether gradients are reduced in several buckets also where the default size has room for all, as `dlo parity`
    #: asks; a bucket's size that a user has set stays.
    several_buckets = False
    #: Checkpoint that ``dlo`` has found for the run. Lightning's trainer knows it only once it is loaded, after setup
    #: where state is sharded.
    checkpoint_to_load: str | None = None

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that see different data, for a mean without a barrier; None to ask ``reduce``."""
        if not dist.is_initialized():
            return None
        groups = mesh_groups(self)
        if groups is not None:
            return groups.data_group
        return dist.group.WORLD if type(_strategy_of(self)).reduce is DDPStrategy.reduce else None

    def attach_counts(self, batch: Any) -> Any:
        """Returns a batch that is still on the CPU, with the counts that the strategy needs attached to it.

        Counting before the transfer avoids a wait for the device.
        """
        return batch

    # --- state of the run ----------------------------------------------------------------------------------
    def local_tensors(self) -> list[Tensor]:
        """Returns this rank's shards of parameters and buffers, of which an average of the weights is taken."""
        module = _module_of(self)
        tensors = [*module.parameters(), *module.buffers()]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def refresh(self) -> None:
        """Called after :meth:`local_tensors` have been written to from outside."""

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank, by parameter name, in the optimizer's order.

        Args:
            optimizer: Optimizer of the run.
        """
        names = {id(parameter): plain_name(name) for name, parameter in _module_of(self).named_parameters()}
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {names.get(id(tensor), f"unnamed.{number}"): tensor for number, tensor in enumerate(stepped)}

    def as_shard(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a tensor that is laid out as a stepped one, as a shard with its place in the full tensor.

        Args:
            name: Name of the parameter.
            tensor: Tensor that the optimizer steps for the parameter.
            value: Tensor in the shape of ``tensor``: itself, its gradient, or state of the optimizer.
        """
        return value

    def finish_step(self) -> None:
        """Waits for communication and copies of the last step, before state is read or written; called on all ranks."""

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes on this rank of ``parameters``, ``gradients`` and ``optimizer`` state, as they are now."""
        return state_bytes(_module_of(self).parameters(), _strategy_of(self).optimizers)

    def full_size(self, name: str, parameter: Tensor) -> int:
        """Returns the number of elements of a parameter's full tensor.

        Args:
            name: Name of the parameter.
            parameter: Parameter of the module, which may be a slice or empty.
        """
        return parameter.numel()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once; on all ranks."""
        return total_norm(collect_gradients(optimizer), _strategy_of(self).root_device)

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too; the same on all ranks.

        Args:
            optimizer: Optimizer of the run.
        """
        names = {id(tensor): name for name, tensor in self.optimizer_tensors(optimizer).items()}
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]

    def gradient_scale(self) -> float | None:
        """Returns the factor by which gradients are scaled when callbacks see them before a step.

        None if callbacks cannot change the gradients that the strategy steps with.
        """
        return 1.0

    def accumulated_gradients(self) -> Mapping[str, Any]:
        """Returns the gradients of an unfinished accumulation by parameter name, their mean over the ranks.

        Tensors or shards, in the form that checkpoints take; called on all ranks. Ranks may have used different
        parameters: each returns those that any has used.
        """
        strategy = _strategy_of(self)
        named = [(plain_name(name), p) for name, p in _module_of(self).named_parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for _, p in named], dtype=torch.int32, device=strategy.root_device)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            used = strategy.reduce(used, reduce_op="max")
        return {
            name: strategy.reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), reduce_op="mean")
            for (name, p), somewhere in zip(named, used.tolist(), strict=True)
            if somewhere
        }

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation.

        Args:
            saved: Gradients of a checkpoint, by parameter name; a mesh's ranks may have saved more under other names.
        """
        for name, parameter in _module_of(self).named_parameters():
            if name in saved:
                parameter.grad = with_strides_of(parameter, saved[name].to(parameter.device))

    # --- before processes start ----------------------------------------------------------------------------

    def check_model(
        self, module: Any, datamodule: Any = None, *, trains: bool = True, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Checks that the strategy can run a model, before any process starts.

        Args:
            module: LightningModule of the run.
            datamodule: Datamodule of the run; None without one.
            trains: Whether the run trains; evaluation needs no gradients.
            callbacks: Callbacks of the run.

        Raises:
            DloError: if it cannot; the message computes the nearest options that work.
        """


class ForeignStrategy(StrategyContract):
    """Adapter for a strategy that does not implement the contract.

    Args:
        strategy: Strategy of Lightning, or one derived from Lightning's.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = weakref.ref(strategy)
        self._has_engine = strategy.handles_gradient_accumulation
        if (isinstance(strategy, DDPStrategy) or has_one_process(strategy)) and not self._has_engine:
            self.zero_stage = 0

    @property
    def strategy(self) -> Strategy:
        """The strategy that is wrapped."""
        strategy = self._strategy()
        assert strategy is not None, "the Trainer that has the strategy is gone"
        return strategy

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities of Lightning's strategies, and those from whose classes a user's own derives."""
        strategy: Any = self.strategy
        kinds = [kind for kind in type(strategy).__mro__ if issubclass(kind, Ability) and kind is not Ability]
        abilities: dict[type[Ability], Ability | str] = dict.fromkeys(kinds, strategy)
        if has_one_process(self.strategy):
            abilities[Replicas] = Replicas()
        if self.strategy.restore_checkpoint_after_setup and not isinstance(self.strategy, ModelParallelStrategy):
            abilities[SeparateParameters] = SeparateParameters.missing
        if self._has_engine:
            abilities[SeparateSteps] = SeparateSteps.missing
        return abilities

    @property
    def ability_owner(self) -> str:
        """Name of the wrapped strategy."""
        return type(self.strategy).__name__

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm of the full gradients; under torch's FSDP 1 from a clipping without a limit."""
        model = self.strategy.model
        return model.clip_grad_norm_(math.inf) if isinstance(model, FSDP1) else super().gradient_norm(optimizer)


_WRAPPED: weakref.WeakKeyDictionary[Strategy, ForeignStrategy] = weakref.WeakKeyDictionary()


def plain_name(name: str) -> str:
    """Returns a tensor's name without the prefix that ``torch.compile(module)`` adds."""
    return name.replace("_orig_mod.", "")


def with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient in the strides of its parameter, which fused optimizers on CUDA require."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def has_one_process(strategy: Strategy) -> bool:
    """Returns whether a strategy is for one process alone, whatever the Trainer's devices."""
    return isinstance(strategy, SingleDeviceStrategy)


def data_share(strategy: object) -> tuple[int, int]:
    """Returns this rank's share of a strategy's samples: its number, and the number of shares.

    Ranks that together hold one copy of the model (tensor, pipeline and context parallelism) have the same share.
    """
    if not isinstance(strategy, ParallelStrategy):
        return 0, 1
    share = strategy.distributed_sampler_kwargs
    return int(share["rank"]), int(share["num_replicas"])


def contract_of(strategy: Strategy) -> StrategyContract:
    """Returns a strategy's answers: the strategy itself if it implements the contract, else its adapter."""
    if isinstance(strategy, StrategyContract):
        return strategy
    contract = _WRAPPED.get(strategy)
    if contract is None:
        contract = _WRAPPED[strategy] = ForeignStrategy(strategy)
    return contract


def loads_checkpoint(trainer: Trainer) -> bool:
    """Returns whether a run loads a checkpoint, asked at setup or later.

    In Python, where state is sharded, it is known at setup if ``trainer.ckpt_path`` was set before the fit.
    """
    return (trainer.ckpt_path or contract_of(trainer.strategy).checkpoint_to_load) is not None


def _strategy_of(contract: object) -> Any:
    return contract.strategy if isinstance(contract, ForeignStrategy) else contract


def _module_of(contract: object) -> LightningModule:
    module = _strategy_of(contract).lightning_module
    assert isinstance(module, LightningModule), "a strategy is asked after `connect` has given it its module"
    return module

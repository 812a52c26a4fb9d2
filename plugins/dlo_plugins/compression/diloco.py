"""Callback that trains each copy of the model by itself, and joins the copies by an outer optimizer: DiLoCo.

DiLoCo: Distributed Low-Communication Training of Language Models. Douillard et al., 2023, arXiv 2311.08105. A copy is
the paper's worker, an island of well-connected devices: a rank under ddp, the ranks of `dp_shard`, `tp`, `pp`, `cp` and
`ep` on a mesh. Departure: a run has no phase of plain data parallelism before; the paper starts from a pretrained model
in some experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dlo_framework.callback import PluginCallback, traits_of
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.errors import DloError, agreed_errors, check_number
from dlo_framework.local_memory import local_tensor
from dlo_framework.optimizers import copy_all, multiply_all
from dlo_framework.shards import FlatShard, Shard, local_data, shard_maker
from dlo_framework.strategy_abilities import Replicas, mesh_groups
from dlo_framework.strategy_contract import contract_of, plain_name
from dlo_framework.watch.media import log_scalars
from dlo_plugins.compression.ddp_hooks import average_tensors

#: Key of the state in a checkpoint.
KEY = "diloco"


class DiLoCo(PluginCallback):
    """Trains each copy of the model by itself for some steps, and then joins the copies by an outer step: DiLoCo.

    In a period, each copy steps the run's own optimizer on its own gradients, and nothing is sent to another. At its
    end, the copies' mean change since the last outer step is the gradient of an outer SGD with Nesterov momentum, whose
    result all copies take over; the state of the inner optimizer stays with its copy. A rank sends its shard of the
    weights once a period: 1 / `period` of the bytes of plain data parallelism.

    A copy is a rank under strategy `ddp`; on a mesh with `dp_replicate` of 2 or more (`hsdp`; `replicate` of fsdp), it
    is the ranks that share one, with `dp_shard`, `tp`, `pp`, `cp` and `ep` inside. It works with automatic
    optimization, with accumulation, in single precision and `bf16-mixed`, and in one process, where it is the outer
    step alone. Validation and checkpoints have the shared weights, those of the last outer step. A run resumes exactly
    on the same copies and shards: the checkpoint has each copy's weights and optimizer state too. On others, the copies
    continue from the shared weights and the mean optimizer state. The last period of a run may be shorter.

    Logged after each outer step: ``diloco/change``, the 2-norm of the mean change.

    Args:
        period: Number of optimizer steps between outer steps; the paper's is 500.
        outer_lr: Learning rate of the outer step; the paper's is 0.7.
        outer_momentum: Nesterov momentum of the outer step; the paper's is 0.9. With 0 and `outer_lr: 1`, weights are
            averaged, as in local SGD.

    Attributes:
        outer: Outer optimizer; None before training.

    Raises:
        DloError: If a value is out of range, the ranks hold one copy of the model together, the precision is
            `16-mixed`, optimization is manual, or another callback needs the same weights on all ranks.
    """

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    #: Why `dlo parity` trains without it.
    left_out_of_parity = "its copies train by themselves between outer steps, unlike one process"

    def __init__(self, period: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        check_number("DiLoCo: period", period, "at least 1 step", "the paper has 500")
        check_number("DiLoCo: outer_lr", outer_lr, "above 0", "the paper has 0.7")
        check_number("DiLoCo: outer_momentum", outer_momentum, "at least 0 and below 1", "the paper has 0.9")
        self.period, self.outer_lr, self.outer_momentum = period, outer_lr, outer_momentum
        self.outer: OuterOptimizer | None = None
        self._loaded: Any = None
        self._local: list[Tensor] | None = None  # Of this copy, while the shared weights are in the module.
        self._stepped = 0  # Optimizer steps at the last outer step, or at the run's start.

    # --- before training -----------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the strategy, the precision and the other callbacks, before processes start.

        Raises:
            DloError: If no copy can train by itself.
        """
        contract_of(trainer.strategy).ability(Replicas, "DiLoCo")
        if str(trainer.precision) in ("16-mixed", "16"):
            raise DloError(
                f"DiLoCo: precision must not need a loss scaler, which would skip steps on some copies, got"
                f" {trainer.precision}; set precision: bf16-mixed"
            )
        if not module.automatic_optimization:
            raise DloError(
                f"DiLoCo: optimization must be automatic, got {type(module).__name__}, which optimizes manually; leave"
                " the callback out"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if traits_of(callback).needs_equal_copies:
                raise DloError(
                    f"DiLoCo: {type(callback).__name__} must be left out, as the copies' weights and gradients differ"
                    " within a period, got both; leave one of them out"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run, checks this one, and makes the strategy keep the copies' gradients apart."""
        self.outer = self._loaded = self._local = None
        if stage == "fit":
            with agreed_errors():
                self.check_run(trainer, pl_module)
        replicas = contract_of(trainer.strategy).find_ability(Replicas)
        if replicas is not None:  # In evaluation too: it may shard the module first.
            replicas.separate_copies()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the module's weights as the shared ones, and restores those of this copy in a resumed run."""
        loaded, self._loaded = self._loaded, None
        self.outer = OuterOptimizer(_weights(trainer, pl_module), self.outer_lr, self.outer_momentum)
        self._stepped = trainer.global_step
        if loaded is not None:
            self._restore(trainer, pl_module, loaded)

    # --- training ------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Takes an outer step at the end of a period."""
        if trainer.global_step - self._stepped >= self.period:
            self._outer_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the last outer step, so that all copies end with the same weights."""
        if trainer.global_step > self._stepped:
            self._outer_step(trainer, pl_module)

    @torch.no_grad()
    def _outer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.outer is not None
        contract, weights = contract_of(trainer.strategy), _weights(trainer, pl_module)
        replicas = contract.ability(Replicas)
        names = [name for name, _ in _trained(pl_module)]
        means = [weight.clone() for weight in weights]
        if _place(trainer).copies > 1:
            average_tensors(means, pl_module.device, _place(trainer).group)
        norm = self.outer.step(means, lambda change: replicas.replica_norm(dict(zip(names, change, strict=True))))
        copy_all(weights, self.outer.shared)
        contract.refresh()
        self._stepped = trainer.global_step
        if trainer.loggers:
            log_scalars(trainer, {"diloco/change": float(norm)})

    # --- evaluation ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the shared weights into the module."""
        if self.outer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        weights = _weights(trainer, pl_module)
        self._local = [weight.clone() for weight in weights]
        copy_all(weights, self.outer.shared)
        contract_of(trainer.strategy).refresh()

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts this copy's weights back."""
        local, self._local = self._local, None
        if local is not None:
            copy_all(_weights(trainer, pl_module), local)
            contract_of(trainer.strategy).refresh()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Puts this copy's weights back, if a validation has failed."""
        self.on_validation_end(trainer, pl_module)

    # --- state ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the shared weights and the mean optimizer state, and beside them each copy's own, and the momenta."""
        if self.outer is None:
            return
        place, state = _place(trainer), checkpoint["state_dict"]
        local = dict(_local_state(trainer, pl_module, self._local))
        makers = {name: shard_maker(state[name]) for name, _ in _trained(pl_module)}
        momenta = zip(makers.items(), self.outer.momenta, strict=True)
        checkpoint[KEY] = {
            "ranks": place.copies,
            "mesh": place.mesh,
            "stepped": self._stepped,
            "momenta": {name: make(value) for (name, make), value in momenta},
            "local": {f"{place.prefix}{name}": place.row(value) for name, value in local.items()},
        }
        shared = dict(zip((id(p) for _, p in _trained(pl_module)), self.outer.shared, strict=True))
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):  # A tied one has several names.
            if id(parameter) in shared and plain_name(name) in state:
                state[plain_name(name)] = shard_maker(state[plain_name(name)])(shared[id(parameter)])
        if place.copies > 1:
            _average_states(checkpoint.get("optimizer_states", ()), pl_module.device, place.group)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the state until the optimizer exists."""
        self._loaded = checkpoint.get(KEY)

    @torch.no_grad()
    def _restore(self, trainer: Trainer, pl_module: LightningModule, saved: Any) -> None:
        assert self.outer is not None
        place, momenta = _place(trainer), as_lazy_state_dict(saved["momenta"])
        state = trainer.strategy.lightning_module_state_dict()
        for (name, _), value in zip(_trained(pl_module), self.outer.momenta, strict=True):
            momenta.read_into(name, shard_maker(state[name])(value))
        if (saved["ranks"], saved.get("mesh", "")) != (place.copies, place.mesh):
            rank_zero_warn(
                f"DiLoCo: the checkpoint has the weights and optimizer states of {_describe(saved)}, and this run has"
                f" {_describe({'ranks': place.copies, 'mesh': place.mesh})}: they continue from the shared weights and"
                " the mean optimizer state"
            )
            return
        self._stepped = saved["stepped"]
        rows = as_lazy_state_dict(saved["local"])
        for name, value in _local_state(trainer, pl_module, None):
            own = torch.empty(value.numel(), dtype=value.dtype)
            rows.read_into(f"{place.prefix}{name}", place.row(own))
            value.copy_(own.view(value.shape))
        contract_of(trainer.strategy).refresh()


@dataclass(frozen=True)
class _Place:
    """This rank's place among the copies of the model.

    Attributes:
        copies: Number of copies.
        index: Number of this rank's copy.
        group: Ranks with the same shards in all copies; None for all ranks.
        mesh: Mesh of a copy and its copies, as text; empty without one.
        prefix: Prefix of names of which each rank of a copy has its own; empty where a copy is one rank.
    """

    copies: int
    index: int = 0
    group: dist.ProcessGroup | None = None
    mesh: str = ""
    prefix: str = ""

    def row(self, value: Tensor) -> Shard:
        """Returns a copy's tensor as its row of one for all copies."""
        flat = value.detach().reshape(-1)
        if self.copies == 1:
            return flat
        return FlatShard(flat, torch.Size((self.copies, flat.numel())), self.index * flat.numel())


def _place(trainer: Trainer) -> _Place:
    groups = mesh_groups(contract_of(trainer.strategy))
    if groups is None:
        return _Place(trainer.world_size, trainer.global_rank)
    own = groups.replica_group
    prefix = f"{dist.get_rank(own)}." if dist.get_world_size(own) > 1 else ""
    copies, index = groups.spec.dp_replicate, groups.coordinates.dp_replicate
    mesh = str(groups.spec) if prefix else ""
    return _Place(copies, index, groups.group("dp_replicate"), mesh, prefix)


def _describe(place: dict[str, Any]) -> str:
    return f"{place['ranks']} {'copies of ' + place['mesh'] if place.get('mesh') else 'ranks'}"


def _trained(module: LightningModule) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the trainable parameters, without those of other stages of a pipeline."""
    named = module.named_parameters()
    return [(plain_name(name), p) for name, p in named if p.requires_grad and not p.is_meta]


def _weights(trainer: Trainer, module: LightningModule) -> list[Tensor]:
    """Returns the memory of this rank's shards of the trainable parameters; call ``refresh`` after a write."""
    contract_of(trainer.strategy).refresh()  # Parameters that are gathered are others.
    return [local_tensor(parameter) for _, parameter in _trained(module)]


def _local_state(
    trainer: Trainer, module: LightningModule, weights: Sequence[Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's weights and optimizer state, the tensors themselves, by name.

    Args:
        trainer: Trainer of the run.
        module: Module that trains.
        weights: Weights of this rank, where the module has the shared ones; None where it has its own.
    """
    own = _weights(trainer, module) if weights is None else weights
    tensors = [(f"weight.{name}", value) for (name, _), value in zip(_trained(module), own, strict=True)]
    for which, optimizer in enumerate(trainer.optimizers):
        for name, tensor in contract_of(trainer.strategy).optimizer_tensors(optimizer).items():
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor):
                    tensors.append((f"optimizer.{which}.{key}.{name}", value))
    yield from ((name, value) for name, value in tensors if value.numel())


def _average_states(states: Any, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Replaces the optimizer states of a checkpoint by ones with the copies' mean."""
    means = []
    for optimizer in states:
        for values in optimizer["state"].values():
            for key, value in values.items():
                if isinstance(value, Shard) and value.dtype.is_floating_point:
                    means.append(local_data(value).clone())
                    values[key] = shard_maker(value)(means[-1])
    average_tensors(means, device, group)


class OuterOptimizer:
    """Shared weights, and their momentum.

    One step, with the mean `w` of the copies' weights: `d = shared - w`, `m = momentum * m + d`, and
    `shared -= lr * (d + momentum * m)`; this is torch's SGD with Nesterov momentum for the gradient `d`.

    Args:
        weights: Initial weights, which are copied.
        lr: Learning rate of the outer step.
        momentum: Momentum of the outer step.

    Attributes:
        shared: Shared weights, the same on all ranks.
        momenta: Momenta, in the order of the weights.
    """

    def __init__(self, weights: Sequence[Tensor], lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.shared = [weight.detach().clone() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self.shared]

    @torch.no_grad()
    def step(self, means: list[Tensor], norm_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Steps the shared weights; returns the norm of the mean change, a scalar.

        Args:
            means: Means of the copies' weights; they are overwritten.
            norm_of: Function of the change that returns its norm.
        """
        torch._foreach_sub_(means, self.shared)  # the change, with the opposite sign of the gradient
        norm = norm_of(means)
        multiply_all(self.momenta, self.momentum)
        torch._foreach_sub_(self.momenta, means)
        torch._foreach_add_(self.shared, means, alpha=self.lr)
        torch._foreach_add_(self.shared, self.momenta, alpha=-self.lr * self.momentum)
        return norm

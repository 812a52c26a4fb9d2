"""Callback that trains each rank by itself, and joins the ranks by an outer optimizer: DiLoCo.

DiLoCo: Distributed Low-Communication Training of Language Models. Douillard et al., 2023, arXiv 2311.08105. Departure:
a run has no phase of plain data parallelism before; the paper starts from a pretrained model in some experiments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.distributed.checkpointing import plain_name
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError, mark_agreed
from dlo_plugins.callbacks.gradient_compression import GradientCompression
from dlo_plugins.callbacks.gradients import GradientNoise
from dlo_plugins.callbacks.prune import Prune
from dlo_plugins.compression.ddp_hooks import average_tensors
from dlo_plugins.compression.error_memory import row_of_rank
from dlo_plugins.curricula.outer_optimizer import OuterOptimizer

#: Key of the state in a checkpoint.
KEY = "diloco"
#: Callbacks that need the ranks' weights or gradients to be the same in each step.
_APART = (WeightEMA, GradientCompression, GradientNoise, Prune)


class DiLoCo(Callback):
    """Trains each rank by itself for some steps, and then joins the ranks by an outer step: DiLoCo.

    In a period, each rank steps the run's own optimizer on its own gradients, and nothing is sent. At its end, the
    ranks' mean change since the last outer step is the gradient of an outer SGD with Nesterov momentum, whose result
    all ranks take over; the state of the inner optimizer stays on its rank. A rank sends its weights once a period:
    1 / `period` of the bytes of plain data parallelism.

    It works with strategy `ddp` and automatic optimization, with accumulation, in single precision and `bf16-mixed`,
    and in one process, where it is the outer step alone. Validation and checkpoints have the shared weights, those of
    the last outer step. A run resumes exactly on the same number of ranks: the checkpoint has each rank's weights and
    optimizer state too. On another number, the ranks continue from the shared weights and the mean optimizer state.
    The last period of a run may be shorter.

    Logged after each outer step: ``diloco/change``, the 2-norm of the mean change.

    Args:
        period: Number of optimizer steps between outer steps; the paper's is 500.
        outer_lr: Learning rate of the outer step; the paper's is 0.7.
        outer_momentum: Nesterov momentum of the outer step; the paper's is 0.9. With 0 and `outer_lr: 1`, weights are
            averaged, as in local SGD.

    Attributes:
        outer: Outer optimizer; None before training.

    Raises:
        DloError: If a value is out of range, the strategy is not `ddp`, the precision is `16-mixed`, optimization is
            manual, or another callback needs the same weights on all ranks.
    """

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    #: Why `dlo parity` trains without it.
    left_out_of_parity = "its ranks train by themselves between outer steps, unlike one process"

    def __init__(self, period: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        if period < 1:
            raise DloError(f"DiLoCo: period must be at least 1 step, got {period}; the paper has 500")
        if outer_lr <= 0:
            raise DloError(f"DiLoCo: outer_lr must be above 0, got {outer_lr}; the paper has 0.7")
        if not 0 <= outer_momentum < 1:
            raise DloError(
                f"DiLoCo: outer_momentum must be at least 0 and below 1, got {outer_momentum}; the paper has 0.9"
            )
        self.period, self.outer_lr, self.outer_momentum = period, outer_lr, outer_momentum
        self.outer: OuterOptimizer | None = None
        self._loaded: Any = None
        self._local: list[Tensor] | None = None  # Of this rank, while the shared weights are in the module.
        self._stepped = 0  # Optimizer steps at the last outer step, or at the run's start.

    # --- before training -----------------------------------------------------------------------------------

    def check_run(
        self, trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None = None
    ) -> None:
        """Checks the strategy, the precision and the other callbacks, before processes start.

        Raises:
            DloError: If ranks cannot train by themselves.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, DataParallelStrategy | SingleDeviceStrategy):
            raise DloError(
                "DiLoCo: strategy must be ddp, in which each rank can train by itself, got"
                f" {type(strategy).__name__}, which shards the state or reduces gradients itself; set strategy ddp"
            )
        if str(trainer.precision) in ("16-mixed", "16"):
            raise DloError(
                f"DiLoCo: precision must not need a loss scaler, which would skip steps on some ranks, got"
                f" {trainer.precision}; set precision: bf16-mixed"
            )
        if not module.automatic_optimization:
            raise DloError(
                f"DiLoCo: optimization must be automatic, got {type(module).__name__}, which optimizes manually; leave"
                " the callback out"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _APART):
                raise DloError(
                    f"DiLoCo: {type(callback).__name__} must be left out, as the ranks' weights and gradients differ"
                    " within a period, got both; leave one of them out"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run, and checks this one."""
        self.outer = self._loaded = self._local = None
        if stage == "fit":
            try:
                self.check_run(trainer, pl_module)
            except DloError as error:
                raise mark_agreed(error) from None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes DDP leave gradients on their rank."""
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # torch checks a hook's annotations, and accepts a hook without any.
            model.register_comm_hook(None, lambda state, bucket: _unreduced(bucket.buffer()))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the module's weights as the shared ones, and restores those of this rank in a resumed run."""
        loaded, self._loaded = self._loaded, None
        weights = [parameter for _, parameter in _trained(pl_module)]
        self.outer = OuterOptimizer(weights, self.outer_lr, self.outer_momentum)
        self._stepped = trainer.global_step
        if loaded is not None:
            self._restore(trainer, pl_module, loaded)

    # --- training ------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes an outer step at the end of a period."""
        if trainer.global_step - self._stepped >= self.period:
            self._outer_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the last outer step, so that all ranks end with the same weights."""
        if trainer.global_step > self._stepped:
            self._outer_step(trainer, pl_module)

    @torch.no_grad()
    def _outer_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.outer is not None
        weights = [parameter.data for _, parameter in _trained(pl_module)]
        means = [weight.clone() for weight in weights]
        if trainer.world_size > 1:
            average_tensors(means, pl_module.device)
        norm = self.outer.step(means)
        torch._foreach_copy_(weights, self.outer.shared)
        self._stepped = trainer.global_step
        if trainer.loggers:
            for logger in trainer.loggers:
                logger.log_metrics({"diloco/change": float(norm)}, step=trainer.global_step)

    # --- evaluation ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the shared weights into the module."""
        if self.outer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        weights = [parameter.data for _, parameter in _trained(pl_module)]
        self._local = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self.outer.shared)

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts this rank's weights back."""
        local, self._local = self._local, None
        if local is not None:
            torch._foreach_copy_([parameter.data for _, parameter in _trained(pl_module)], local)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts this rank's weights back, if a validation has failed."""
        self.on_validation_end(trainer, pl_module)

    # --- state ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the shared weights and the mean optimizer state, and beside them each rank's own, and the momenta."""
        if self.outer is None:
            return
        local = dict(_local_state(trainer, pl_module, self._local))
        checkpoint[KEY] = {
            "ranks": trainer.world_size,
            "stepped": self._stepped,
            "momenta": {name: value for (name, _), value in zip(_trained(pl_module), self.outer.momenta, strict=True)},
            "local": {name: _row(value, trainer.world_size) for name, value in local.items()},
        }
        state = checkpoint["state_dict"]
        for (name, _), shared in zip(_trained(pl_module), self.outer.shared, strict=True):
            state[name] = shared
        if trainer.world_size > 1:
            _average_states(checkpoint.get("optimizer_states", ()), pl_module.device)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the state until the optimizer exists."""
        self._loaded = checkpoint.get(KEY)

    @torch.no_grad()
    def _restore(self, trainer: Trainer, pl_module: LightningModule, saved: Any) -> None:
        assert self.outer is not None
        momenta = as_lazy_state_dict(saved["momenta"])
        for (name, _), value in zip(_trained(pl_module), self.outer.momenta, strict=True):
            momenta.read_into(name, value)
        if saved["ranks"] != trainer.world_size:
            rank_zero_warn(
                f"DiLoCo: the checkpoint has the weights and optimizer states of {saved['ranks']} ranks, and this run"
                f" has {trainer.world_size}: they continue from the shared weights and the mean optimizer state"
            )
            return
        self._stepped = saved["stepped"]
        rows = as_lazy_state_dict(saved["local"])
        for name, value in _local_state(trainer, pl_module, None):
            own = torch.empty(max(1, value.numel()), dtype=value.dtype)
            rows.read_into(name, _row(own, trainer.world_size))
            value.copy_(own.view(value.shape))


def _trained(module: LightningModule) -> list[tuple[str, torch.nn.Parameter]]:
    return [(plain_name(name), p) for name, p in module.named_parameters() if p.requires_grad]


def _local_state(
    trainer: Trainer, module: LightningModule, weights: list[Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's weights and optimizer state, the tensors themselves, by name.

    Args:
        trainer: Trainer of the run.
        module: Module that trains.
        weights: Weights of this rank, where the module has the shared ones; None where it has its own.
    """
    trained = _trained(module)
    for number, (name, parameter) in enumerate(trained):
        yield f"weight.{name}", parameter.data if weights is None else weights[number]
    for which, optimizer in enumerate(trainer.optimizers):
        for name, parameter in trained:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{which}.{key}.{name}", value


def _row(value: Tensor, ranks: int) -> Any:
    """Returns a rank's tensor as its row of one for all ranks."""
    flat = value.detach().reshape(-1)
    return row_of_rank(flat) if ranks > 1 else flat


def _average_states(states: Any, device: torch.device) -> None:
    """Replaces the optimizer states of a checkpoint by copies with the ranks' mean."""
    copies = []
    for optimizer in states:
        for values in optimizer["state"].values():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    values[key] = value.detach().clone()
                    copies.append(values[key])
    average_tensors(copies, device)


def _unreduced(buffer: Tensor) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future

"""Exponential moving average (EMA) of a model's weights, used in place of the weights in evaluation.

The averaging is that of Polyak & Juditsky (1992), as in vision recipes. Lightning's own `EMAWeightAveraging` (2.6.6) is
not used because it keeps the average on the CPU when a GPU trains (it is built before the model moves), builds the
model outside the strategy's context, tests the un-averaged weights with `trainer.test` after a fit, and loses the
trained weights in a checkpoint that is saved after training ends or during validation: such a run does not resume bit
for bit. The layout of a checkpoint is Lightning's: `state_dict` holds the average, for evaluation and export, and
`current_model_state` the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dlo_framework.errors import DloError
from dlo_framework.strategy_contract import contract_of

_CURRENT = "current_model_state"
_STATE = "averaging_state"
#: Digits of the average beyond those of half-precision weights, in parts that such weights can hold.
_REST = "averaging_rest"


class WeightEMA(Callback):
    """Averages the weights after each optimizer step, and evaluates and saves the average.

    Validation uses the average; training continues with the trained weights. When training ends, the module holds the
    average. It works under any strategy that keeps parameters as tensors of the module: each rank averages its shards.
    The average of half-precision weights (``bf16-true``) is kept in fp32, because the change of a step would be lost to
    rounding.

    Args:
        decay: Weight of the old average in each step, in [0, 1). The average spans about `1 / (1 - decay)` steps:
            0.9999 suits runs of 100,000 steps or more; in shorter ones it would still contain the start.

    Raises:
        DloError: if `decay` is outside [0, 1).
    """

    #: Shows ExactResume that this callback loads the trained weights of a checkpoint that has both.
    loads_trained_weights = True

    def __init__(self, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise DloError(f"the EMA decay must be in [0, 1), got {decay}; 0.9999 is usual, 0.999 for short runs")
        self.decay = decay
        self._update = get_ema_multi_avg_fn(decay)
        self._average: list[Tensor] | None = None
        self._trained: list[Tensor] = []  # walking the modules in each step would cost more than the average
        self._updates = 0
        self._last_step = 0
        self._swapped = False
        self._aside: dict[int, Tensor] = {}  # trained weights beyond the average's dtype, while it is swapped in
        #: Functions of the trainer that change the average in the module's tensors when it is put there, such as one
        #: that keeps pruned weights at zero; called on all ranks.
        self.restrictions: list[Callable[[Trainer], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops an earlier run's average: its module holds it."""
        self.restrictions = []
        self._average, self._updates, self._swapped, self._aside = None, 0, False, {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the average from the module, which has just loaded it, and loads the trained weights."""
        if _CURRENT not in checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return
        held = contract_of(trainer.strategy).local_tensors()
        self._average = [_to_fp32(tensor) for tensor in held]
        for rest in checkpoint.get(_REST, {}).values():
            for theirs in held:
                theirs.detach().zero_()
            trainer.strategy.load_model_state_dict({**checkpoint, "state_dict": rest}, strict=False)
            for ours, theirs in zip(self._average, held, strict=True):
                ours += theirs.detach()
        self._updates = int(checkpoint[_STATE]["n_averaged"])
        trained = {**checkpoint, "state_dict": checkpoint[_CURRENT]}
        trainer.strategy.load_model_state_dict(trained, strict=pl_module.strict_loading)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Initialises the average to the weights, now on their device, unless it was loaded."""
        tensors = self._trained = contract_of(trainer.strategy).local_tensors()
        self._last_step = trainer.global_step
        loaded = self._average
        if loaded is None:
            self._average = [_to_fp32(tensor) for tensor in tensors]
        else:
            self._average = [old.to(new.device) for old, new in zip(loaded, tensors, strict=True)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average if the batch ended an optimizer step."""
        if trainer.global_step == self._last_step or self._average is None:
            return
        self._last_step = trainer.global_step
        contract_of(trainer.strategy).finish_step()
        with torch.no_grad():
            self._step(self._trained, self._average)
        self._updates += 1

    def _step(self, tensors: list[Tensor], average: list[Tensor]) -> None:
        pairs = list(zip(average, tensors, strict=True))
        together = [(a, t) for a, t in pairs if t.is_floating_point() and a.dtype == t.dtype and self._updates > 0]
        if together:
            self._update([a for a, _ in together], [t for _, t in together], self._updates)
        for old, new in pairs:
            # Before the first update the average is only the initial value; counters are never averaged.
            if self._updates == 0 or not (new.is_floating_point() or new.is_complex()):
                old.copy_(new)
            elif old.dtype != new.dtype or new.is_complex():
                self._update([old], [new.to(old.dtype)], self._updates)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average into the module."""
        self._swap_to(trainer, pl_module, average=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the trained weights back into the module."""
        self._swap_to(trainer, pl_module, average=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the average in the module; a checkpoint saved from here on still holds both."""
        self._trained = []
        self._swap_to(trainer, pl_module, average=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts the trained weights back if a validation was interrupted."""
        self._swap_to(trainer, pl_module, average=False)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the average as `state_dict` and the trained weights beside it."""
        if self._average is None:
            return
        checkpoint[_CURRENT], checkpoint["state_dict"] = self._both_states(trainer, pl_module, checkpoint)
        checkpoint[_STATE] = {"n_averaged": self._updates}
        rest = self._residual(trainer, pl_module)
        if rest:
            checkpoint[_REST] = rest

    def average_only(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a weights-only checkpoint, for which Lightning calls no callback."""
        if self._average is not None and _CURRENT not in checkpoint:
            _, checkpoint["state_dict"] = self._both_states(trainer, pl_module, checkpoint)

    def _both_states(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the trained and the averaged state; the module keeps the one that it holds.

        The strategy gathers the state that the module does not hold in the same way as the one that it does.
        """
        held, swapped = checkpoint["state_dict"], self._swapped
        self._swap_to(trainer, pl_module, average=not swapped)
        other = {name: value.detach().clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
        self._swap_to(trainer, pl_module, average=swapped)
        return (other, held) if swapped else (held, other)

    @torch.no_grad()
    def _residual(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, dict[str, Tensor]]:
        """Returns the average's digits beyond the weights' own; two more parts make up fp32."""
        assert self._average is not None
        held = contract_of(trainer.strategy).local_tensors()
        wide = [(ours, theirs) for ours, theirs in zip(self._average, held, strict=True) if ours.dtype != theirs.dtype]
        kept = [theirs.clone() for _, theirs in wide]
        left = [ours - ours.to(theirs.dtype) for ours, theirs in wide]
        parts: dict[str, dict[str, Tensor]] = {}
        for number in ("1", "2") if wide else ():
            for part, (_, theirs) in zip(left, wide, strict=True):
                theirs.copy_(part)
                part -= theirs
            contract_of(trainer.strategy).refresh()
            state = trainer.strategy.lightning_module_state_dict()
            parts[number] = {name: value.detach().clone() for name, value in state.items() if _is_half(value)}
        for own, (_, theirs) in zip(kept, wide, strict=True):
            theirs.copy_(own)
        if wide:
            contract_of(trainer.strategy).refresh()
        return parts

    @torch.no_grad()
    def _swap_to(self, trainer: Trainer, pl_module: LightningModule, *, average: bool) -> None:
        if self._average is None or self._swapped == average:
            return
        for number, (ours, theirs) in enumerate(
            zip(self._average, contract_of(trainer.strategy).local_tensors(), strict=True)
        ):
            if not average and number in self._aside:
                theirs.copy_(self._aside.pop(number))
                continue
            held = theirs.detach().clone()
            theirs.copy_(ours)
            if ours.dtype == theirs.dtype:
                ours.copy_(held)
            else:
                self._aside[number] = held
        self._swapped = average
        for restrict in self.restrictions if average else ():
            restrict(trainer)
        contract_of(trainer.strategy).refresh()


def _is_half(value: Any) -> bool:
    return getattr(value, "dtype", None) in (torch.bfloat16, torch.float16)


def _to_fp32(tensor: Tensor) -> Tensor:
    """Returns a copy, in fp32 for a half-precision tensor."""
    return tensor.detach().to(torch.float32 if _is_half(tensor) else tensor.dtype, copy=True)

"""Exponential moving average of a module's weights, of each rank's shards, which can be put in the weights' place.

The averaging is that of Polyak & Juditsky (1992), as in vision recipes. The average of half-precision weights is kept
in fp32, because the change of a step would be lost to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dlo_framework.strategy_contract import contract_of


class WeightAverage:
    """Average of the tensors in which this rank holds the run's model.

    Args:
        decay: Weight of the old average in each update, in [0, 1).
        copies_buffers: Whether buffers are copied, and not averaged.

    Attributes:
        tensors: Average on this rank, while the module holds the trained weights; None before :meth:`begin`.
        updates: Number of updates; the first one copies the weights.
        swapped: Whether the module holds the average, and :attr:`tensors` the trained weights.
        restrictions: Functions of the strategy that change the average in the module's tensors when it is put there,
            such as one that keeps pruned weights at zero; called on all ranks.
    """

    def __init__(self, decay: float, *, copies_buffers: bool = False) -> None:
        self.tensors: list[Tensor] | None = None
        self.updates = 0
        self.swapped = False
        self.restrictions: list[Callable[[Any], None]] = []
        self._copies_buffers = copies_buffers
        self._update = get_ema_multi_avg_fn(decay)
        self._aside: dict[int, Tensor] = {}  # trained weights beyond the average's dtype, while it is swapped in

    def begin(self, held: list[Tensor]) -> None:
        """Initialises the average to the weights, unless it was loaded; a loaded one moves to their device.

        Args:
            held: Tensors of the strategy's ``local_tensors``.
        """
        if self.tensors is None:
            self.tensors = [_to_fp32(tensor) for tensor in held]
        else:
            self.tensors = [old.to(new.device) for old, new in zip(self.tensors, held, strict=True)]

    @torch.no_grad()
    def update(self, held: list[Tensor], buffers: int = 0) -> None:
        """Updates the average.

        Args:
            held: Tensors of the strategy's ``local_tensors``, after the strategy has finished its step.
            buffers: Number of the last of them that are buffers.
        """
        assert self.tensors is not None
        assert not self.swapped
        pairs = list(zip(self.tensors, held, strict=True))
        copied = len(pairs) - (buffers if self._copies_buffers else 0)
        averaged = pairs[:copied]
        together = [(a, t) for a, t in averaged if t.is_floating_point() and a.dtype == t.dtype and self.updates > 0]
        if together:
            self._update([a for a, _ in together], [t for _, t in together], self.updates)
        for number, (old, new) in enumerate(pairs):
            # Before the first update the average is only the initial value; counters are never averaged.
            if self.updates == 0 or number >= copied or not (new.is_floating_point() or new.is_complex()):
                old.copy_(new)
            elif old.dtype != new.dtype or new.is_complex():
                self._update([old], [new.to(old.dtype)], self.updates)
        self.updates += 1

    @torch.no_grad()
    def swap(self, strategy: Any, *, average: bool) -> None:
        """Puts the average, or the trained weights, into the module; does nothing if it holds them."""
        if self.tensors is None or self.swapped == average:
            return
        held_now = contract_of(strategy).local_tensors()
        for number, (ours, theirs) in enumerate(zip(self.tensors, held_now, strict=True)):
            if not average and number in self._aside:
                theirs.copy_(self._aside.pop(number))
                continue
            held = theirs.detach().clone()
            theirs.copy_(ours)
            if ours.dtype == theirs.dtype:
                ours.copy_(held)
            else:
                self._aside[number] = held
        self.swapped = average
        for restrict in self.restrictions if average else ():
            restrict(strategy)
        contract_of(strategy).refresh()

    # --- checkpoints ---------------------------------------------------------------------------------------

    def other_state(self, strategy: Any) -> dict[str, Any]:
        """Returns the state by name that the module does not hold now, gathered as the one that it holds is."""
        swapped = self.swapped
        self.swap(strategy, average=not swapped)
        other = {name: value.detach().clone() for name, value in strategy.lightning_module_state_dict().items()}
        self.swap(strategy, average=swapped)
        return other

    @torch.no_grad()
    def residual(self, strategy: Any) -> dict[str, dict[str, Any]]:
        """Returns the average's digits beyond the weights' own; two more parts of half precision make up fp32."""
        assert self.tensors is not None
        contract = contract_of(strategy)
        held = contract.local_tensors()
        wide = [(ours, theirs) for ours, theirs in zip(self.tensors, held, strict=True) if ours.dtype != theirs.dtype]
        kept = [theirs.clone() for _, theirs in wide]
        left = [ours - ours.to(theirs.dtype) for ours, theirs in wide]
        parts: dict[str, dict[str, Any]] = {}
        for number in ("1", "2") if wide else ():
            for part, (_, theirs) in zip(left, wide, strict=True):
                theirs.copy_(part)
                part -= theirs
            contract.refresh()
            state = strategy.lightning_module_state_dict()
            parts[number] = {name: value.detach().clone() for name, value in state.items() if _is_half(value)}
        for own, (_, theirs) in zip(kept, wide, strict=True):
            theirs.copy_(own)
        if wide:
            contract.refresh()
        return parts

    @torch.no_grad()
    def load(self, strategy: Any, checkpoint: dict[str, Any], rest: Mapping[str, Any], updates: int) -> None:
        """Takes the average from the module, which has just loaded it.

        Args:
            strategy: Strategy of the run.
            checkpoint: Checkpoint that is being loaded.
            rest: Result of :meth:`residual`.
            updates: Number of updates.
        """
        held = contract_of(strategy).local_tensors()
        self.tensors = [_to_fp32(tensor) for tensor in held]
        kept = [theirs.detach().clone() for theirs in held] if rest else []  # Not all buffers are in checkpoints.
        for state in rest.values():
            for theirs in held:
                theirs.detach().zero_()
            strategy.load_model_state_dict({**checkpoint, "state_dict": state}, strict=False)
            for ours, theirs in zip(self.tensors, held, strict=True):
                ours += theirs.detach()
        for own, theirs in zip(kept, held, strict=False):
            theirs.detach().copy_(own)
        self.updates = updates


def _is_half(value: Any) -> bool:
    return getattr(value, "dtype", None) in (torch.bfloat16, torch.float16)


def _to_fp32(tensor: Tensor) -> Tensor:
    """Returns a copy, in fp32 for a half-precision tensor."""
    return tensor.detach().to(torch.float32 if _is_half(tensor) else tensor.dtype, copy=True)

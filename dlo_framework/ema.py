"""Exponential moving average (EMA) of a model's weights, used in place of the weights in evaluation.

The averaging is that of Polyak & Juditsky (1992), as in vision recipes, of each rank's shards. The average of half-
precision weights is kept in fp32, because the change of a step would be lost to rounding. Lightning's own
`EMAWeightAveraging` (2.6.6) is not used because it keeps the average on the CPU when a GPU trains (it is built before
the model moves), builds the model outside the strategy's context, tests the un-averaged weights with `trainer.test`
after a fit, and loses the trained weights in a checkpoint that is saved after training ends or during validation: such
a run does not resume bit for bit. The layout of a checkpoint is Lightning's: `state_dict` holds the average, for
evaluation and export, and `current_model_state` the trained weights.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.checkpoint import load
from dlo_framework.errors import check_number
from dlo_framework.placed_model import PlacedModel, evaluation_mode
from dlo_framework.strategy_contract import PlacesSecondModel, contract_of

_CURRENT = "current_model_state"
_STATE = "averaging_state"
#: Digits of the average beyond those of half-precision weights, in parts that such weights can hold.
_REST = "averaging_rest"


class WeightEMA(PluginCallback):
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

    example = "{decay: 0.8}"

    #: Shows ExactResume that this callback loads the trained weights of a checkpoint that has both.
    loads_trained_weights = True
    needs_equal_copies = True

    def __init__(self, decay: float = 0.9999) -> None:
        check_number("the EMA decay", decay, "at least 0 and below 1", "0.9999 is usual, 0.999 for short runs")
        self.decay = decay
        self._held = WeightAverage(decay)
        self._trained: list[Tensor] = []  # walking the modules in each step would cost more than the average
        self._last_step = 0

    @property
    def _average(self) -> list[Tensor] | None:
        return self._held.tensors

    @property
    def restrictions(self) -> list[Callable[[Any], None]]:
        """Functions of the strategy that change the average when it is put into the module; dropped by a new run."""
        return self._held.restrictions

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drops an earlier run's average: its module holds it."""
        self._held = WeightAverage(self.decay)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the average from the module, which has just loaded it, and loads the trained weights."""
        if _CURRENT not in checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return
        rest, updates = checkpoint.get(_REST, {}), int(checkpoint[_STATE]["n_averaged"])
        self._held.load(trainer.strategy, checkpoint, rest, updates)
        trained = {**checkpoint, "state_dict": checkpoint[_CURRENT]}
        trainer.strategy.load_model_state_dict(trained, strict=pl_module.strict_loading)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Initialises the average to the weights, now on their device, unless it was loaded."""
        tensors = self._trained = contract_of(trainer.strategy).local_tensors()
        self._last_step = trainer.global_step
        self._held.begin(tensors)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch ended an optimizer step."""
        if trainer.global_step == self._last_step or self._average is None:
            return
        self._last_step = trainer.global_step
        contract_of(trainer.strategy).finish_step()
        self._held.update(self._trained)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average into the module."""
        self._held.swap(trainer.strategy, average=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the trained weights back into the module."""
        self._held.swap(trainer.strategy, average=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the average in the module; a checkpoint saved from here on still holds both."""
        self._trained = []
        self._held.swap(trainer.strategy, average=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts the trained weights back if a validation was interrupted."""
        self._held.swap(trainer.strategy, average=False)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the average as `state_dict` and the trained weights beside it."""
        if self._average is None:
            return
        checkpoint[_CURRENT], checkpoint["state_dict"] = self._both_states(trainer, checkpoint)
        checkpoint[_STATE] = {"n_averaged": self._held.updates}
        rest = self._held.residual(trainer.strategy)
        if rest:
            checkpoint[_REST] = rest

    def average_only(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a weights-only checkpoint, for which Lightning calls no callback."""
        if self._average is not None and _CURRENT not in checkpoint:
            _, checkpoint["state_dict"] = self._both_states(trainer, checkpoint)

    def _both_states(self, trainer: Trainer, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the trained and the averaged state; the module keeps the one that it holds."""
        held, other = checkpoint["state_dict"], self._held.other_state(trainer.strategy)
        return (other, held) if self._held.swapped else (held, other)


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
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_fp32(tensor: Tensor) -> Tensor:
    """Returns a copy, in fp32 for a half-precision tensor."""
    return tensor.detach().to(torch.float32 if _is_half(tensor) else tensor.dtype, copy=True)


_KEY = "frozen_average"


class AveragedModel(PlacedModel, PluginCallback):
    """Average of the run's own model, whose weights are in the model for the time of a forward.

    Each rank keeps the average of its shards; the model's own placement computes with them. The average is in the
    run's checkpoints.

    Args:
        trainer: Trainer of the run, whose model has been set up.
        decay: Weight of the old average in each optimizer step, in [0, 1).
    """

    def __init__(self, trainer: Trainer, decay: float) -> None:
        self._trainer, self._contract = trainer, contract_of(trainer.strategy)
        self._inner = self._contract.ability(PlacesSecondModel).place_own()
        super().__init__(self._inner.task, self._inner.device, moved=True)
        self._average = WeightAverage(decay, copies_buffers=True)
        self._head: Any = None
        callbacks = callbacks_of(trainer)
        self._key = f"{_KEY}_{sum(isinstance(callback, AveragedModel) for callback in callbacks)}"
        self._last_step = 0
        callbacks.append(self)

    @property
    def state_key(self) -> str:
        """Key of the callback, one for each average."""
        return self._key

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from the weights, unless the run resumes with an average."""
        self._restore()  # Only now: strategies that shard load the run's checkpoint after `on_fit_start`.
        # Not from those after the first step, as WeightEMA does: the first forward comes before it.
        self._average.begin(self._contract.local_tensors())
        self._average.updates = max(self._average.updates, 1)
        self._last_step = self._trainer.global_step

    def _restore(self) -> None:
        """Reads the average from the checkpoint that the run resumes from, if that has one."""
        strategy: Any = self._trainer.strategy
        path = strategy.broadcast(str(self._trainer.ckpt_path or ""))
        saved = load(path, level=None) if path else {}  # The strategy has verified it.
        entry = saved.get(self._key)
        if entry is None:
            return
        trained = [tensor.detach().clone() for tensor in self._contract.local_tensors()]
        strategy.load_model_state_dict({**saved, "state_dict": entry["state"]}, strict=True)
        self._average.load(strategy, saved, entry.get("rest", {}), int(entry["updates"]))
        with torch.no_grad():
            for tensor, own in zip(self._contract.local_tensors(), trained, strict=True):
                tensor.copy_(own)
        self._contract.refresh()

    @property
    def has_outputs(self) -> bool:
        """Whether this rank gets the outputs."""
        return self._inner.has_outputs

    def outputs(self, batch: Any) -> Any:
        """Returns the outputs of the average for a batch, in evaluation mode and without a graph."""
        self.catch_up()
        self._head = None
        self._average.swap(self._trainer.strategy, average=True)
        try:
            with _evaluating(self.task):
                outputs = self._inner.outputs(batch)
                if self.has_outputs and hasattr(self.task, "head"):
                    with self._inner.gathered(), torch.no_grad():
                        # A copy: while a loss uses it, the model's own weights are part of a graph.
                        self._head = copy.deepcopy(self.task.head)
        finally:
            self._average.swap(self._trainer.strategy, average=False)
        return outputs

    @property
    def head(self) -> Any:
        """Head of the average at the last :meth:`outputs`."""
        assert self._head is not None, "outputs comes first"
        return self._head

    def shards(self) -> dict[str, Any]:
        """Returns this rank's shards of the average, by name, copied."""
        self.catch_up()
        return self._average.other_state(self._trainer.strategy)

    def held_bytes(self) -> int:
        """Returns the bytes of the average's shards in this rank's memory."""
        return sum(tensor.nbytes for tensor in self._average.tensors or ())

    def catch_up(self) -> None:
        """Updates the average if an optimizer step has ended since the last call."""
        if self._trainer.global_step == self._last_step:
            return
        self._last_step = self._trainer.global_step
        self._contract.finish_step()
        buffers = sum(not buffer.is_meta for buffer in self.task.buffers())
        self._average.update(self._contract.local_tensors(), buffers)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch ended an optimizer step."""
        self.catch_up()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the average's state: its shards by name; called on all ranks."""
        self.catch_up()
        state = {"state": self._average.other_state(trainer.strategy), "updates": self._average.updates}
        rest = self._average.residual(trainer.strategy)
        checkpoint[self._key] = {**state, "rest": rest} if rest else state

    def close(self) -> None:
        """Frees the average; the run's model keeps its own weights."""
        if self in callbacks_of(self._trainer):
            callbacks_of(self._trainer).remove(self)
        self.task = self._head = self._average.tensors = None


@contextlib.contextmanager
def _evaluating(task: Any) -> Iterator[None]:
    """Puts a task into evaluation mode inside the block, and hides its trainer, which is in a stage of training."""
    trainer, task._trainer = task._trainer, None
    try:
        with evaluation_mode(task):
            yield
    finally:
        task._trainer = trainer

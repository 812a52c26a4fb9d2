"""Average of the run's own model as a second model: its weights take the model's place for each forward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.checkpoint import load
from dlo_framework.placed_model import PlacedModel
from dlo_framework.strategy_contract import contract_of
from dlo_framework.weight_average import WeightAverage

_KEY = "frozen_average"


class AveragedModel(PlacedModel):
    """Average of the run's own model, whose weights are in the model for the time of a forward.

    Each rank keeps the average of its shards; the model's own placement computes with them. The average is in the
    run's checkpoints.

    Args:
        trainer: Trainer of the run, whose model has been set up.
        decay: Weight of the old average in each optimizer step, in [0, 1).
    """

    def __init__(self, trainer: Trainer, decay: float) -> None:
        self._trainer, self._contract = trainer, contract_of(trainer.strategy)
        self._inner = self._contract.place_own()
        super().__init__(self._inner.task, self._inner.device, moved=True)
        self._average = WeightAverage(decay, copies_buffers=True)
        self._head: Any = None
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        number = sum(isinstance(callback, _Updates) for callback in callbacks)
        self._updates = _Updates(self, f"{_KEY}_{number}")
        self._last_step = 0
        callbacks.append(self._updates)

    def begin(self) -> None:
        """Starts from the weights, unless the run resumes with an average; called when the run has read its state."""
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
        entry = saved.get(self._updates.key)
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
                found = self._inner.outputs(batch)
                if self.has_outputs and hasattr(self.task, "head"):
                    with self._inner.gathered(), torch.no_grad():
                        # A copy: while a loss uses it, the model's own weights are part of a graph.
                        self._head = copy.deepcopy(self.task.head)
        finally:
            self._average.swap(self._trainer.strategy, average=False)
        return found

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

    def save(self) -> dict[str, Any]:
        """Returns the average's state for a checkpoint: its shards by name; called on all ranks."""
        self.catch_up()
        strategy = self._trainer.strategy
        state = {"state": self._average.other_state(strategy), "updates": self._average.updates}
        rest = self._average.residual(strategy)
        return {**state, "rest": rest} if rest else state

    def close(self) -> None:
        """Frees the average; the run's model keeps its own weights."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if self._updates in callbacks:
            callbacks.remove(self._updates)
        self.task = self._head = self._average.tensors = None


class _Updates(Callback):
    """Callback that updates an average after each optimizer step, and adds it to checkpoints."""

    def __init__(self, model: AveragedModel, key: str) -> None:
        self._model, self.key = model, key

    @property
    def state_key(self) -> str:
        """Key of the callback, one for each average."""
        return self.key

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the average."""
        self._model.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average if the batch ended an optimizer step."""
        self._model.catch_up()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the average; called on all ranks."""
        checkpoint[self.key] = self._model.save()


@contextlib.contextmanager
def _evaluating(task: Any) -> Iterator[None]:
    """Puts a task into evaluation mode inside the block, and hides its trainer, which is in a stage of training."""
    modes = [(module, module.training) for module in task.modules()]
    trainer, task._trainer = task._trainer, None
    task.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        task._trainer = trainer

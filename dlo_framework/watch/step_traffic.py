"""Communication of a step on the first rank, by collective and axis of the mesh, for ``summary.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.distributed.traffic import Traffic, TrafficCounter
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.flops import is_compiled
from dlo_framework.watch.state_bytes import STEP


class TrafficReport(Callback):
    """Counts, on one of a run's first steps on several ranks, what the first rank sends; on by default.

    It adds the bytes of the step to the summary, all micro-batches included: for each axis of the mesh and kind of
    collective, where a buffer of n elements counts n, as in the ZeRO paper. Groups of a strategy without a mesh have
    the axis ``data``. A compiled model is not counted.

    Attributes:
        found: Communication; None before it is counted.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self) -> None:
        self.found: tuple[Traffic, ...] | None = None
        self._counter: TrafficCounter | None = None
        self._began = 0
        self._is_new_step = False
        self._steps: int | None = None  # optimizer steps at the end of the last batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clears an earlier run's count."""
        if stage == "fit":
            self.found = self._steps = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts to count with the first micro-batch of a step, once the optimizer has state."""
        if self._steps is None or self._steps < STEP or self._counter is not None or self.found is not None:
            return
        if self._is_new_step and trainer.is_global_zero and trainer.world_size > 1 and not is_compiled(pl_module):
            groups = contract_of(trainer.strategy).groups
            self._began = trainer.global_step
            self._counter = TrafficCounter((lambda name: "data") if groups is None else groups.axis_of)
            self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Completes the count with the last micro-batch of the step."""
        if self._counter is not None and trainer.global_step > self._began:
            self.found = self._counter.found
            self._end()
        self._is_new_step = trainer.global_step != self._steps
        self._steps = trainer.global_step

    def _end(self, *_: Any, **__: Any) -> None:
        """Drops the count of a step that the run did not complete."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)

    on_train_end = on_exception = _end

    def summary(self) -> list[dict[str, Any]] | None:
        """Returns the communication for ``summary.json``; None if nothing was counted."""
        return None if self.found is None else [asdict(row) for row in self.found]

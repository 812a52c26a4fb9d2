"""Facts that callbacks add to a run's ``summary.json``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer


@runtime_checkable
class RunFacts(Protocol):
    """Callback that adds entries to ``summary.json``."""

    def summary_facts(self, trainer: Trainer) -> dict[str, Any]:
        """Returns JSON values by name; called on rank 0 alone, also after an interruption.

        Args:
            trainer: Trainer of the run.
        """

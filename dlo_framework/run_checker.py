"""Check of a fit by its callbacks and its module, before processes start and data load."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningDataModule, LightningModule


@runtime_checkable
class RunChecker(Protocol):
    """Callback or module that checks a fit before processes start.

    The command line and :class:`dlo_framework.trainer.Trainer` call :meth:`check_run`. Lightning's own Trainer does
    not: check in `setup` too.
    """

    def check_run(self, trainer: Any, module: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Checks the run.

        Args:
            trainer: Trainer of the run; its strategy knows the ranks, and has started none.
            module: Module of the run, whose model may not be built.
            datamodule: Datamodule of the run, which has read no data; None without one.

        Raises:
            DloError: The run cannot work as configured; the message has the fix.
        """

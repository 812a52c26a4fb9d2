"""Command line of ``dlo fit`` up to its task: it parses configs, and builds model and data without a run folder."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.run_setup import check_strategy
from dlo_framework.testing.training import silence_lightning


class InspectedRun(DloCLI):
    """``dlo fit`` without its trainer, for `dlo sweep`.

    Args:
        found: Scanned command line, with ``fit`` as its command.
    """

    prog = "dlo sweep"

    def __init__(self, found: ConfigScan) -> None:
        #: Arguments of the trainer as the config has them.
        self.trainer_arguments: dict[str, Any] = {}
        silence_lightning()
        super().__init__(found)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: a trial starts without a checkpoint."""

    def check(self, words: list[str]) -> None:
        """Parses another config.

        Args:
            words: Arguments of ``dlo``, from ``fit`` on.

        Raises:
            ParseError: The parser refuses it.
        """
        config = self.parser.parse_args(words)[self.command]
        check_strategy(config.trainer.strategy)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds a trainer without the config's parts, which no method uses."""
        config = self._get(self.config_init, "trainer")
        check_strategy(config.get("strategy"))
        self.trainer_arguments = dict(config)
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing: Lightning (2.6) would start the command at the end of its constructor."""

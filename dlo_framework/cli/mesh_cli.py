"""The command line of ``dlo fit`` for looking at its run: everything is built on CPUs that need not exist."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from dlo_framework.cli.lightning_cli import DloCLI, check_strategy
from dlo_framework.cli.scan import Scan
from dlo_framework.errors import DloError
from dlo_framework.testing.training import quiet


class MeshCLI(DloCLI):
    """``dlo fit`` up to its trainer, without callbacks, loggers and a run folder.

    Args:
        found: the scanned command line, with ``fit`` as its command.
        ranks: in place of the trainer's devices on all nodes; None leaves these.
        word: the command that looks.

    Raises:
        DloError: on what a part refuses: the strategy, above all, where the mesh does not fit the ranks or the model.
    """

    def __init__(self, found: Scan, ranks: int | None, word: str = "mesh") -> None:
        self._ranks, self._word = ranks, word
        #: The trainer's arguments as the config has them.
        self.trainer_arguments: dict[str, Any] = {}
        quiet()
        super().__init__(found)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, under the command's own name."""
        self._subcommand_parsers[self.command].prog = f"dlo {self._word}"
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Looks for no checkpoint: what is looked at does not depend on one."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer on as many CPU processes as the run has ranks; none of them is started."""
        config = self._get(self.config_init, "trainer")
        check_strategy(config.get("strategy"))
        check_model = getattr(self.model, "check", None)
        if callable(check_model):
            check_model(self.datamodule)  # A task may learn from it how many classes there are.
        self.trainer_arguments = dict(config)
        devices, nodes = ranks_and_nodes(config.get("devices"), config.get("num_nodes") or 1, self._ranks, self._word)
        kwargs |= {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
        kwargs |= {"callbacks": [], "logger": False, "enable_checkpointing": False, "profiler": None}
        if config.get("precision") in ("16-mixed", 16, "16"):
            kwargs["precision"] = "bf16-mixed"  # Lightning has the other on accelerators alone; both hold as much.
        return self._build_trainer(kwargs)

    def _check_shares(self, trainer: Trainer) -> None:
        """Checks no batch: of a world that is looked at, none has been chosen yet."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs nothing: Lightning (2.6) would start the command as the last thing of its constructor."""


def ranks_and_nodes(devices: Any, nodes: int, ranks: int | None, word: str = "mesh") -> tuple[int, int]:
    """Returns the ranks of a node, and how many nodes there are.

    Args:
        devices: of the trainer's config: a number, or their numbers, or what depends on the machine.
        nodes: of the trainer's config.
        ranks: of all nodes together, in place of these; nodes then stay as large as they are, where that goes.
        word: the command that asks.

    Raises:
        DloError: if the number depends on the machine, and no ranks are given.
    """
    if isinstance(devices, list | tuple):
        number = len(devices)
    else:
        number = int(devices) if str(devices).isdigit() else 0
    if ranks is not None:
        return (number, ranks // number) if number and ranks % number == 0 else (ranks, 1)
    if number < 1:
        raise DloError(
            f"{word}: trainer.devices: {devices} depends on the machine that a run is on; say how many ranks there will"
            " be: --ranks 8, or --trainer.devices 8"
        )
    return number, nodes

"""Command line of ``dlo fit`` that builds the parts of a run on simulated CPU ranks, to inspect them."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import yaml
from lightning.pytorch import Trainer

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel, find_frozen_models
from dlo_framework.run_setup import check_strategy, with_checkpoint_io
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.mesh.mesh_simulation import simulated_precision
from dlo_plugins.strategies.mesh import MeshStrategy


class SimulatedRun(DloCLI):
    """``dlo fit`` up to its trainer, without callbacks, loggers and a run folder.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        ranks: Number of ranks, in place of the trainer's devices x nodes; None keeps those.
        prog: Words that call the command, for usage lines.
        infers_ranks: Whether a run whose devices depend on the machine has the ranks of its mesh's axes, and one rank
            without a mesh; otherwise it is an error.

    Raises:
        DloError: If a part refuses its options; above all, if the mesh does not fit the ranks or the model.
    """

    simulates_ranks = True

    def __init__(self, found: ConfigScan, ranks: int | None, prog: str, infers_ranks: bool = False) -> None:
        self._ranks, self.prog, self._infers_ranks = ranks, prog, infers_ranks
        #: Arguments of the trainer as the config has them.
        self.trainer_arguments: dict[str, Any] = {}
        silence_lightning()
        super().__init__(found)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: the inspected parts do not depend on a checkpoint."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer on as many simulated CPU ranks as the run has; none of them is started."""
        config = self._get(self.config_init, "trainer")
        check_strategy(config.get("strategy"))
        check_model = getattr(self.model, "check", None)
        if callable(check_model):
            check_model(self.datamodule)  # A task may read its number of classes from the data.
        self.trainer_arguments = dict(config)
        if self._ranks is None and self._infers_ranks and config.get("devices") in ("auto", -1, "-1"):
            self._ranks = _ranks_of_axes(config.get("strategy"))
            print(f"{self.prog}: devices is {config.get('devices')}; ranks: {self._ranks} (--ranks)", file=sys.stderr)
        devices, nodes = count_ranks_and_nodes(config.get("devices"), config.get("num_nodes") or 1, self._ranks)
        kwargs |= {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
        kwargs |= {"callbacks": [], "logger": False, "enable_checkpointing": False, "profiler": None}
        if config.get("precision") in ("16-mixed", 16, "16"):  # Lightning takes fp16 on accelerators only.
            plugins = [*with_checkpoint_io(config.get("plugins")), simulated_precision("16-mixed")]
            kwargs |= {"precision": None, "plugins": plugins}
        return self._build_trainer(kwargs)

    def second_models(self) -> list[FrozenModel]:
        """Returns the second models of the config's task and callbacks, such as a teacher."""
        callbacks = self._get(self.config_init, "trainer").get("callbacks") or []
        return find_frozen_models([self.model, *(callbacks if isinstance(callbacks, list) else [callbacks])])

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing: Lightning (2.6) would start the command at the end of its constructor."""


def _ranks_of_axes(strategy: Any) -> int:
    """Returns the product of the axes of a strategy's mesh, those of any size as 1; 1 for a strategy without a mesh."""
    if not isinstance(strategy, MeshStrategy):
        return 1
    return math.prod(max(1, size) for size in dataclasses.astuple(strategy.spec))


def count_ranks_and_nodes(devices: Any, nodes: int, ranks: int | None) -> tuple[int, int]:
    """Returns the number of ranks of a node, and the number of nodes.

    Args:
        devices: Devices of the trainer's config: a number, a list of indices, or a name such as ``auto``.
        nodes: Number of nodes of the trainer's config.
        ranks: Number of ranks of all nodes, in place of both; the node size is kept where it divides ``ranks``.

    Raises:
        DloError: If the number of devices depends on the machine and ``ranks`` is None.
    """
    if isinstance(devices, list | tuple):
        number = len(devices)
    else:
        number = int(devices) if str(devices).isdigit() else 0
    if ranks is not None:
        return (number, ranks // number) if number and ranks % number == 0 else (ranks, 1)
    if number < 1:
        raise DloError(
            f"trainer.devices must be a number where the run's machine is not at hand, got {devices}; set the ranks:"
            " --ranks 8, or --trainer.devices 8"
        )
    return number, nodes


class UnplannedRun(SimulatedRun):
    """Run on one rank, whose task does not recompute; a plan chooses both.

    Attributes:
        user_config: Config as the user means it: all files and overrides, without Lightning's defaults.
    """

    user_config: dict[str, Any]

    def before_instantiate_classes(self) -> None:
        """Keeps the config, and removes from it what a plan chooses."""
        super().before_instantiate_classes()
        config = self.config[self.command]
        self.user_config = yaml.safe_load(self._parser(self.command).dump(config, skip_default=True))
        for key, value in (("strategy", "auto"), ("devices", 1), ("num_nodes", 1)):
            config[f"trainer.{key}"] = value
        if config.get("model.init_args.recompute"):
            config["model.init_args.recompute"] = False

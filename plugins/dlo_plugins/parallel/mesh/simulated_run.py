"""Parts of a run on simulated CPU ranks, for commands that inspect them: no rank starts, and nothing is written."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.data.description import ModuleDescription
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel, find_frozen_models
from dlo_framework.run_setup import check_run, with_checkpoint_io
from dlo_framework.testing.training import silence_lightning
from dlo_framework.trainer import CheckedTrainer
from dlo_plugins.parallel.mesh.mesh_simulation import simulated_precision
from dlo_plugins.parallel.mesh.strategy import MeshStrategy


class SimulatedRun:
    """Model, data and trainer of ``dlo fit``, without callbacks, loggers and a run folder.

    Args:
        config_scan: Scanned command line, with ``fit`` as its command.
        ranks: Number of ranks, in place of the trainer's devices x nodes; None keeps those.
        prog: Words that call the command, for usage lines.
        infers_ranks: Whether a run whose devices depend on the machine has the ranks of its mesh's axes, and one rank
            without a mesh; otherwise it is an error.
        unplanned: Whether the run has one process, and a task that does not recompute, whatever the config says; a plan
            chooses both.

    Attributes:
        model: Module of the run.
        datamodule: Datamodule of the run; None without one.
        trainer: Trainer, whose strategy knows the ranks and has started none.
        trainer_options: Arguments of the trainer as the config has them.
        user_config: Config as the user means it: all files and overrides, without Lightning's defaults.

    Raises:
        DloError: If a part refuses its options; above all, if the mesh does not fit the ranks or the model.
    """

    def __init__(
        self, config_scan: ConfigScan, ranks: int | None, prog: str, infers_ranks: bool = False, unplanned: bool = False
    ) -> None:
        silence_lightning()
        cli = DloCLI(config_scan, prog)
        self.user_config = cli.user_config()
        if unplanned:
            for key, value in (("strategy", "auto"), ("devices", 1), ("num_nodes", 1)):
                cli.options[f"trainer.{key}"] = value
            if cli.options.get("model.init_args.recompute"):
                cli.options["model.init_args.recompute"] = False
        cli.build()
        self.model, self.datamodule, self.trainer_options = cli.model, cli.datamodule, cli.trainer_options
        if callable(check_model := ModuleDescription(self.model).check):
            check_model(self.datamodule)  # A task may read its number of classes from the data.
        self._callbacks = cli.callbacks()
        config = self.trainer_options
        if ranks is None and infers_ranks and config["devices"] in ("auto", -1, "-1"):
            ranks = _ranks_of_axes(config["strategy"])
            print(f"{cli.prog}: devices is {config['devices']}; ranks: {ranks} (--ranks)", file=sys.stderr)
        devices, nodes = count_ranks_and_nodes(config["devices"], config["num_nodes"] or 1, ranks)
        changes: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
        changes |= {"callbacks": [], "logger": False, "enable_checkpointing": False, "profiler": None}
        if config["precision"] in ("16-mixed", 16, "16"):  # Lightning takes fp16 on accelerators only.
            plugins = [*with_checkpoint_io(config["plugins"]), simulated_precision("16-mixed")]
            changes |= {"precision": None, "plugins": plugins}
        self.trainer = cli.make_trainer(CheckedTrainer, **changes)
        parts = self.trainer, self.model, self.datamodule
        check_run(*parts, command=cli.command, ckpt_path=None, has_batch_size=False)

    def second_models(self) -> list[FrozenModel]:
        """Returns the second models of the config's task and callbacks, such as a teacher."""
        return find_frozen_models([self.model, *self._callbacks])


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

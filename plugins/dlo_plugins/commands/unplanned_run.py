"""Command line of ``dlo fit`` that builds what is planned: model and data, without the config's own parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dlo_plugins.commands.simulated_run import SimulatedRun


class UnplannedRun(SimulatedRun):
    """Run on one rank, whose task does not recompute; a plan chooses both.

    Attributes:
        user_config: Config as the user means it: all files and overrides, without Lightning's defaults.
    """

    user_config: dict[str, Any]

    @property
    def runs(self) -> Path:
        """Folder that holds all runs."""
        return self._runs().parent

    def before_instantiate_classes(self) -> None:
        """Keeps the config, and removes from it what a plan chooses."""
        super().before_instantiate_classes()
        config = self.config[self.command]
        self.user_config = yaml.safe_load(self._parser(self.command).dump(config, skip_default=True))
        for key, value in (("strategy", "auto"), ("devices", 1), ("num_nodes", 1)):
            config[f"trainer.{key}"] = value
        if config.get("model.init_args.recompute"):
            config["model.init_args.recompute"] = False

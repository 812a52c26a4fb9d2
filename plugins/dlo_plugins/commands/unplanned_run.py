"""Command line of ``dlo fit`` that builds what is planned: model and data, without the config's own parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from dlo_plugins.commands.simulated_run import SimulatedRun


class UnplannedRun(SimulatedRun):
    """Run on one rank, whose task does not recompute; a plan chooses both.

    Attributes:
        user_config: Config as the user means it: all files and overrides, without Lightning's defaults.
        second_parameters: Number of parameters of each second model, such as a teacher, of the task and callbacks.
    """

    user_config: dict[str, Any]
    second_parameters: list[int]

    @property
    def runs(self) -> Path:
        """Folder that holds all runs."""
        return self._runs().parent

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Counts the second models, and builds a trainer without callbacks.

        Raises:
            DloError: A second model cannot be built, or the trainer cannot.
        """
        trainer = super().instantiate_trainer(**kwargs)
        twins = [frozen.check(self.model, self.datamodule) for frozen in self.second_models()]
        self.second_parameters = [sum(parameter.numel() for parameter in twin.parameters()) for twin in twins]
        return trainer

    def before_instantiate_classes(self) -> None:
        """Keeps the config, and removes from it what a plan chooses."""
        super().before_instantiate_classes()
        config = self.config[self.command]
        self.user_config = yaml.safe_load(self._parser(self.command).dump(config, skip_default=True))
        for key, value in (("strategy", "auto"), ("devices", 1), ("num_nodes", 1)):
            config[f"trainer.{key}"] = value
        if config.get("model.init_args.recompute"):
            config["model.init_args.recompute"] = False

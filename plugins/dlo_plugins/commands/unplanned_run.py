"""Command line of ``dlo fit`` that builds what is planned: model and data, without the config's own parallelism."""

from __future__ import annotations

from typing import Any

import yaml
from lightning.pytorch import Trainer

from dlo_framework.frozen_model import FrozenModel
from dlo_framework.task import Task
from dlo_plugins.commands.simulated_run import SimulatedRun


class UnplannedRun(SimulatedRun):
    """Run on one rank, whose task does not recompute; a plan chooses both.

    Attributes:
        user_config: Config as the user means it: all files and overrides, without Lightning's defaults.
        frozen_models: Second models of the task and of callbacks, such as a teacher, each with its task on the meta
            device.
    """

    user_config: dict[str, Any]
    frozen_models: list[tuple[FrozenModel, Task]]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Finds the second models, and builds a trainer without callbacks.

        Raises:
            DloError: A second model cannot be built, or the trainer cannot.
        """
        trainer = super().instantiate_trainer(**kwargs)
        self.frozen_models = [(frozen, frozen.check(self.model, self.datamodule)) for frozen in self.second_models()]
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

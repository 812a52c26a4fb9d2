"""Command line of ``dlo fit`` for ``dlo profile``: some steps of training with Profile and Energy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework import runs
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError
from dlo_framework.stop import GracefulStop
from dlo_plugins.profiling.energy_callback import Energy
from dlo_plugins.profiling.profile_callback import Profile

#: Folder among a config's runs that holds its profiles.
PROFILES = "profile"


class ProfileCLI(DloCLI):
    """``dlo fit`` for some steps, without validation and checkpoints, of which the last ones are profiled.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        steps: Number of optimizer steps.
        active: Number of steps that are recorded.
        machine: Machine of the roofline; None to measure.
    """

    prog = "dlo profile"
    description = "Profile some steps of training; the options are those of `dlo fit`."

    def __init__(self, found: ConfigScan, steps: int, active: int, machine: str | None) -> None:
        self._steps, self._active, self._machine = steps, active, machine
        super().__init__(found)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer as ``dlo fit`` does.

        Raises:
            DloError: If an option rules out a profile.
        """
        if self._get(self.config_init, "trainer").get("fast_dev_run"):
            raise DloError(f"profile: trainer.fast_dev_run must be off for {self._steps} steps; remove it")
        if self.config[self.command].ckpt_path:
            raise DloError("profile: --ckpt_path must be unset; remove it: time does not depend on the weights")
        return super().instantiate_trainer(**kwargs)

    def _new_run(self) -> Path:
        """Creates a folder for the profile under ``profile``, so that the first run is still ``version_0``."""
        return runs.new_run(self._runs() / PROFILES)

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Builds a trainer that ends after the profile: callbacks that save are removed, validation is off."""
        saves = [each for each in kwargs["callbacks"] if isinstance(each, Checkpoint | EndCheckpoint)]
        stop = [each for each in saves if isinstance(each, GracefulStop)]
        callbacks = [each for each in kwargs["callbacks"] if each not in saves]
        given = next((each for each in callbacks if isinstance(each, Profile)), None)
        formats = given.formats if given is not None else None
        searched = given is None or given.waits
        warmup = min(2, self._steps - self._active - 3)
        own = Profile(
            wait=self._steps - self._active - warmup - searched,
            warmup=warmup,
            active=self._active,
            ranks=given.ranks if given is not None else None,
            formats=formats,
            waits=searched,
            machine=self._machine or (given.machine if given is not None else None),
        )
        # Before dlo's own callbacks, like the user's.
        callbacks = [own, *(each for each in callbacks if each is not given)]
        if not any(isinstance(each, Energy) for each in callbacks):
            callbacks.insert(0, Energy())
        kwargs["callbacks"] = [*callbacks, *stop]
        kwargs |= {"enable_checkpointing": bool(stop), "num_sanity_val_steps": 0, "limit_val_batches": 0}
        # Each epoch has a step, so that max_steps ends the run; points in percent need a number of epochs.
        epochs = max(self._get(self.config_init, "trainer").get("max_epochs") or 0, self._steps)
        kwargs |= {"max_steps": self._steps, "max_epochs": epochs, "max_time": None}
        return super()._build_trainer(kwargs)

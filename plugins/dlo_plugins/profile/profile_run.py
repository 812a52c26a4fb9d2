"""The run of ``dlo profile``: some steps of a config, of which the last are recorded."""

from __future__ import annotations

from pathlib import Path

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.short_run import open_run, train_briefly
from dlo_plugins.profile.callback import Profile
from dlo_plugins.profile.energy import Energy


def profile(found: ConfigScan, steps: int, active: int, machine: str | None) -> Path:
    """Profiles the last of some steps of a config's training; returns the run's folder.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        steps: Number of optimizer steps.
        active: Number of steps that are recorded.
        machine: Machine of the roofline; None to measure.
    """
    reasons = {"fast_dev_run": f"a profile has {steps} steps", "ckpt_path": "time does not depend on the weights"}
    cli = open_run(found, "profile", reasons)
    callbacks = cli.callbacks()
    given = next((each for each in callbacks if isinstance(each, Profile)), None)
    searched = given is None or given.waits
    warmup = min(2, steps - active - 3)
    own = Profile(
        wait=steps - active - warmup - searched,
        warmup=warmup,
        active=active,
        ranks=given.ranks if given is not None else None,
        formats=given.formats if given is not None else None,
        waits=searched,
        machine=machine or (given.machine if given is not None else None),
    )
    callbacks = [own, *(each for each in callbacks if each is not given)]
    if not any(isinstance(each, Energy) for each in callbacks):
        callbacks.insert(0, Energy())
    # Each epoch has a step, so that max_steps ends the run; points in percent need a number of epochs.
    epochs = max(cli.options.trainer.max_epochs or 0, steps)
    return train_briefly(cli, "profile", callbacks, max_steps=steps, max_epochs=epochs, max_time=None)

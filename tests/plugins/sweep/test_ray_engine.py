"""Parts of the engine on Ray that need no cluster; `tests/e2e/test_sweep_on_ray.py` runs sweeps."""

import pytest

from dlo_plugins.sweep.ray_engine import name_trial, trial_number

experiment = pytest.importorskip("ray.tune.experiment")


def test_a_member_that_copies_another_keeps_its_number():
    """Population-based training gives a trial the full config of the one that it copies."""
    config = {"number": 7, "values": {"lr": 0.1}}
    trial = experiment.Trial("stub", stub=True, config=config, trial_name_creator=name_trial)
    trial.set_config({"number": 3, "values": {"lr": 0.2}})
    assert trial_number(trial) == 7

"""Old import paths: a config that an earlier version wrote loads, and a warning names the new path."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlo_framework.moved import MOVED

CONFIG = Path(__file__).with_name("config_0_2.yaml")


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_at_the_new_one(old):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=re.escape(f"{old} has moved to {MOVED[old]}; write that")):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])


def test_a_wrong_path_is_still_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"dlo_plugins\.callbacks\.nothing"):
        importlib.import_module("dlo_plugins.callbacks.nothing")


def test_a_config_that_version_0_2_wrote_loads(tmp_path):
    assert "dlo_plugins.callbacks.one_cycle.OneCycle" in str(yaml.safe_load(CONFIG.read_text()))
    done = subprocess.run(
        [sys.executable, "-m", "dlo_framework", "fit", "--config", str(CONFIG), "--dry-run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "dlo_plugins.callbacks.one_cycle has moved to dlo_plugins.schedules.lr_curves" in done.stderr

"""Old import paths: a config that an earlier version wrote loads, and a warning names the new path."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from dlo_framework.cli.main import main
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


def test_a_config_that_version_0_2_wrote_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = "dlo_plugins.callbacks.one_cycle"
    assert f"{old}.OneCycle" in str(yaml.safe_load(CONFIG.read_text()))
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} has moved to dlo_plugins.schedules.lr_curves"):
        assert main(["fit", "--config", str(CONFIG), "--dry-run"]) == 0

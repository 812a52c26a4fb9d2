"""The example of the page on parity is a test file that passes, and one that can fail."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "distributed_test.py"


def test_the_example_passes(monkeypatch):
    spec = importlib.util.spec_from_file_location("distributed_test", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "distributed_test", module)
    spec.loader.exec_module(module)
    module.test_mean()
    module.test_parity()
    monkeypatch.setattr(module, "run_distributed", lambda *args: [0.0, 1.0])
    with pytest.raises(AssertionError):
        module.test_mean()

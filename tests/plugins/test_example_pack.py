"""A third-party pack: installed by pip, listed from its metadata, loaded when named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import json, sys
from dlo_framework.registry import Registry

registry = Registry()
before = "dlo_example_pack" in sys.modules
allowed_before = "dlo_example_pack.weight_norm" in registry.allowed_import_paths()
found = registry.find_named(["WeightNormLogger"])
cls = registry.load(found[0].name, found[0].kind)
registry.allow_class_path("dlo_example_pack.weight_norm.WeightNormLogger")
print(json.dumps([before, allowed_before, f"{cls.__module__}.{cls.__name__}", cls().every_n_steps]))
"""


@pytest.fixture
def listed(dlo, example_pack: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function: words after `dlo plugins` to the JSON that it prints, with the pack on the path."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(example_pack))
    return lambda *words: json.loads(dlo("plugins", *words, "--json").stdout)


def test_it_is_listed_with_its_distribution(listed) -> None:
    (record,) = [record for record in listed() if record["name"] == "WeightNormLogger"]
    assert (record["kind"], record["distribution"], record["version"]) == ("callback", "dlo-example-pack", "1.0.0")
    assert record["description"] == "Logs the L2 norm of the weights, in total and per submodule."
    assert record["conflict"] is None


def test_show_has_its_parameters(listed, example_pack: Path) -> None:
    shown = listed("show", "WeightNormLogger")
    assert [(p["name"], p["default"]) for p in shown["parameters"]] == [("every_n_steps", "50"), ("depth", "2")]
    assert shown["defined_in"].startswith(str(example_pack))


def test_it_is_imported_and_allowed_once_named(example_pack: Path) -> None:
    expected = [False, False, "dlo_example_pack.weight_norm.WeightNormLogger", 50]
    environment = {**os.environ, "PYTHONPATH": str(example_pack)}
    words = [sys.executable, "-c", LOAD]
    done = subprocess.run(words, env=environment, cwd=example_pack, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected

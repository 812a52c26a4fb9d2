"""A third-party pack: installed by pip, listed from its metadata, loaded when named."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlo_framework.registry import Registry


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


def test_it_is_imported_and_allowed_once_named(example_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(example_pack)
    for name in [name for name in sys.modules if name.startswith("dlo_example_pack")]:  # Another test's.
        monkeypatch.delitem(sys.modules, name)
    registry, module = Registry(), "dlo_example_pack.weight_norm"
    assert "dlo_example_pack" not in sys.modules
    assert module not in registry.allowed_import_paths()
    (found,) = registry.find_named(["WeightNormLogger"])
    cls: Any = registry.load(found.name, found.kind)
    registry.allow_class_path(f"{module}.WeightNormLogger")
    assert (cls.__module__, cls().every_n_steps) == (module, 50)
    for name in [name for name in sys.modules if name.startswith("dlo_example_pack")]:
        del sys.modules[name]

"""Options of callbacks on the command line reach the callback that they name, or that alone takes them."""

import json
from pathlib import Path

import lightning.pytorch  # noqa: F401  Lightning's callbacks are found among imported classes.
import pytest

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.plugin_arguments import place_callback_options
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry

CALLBACKS = """callbacks:
    - {class_path: OneCycle, init_args: {pct_start: 0.1}}
    - WeightEMA
    - {class_path: EarlyStopping, init_args: {monitor: val_loss}}
    - {class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {monitor: val_loss}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Returns a function that places the options of a command line, and returns the lists that it then has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"trainer:\n  {CALLBACKS}")
    (tmp_path / "more.yaml").write_text("trainer: {callbacks+: [{class_path: BatchMix}]}")
    (tmp_path / "other.yaml").write_text("trainer: {callbacks: [{class_path: BatchMix}]}")

    def run(*words: str) -> tuple[list[str], list]:
        found = scan(["fit", *words])
        registry = Registry()
        for plugin in registry.find_named(found.strings):
            registry.load(plugin.name, plugin.kind)
        argv = place_callback_options(found.argv, found.configs, registry)
        return argv, [json.loads(word) for word in argv if word.startswith(("[{", '{"'))]

    return run


def test_an_option_reaches_the_callback_that_it_names(place):
    words = ["--trainer.callbacks.OneCycle.init_args.max_lr", "0.3", "--trainer.callbacks.WeightEMA.decay=0.5"]
    argv, (items,) = place("--config", "a.yaml", *words, "--trainer.callbacks.ModelCheckpoint.monitor", "x")
    assert argv[:4] == ["fit", "--config", "a.yaml", "--trainer.callbacks"]
    assert len(argv) == 5
    assert items[0] == {"class_path": "OneCycle", "init_args": {"pct_start": 0.1, "max_lr": "0.3"}}
    assert items[1] == {"class_path": "WeightEMA", "init_args": {"decay": "0.5"}}
    assert (items[2]["init_args"], items[3]["init_args"]) == ({"monitor": "val_loss"}, {"monitor": "x"})


def test_an_option_without_a_name_reaches_the_only_callback_that_takes_it(place):
    _, (items,) = place("--config", "a.yaml", "--trainer.callbacks.max_lr", "0.3")
    assert items[0]["init_args"]["max_lr"] == "0.3"
    argv, _ = place("--config", "a.yaml", "--trainer.callbacks.nonsense", "3")
    assert argv[-2:] == ["--trainer.callbacks.nonsense", "3"], "the parser reports it"
    with pytest.raises(DloError, match=r"got EarlyStopping and ModelCheckpoint, which take it; write --trainer\.callb"):
        place("--config", "a.yaml", "--trainer.callbacks.monitor", "x")


def test_an_option_after_an_added_callback_is_its_own(place):
    words = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "x"]
    assert place("--config", "a.yaml", *words)[0] == ["fit", "--config", "a.yaml", *words]
    argv, (items,) = place("--trainer.callbacks+", "OneCycle", *words, "--trainer.callbacks.OneCycle.max_lr", "1")
    assert argv[1] == "--trainer.callbacks+"
    assert items == [{"class_path": "OneCycle", "init_args": {"max_lr": "1"}}]


def test_configs_that_add_and_that_replace(place, capfd):
    _, (items,) = place("--config", "a.yaml", "--config", "more.yaml", "--trainer.callbacks.BatchMix.prob", "0.2")
    assert [item if isinstance(item, str) else item["class_path"].rpartition(".")[2] for item in items] == [
        *("OneCycle", "WeightEMA", "EarlyStopping", "ModelCheckpoint", "BatchMix")
    ]
    assert items[-1]["init_args"] == {"prob": "0.2"}
    assert capfd.readouterr().err == ""
    with pytest.raises(DloError, match="must name a callback of the run, got OneCycle; it has: BatchMix"):
        place("--config", "a.yaml", "--config", "other.yaml", "--trainer.callbacks.OneCycle.max_lr", "1")
    replaced = "OneCycle, WeightEMA, EarlyStopping, ModelCheckpoint of a.yaml; 'callbacks+:' adds to them"
    assert f"other.yaml: trainer.callbacks replaces {replaced}" in capfd.readouterr().err
    Path("none.yaml").write_text("trainer: {callbacks: null}")
    place("--config", "a.yaml", "--config", "none.yaml")
    assert f"none.yaml: trainer.callbacks replaces {replaced}" in capfd.readouterr().err

"""Names in a config and on the command line: a plug-in's short name, and options of the callback that they name."""

import json
import os
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.main import main
from dlo_framework.cli.plugin_arguments import expand_arguments, expand_short_names, place_callback_options
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.run import runs

OURS = {"FSDPStrategy": "dlo_plugins.parallel.fsdp.strategy.FSDPStrategy"}


def test_short_names_are_written_in_full_under_class_path_alone():
    config = {
        "trainer": {"strategy": {"class_path": "FSDPStrategy", "init_args": {"units": ["FSDPStrategy"]}}, "devices": 2},
        "callbacks": [{"class_path": "Other"}, {"class_path": "FSDPStrategy"}, "FSDPStrategy"],
    }
    full = expand_short_names(config, OURS)
    assert full["trainer"]["strategy"]["class_path"] == OURS["FSDPStrategy"]
    assert full["trainer"]["strategy"]["init_args"] == {"units": ["FSDPStrategy"]}
    assert full["callbacks"] == [{"class_path": "Other"}, {"class_path": OURS["FSDPStrategy"]}, "FSDPStrategy"]
    assert config["callbacks"][1] == {"class_path": "FSDPStrategy"}


def test_short_names_on_the_command_line_are_those_of_plugins():
    full = OURS["FSDPStrategy"]
    argv = ["fit", "--trainer.strategy.class_path", "FSDPStrategy", "--trainer.strategy.class_path=FSDPStrategy"]
    argv += ["--trainer.strategy", "FSDPStrategy", "--trainer.callbacks+=FSDPStrategy", "--run.name", "FSDPStrategy"]
    found = expand_arguments(argv, OURS)
    assert found[2:4] == [full, f"--trainer.strategy.class_path={full}"]
    assert found[4:7] == ["--trainer.strategy", full, f"--trainer.callbacks+={full}"]
    assert found[7:] == ["--run.name", "FSDPStrategy"], "other options have values of their own"


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys):
    """Returns a function that runs `dlo fit` on the quick start, and returns the exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = main(["fit", "--config", "quickstart", "--trainer.accelerator", "cpu", *words])
        os.environ.pop(runs.ENVIRONMENT, None)
        return code, "".join(capsys.readouterr())

    return run


def test_a_config_and_the_command_line_take_the_plugin_for_the_name(fit, tmp_path):
    (tmp_path / "x.yaml").write_text("trainer: {strategy: {class_path: FSDPStrategy, init_args: {replicate: 3}}}\n")
    for words in (
        ["--config", "x.yaml"],
        ["--trainer.strategy.class_path", "FSDPStrategy", "--trainer.strategy.init_args.replicate", "3"],
        ["--trainer.strategy", "FSDPStrategy", "--trainer.strategy.init_args.replicate", "3"],
    ):
        code, text = fit(*words, "--trainer.devices", "2")
        assert code == 2
        assert "world size must be divisible by replicate 3, got 2" in text
    assert not list(tmp_path.glob("runs/*/version_*"))


def test_an_alias_is_the_plugins(fit):
    code, text = fit("--trainer.strategy", "fsdp", "--trainer.devices", "1", "--dry-run")
    assert code == 0
    assert "FSDPStrategy on 1 rank(s)" in text


def test_a_misspelt_alias_is_told_before_the_plugin_is_known(fit):
    code, error = fit("--trainer.strategy", "hsdpp")
    assert code == 2
    assert "unknown strategy 'hsdpp'; did you mean 'hsdp'?" in error
    assert "use one of auto, ddp, deepspeed, fsdp, hsdp, mesh, zero1, zero2, zero3; `dlo plugins`" in error


# --- options of callbacks on the command line reach the callback that they name, or that alone takes them ------------


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

"""A plug-in's short name in a config, where another library's class is called the same."""

import pytest

from dlo_framework.cli.plugin_arguments import expand_arguments, expand_short_names, prefer_plugins
from dlo_framework.registry import Plugin

OURS = {"FSDPStrategy": "dlo_plugins.strategies.fsdp.FSDPStrategy"}


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


def test_jsonargparse_reads_configs_so_until_other_plugins_are_preferred():
    import jsonargparse

    plugin = Plugin("FSDPStrategy", "strategy", "dlo_plugins.strategies.fsdp:FSDPStrategy", "dlo_framework", "0")
    before = jsonargparse.get_loader("yaml")
    try:
        prefer_plugins([plugin])
        assert jsonargparse.get_loader("yaml")("a: {class_path: FSDPStrategy}") == {
            "a": {"class_path": OURS["FSDPStrategy"]}
        }
        prefer_plugins([])
        assert jsonargparse.get_loader("yaml")("a: {class_path: FSDPStrategy}") == {"a": {"class_path": "FSDPStrategy"}}
    finally:
        jsonargparse.set_loader("yaml", before)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("{class_path: FSDPStrategy, init_args: {replicate: 3}}", 2), ("fsdp", 1)]
)
def test_the_command_takes_the_plugin_for_the_name(dlo, strategy, devices):
    (dlo.folder / "x.yaml").write_text(
        f"trainer: {{strategy: {strategy}, devices: {devices}, accelerator: cpu, max_steps: 1}}\n"
    )
    code = 0 if strategy == "fsdp" else 2
    done = dlo("fit", "--config", "quickstart", "--config", "x.yaml", "--trainer.limit_val_batches", "0", code=code)
    if code:
        assert "replicate must divide the world size 2, got 3; use replicate=2 or run 3 processes" in done.stderr
        assert not list(dlo.folder.glob("runs/*/version_*"))
    else:
        assert "FSDPStrategy on 1 rank(s)" in done.stdout


@pytest.mark.parametrize("words", ["--trainer.strategy.class_path FSDPStrategy", "--trainer.strategy FSDPStrategy"])
def test_the_command_line_takes_the_plugin_for_the_name(dlo, words):
    options = ["--trainer.strategy.init_args.replicate", "3", "--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    error = dlo("fit", "--config", "quickstart", *words.split(), *options, code=2).stderr
    assert "replicate must divide the world size 2, got 3; use replicate=2 or run 3 processes" in error


def test_a_misspelt_alias_is_told_before_the_plugin_is_known(dlo):
    error = dlo("fit", "--config", "quickstart", "--trainer.strategy", "hsdpp", code=2).stderr
    assert "unknown strategy 'hsdpp'; did you mean 'hsdp'?" in error
    assert "use one of auto, ddp, deepspeed, fsdp, hsdp, mesh, zero1, zero2, zero3; `dlo plugins`" in error

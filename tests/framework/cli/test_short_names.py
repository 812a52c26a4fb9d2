"""A plug-in's short name in a config, where another library's class is called the same."""

import os

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest

from dlo_framework.cli.main import main
from dlo_framework.cli.plugin_arguments import expand_arguments, expand_short_names
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

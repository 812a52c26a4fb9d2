"""``dlo lr-find``: the sweep alone, on one rank and on two."""

import json

import yaml

from dlo_framework.cli.main import main
from support.digits_config import WIDE, digits_config

CONFIG = digits_config(
    "max_epochs: 2, accelerator: cpu, log_every_n_steps: 1, accumulate_grad_batches: 2",
    WIDE,
    "image_size: 16, batch_size: 32",
    "schedule: constant",
)


def report(dlo, name):
    return json.loads((dlo.folder / "runs" / name / "version_0" / "lr_find.json").read_text())


SUGGESTION = """
from dlo_plugins.schedules.lr_finder import SUGGESTIONS

@SUGGESTIONS.register("Middle")
def middle(rates, losses):
    return rates[len(rates) // 2]
"""


def test_it_sweeps_prints_and_leaves_a_curve_and_no_checkpoint(dlo):
    """The suggestion that the config names is of a user's file."""
    (dlo.folder / "small.yaml").write_text(CONFIG)
    (dlo.folder / "lr_middle.py").write_text(SUGGESTION)
    named = "[{class_path: LRFinder, init_args: {num_steps: 20, suggestion: %s}}]"
    arguments = ("lr-find", "--config", "small.yaml", "--plugins", "[./lr_middle.py]", "--trainer.callbacks")
    out = dlo(*arguments, named % "Middle").stdout
    found = report(dlo, "small/lr-find")
    kept = [point["lr"] for point in found["points"]][2:-5]
    assert found["suggestion"] == "Middle"
    assert found["lr"] == kept[len(kept) // 2]
    assert f"Middle   {found['lr']:.3g} <- suggested" in out
    assert set(found["suggestions"]) == {"valley", "steep", "minimum", "slide", "Middle"}
    assert "curve    runs/small/lr-find/version_0/lr_find.png" in out
    assert found["applied"] is False
    assert found["points"][0]["lr"] == 1e-7
    folder = dlo.folder / "runs" / "small" / "lr-find" / "version_0"
    assert not (dlo.folder / "runs" / "small" / "version_0").exists(), "the first fit takes it"
    names = {path.name.partition(".out")[0] for path in folder.rglob("*")}
    assert names == {"config.yaml", "hparams.yaml", "lr_find.json", "lr_find.png", "events"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["class_path"].endswith("DigitsData")


def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG)
    unknown = ["--trainer.callbacks", "[{class_path: LRFinder, init_args: {suggestion: steepp}}]"]
    for words, message in (
        (["--trainer.fast_dev_run", "true"], "lr-find: trainer.fast_dev_run must be unset; remove it: a sweep has"),
        (["--ckpt_path", "last"], "lr-find: --ckpt_path must be unset; remove it: a sweep starts from"),
        (unknown, "unknown LRFinder suggestion 'steepp'; did you mean 'steep'?"),
    ):
        assert main(["lr-find", "--config", "small.yaml", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

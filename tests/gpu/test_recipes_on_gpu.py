"""Shipped recipes on one GPU: a few steps of each that one device can train, and the quick start to its end."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

#: Recipes of two ranks, and the ranges of a sweep.
LEFT_OUT = {"diloco", "mesh", "one_bit_adam", "sweep_space"}
FOLDER = files("dlo_framework.configs").joinpath("digits")
DIGITS = sorted({Path(str(file)).stem for file in FOLDER.iterdir()} - LEFT_OUT)
LANGUAGE = ("quickstart", "distill", "curriculum", "int8", "mixture", "moe_quickstart", "sparse_attention")
ONE_GPU = ["--trainer.accelerator", "gpu", "--trainer.devices", "1"]
SHORT = [*ONE_GPU, "--trainer.max_epochs", "2", "--trainer.limit_val_batches", "2"]
FEW_STEPS = [*ONE_GPU, "--trainer.max_steps", "24", "--trainer.val_check_interval", "12"]
FEW_STEPS += ["--trainer.limit_val_batches", "2"]
#: Recipes that share a process, for its imports.
GROUP = 7
SCRIPT = """
import json, os, sys
from dlo_framework.cli.main import main
failed = []
for words in json.loads(sys.argv[1]):
    os.environ.pop("DLO_RUN_FOLDER", None)  # Each is a run of its own.
    try:
        code = main(words)
    except BaseException as error:
        code = repr(error)
    if code:
        failed.append(f"{' '.join(words)}: {code}")
sys.exit("; ".join(failed) or 0)
"""


def run_each(folder: Path, *commands: list[str]) -> str:
    """Runs `dlo` with each list of words, in one process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-9000:]}"
    return done.stdout


def summary_of(run: Path) -> dict:
    return json.loads((run / "version_0" / "summary.json").read_text())


@pytest.mark.parametrize("names", [DIGITS[at : at + GROUP] for at in range(0, len(DIGITS), GROUP)], ids=lambda n: n[0])
def test_recipes_on_the_digits_train(tmp_path: Path, names: list[str]) -> None:
    # The teacher of `distill` is another run.
    teacher = [["fit", "--config", "quickstart", "--run.name", "digits_teacher", *SHORT]] if "distill" in names else []
    run_each(tmp_path, *teacher, *(["fit", "--config", f"digits/{name}", *SHORT] for name in names))
    for name in names:
        summary = summary_of(tmp_path / "runs" / name)
        assert summary["status"] == "finished"
        assert summary["accelerator"] == "CUDAAccelerator"


def test_recipes_of_language_models_train(tmp_path: Path) -> None:
    runs = {name: "llm_teacher" if name == "quickstart" else f"llm_{name}" for name in LANGUAGE}
    run_each(
        tmp_path, *(["fit", "--config", f"llm/{name}", "--run.name", run, *FEW_STEPS] for name, run in runs.items())
    )
    for run in runs.values():
        assert summary_of(tmp_path / "runs" / run)["status"] == "finished"


def test_the_quick_start_learns_the_digits(tmp_path: Path) -> None:
    fit = ["fit", "--config", "quickstart", *ONE_GPU]
    half = ["--run.name", "half", "--trainer.precision", "bf16-mixed"]
    run_each(tmp_path, fit, ["validate", *fit[1:], "--ckpt_path", "best"], [*fit, *half])
    for name in ("quickstart", "half"):
        assert summary_of(tmp_path / "runs" / name)["best_metric"]["val_acc1"] > 0.96

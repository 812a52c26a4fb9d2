"""The page that compares dlo with Lightning alone and Accelerate: its figures are those of the three programs."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "comparison"
STRATEGY = {"dlo": ["--strategy", "fsdp"], "lightning": ["--strategy", "ddp"], "accelerate": []}
ALONE = {name: ["--ranks", "1", *(["--strategy", "auto"] if words else [])] for name, words in STRATEGY.items()}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def table() -> dict[str, dict[str, str]]:
    """Returns the page's table: program to row to cell."""
    text = (ROOT / "docs/comparison.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {name: {row[0]: row[column] for row in rows[:7]} for column, name in enumerate(STRATEGY, start=1)}


def count_lines(file: Path) -> int:
    """Returns the number of lines that hold code: not blank, not of a docstring."""
    tree = ast.parse(file.read_text())
    (docstring,) = (node for node in tree.body[:1] if isinstance(node, ast.Expr))
    documented = range(docstring.lineno, docstring.end_lineno + 1)
    lines = enumerate(file.read_text().splitlines(), start=1)
    return sum(bool(line.strip()) for number, line in lines if number not in documented)


@pytest.mark.parametrize("name", STRATEGY)
def test_the_page_has_the_programs_lines(name):
    assert table()[name]["lines of code"] == str(count_lines(PROGRAMS / f"with_{name}.py"))


class Runs:
    """Runs of one program, each with the losses that it recorded."""

    def __init__(self, folder: Path, start) -> None:
        self.folder, self.start = folder, start

    def losses(self, *words: str) -> list[float]:
        file = self.folder / "losses.txt"
        file.unlink(missing_ok=True)
        self.start(*words)
        return [float(line) for line in file.read_text().split()]


def first_difference(losses: list[float], expected: list[float]) -> str:
    assert len(losses) == len(expected)
    close = [loss == pytest.approx(other, rel=1e-5) for loss, other in zip(losses, expected, strict=True)]
    return f"others from step {close.index(False) + 1}" if False in close else "the same"


def check_page(name: str, runs: Runs) -> None:
    alone = runs.losses(*ALONE[name])
    on_ranks = runs.losses(*STRATEGY[name])
    stopped = runs.losses(*STRATEGY[name], "--steps", "11")
    before = runs.folder.with_name("stopped")
    shutil.copytree(runs.folder, before)
    resumed = stopped + runs.losses(*STRATEGY[name], "--resume")
    shutil.rmtree(runs.folder)
    shutil.copytree(before, runs.folder)
    resumed_alone = stopped + runs.losses(*ALONE[name], "--resume")
    cells = table()[name]
    assert cells["losses of 2 ranks, beside one process's"] == first_difference(on_ranks, alone)
    assert cells["losses after a resume within an epoch"] == first_difference(resumed, on_ranks)
    assert cells["losses after a resume by one process"] == first_difference(resumed_alone, on_ranks)


@pytest.mark.slow
def test_dlos_figures(dlo, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    dlo.folder = tmp_path / "run"
    dlo.folder.mkdir()
    check_page("dlo", Runs(dlo.folder, lambda *words: dlo(str(PROGRAMS / "with_dlo.py"), *words)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_the_others_figures(name, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()

    def start(*words: str) -> str:
        launcher = TORCHRUN if name == "accelerate" and "--ranks" not in words else []
        command = [sys.executable, *launcher, str(PROGRAMS / f"with_{name}.py"), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    check_page(name, Runs(folder, start))
    if name == "accelerate":
        assert "MULTI_CPU" in start(), "FSDP of Accelerate is ignored on a CPU"

"""`dlo sweep` as a user runs it, alone and as tasks of a job array: kills, Ctrl-C and time limits lose no trial."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlo_framework.errors import DloError
from dlo_plugins.sweep import command as sweep_command
from support import slurm_standin
from support.dlo_process import DloProcess
from support.launchers import wait_until
from support.sweep_config import CONFIG

SPACE = {"model.init_args.lr": {"log": ["1e-4", "1e-1"]}, "model.init_args.optimizer": ["adamw", "sgd"]}
WORDS = ("--config", "tiny.yaml", "--space", "space.yml")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "space.yml").write_text(yaml.safe_dump(SPACE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(place: Path, *words: str) -> DloProcess:
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
    return DloProcess(["sweep", *WORDS, *words], place, mine | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trials", [1, 2])
def test_a_killed_sweep_goes_on_and_its_best_config_is_a_config(place, trials):
    """The worker is killed (SIGKILL) in its first trial, once that has a checkpoint; a second start ends the sweep."""
    options = ("--trials", str(trials), "--sampler", "random")
    killed = start(place, *options)
    folder = place / "runs" / "sweeps" / "tiny"
    saved = folder / "trials" / "0000" / "version_0" / "checkpoints" / "last.ckpt"
    wait_until(saved.exists)
    killed.kill()
    killed.communicate()
    before = [json.loads(line) for line in (folder / "trials" / "0000" / "reports.jsonl").read_text().splitlines()]
    assert before
    again = start(place, *options)
    out, err = again.communicate(timeout=500)
    assert again.returncode == 0, err[-3000:]
    assert f"{trials} trials: {trials} complete, 0 pruned, 0 fail" in out.replace("1 trial:", "1 trials:")
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["trial"] for row in rows] == ["0", "1"][:trials]
    assert {row["state"] for row in rows} == {"complete"}
    assert len({row["model.init_args.lr"] for row in rows}) == trials
    # One run, which was resumed: the values before the kill are kept, and no step is trained twice in the end.
    assert [path.name for path in (folder / "trials" / "0000").glob("version_*")] == ["version_0"]
    summary = json.loads((folder / "trials" / "0000" / "version_0" / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("finished", 3, 12)
    reports = [json.loads(line) for line in (folder / "trials" / "0000" / "reports.jsonl").read_text().splitlines()]
    assert {report["step"] for report in reports} == {1, 2, 3}
    by_step = {}
    for report in reports:  # What was validated twice had the same value: the resumed run is the same run.
        assert by_step.setdefault(report["step"], report["value"]) == report["value"]
    check_best(folder, rows)
    check_board(folder / "trials" / f"{trials - 1:04d}" / "version_0")


def check_best(folder: Path, rows: list[dict[str, str]]) -> None:
    best = yaml.safe_load((folder / "best.yaml").read_text())
    done = [row for row in rows if row["state"] == "complete"]
    expected = max(done, key=lambda row: float(row["val_acc1"]))
    assert best["model"]["init_args"]["lr"] == float(expected["model.init_args.lr"])
    assert "run" not in best
    assert best["trainer"]["callbacks"] is None
    for name in ("history", "parallel_coordinates", "slices", "curves"):
        assert (folder / "plots" / f"{name}.png").stat().st_size > 5000
        assert "plotly" in (folder / "plots" / f"{name}.html").read_text()


def check_board(run: Path) -> None:
    """HParams: the values, the trial's number, and the last metrics."""
    events = EventAccumulator(str(run), size_guidance={"tensors": 0})
    events.Reload()
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for name in (b"sweep/trial", b"sweep/model.init_args.lr", b"sweep/model.init_args.optimizer"):
        assert name in hparams
    assert any(tag.startswith("final/val_acc1") for tag in events.Tags()["scalars"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_reaches_a_trial_once_so_that_it_saves(place):
    """A terminal sends the signal to the whole process group, and a run takes a second one as a wish to end at once."""
    words = ["dlo", "sweep", *WORDS, "--trials", "1", "--sampler", "random", "--trainer.max_epochs", "500"]
    process = subprocess.Popen(words, cwd=place, stderr=subprocess.PIPE, text=True, start_new_session=True)
    folder = place / "runs" / "sweeps" / "tiny" / "trials" / "0000"
    wait_until((folder / "reports.jsonl").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err[-3000:]
    log = (folder / "trial.log").read_text()
    assert "second Ctrl-C" not in log
    summary = json.loads((folder / "version_0" / "summary.json").read_text())
    assert summary["status"] == "interrupted: RunStopped"
    assert list((folder / "version_0" / "checkpoints").glob("*.ckpt"))


def sweep(*words: str) -> int:
    return sweep_command.main([*WORDS, *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trials", "0"), "sweep: --trials must be at least 1, got 0"),
        (("--metric", "val_loss"), "sweep: --metric and --mode must be set together"),
        (("--model.init_args.lr", "1"), "sweep: --model.init_args.lr must be left out, as the space sets"),
        (("--run.name", "x"), "sweep: --run.name must be left out, as the sweep sets it"),
        (("--trainer.num_nodes", "2"), "sweep: trainer.num_nodes must be 1, as a trial runs on its worker's node"),
        (("--engine", "ray", "--pruner", "bohb"), "sweep: --pruner must be one of none, asha, median, pbt with"),
        (("--space", "nothing.yml"), "sweep: --space must be a file or a shipped space, got nothing.yml"),
    ],
)
def test_bad_options_are_one_sentence_before_a_process_starts(place, words, message):
    with pytest.raises(DloError) as refused:
        sweep(*words)
    assert str(refused.value).startswith(message)
    assert not list((place / "runs").rglob("trial.yaml")) if (place / "runs").exists() else True


@pytest.mark.slow
def test_a_key_that_the_model_does_not_have_is_found_before_the_first_trial(place):
    (place / "space.yml").write_text(yaml.safe_dump({"model.init_args.lrr": {"log": [1e-4, 1e-1]}}))
    with pytest.raises(DloError, match=r"unknown key 'model.init_args.lrr' of ImageClassifier; did you mean 'lr'\?"):
        sweep("--trials", "2")


def test_a_rank_of_a_launcher_and_a_folder_without_a_sweep_are_refused(place, monkeypatch):
    with pytest.raises(DloError, match="sweep: report needs the folder of a sweep"):
        sweep_command.main(["report", str(place)])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DloError, match="sweep: the command must be started once a job"):
        sweep()


def test_the_shipped_space_fits_the_shipped_config(place):
    from dlo_plugins.sweep.search_space import SearchSpace, apply_values

    base = yaml.safe_load((Path(sweep_command.__file__).parents[3] / "configs/digits/sweep.yaml").read_text())
    of = SearchSpace(sweep_command.read_space("digits/sweep_space"))
    for values in of.probes():
        assert apply_values(base, values)["data"]["init_args"]["batch_size"] in (64, 128, 256, 512)


# the shipped script of a sweep as a job array, end to end, on a stand-in for SLURM: a lost node, and a time limit


SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "sweep.sbatch"
SHARED_SPACE = {"model.init_args.lr": {"log": ["1e-4", "1e-1"]}}
TRIALS = 5


def write_script(place: Path) -> Path:
    """Writes the shipped script with two tasks, a small config and few trials; nothing else differs."""
    (place / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "space.yml").write_text(yaml.safe_dump(SHARED_SPACE))
    text, changes = SCRIPT.read_text(), 0
    for old, new in {
        "--array=1-8": "--array=1-2",
        "--config digits/sweep --space digits/sweep_space": "--config tiny.yaml --space space.yml --sampler random",
        "--trials 100 --pruner asha": f"--trials {TRIALS}",
    }.items():
        changes += text.count(old)
        text = text.replace(old, new)
    assert changes == 3
    (place / "sweep.sbatch").write_text(text)
    return place / "sweep.sbatch"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_of_an_array_share_trials_and_a_lost_node_and_a_time_limit_lose_none(tmp_path):
    script, notes = write_script(tmp_path), tmp_path / "slurm"
    notes.mkdir()
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST", "SLURM"))}
    mine |= {"PATH": f"{slurm_standin.install(tmp_path / 'bin')}:{os.environ['PATH']}", "SLURM_STANDIN": str(notes)}
    job = subprocess.Popen(["sbatch", script.name], cwd=tmp_path, env=mine)
    folder = tmp_path / "runs" / "sweeps" / "tiny"

    def reports(trial: int) -> list[dict[str, float]]:
        path = folder / "trials" / f"{trial:04d}" / "reports.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    wait_until(lambda: reports(0) and reports(1))  # Both tasks train.
    # A node fails: all processes of the first task are killed at once.
    os.killpg(int((notes / "task 1.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: any(reports(number) for number in range(2, TRIALS)))
    # The second task comes near its time limit: the step gets the signal, saves, and the script puts the task back.
    os.kill(int((notes / "step 2.pid").read_text()), signal.SIGUSR1)
    assert job.wait(timeout=600) == 0, "\n".join(path.read_text()[-2000:] for path in notes.glob("*.log"))
    ended = [line.split() for line in (notes / "ended").read_text().splitlines()]
    assert ["1", "0", "-9"] in ended
    assert ["2", "0", "143"] in ended
    assert sum(code == "0" for _, _, code in ended) == 2
    report = subprocess.run(["dlo", "sweep", "report", str(folder)], cwd=tmp_path, env=mine, capture_output=True)
    assert report.returncode == 0, report.stderr
    assert re.search(rf"{TRIALS} trials: {TRIALS} complete, 0 pruned, 0 fail".encode(), report.stdout)
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["trial"] for row in rows] == [str(number) for number in range(TRIALS)]
    assert len({row["model.init_args.lr"] for row in rows}) == TRIALS
    for number in range(TRIALS):
        runs = sorted((folder / "trials" / f"{number:04d}").glob("version_*"))
        saved = [run.name for run in runs if (run / "checkpoints" / "last.ckpt").exists()]
        assert saved == [runs[-1].name], "only a trial that was killed before its first checkpoint begins again"
        by_step: dict[float, float] = {}
        for one in reports(number):
            assert by_step.setdefault(one["step"], one["value"]) == one["value"], "a resumed run is the same run"
        assert sorted(by_step) == [1, 2, 3]

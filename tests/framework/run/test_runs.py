"""Run folders, the checkpoints that are kept and found in them by name, and the lines that a user is not shown."""

import errno
import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework import run_setup
from dlo_framework.checkpoint import load, newest_valid, note_resumption, resumptions, save
from dlo_framework.cli.main import main
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import SingleProcessStrategy, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.run.process import shorten_warnings, silence_warnings
from support.trainers import Squares, quiet_trainer


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (runs.ENVIRONMENT, runs.FOUND, "RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop(runs.FOUND, None)  # Set by the code under test, after monkeypatch has read it.


def keep(run, step, name="last.ckpt", best=None):
    """Saves a checkpoint as a run does whose ModelCheckpoint has recorded ``best``."""
    kept = {"monitor": "val", "best_model_path": str(best)} if best else {"monitor": None, "best_model_path": "x"}
    content = {"state_dict": {"w": torch.ones(1)}, "optimizer_states": [], "global_step": step, "epoch": 0}
    save({**content, "callbacks": {"Other": {"n": 1}, "ModelCheckpoint": kept}}, run / "checkpoints" / name)
    return run / "checkpoints" / name


def summarise(run, best, **fields):
    run.mkdir(parents=True, exist_ok=True)
    (run / "summary.json").write_text(json.dumps({"best_checkpoint": best, **fields}))


def test_runs_are_numbered_and_gaps_are_not_filled(tmp_path):
    assert runs.new_run(tmp_path).name == "version_0"
    assert runs.new_run(tmp_path).name == "version_1"
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_x").mkdir()
    assert runs.new_run(tmp_path).name == "version_8"


def test_two_jobs_at_once_get_two_folders(tmp_path, monkeypatch):
    """Between a job's check of the folder and its mkdir, another job may have taken the number."""
    monkeypatch.setattr(runs, "versions", lambda folder: [])
    (tmp_path / "version_0").mkdir()
    assert runs.new_run(tmp_path).name == "version_1"


def test_a_second_run_in_one_process_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """A ``dlo`` that a run starts, and a rank that resumes another run, do not get the first one's answer."""
    monkeypatch.setenv("SLURM_PROCID", "0")  # Variables of a job's shell: all its processes have them.
    assert [runs.new_run(tmp_path / "a").name for _ in range(2)] == ["version_0", "version_1"]
    assert runs.new_run(tmp_path / "b") == tmp_path / "b" / "version_0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.new_run(tmp_path / "a").name == "pending"
    assert runs.new_run(tmp_path / "b").name == "version_0", "a rank that rank 0 has started uses its folder"
    assert runs.new_run(tmp_path / "b").name == "pending", "told once: a second run in this process is another"


def test_a_second_run_in_one_process_looks_anew_for_its_checkpoint(tmp_path, monkeypatch):
    for number in range(2):
        last = keep(tmp_path / f"version_{number}", 5)
        assert runs.find_checkpoint(tmp_path, "last") == runs.unfinished(tmp_path) == last
    newer = keep(tmp_path / "version_2", 5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.unfinished(tmp_path) == last, "a rank takes the word of the one that has started it"
    assert runs.unfinished(tmp_path) == newer, "for one run"


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_other_ranks_make_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    runs.new_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_best_is_what_the_summary_names(tmp_path):
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "best.ckpt").touch()
    with pytest.raises(DloError, match="has a best checkpoint"):
        runs.find_checkpoint(tmp_path, "best")
    (tmp_path / "version_0" / "summary.json").write_text(json.dumps({"best_checkpoint": "checkpoints/best.ckpt"}))
    assert runs.find_checkpoint(tmp_path, "best") == folder / "best.ckpt"


def test_best_of_a_run_that_was_killed_is_what_its_newest_checkpoint_says(tmp_path):
    """A summary is written at a run's end: one that was killed, or still runs, has none, or that of an earlier end."""
    summarise(tmp_path / "version_0", "checkpoints/old.ckpt", status="finished", steps=9)
    keep(tmp_path / "version_0", 9, "old.ckpt")
    run = tmp_path / "version_1"
    first = keep(run, 5, "epoch=0.ckpt", run / "checkpoints" / "epoch=0.ckpt")
    keep(run, 8, best=first)
    assert runs.find_checkpoint(tmp_path, "best") == first
    summarise(run, "checkpoints/epoch=0.ckpt", status="interrupted: RunStopped", steps=8)
    note_resumption(run / "checkpoints" / "last.ckpt")
    better = keep(run, 12, "epoch=1.ckpt", run / "checkpoints" / "epoch=1.ckpt")
    keep(run, 15, best=better)
    assert runs.find_checkpoint(tmp_path, "best") == better


@pytest.mark.parametrize("moved", [False, True])
def test_best_of_a_killed_run_is_found_where_the_run_is_now(tmp_path, moved):
    was = tmp_path / "elsewhere" / "version_0"
    best = keep(tmp_path / "version_0", 5, "epoch=0.ckpt")
    last = keep(tmp_path / "version_0", 8, best=was / "checkpoints" / "epoch=0.ckpt")
    if moved:
        content = load(last)
        save({**content, "state_dict": dict(content["state_dict"]), "run_folder": str(was)}, last)
        assert runs.find_checkpoint(tmp_path, "best") == best
    else:
        with pytest.raises(DloError, match=r"epoch=0\.ckpt, which does not exist; .*or the path"):
            runs.find_checkpoint(tmp_path, "best")


def test_best_of_an_older_run_is_never_given_for_the_newest_without_a_word(tmp_path):
    summarise(tmp_path / "version_0", "checkpoints/old.ckpt", status="finished", steps=9)
    old = keep(tmp_path / "version_0", 9, "old.ckpt")
    (tmp_path / "version_1").mkdir()
    with pytest.warns(UserWarning, match="skipping .*version_1: it has no checkpoint"):
        assert runs.find_checkpoint(tmp_path, "best") == old
    keep(tmp_path / "version_1", 3)
    with pytest.raises(DloError, match=r"best: the newest run, .*version_1, has none; .*or the path"):
        runs.find_checkpoint(tmp_path, "best")


def test_a_full_disk_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DloError, match=r"no space in the run folder: need 16\.8 MB, 1\.0 kB free"):
        runs.new_run(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DloError, match=r"cannot create the run folder .*; choose another with --run\.dir"):
        runs.new_run(tmp_path / "file")


# --- auto: the newest run is resumed if it has not finished; else a new one starts ---------------------------------


def make_run(folder, number: int, step: int | None, status: str | None = None, steps: int = 0):
    """Creates a run with a checkpoint at a step, and a summary."""
    run = folder / f"version_{number}"
    run.mkdir(parents=True)
    if step is not None:
        keep(run, step)
    if status is not None:
        summarise(run, None, status=status, steps=steps)
    return run / runs.CHECKPOINTS / runs.LAST


def test_a_run_that_was_killed_or_stopped_goes_on(tmp_path):
    assert runs.unfinished(tmp_path / "none") is None
    make_run(tmp_path, 0, 90, "finished", 90)
    killed = make_run(tmp_path, 1, 30)
    assert runs.unfinished(tmp_path) == killed
    stopped = make_run(tmp_path, 2, 40, "interrupted: RunStopped", 40)
    assert runs.unfinished(tmp_path) == stopped
    longer = make_run(tmp_path, 3, 120, "finished", 90)
    assert runs.unfinished(tmp_path) == longer, "made longer and killed"
    make_run(tmp_path, 4, None)
    assert runs.unfinished(tmp_path) is None, "nor does an older one for a run that has no checkpoint yet"


def test_a_new_run_after_a_finished_one_is_told_of(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(run_setup, "rank_zero_info", lines.append)

    def start() -> str:
        lines.clear()
        assert run_setup.find_start_checkpoint("auto", lambda: tmp_path, trains=True) == (None, True)
        return "".join(lines)

    assert not start(), "the first run of its name"
    make_run(tmp_path, 0, 90, "finished", 90)
    assert f"ckpt_path auto: {tmp_path}/version_0 has finished after 90 steps, so a new run starts" in start()
    assert f"set ckpt_path to {tmp_path}/version_0/checkpoints/last.ckpt, and trainer.max_epochs or" in start()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not start(), "one line, of the first rank"
    monkeypatch.delenv("LOCAL_RANK")
    make_run(tmp_path, 1, None)
    assert not start(), "the newest has not finished"


@pytest.mark.parametrize("step", [30, None])
def test_the_ranks_that_this_process_starts_decide_alike(tmp_path, monkeypatch, step):
    found = make_run(tmp_path, 0, step)
    expected = None if step is None else found
    assert runs.unfinished(tmp_path) == expected
    make_run(tmp_path, 1, 50)  # Rank 0 creates its folder while the others start.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.unfinished(tmp_path) == expected


# --- the paths of a run's checkpoints, its best one, and what remains of a run that cannot write any more ------------


class Net(Squares):
    """Its metric is best in the second epoch."""

    best_metric = ("val", "max")

    def validation_step(self, batch, batch_idx):
        self.log("val", -float((self.current_epoch - 1) ** 2))


def fit(folder: Path, callbacks=(), resume: Path | None = None, **options) -> Trainer:
    """Trains four steps an epoch."""
    module = Net(torch.nn.Linear(1, 1))
    callbacks = add_default_callbacks(list(callbacks), run_folder=folder, model=module, progress_bar=False)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True, **options}
    trainer = quiet_trainer(callbacks=callbacks, **options)
    use_canonical_checkpoints(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    trainer.fit(module, data, data, ckpt_path=resume)
    return trainer


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- one's own ModelCheckpoint ------------------------------------------------------------------------------


def test_ones_own_checkpoints_are_the_runs_whatever_the_logger(tmp_path):
    own = ModelCheckpoint(every_n_train_steps=6, save_top_k=-1, save_last=True)
    fit(tmp_path / "x" / "version_0", [own], logger=CSVLogger(tmp_path / "curves"))
    best = "epoch=1-step=8-val=0.0000.ckpt"
    assert names(tmp_path / "x" / "version_0") == ["epoch=1-step=6.ckpt", best, "epoch=2-step=12.ckpt", "last.ckpt"]
    assert runs.find_checkpoint(tmp_path / "x", "last").name == "last.ckpt"


@pytest.mark.parametrize("save_last", [None, True])
def test_ones_own_elsewhere_leave_the_run_its_last(tmp_path, save_last):
    """Also one that saves at the same times as dlo's own, which Lightning would not distinguish by its state."""
    fit(tmp_path / "x" / "version_0", [ModelCheckpoint(tmp_path / "elsewhere", save_top_k=-1, save_last=save_last)])
    assert load(tmp_path / "x" / "version_0" / "checkpoints" / "last.ckpt")["global_step"] == 12
    assert len(list((tmp_path / "elsewhere").iterdir())) == (4 if save_last else 3)
    assert runs.unfinished(tmp_path / "x") is None


# --- the best -----------------------------------------------------------------------------------------------


def test_the_best_one_is_found_by_a_relative_path_where_the_runs_lie_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er" / "disk").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "deep" / "er" / "disk", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    fit(Path("runs/x/version_0"))
    assert summary(Path("runs/x/version_0"))["best_checkpoint"].startswith("checkpoints/epoch=1")
    assert runs.find_checkpoint(Path("runs/x"), "best").name.startswith("epoch=1")


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_run_that_was_moved_knows_its_best_still(tmp_path, move):
    fit(tmp_path / "old")
    best = summary(tmp_path / "old")["best_checkpoint"]
    move(tmp_path / "old", tmp_path / "new")
    fit(tmp_path / "new", resume=tmp_path / "new" / "checkpoints" / "last.ckpt", max_epochs=5)
    assert summary(tmp_path / "new")["best_metric"] == {"val": 0.0}
    assert summary(tmp_path / "new")["best_checkpoint"] == best
    assert names(tmp_path / "new") == [Path(best).name, "last.ckpt", "resumed.jsonl"]


def test_a_new_run_from_anothers_checkpoint_does_not_take_its_best_over(tmp_path):
    fit(tmp_path / "old")
    fit(tmp_path / "new", resume=tmp_path / "old" / "checkpoints" / "last.ckpt", max_epochs=5)
    assert summary(tmp_path / "new")["best_metric"] == {"val": -4.0}
    assert resumptions(tmp_path / "old" / "checkpoints") == resumptions(tmp_path / "new" / "checkpoints") == 0


def test_a_run_notes_what_it_goes_on_from_and_what_it_leaves(tmp_path):
    every = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}"}
    fit(tmp_path / "x" / "version_0", [ModelCheckpoint(**every)])
    folder = tmp_path / "x" / "version_0"
    fit(folder, [ModelCheckpoint(**every)], resume=folder / "checkpoints" / "step=4.ckpt", max_epochs=2)
    (line,) = map(json.loads, (folder / "checkpoints" / "resumed.jsonl").read_text().splitlines())
    assert (line["from"], line["step"]) == ("step=4.ckpt", 4)
    best = "epoch=1-step=8-val=0.0000.ckpt"
    assert sorted(line["left_behind"]) == [best, "last.ckpt", "step=12.ckpt", "step=8.ckpt"]
    assert summary(folder)["resumptions"] == 1
    assert load(runs.find_checkpoint(tmp_path / "x", "last"))["global_step"] == 8
    assert runs.unfinished(tmp_path / "x") is None


# --- no more room -------------------------------------------------------------------------------------------


def full(self, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", str(self))


class Fails(Callback):
    def on_train_batch_end(self, trainer, *_):
        raise DloError("no space for the checkpoint")


def test_a_summary_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DloError, match="no space for the checkpoint"):
        fit(tmp_path, [Fails()])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "summary.json" in line]
    why = f"cannot write {tmp_path / 'summary.json'}: No space left on device"
    assert line == f"dlo: the summary of this run could not be written: {why}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.yaml"]


def test_the_best_is_the_one_before_where_the_new_one_found_no_room(tmp_path, monkeypatch):
    save = SingleProcessStrategy.save_checkpoint

    def refuse_second_best(self, checkpoint, filepath, storage_options=None):
        if Path(filepath).name.startswith("epoch=1"):
            raise DloError("no space for the checkpoint")
        save(self, checkpoint, filepath, storage_options)

    monkeypatch.setattr(SingleProcessStrategy, "save_checkpoint", refuse_second_best)
    with pytest.raises(DloError, match="no space for the checkpoint"):
        fit(tmp_path / "x" / "version_0")
    record = summary(tmp_path / "x" / "version_0")
    assert (record["status"], record["best_metric"]) == ("interrupted: DloError", {"val": -1.0})
    best = runs.find_checkpoint(tmp_path / "x", "best")
    assert best == tmp_path / "x" / "version_0" / record["best_checkpoint"]
    assert load(best)["global_step"] == 4


def test_one_that_cannot_be_written_at_the_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DloError, match=r"cannot write .*summary\.json: No space left on device"):
        fit(tmp_path)


# --- lines that a user cannot act on are not shown; others are -------------------------------------------------------


def test_lightnings_tip_on_tensor_cores_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    silence_warnings()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        rank_zero_info(
            "You are using a CUDA device ('NVIDIA H200') that has Tensor Cores. To properly utilize them, ..."
        )
        rank_zero_info("GPU available: True (cuda), used: True")
    assert [record.getMessage() for record in caplog.records] == ["GPU available: True (cuda), used: True"]


def test_dlos_own_warnings_are_one_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    shorten_warnings()
    shorten_warnings()
    told = warnings.formatwarning("too long", UserWarning, "/a/dlo_tasks/language/positions.py", 58, "warn(x)")
    assert told == "warning: too long\n"
    for file in ("/home/me/train.py", "/home/me/dlo_train.py"):
        assert f"{file}:58: UserWarning: too long" in warnings.formatwarning(
            "too long", UserWarning, file, 58, "warn(x)"
        )


# --- checkpoints by name where a run has gone back: earlier ones supersede the later --------------------------------


@pytest.fixture
def run(tmp_path):
    """A run that has reached step 900, with a checkpoint each 100 steps."""
    folder = tmp_path / "x" / "version_0"
    for step in range(100, 1000, 100):
        keep(folder, step, f"step={step}.ckpt")
    keep(folder, 900, "last.ckpt")
    return folder


def newest(run) -> str:
    """Returns the name that ``last`` finds, which ``auto`` finds too."""
    found = runs.find_checkpoint(run.parent, "last")
    assert runs.unfinished(run.parent) == found
    return found.name


def go_on(run, name: str) -> None:
    note_resumption(run / runs.CHECKPOINTS / name)


def test_what_a_run_has_left_behind_is_not_gone_on_with(run):
    assert newest(run) == "last.ckpt"
    go_on(run, "step=500.ckpt")
    assert newest(run) == "step=500.ckpt", "killed before it has saved anything"
    keep(run, 600, "step=600-v1.ckpt")
    assert newest(run) == "step=600-v1.ckpt"
    keep(run, 650, "last.ckpt")
    assert newest(run) == "last.ckpt"
    assert load(run / "checkpoints" / "last.ckpt")["global_step"] == 650
    go_on(run, "last.ckpt")
    keep(run, 700, "last.ckpt")
    assert load(run / "checkpoints" / newest(run))["global_step"] == 700
    assert resumptions(run / "checkpoints") == 2


def test_a_finished_run_that_went_back_is_not_finished(run):
    (run / runs.SUMMARY).write_text(json.dumps({"status": "finished", "steps": 900}))
    assert runs.unfinished(run.parent) is None
    go_on(run, "step=500.ckpt")
    keep(run, 650, "last.ckpt")
    assert newest(run) == "last.ckpt"
    (run / runs.SUMMARY).write_text(json.dumps({"status": "finished", "steps": 650, "resumptions": 1}))
    assert runs.unfinished(run.parent) is None


def test_a_branch_that_was_left_may_be_taken_up_again(run):
    go_on(run, "step=500.ckpt")
    keep(run, 600, "step=600-v1.ckpt")
    go_on(run, "step=600.ckpt")
    assert newest(run) == "step=600.ckpt", "not the other branch's of the same step"
    go_on(run, "step=600-v1.ckpt")
    assert newest(run) == "step=600-v1.ckpt"
    go_on(run, "last.ckpt")
    assert load(run / "checkpoints" / newest(run))["global_step"] == 900


@pytest.mark.parametrize("kind", ["copied", "by a clock that is behind"])
def test_neither_clocks_nor_copies_change_the_answer(run, monkeypatch, kind, tmp_path):
    if kind == "by a clock that is behind":
        monkeypatch.setattr("time.time", lambda: 1.0)
    go_on(run, "step=500.ckpt")
    keep(run, 600, "step=600.ckpt")
    if kind == "copied":
        shutil.copytree(run, tmp_path / "y" / "version_0", copy_function=shutil.copy)
        run = tmp_path / "y" / "version_0"
    assert newest(run) == "step=600.ckpt"


def test_a_damaged_one_is_told_of_and_what_was_left_is_not_offered(run):
    (run / "checkpoints" / "step=900.ckpt" / "manifest.json").unlink()
    go_on(run, "step=500.ckpt")
    with pytest.warns(UserWarning, match=r"skipping .*step=900\.ckpt"):
        assert newest(run) == "step=500.ckpt"
    shutil.rmtree(run / "checkpoints" / "step=900.ckpt")
    (run / "checkpoints" / "step=500.ckpt" / "state.pt").unlink()
    with pytest.raises(DloError, match=r"the newest valid one beside it is .*step=400\.ckpt$"):
        load(run / "checkpoints" / "step=500.ckpt")
    with pytest.warns(UserWarning, match=r"skipping .*step=500\.ckpt"):
        assert newest(run) == "step=400.ckpt"


def test_single_files_too_and_a_note_that_cannot_be_read_is_none(tmp_path):
    for step in (5, 9):
        content = {"state_dict": {}, "optimizer_states": [], "global_step": step, "pytorch-lightning_version": "2.6.6"}
        torch.save(content, tmp_path / f"{step}.ckpt")
    note_resumption(tmp_path / "5.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "5.ckpt"
    (tmp_path / "resumed.jsonl").write_text("not JSON\n")
    assert newest_valid(tmp_path) == tmp_path / "9.ckpt"


# --- ``dlo checkpoint ... last | best``: the checkpoint of a run, without its path -----------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs called ``a``, of which the older has the later files, and one called ``b``, the newest."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()  # Data of the same name.
    for time, (name, step) in enumerate({"a/version_1": 1, "a/version_0": 2, "b/version_0": 3}.items()):
        checkpoints = Path("runs", name, runs.CHECKPOINTS)
        for file in ("last.ckpt", "top.ckpt"):
            content = {"state_dict": {"w": torch.tensor([float(step)])}, "global_step": step, "epoch": 0}
            save({**content, "optimizer_states": [], "loops": {}}, checkpoints / file)
        summary = {"best_checkpoint": "checkpoints/top.ckpt", "status": "finished", "steps": step}
        (checkpoints.parent / runs.SUMMARY).write_text(json.dumps(summary))
        os.utime(checkpoints, (time + 1, time + 1))
    yield tmp_path
    os.environ.pop(runs.FOUND, None)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["last"], 3),
        (["best"], 3),
        (["last", "--run", "a"], 1),
        (["best", "--run", "a"], 1),
        (["last", "--run", "runs/a"], 1),
        (["best", "--run", "runs/a/version_0"], 2),
        (["runs/a/version_0/checkpoints/last.ckpt"], 2),
    ],
)
def test_a_run_s_checkpoint_is_found(folder, capsys, words, step):
    assert main(["checkpoint", "inspect", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"] == step
    named = words[0] in ("last", "best")
    assert printed.err.startswith(f"{words[0]}: runs/") if named else not printed.err, "which one was meant"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["last", "--run", "bb"], "--run must name a run in runs/, or a folder, got bb; did you mean 'b'?"),
        (["x.ckpt", "--run", "b"], "--run must come with last or best, got the path x.ckpt; remove --run"),
    ],
)
def test_what_is_not_there_is_told(folder, capsys, words, message):
    assert main(["checkpoint", "inspect", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_run_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "verify", "last"]) == 2
    assert "--run must name a run, got none, and there is none in" in capsys.readouterr().err

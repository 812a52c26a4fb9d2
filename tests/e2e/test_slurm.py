"""The scripts for SLURM train ranks on a stand-in that refuses what SLURM and Jean Zay refuse."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from support import slurm_standin
from support.doc_folder import small_files
from support.launchers import wait_until
from support.sweep_config import CONFIG

SCRIPTS = sorted((Path(__file__).parents[2] / "configs" / "slurm").glob("*.sbatch"))
JEAN_ZAY = next(path for path in SCRIPTS if path.stem == "jean_zay")
MINE = "--account=abc@h100"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_accepts_the_scripts(dlo, script):
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    options, _ = slurm_standin.check_job([MINE, str(script)], "jean-zay" if script == JEAN_ZAY else "")
    assert "requeue" in options
    assert re.fullmatch(r"USR1@\d+", options["signal"])
    for name in re.findall(r"dlo fit --config (\S+)", text):
        dlo("configs", name)


def test_jean_zay_accepts_what_the_script_and_the_guide_say():
    pages = [path.read_text() for path in sorted((JEAN_ZAY.parents[2] / "docs/guides").glob("idris*.md"))]
    french, english = (re.findall(r"^\$ .+", page, re.M) for page in pages)
    assert french == english
    lines = re.findall(r"sbatch (.+?) \S*jean_zay\.sbatch", JEAN_ZAY.read_text() + pages[1])
    assert len(lines) >= 6
    for line in lines:
        slurm_standin.check_job([*line.split(), str(JEAN_ZAY)], "jean-zay")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{MINE} --gpu=4", "unrecognized option '--gpu'"),
        (f"{MINE} --mem=0", "--mem is disabled"),
        ("", "Invalid account"),
        ("--account=abc", "Invalid account"),
        ("--account=abc@a100", "Invalid job type"),
        (f"{MINE} -C h200", "Invalid feature specification"),
        (f"{MINE} --qos=qos_gpu-t4", "Invalid qos"),
        (f"{MINE} --time=20:00:01", "Requested time limit is invalid"),
        (f"{MINE} --qos=qos_gpu_h100-dev --time=03:00:00", "Requested time limit is invalid"),
        (f"{MINE} --ntasks-per-node=2", "2 tasks on the 4 GPUs"),
        (f"{MINE} --cpus-per-task=25", "node configuration is not available"),
        ("--account=abc@v100 -C v100-32g", "node configuration is not available"),
    ],
)
def test_jean_zay_refuses(options, message):
    with pytest.raises(slurm_standin.Refused, match=message):
        slurm_standin.check_job([*options.split(), str(JEAN_ZAY)], "jean-zay")


def test_a_step_has_the_cores_of_the_job_only_if_told(monkeypatch):
    monkeypatch.delenv("SRUN_CPUS_PER_TASK", raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "24")
    with pytest.raises(slurm_standin.Refused, match="a task has 1 CPU of the job's 24"):
        slurm_standin.srun(["dlo", "fit"])


def submit(folder: Path, script: Path, *words: str) -> tuple[subprocess.Popen, Path]:
    """Submits a script on two CPU ranks; returns the process of `sbatch`, and the folder with its notes."""
    notes, environment = folder / "slurm", folder / "env" / "bin" / "activate"
    notes.mkdir()
    environment.parent.mkdir(parents=True)
    environment.touch()
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST", "SLURM", "SRUN"))}
    mine |= {"PATH": f"{slurm_standin.install(folder / 'bin')}:{os.environ['PATH']}", "SLURM_STANDIN": str(notes)}
    mine |= {"SLURM_STANDIN_SITE": "jean-zay" if script == JEAN_ZAY else "", "VENV": str(folder / "env")}
    mine |= {"IMAGENET": str(folder / "photos"), "CHATS": str(small_files() / "chats/*.jsonl")}
    options = [MINE, "--nodes=1", "--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=1"]
    return subprocess.Popen(["sbatch", *options, str(script), *words], cwd=folder, env=mine), notes


@pytest.mark.slow
def test_a_job_on_jean_zay_saves_before_its_time_limit_and_goes_on_in_the_queue(tmp_path, curve):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG | {"run": {"name": "tiny"}}))
    words = ["--trainer.strategy", "zero2", "--trainer.max_epochs", "40", "--trainer.log_every_n_steps", "1"]
    job, notes = submit(tmp_path, JEAN_ZAY, "--config", "tiny.yaml", *words)
    run = tmp_path / "runs" / "tiny" / "version_0"
    wait_until((run / "checkpoints" / "last.ckpt").exists, said=(notes / "task 0.log").read_text)
    first = curve(run)
    os.kill(int((notes / "step 0.pid").read_text()), signal.SIGUSR1)
    assert job.wait(timeout=300) == 0, (notes / "task 0.log").read_text()[-4000:]
    assert (notes / "ended").read_text() == "0 0 143\n0 1 0\n"
    found = curve(run)
    assert sorted(found) == list(range(1, 161))  # No step is missing.
    assert first == {step: found[step] for step in first}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imagenet", "llm"])
def test_the_other_scripts_train_ranks(tmp_path, photos, name):
    tiny = {
        "imagenet": {"data": {"class_path": "ImageFolderData", "init_args": {"image_size": 16, "batch_size": 4}}},
        "llm": {
            "model": {"class_path": "CausalLM", "init_args": {"model": str(small_files() / "small_model")}},
            "data": {"class_path": "TextData", "init_args": {"seq_len": 32, "batch_size": 4}},
        },
    }
    config = CONFIG | tiny[name] | {"run": {"name": "tiny"}}
    config["trainer"] = CONFIG["trainer"] | {"max_epochs": 1, "strategy": "zero3"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "photos").symlink_to(photos)
    script = next(path for path in SCRIPTS if path.stem == name)
    text, changes = re.subn(r"--config \S+", "--config tiny.yaml", script.read_text())
    assert changes == 1
    (tmp_path / script.name).write_text(text)
    job, notes = submit(tmp_path, tmp_path / script.name)
    assert job.wait(timeout=200) == 0, (notes / "task 0.log").read_text()[-4000:]
    assert (tmp_path / "runs" / "tiny" / "version_0" / "checkpoints" / "last.ckpt").exists()

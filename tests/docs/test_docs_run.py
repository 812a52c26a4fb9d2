"""Every command and config of the pages runs, in short, in the folder of a reader who has small models and data.

What this machine cannot run, for want of a GPU, a cluster or a package, is parsed and checked. A page that is cheap is
in the ordinary suite; ``pytest -m "" -n0 tests/docs/test_docs_run.py`` runs all.
"""

import importlib
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dlo_process import DloProcess
from support.doc_folder import fill_folder, in_small, is_text
from support.doc_pages import ROOT, Block, read_blocks
from support.slurm_standin import read_options

#: Modules that runs need, imported here and not by each process.
for name in ("deepspeed.strategy", "parallel.mesh.strategy", "parallel.zero.strategy"):
    importlib.import_module(f"dlo_plugins.{name}")
for name in ("imagenet.classifier", "imagenet.digits", "language.causal_lm", "language.text_data"):
    importlib.import_module(f"dlo_tasks.{name}")

PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
PAGES.pop("docs/guides/idris.fr.md")  # It has the English page's commands.

TRAIN = "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
TRAIN += " --trainer.val_check_interval 1.0 --trainer.log_every_n_steps 1"
#: Options that shorten a command; the last of an option counts.
SHORT = {
    "fit": TRAIN,
    "sweep": f"{TRAIN} --trials 2",
    "ticket": f"{TRAIN} --rounds 1",
    "profile": "--steps 5 --active 1",
    "parity": "--steps 2 --trainer.limit_val_batches 1",
    "lr-find": "--trainer.callbacks+ LRFinder --trainer.callbacks.num_steps 20",
    "predict": "--trainer.limit_predict_batches 1",
    **dict.fromkeys(("validate", "quantise"), "--trainer.limit_val_batches 1"),
}
#: Commands that print the same on each machine: what a page shows of it is compared.
EXACT = re.compile(r"dlo (mesh|config|remat|prune) |--dry-run")


class Reader:
    """Runs the commands and configs of a page, in order, in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def dlo(self, words: list[str], code: int = 0) -> tuple[str, str]:
        """Runs ``dlo``, or a script; returns standard output and error, unless the exit code is another."""
        process = DloProcess(words, self.folder, self.environment)
        out, err = process.communicate(timeout=280)
        assert process.returncode == code, f"{shlex.join(words)}\n{out[-1500:]}\n{err[-3000:]}"
        return out, err

    def run_yaml(self, block: Block) -> None:
        """Trains a config, alone if it has a model and data, else after a shipped one."""
        config = yaml.safe_load(in_small(block.text))
        model, data = (config.get(key, {}).get("init_args", {}) for key in ("model", "data"))
        data |= {"batch_size": 8} if "class_path" in config.get("data", {}) else {}
        data |= {"seq_len": 64} if "seq_len" in data else {}
        for kind, name in {"callback": "epoch_clock", "applier": "channels_last"}.items():
            if f"./{name}.py" in config.get("plugins", ()) and not (self.folder / f"{name}.py").exists():
                self.dlo(["plugins", "new", kind, name])
        configs = {f"line{block.line}.yaml": config}
        if not all("class_path" in config.get(key, {}) for key in ("model", "data")):
            named = re.match(r"after (\S+)", block.note)
            shipped = named[1] if named else "llm/quickstart" if is_text(block.text) else "quickstart"
            base = yaml.safe_load((ROOT / f"configs/{shipped}.yaml").read_text())
            base.pop("run", None)
            if "model" in model:
                base["model"]["init_args"].pop("config", None)
            if "schedule" in model and model["schedule"] != "constant":
                base["trainer"].pop("callbacks")
            if "strategy" in config.get("trainer", {}):  # It divides the batch.
                base["data"]["init_args"]["batch_size"] = 16
            configs = {"base.yaml": base, **configs}
        for file, content in configs.items():
            (self.folder / file).write_text(yaml.safe_dump(content, sort_keys=False))
        words = ["fit", *(word for file in configs for word in ("--config", file))]
        self.run_dlo(words, block, block.text, [])

    def run_command(self, command: str, block: Block, shown: list[str]) -> None:
        """Runs one command; those of other programs are left out, but what they start is checked."""
        text, _, target = in_small(command).partition(" > ")
        program, *words = shlex.split(text, comments=True)
        if program == "dlo":
            out = self.run_dlo(words, block, text, shown)
            if target:
                file = self.folder / target.removeprefix("~/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(out)
        elif program == "python":
            self.dlo(words)
        elif words and program in ("pytest", "torchrun") and "--nnodes" not in words:
            module = "torch.distributed.run" if program == "torchrun" else "pytest"
            line = [sys.executable, "-m", module, *words, *(TRAIN.split() if "fit" in words else [])]
            done = subprocess.run(line, cwd=self.folder, env=self.environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        elif program == "sbatch":
            self.dlo(["fit", *read_options(words)[1][1:], "--print_config"])
        elif "fit" in words:
            self.dlo([*(word for word in words[words.index("fit") :] if word != "--deepspeed"), "--print_config"])

    def run_dlo(self, words: list[str], block: Block, text: str, shown: list[str]) -> str:
        """Runs ``dlo`` in short, and returns its output; if this machine cannot, checks the config."""
        self.provide_runs(words, text)
        trainer = self.read_trainer(words)
        size = ranks(trainer) * trainer.get("num_nodes", 1)
        cannot = block.note.startswith("checked only: ") or trainer.get("accelerator") == "gpu"
        if words[:2] != ["sweep", "report"] and "--dry-run" not in words:
            short = SHORT.get(words[0], "")
            if re.search("DynamicBatchSize|digits/race", text):
                short = short.replace("--trainer.limit_train_batches 2", "")
            words = [*words, *short.split()]
        if "--data.init_args.root" in words:
            words += ["--data.init_args.batch_size", "8", "--model.init_args.num_classes", "2"]
        if words[0] == "fit":
            words += ["--trainer.devices", str(ranks(trainer))]
            words += ["--trainer.max_epochs", "2"] if "--ckpt_path" in words else []
            words += ["--print_config"] if cannot else ["--dry-run"] if size > 8 else []
            cannot = cannot or size > 8
        error = bool(shown) and ": error: " in shown[0]
        try:
            out, err = self.dlo(words, code=2 if error else 1 if words[:2] == ["config", "diff"] else 0)
        except AssertionError as failure:
            if re.search(r"error: .*needs .*(not installed|pip install)", str(failure)) is None:
                raise
            return ""
        if cannot:
            return out
        printed = [line.rstrip() for line in (out + err).splitlines()]
        lines = [line for line in shown if line not in ("", "...")] if error or EXACT.search(f"dlo {text}") else []
        assert [line for line in lines if line not in printed] == [], f"{text} prints otherwise:\n{out}{err}"
        return out

    def provide_runs(self, words: list[str], text: str) -> None:
        """Trains the runs that a command or config starts from, unless the page has."""
        runs = {name: "my.yaml" if name == "my" else "" for name in re.findall(r"(?:runs/|--run )([\w-]+)", text)}
        if "--ckpt_path" in words and words[words.index("--ckpt_path") + 1] in ("best", "last"):
            config = words[words.index("--config") + 1]
            runs[config.replace("/", "_") if config == "llm/quickstart" else Path(config).stem] = config
        if words[0] == "checkpoint" and {"best", "last"} & set(words) and not runs:
            runs["quickstart"] = "quickstart"
        for name, config in runs.items():
            if not (self.folder / "runs" / name).exists() and name != "sweeps":
                shipped = "llm/quickstart" if is_text(name) else "quickstart"
                self.dlo(["fit", "--config", config or shipped, "--run.name", name, *TRAIN.split()])

    def read_trainer(self, words: list[str]) -> dict[str, Any]:
        """Returns the Trainer's arguments that configs and options set."""
        trainer: dict[str, Any] = {}
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word == "--config":
                files = (self.folder / value, ROOT / f"configs/{value}.yaml")
                trainer |= yaml.safe_load(next(file for file in files if file.is_file()).read_text()).get("trainer", {})
            elif word in ("--trainer.devices", "--trainer.num_nodes", "--trainer.strategy", "--trainer.accelerator"):
                trainer[word.removeprefix("--trainer.")] = yaml.safe_load(value)
        return trainer


def ranks(trainer: dict[str, Any]) -> int:
    """Returns the number of ranks of a node that a config needs: those of its mesh, or two for any strategy."""
    strategy = trainer.get("strategy")
    options = strategy.get("init_args", {}) if isinstance(strategy, dict) else {}
    axes = [options.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    least = max(math.prod(size for size in axes if size > 0), 2 if strategy not in (None, "auto") else 1)
    devices = trainer.get("devices")
    return devices if isinstance(devices, int) and devices > 0 else least


def steps(blocks: list[Block]) -> Iterator[tuple[int, Block, str, list[str]]]:
    """Yields the line and block of each config, and of each command with what the page shows that it prints."""
    for block, after in pairwise([*blocks, Block(0, "", "", "")]):
        if block.language == "yaml":
            yield block.line, block, "", []
        lines = block.text.replace("\\\n", "  ").splitlines() if block.language in ("console", "bash", "") else []
        first = "$ " if block.language == "console" else ("srun ", "pip ")
        starts = [number for number, line in enumerate(lines) if line.startswith(first)]
        for start, end in pairwise([*starts, len(lines)]):
            shown = lines[start + 1 : end]
            if not shown and end == len(lines) and after.language == "text" and after.line - block.line - end == 3:
                shown = after.text.splitlines()
            for command in lines[start].removeprefix("$ ").split(" && "):
                yield block.line + start, block, command, shown


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if "errors" in page else pytest.mark.slow) for page in PAGES]
)
def test_what_a_page_shows_runs(page: str, photos: Path, example_pack: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(example_pack)}
    todo = list(steps(read_blocks(PAGES[page])))
    if todo:
        fill_folder(tmp_path, PAGES[page], photos)
    reader, failed = Reader(tmp_path, environment), []
    for line, block, command, shown in todo:
        try:
            if command:
                reader.run_command(command, block, shown)
            else:
                reader.run_yaml(block)
        except AssertionError as error:
            failed.append(f"{page}:{line}: {error}")
    assert not failed, "\n\n".join(failed)

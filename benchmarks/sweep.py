"""How many samples does a sweep with ASHA need to 98% on the digits, beside random search; are trials lost by kills?

    python benchmarks/sweep.py [--seeds 5] [--kills 50] [--rounds 3] [--curves runs/sweep_curves.json]

* search: random search trains each trial to its end; ASHA prunes trials of the same values, from the same sampler and
  seed. Counted are the samples of all trials, and those until the first validation of at least 98%. A trial's values
  and its curve depend on the seed and the trial's number alone, so that each curve is trained once, to its end, and
  both searches read it: through the queue, the worker and the pruner of `dlo sweep`. Curves are kept in a file.
* kills: four workers share a storage and run trials whose training is replaced by short sleeps; random workers are
  killed (SIGKILL) at random times, and replaced. Counted are trials that did not end, that ran at the same time in two
  workers, and that ran again after their end.
* overhead: elapsed time of a trial of `dlo sweep`, compared with `dlo fit` of the same config.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, all_ratios, pause, take_turns

from dlo_framework.atomic_file import write_atomic
from dlo_plugins.sweep.search_space import SweepSettings, apply_values, read_settings
from dlo_plugins.sweep.trial_queue import Claim, SweepWorkers, TrialQueue

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "digits"
TARGET = 0.98
#: File of the executions of trials, one JSON object a line, and seconds of a validation in a killed sweep.
EXECUTIONS, STEP = "executions.jsonl", 0.02
_VALIDATIONS = 4
Answer = Callable[[dict[str, Any]], dict[str, Any]]


# --- samples to the target -----------------------------------------------------------------------------------


def train(config: dict[str, Any], seed: int) -> list[dict[str, float]]:
    """Trains a trial's config to its end; returns its validations: value and samples so far."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from dlo_plugins.schedules.lr_curves import OneCycle
    from dlo_tasks.imagenet.classifier import ImageClassifier
    from dlo_tasks.imagenet.digits import DigitsData

    class Curve(Callback):
        """Records the accuracy after each epoch."""

        def __init__(self) -> None:
            self.points: list[dict[str, float]] = []
            self.samples = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.samples += len(batch[0])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.points.append({"value": float(trainer.callback_metrics["val_acc1"]), "samples": self.samples})

    torch.set_num_threads(1)
    seed_everything(seed, workers=True, verbose=False)
    curve = Curve()
    one_cycle = config["trainer"]["callbacks"][0]["init_args"]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        max_epochs=config["trainer"]["max_epochs"],
        callbacks=[OneCycle(**one_cycle), curve],
    )
    task = ImageClassifier(**config["model"]["init_args"], log_images=0)
    trainer.fit(task, datamodule=DigitsData(**config["data"]["init_args"], seed=seed))
    return curve.points


class Curves:
    """Curves of trials, trained when they are first asked for, and kept in a file.

    Args:
        path: File, which may hold curves of an earlier run.
        seconds: Seconds after which no further curve is trained.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._until = path, ELAPSED.now() + seconds
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __call__(
        self, config: dict[str, Any], values: dict[str, Any], seed: int, number: int
    ) -> list[dict[str, float]]:
        """Returns the curve of a trial.

        Raises:
            TimeoutError: It is not known, and the time is over.
        """
        key = f"{seed}/{number}"
        if key not in self.known or self.known[key]["values"] != values:
            if ELAPSED.now() > self._until:
                raise TimeoutError
            points = train(apply_values(config, values), seed)
            self.known[key] = {"values": values, "points": points}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known) + "\n")
            print(f"seed {seed}, trial {number}: {max(point['value'] for point in points):.4f}", flush=True)
        found: list[dict[str, float]] = self.known[key]["points"]
        return found


@dataclass
class Search:
    """Cost of a search.

    Attributes:
        samples: Samples of all trials, each to its end or to where it was pruned.
        first: Samples of all trials until the first validation at the target; None if no trial reached it.
        best: Best value of all validations.
        full: Number of trials that ran to their end.
    """

    samples: float = 0.0
    first: float | None = None
    best: float = 0.0
    full: int = 0


def search(curves: Curves, seed: int, pruner: str, options: argparse.Namespace) -> Search:
    """Runs a sweep over known curves.

    Args:
        curves: Curves of the trials.
        seed: Seed of the sampler, of the weights and of the data.
        pruner: Name of the pruner.
        options: Options of the benchmark.
    """
    config = yaml.safe_load((CONFIGS / "sweep.yaml").read_text())
    config["trainer"]["max_epochs"] = options.epochs
    space = yaml.safe_load((CONFIGS / "sweep_space.yml").read_text())
    methods = {"sampler": "random", "pruner": pruner, "seed": seed, "validations": options.epochs}
    settings = SweepSettings(config, space, "val_acc1", "maximize", options.trials, **methods)
    spent = Search()

    def run(claim: Claim, answer: Answer) -> int:
        before = 0.0
        for step, point in enumerate(curves(config, claim.values, seed, claim.number), 1):
            spent.samples += point["samples"] - before
            before, spent.best = point["samples"], max(spent.best, point["value"])
            if point["value"] >= TARGET and spent.first is None:
                spent.first = spent.samples
            if answer({"step": step, "value": point["value"]})["stop"]:
                return 0
        spent.full += 1
        return 0

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name) / "sweep"
        folder.mkdir()
        SweepWorkers(TrialQueue(folder, settings, create=True), runner=run).run()
    return spent


def search_tables(curves: Curves, options: argparse.Namespace) -> list[Table]:
    """Returns the samples of each pruner as a part of those of random search: until the target, and of all trials.

    Those until the target are compared with random search until the target, and with its full search: to know its best
    trial, random search has to train all of them.
    """
    base = f"random search, each of {options.trials} trials to its end"
    until = Table(f"samples until the first validation of {TARGET:.0%}, of all trials in their order", base, "samples")
    found_in_full = Table(f"samples until the first validation of {TARGET:.0%}, of the full search's", base, "samples")
    total = Table(f"samples of {options.trials} trials", base, "samples")
    seeds = range(1, options.seeds + 1)
    found = {
        name: [search(curves, seed, name, options) for seed in seeds]
        for name in ("none", "asha", "hyperband", "median")
    }
    for name, own in found.items():
        row, ours = ("random search" if name == "none" else f"random values, {name}"), name == "asha"
        pairs = list(zip(own, found["none"], strict=True))
        ratios = [one.first / other.first for one, other in pairs if one.first and other.first]
        of_full = [one.first / other.samples for one, other in pairs if one.first]
        shown = ", ".join("-" if one.first is None else f"{one.first:,.0f}" for one in own)
        reached = sum(one.first is not None for one in own)
        if ratios:
            until.add(row, ratios, bar=0.25 if ours else None, ours=ours, seeds_that_reached_it=reached, samples=shown)
            found_in_full.add(row, of_full, bar=0.25 if ours else None, ours=ours, seeds_that_reached_it=reached)
        total.add(
            row,
            [one.samples / other.samples for one, other in pairs],
            bar=0.25 if ours else None,
            ours=ours,
            seeds_that_reached_it=reached,
            best=", ".join(f"{one.best:.4f}" for one in own),
            trials_to_the_end=", ".join(str(one.full) for one in own),
        )
    return [until, found_in_full, total]


# --- kills ---------------------------------------------------------------------------------------------------


def work(folder: Path) -> int:
    """Runs one worker of a killed sweep, whose trials sleep; each validation and end is written to a file."""
    settings = read_settings(folder)
    assert settings is not None
    queue = TrialQueue(folder, settings)

    def run(claim: Claim, answer: Answer) -> int:
        note(folder, claim.number, "start")
        path = claim.folder / "checkpoint.txt"
        done = int(path.read_text()) if path.exists() else 0
        for step in range(done + 1, _VALIDATIONS + 1):
            pause(STEP * random.random())
            answer({"step": step, "value": float(step)})
            write_atomic(path, str(step))  # Like a checkpoint, which a run saves after it has reported.
            note(folder, claim.number, f"validation {step}")
        version = claim.folder / "version_0"
        version.mkdir(exist_ok=True)
        (version / "summary.json").write_text(json.dumps({"status": "finished"}))
        note(folder, claim.number, "end")
        return 0

    return SweepWorkers(queue, runner=run).run()


def note(folder: Path, number: int, what: str) -> None:
    """Appends a line to the file of executions, in one system call."""
    line = json.dumps({"trial": number, "what": what, "pid": os.getpid(), "time": ELAPSED.now()}) + "\n"
    descriptor = os.open(folder / EXECUTIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def kill_workers(folder: Path, kills: int, seed: int, storage: str = "", workers: int = 4) -> dict[str, int]:
    """Runs a sweep of four workers, kills random ones, and returns what went wrong.

    Args:
        folder: New folder of the sweep.
        kills: Number of kills.
        seed: Seed of their times.
        storage: Storage of the sweep; empty for its journal.
        workers: Number of workers.
    """
    folder.mkdir(parents=True)
    settings = SweepSettings(
        {}, {"x": {"uniform": [0, 1]}}, "value", "maximize", 6 * kills, sampler="random", storage=storage
    )
    settings.write(folder)
    TrialQueue(folder, settings, create=True)
    chance, died = random.Random(seed), {}
    running = [start_worker(folder) for _ in range(workers)]
    while len(died) < kills and any(worker.poll() is None for worker in running):
        pause(chance.uniform(0.02, 0.3))
        begun = {line["pid"] for line in read_executions(folder)}
        ready = [place for place, worker in enumerate(running) if worker.poll() is None and worker.pid in begun]
        if ready:  # A worker that is still importing would lose nothing.
            place = chance.choice(ready)
            running[place].kill()
            running[place].wait()
            died[running[place].pid] = ELAPSED.now()
            running[place] = start_worker(folder)
    for worker in running:
        worker.wait(timeout=120)
    return count_faults(folder, settings, died) | {"kills": len(died)}


def start_worker(folder: Path) -> subprocess.Popen[bytes]:
    """Starts a worker of a killed sweep."""
    return subprocess.Popen([sys.executable, __file__, "--worker", str(folder)], stderr=subprocess.DEVNULL)


def read_executions(folder: Path) -> list[dict[str, Any]]:
    """Returns what the workers have noted."""
    path = folder / EXECUTIONS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count_faults(folder: Path, settings: SweepSettings, died: dict[int, float]) -> dict[str, int]:
    """Returns how many trials were lost, ran twice at the same time, ran again after their end, or lost a value.

    Args:
        folder: Folder of the sweep.
        settings: Settings of the sweep.
        died: Time at which each killed worker was killed, by its process id.
    """
    lines = read_executions(folder)
    trials = TrialQueue(folder, settings).study.get_trials(deepcopy=False)
    final = {line["pid"]: line for line in lines}
    inside = sum(final[pid]["what"] != "end" for pid in died if pid in final)
    faults = {
        "trials": len(trials),
        "kills_inside_a_trial": inside,
        "lost": 0,
        "at_the_same_time": 0,
        "again_after_its_end": 0,
        "values_lost": 0,
    }
    faults["lost"] += abs(len(trials) - settings.trials)
    for trial in trials:
        own = [line for line in lines if line["trial"] == trial.number]
        faults["lost"] += trial.state.name != "COMPLETE"
        ends = [line for line in own if line["what"] == "end"]
        # A worker that is killed between its note and the queue's has not ended its trial, which runs again.
        unrecorded = [line for line in ends if line["pid"] in died and line is final[line["pid"]]]
        faults["again_after_its_end"] += not 1 <= len(ends) <= 1 + len(unrecorded)
        faults["values_lost"] += list(trial.intermediate_values) != list(range(1, _VALIDATIONS + 1))
        starts = [line for line in own if line["what"] == "start"]
        for before, after in itertools.pairwise(starts):
            is_over = before["pid"] in died
            faults["at_the_same_time"] += not is_over or any(
                line["pid"] == before["pid"] and line["time"] > after["time"] for line in own
            )
    return faults


def kill_table(options: argparse.Namespace) -> Table:
    """Returns what went wrong in sweeps whose workers were killed, in the journal and in SQLite."""
    table = Table("trials lost or run twice under kills", "trials", ELAPSED)
    with tempfile.TemporaryDirectory() as name:
        for kind, storage in (("journal", ""), ("sqlite", f"sqlite:///{name}/sweep.db")):
            found = kill_workers(Path(name) / kind, options.kills, options.seed, storage)
            print(kind, found, flush=True)
            wrong = sum(found[key] for key in ("lost", "at_the_same_time", "again_after_its_end", "values_lost"))
            table.add(kind, [float(wrong)], bar=0.0, ours=True, **found)
    return table


# --- overhead ------------------------------------------------------------------------------------------------


def overhead_table(options: argparse.Namespace) -> Table:
    """Returns the elapsed time of a trial of ``dlo sweep`` beside ``dlo fit`` of the same config."""
    table = Table("a trial of dlo sweep", "dlo fit of the same config", ELAPSED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = yaml.safe_load((CONFIGS / "sweep.yaml").read_text())
        config["trainer"] |= {"max_epochs": options.overhead_epochs, "enable_progress_bar": False, "accelerator": "cpu"}
        (folder / "base.yaml").write_text(yaml.safe_dump(config))
        space = {"trainer.log_every_n_steps": [10, 11]}  # Changes nothing that takes time.
        settings = SweepSettings(
            config, space, "val_acc1", "maximize", 100, sampler="random", pruner="asha", validations=1, first=1000
        )
        (folder / "sweep").mkdir()
        settings.write(folder / "sweep")
        queue = TrialQueue(folder / "sweep", settings, create=True)
        worker = SweepWorkers(queue)

        def fit() -> float:
            began = ELAPSED.now()
            command = [sys.executable, "-m", "dlo_framework", "fit", "--config", "base.yaml"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            return ELAPSED.now() - began

        def trial() -> float:
            began = ELAPSED.now()
            claim = queue.claim()
            assert claim is not None
            worker.run_claim(claim, {})
            assert queue.describe(claim.number).startswith(": val_acc1")
            return ELAPSED.now() - began

        seconds = take_turns({"dlo fit": fit, "dlo fit again": fit, "dlo sweep": trial}, options.rounds)
    for row, values in all_ratios(seconds, "dlo fit").items():
        ours = row == "dlo sweep"
        table.add(row, values, bar=1.05 if ours else None, ours=ours, control=row == "dlo fit again")
    table.notes.append(f"{options.overhead_epochs} epochs; the command's own start, and its check, are not included")
    return table


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(Path(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=27, help="epochs of a full trial of the search")
    parser.add_argument("--trials", type=int, default=30, help="trials of a search")
    parser.add_argument("--curves", type=Path, default=Path("runs") / "sweep_curves.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="seconds after which no further curve is trained")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the overhead")
    parser.add_argument("--overhead-epochs", type=int, default=20)
    parser.add_argument(
        "--parts", nargs="+", choices=("search", "kills", "overhead"), default=["search", "kills", "overhead"]
    )
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    if "search" in options.parts:
        try:
            for table in search_tables(Curves(options.curves, options.seconds), options):
                if table.rows:
                    record.add(table)
                else:
                    record.without(table.title, f"no seed reached {TARGET:.0%}")
        except TimeoutError:
            record.without("search", f"not all curves are in {options.curves}; start it again")
    if "kills" in options.parts:
        record.add(kill_table(options))
    if "overhead" in options.parts:
        record.add(overhead_table(options))
    record.finish()


if __name__ == "__main__":
    main()

"""One trial: a run that meets a fault at a place, and is started again until it has finished."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.dlo_process import DloProcess
from support.launchers import free_port
from support.rank_server import fork_server

ROOT = Path(__file__).resolve().parents[2]
MARKS = Path(__file__).with_name("marks.py")
_ZERO3 = {"class_path": "ZeroStrategy", "init_args": {"stage": 3, "timeout_minutes": 0.5}}
_FSDP = {"class_path": "FSDPStrategy", "init_args": {"timeout_minutes": 0.5}}
_DEEPSPEED = {"class_path": "DeepSpeedBridge", "init_args": {"stage": 2, "timeout_minutes": 0.5}}
_TP = {"class_path": "MeshStrategy", "init_args": {"tp": 2, "dp_shard": 1, "timeout_minutes": 0.5}}
#: Run on one to three nodes.
ELASTIC = "zero3, elastic"
#: Config, strategy and number of ranks of each run; of one on nodes that come and go, the most.
RUNS: dict[str, tuple[str, Any, int]] = {
    "quick start": ("quickstart", "auto", 1),
    "zero3 on 2 ranks": ("quickstart", _ZERO3, 2),
    "fsdp on 2 ranks": ("quickstart", _FSDP, 2),
    "DeepSpeed stage 2 on 2 ranks": ("quickstart", _DEEPSPEED, 2),
    "tp 2": ("quickstart", _TP, 2),
    ELASTIC: ("quickstart", _ZERO3, 3),
    "mixture": ("llm/mixture", "auto", 1),
    "mixture, zero3 on 2 ranks": ("llm/mixture", _ZERO3, 2),
}
FAULTS = ("KILL", "TERM", "INT", "INT twice", "STOP", "full disk")
#: The only fault of an elastic run: a node is lost, with all that runs on it, and comes back.
NODE = "node"
#: Relative difference of a loss between numbers of ranks, whose sums are rounded in other orders.
ROUNDING = 1e-3
PLACES = ("start", "compile", "step", "validation", "save", "end")
#: Seconds after a fault until a run that has not ended counts as hung; beside them a run may finish.
HUNG = 180.0
#: Starts until a run that does not finish counts as lost.
STARTS = 5
#: Bytes that a file may have once the disk is "full", where no file system of its own can be mounted.
FULL = 4096


@dataclass
class Trial:
    """What is done to a run, and what became of it.

    Attributes:
        run: Key of :data:`RUNS`.
        fault: One of :data:`FAULTS`.
        place: One of :data:`PLACES`.
        delay: Seconds from the place to the fault.
        recovery: Seconds from the fault to the first step of the start after it, or to the next step of a run that went
            on by itself; None where no step was left.
        hung: Whether a process had not ended in time.
        lost: Differences from the undisturbed run; empty without any.
        codes: Exit codes of the starts.
        no_effect: Whether the fault came after the run's end, or the run finished as if there had been none.
    """

    run: str
    fault: str
    place: str
    delay: float
    recovery: float | None = None
    hung: bool = False
    lost: str = ""
    codes: list[int] = field(default_factory=list)
    no_effect: bool = False


def draw(number: int, seed: int, runs: list[str], faults: Sequence[str] = FAULTS) -> Trial:
    """Returns trial ``number`` of a seed: faults and runs take turns, place and delay are drawn."""
    rng = random.Random(f"{seed} {number}")
    run = runs[number % len(runs)]
    fault, place = faults[number // len(runs) % len(faults)], rng.choice(PLACES)
    if run == ELASTIC:  # torchrun waits minutes for a node that is lost after its ranks have ended.
        fault, place = NODE, rng.choice(PLACES[:-1])
    longest = {"start": 8.0, "compile": 1.0, "step": 2.0, "validation": 0.5, "save": 0.3, "end": 0.6}[place]
    return Trial(run, fault, place, round(rng.uniform(0.0, longest), 3))


def _shorten_quick_start(config: dict[str, Any]) -> None:
    config["model"]["init_args"]["model_args"] |= {"embed_dim": 48, "depth": 2, "num_heads": 2}


def _shorten_mixture(config: dict[str, Any]) -> None:
    """Makes epochs of 20 steps of a tiny Llama, validated and saved in mid-epoch too, while the mixture changes."""
    del config["run"], config["trainer"]["max_steps"]
    config["trainer"] |= {"val_check_interval": 6, "limit_val_batches": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 32}
    config["model"]["init_args"]["config"] |= sizes
    data = config["data"]["init_args"]
    data["sources"]["code"]["files"] = "stdlib://asyncio/*.py"
    data["mix"][-1]["samples"] = 120
    data |= {"seq_len": 32, "epoch_samples": 80, "val_files": "stdlib://json/*.py", "num_workers": 1}
    data |= {"vocab_size": 512, "corpus_bytes": 200_000, "cache_dir": "cache"}


class Runner:
    """Runs ``dlo fit`` in a folder of its own.

    Args:
        folder: Folder of the trial; its runs lie in it.
        run: Key of :data:`RUNS`.
        epochs: Number of epochs.
        warm: Whether processes are forked from one that has imported torch already.
    """

    def __init__(self, folder: Path, run: str, epochs: int, warm: bool = False) -> None:
        self.folder, self.marks, self.warm = folder, folder / "marks", warm
        folder.mkdir(parents=True)
        name, strategy, devices = RUNS[run]
        config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        config["plugins"] = [str(MARKS)]
        callbacks = [*config["trainer"].get("callbacks", []), {"class_path": "Marks"}]
        if devices == 1 and name == "quickstart":
            callbacks.append({"class_path": "Compile", "init_args": {"backend": "aot_eager"}})
        own = {"strategy": strategy, "devices": devices, "accelerator": "cpu", "enable_progress_bar": False}
        config["trainer"] |= {**own, "callbacks": callbacks, "max_epochs": epochs, "enable_model_summary": False}
        shorten = {"quickstart": _shorten_quick_start, "llm/mixture": _shorten_mixture}[name]
        shorten(config)
        self.nodes = devices if run == ELASTIC else 0
        if self.nodes:
            config["trainer"]["devices"] = "auto"
            config["data"]["init_args"]["batch_size"] = 48  # Divisible by each number of ranks.
        (folder / "chaos.yaml").write_text(yaml.safe_dump(config))
        self.tmpfs = False

    def start(self) -> Process:
        """Starts the run, or goes on with it."""
        words = ["fit", "--config", "chaos.yaml", "--ckpt_path", "auto", "--run.stop_grace", "30"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PL_"))}
        environment |= {"CHAOS_MARKS": str(self.marks), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        if self.nodes:
            return Nodes(words, self.folder, environment, self.nodes)
        if self.warm:
            process = DloProcess(words, self.folder, environment)
            for stream in (process.stdout, process.stderr):
                threading.Thread(target=self._keep, args=(stream,), daemon=True).start()
            return process
        return _start(["-m", "dlo_framework", *words], self.folder, environment)

    def _keep(self, stream: IO[str]) -> None:
        with open(self.folder / "output", "a") as output, stream:
            for line in stream:
                output.write(line)
                output.flush()

    def ranks(self) -> list[int]:
        """Returns the ranks' processes, of all starts."""
        return [int(place.split("-")[2]) for _, place, _ in self.lines() if place.startswith("pid-")]

    def kill(self, process: Process) -> None:
        """Leaves nothing of a start."""
        if isinstance(process, Nodes):
            process.end()
        for pid in {process.pid, *self.ranks()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def lines(self) -> list[tuple[float, str, int]]:
        """Returns the marks so far."""
        if not self.marks.exists():
            return []
        fields = [line.split() for line in self.marks.read_text().splitlines()]
        return [(float(found[0]), found[1], int(found[2])) for found in fields if len(found) == 3]

    def summary(self) -> dict[str, Any]:
        """Returns the newest run's summary; empty where there is none."""
        runs = sorted(self.folder.glob("runs/chaos/version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        with contextlib.suppress(OSError, json.JSONDecodeError, IndexError):
            return dict(json.loads((runs[-1] / "summary.json").read_text()))
        return {}

    def result(self) -> dict[str, Any] | None:
        """Returns what a finished run's figures are, to the last bit; None of one that has not finished."""
        found = self.summary()
        if found.get("status") != "finished":
            return None
        return {key: found.get(key) for key in ("metrics", "best_metric", "steps", "epochs")}


class Nodes:
    """torchrun on several nodes, all on this host: one rank each. The first, where all meet, is never lost.

    It has the methods of ``subprocess.Popen`` that trials use, which are of the first node's torchrun.

    Args:
        words: Arguments after ``dlo``.
        folder: Working directory.
        environment: Environment variables.
        number: Number of nodes.
    """

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str], number: int) -> None:
        self._words, self._folder = words, folder
        self._environment = environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._number, self._port, self._ended = number, free_port(), threading.Event()
        self._torchruns = [self._start(node) for node in range(number)]

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        words = ["-m", "torch.distributed.run", f"--nnodes=1:{self._number}", "--nproc-per-node=1", "--max-restarts=9"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1"]
        words += [f"--rdzv-conf=is_host={str(node == 0).lower()},last_call_timeout=5,keep_alive_interval=1"]
        return _start([*words, "-m", "dlo_framework", *self._words], self._folder, self._environment)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._torchruns[0].pid

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._torchruns[0].poll()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the run, and leaves no node behind."""
        code = self._torchruns[0].wait(timeout)
        self.end()
        return code

    def lose(self, node: int, seconds: float) -> None:
        """Kills a node with all that runs on it, which comes back after some seconds."""
        _kill_tree(self._torchruns[node])

        def come_back() -> None:
            if not self._ended.wait(seconds):
                self._torchruns[node] = self._start(node)

        threading.Thread(target=come_back, daemon=True).start()

    def end(self) -> None:
        """Kills what still runs."""
        self._ended.set()
        for torchrun in self._torchruns:
            _kill_tree(torchrun)


#: Run that has been started.
Process = subprocess.Popen[bytes] | DloProcess | Nodes


def _start(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts Python in a session of its own; what it prints is in the folder's file ``output``."""
    with open(folder / "output", "ab") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid)
        for each in [tree, *tree.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def import_all() -> None:
    """Imports what runs do, and makes warm ones forks of this process; each would spend seconds on it otherwise."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for devices where it is not told, and warns.
    for entry in metadata.distribution("dlo_framework").entry_points:
        if entry.group.startswith("dlo_framework.plugins"):
            entry.load()
    for name in ("dlo_framework.cli.lightning_cli", "sklearn.datasets", "tensorboard", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    importlib.import_module("deepspeed.runtime.engine")
    del os.environ["DS_ACCELERATOR"]
    gc.freeze()
    fork_server([])


def left_alone(folder: Path, run: str, epochs: int, warm: bool = False, seconds: float = 600) -> dict[str, Any]:
    """Returns the figures of a run that nothing happens to."""
    runner = Runner(folder, run, epochs, warm)
    code = runner.start().wait(timeout=seconds)
    result = runner.result()
    assert code == 0, (folder / "output").read_text()[-2000:]
    assert result is not None
    assert result["metrics"]
    return result


def carry_out(trial: Trial, folder: Path, epochs: int, expected: dict[str, Any], warm: bool = False) -> Trial:
    """Runs a trial, and writes what became of it into it."""
    runner = Runner(folder, trial.run, epochs, warm)
    fault = resumed = None
    full = _Disk(folder / "runs") if trial.fault == "full disk" else None
    try:
        for start in range(STARTS):
            resumed = resumed or (time.time() if start else None)
            process = runner.start()
            if start == 0:
                fault = _bring_about(trial, runner, process, full)
            try:
                trial.codes.append(process.wait(timeout=HUNG))
            except subprocess.TimeoutExpired:
                trial.hung = True
                runner.kill(process)
                break
            if full is not None:
                full.free()
            if runner.result() is not None:
                break
        after = resumed or fault
        if runner.nodes and fault is not None:  # Ranks that are left may end their step.
            after = min(
                (at for at, place, _ in runner.lines() if place.startswith("pid-") and at > fault), default=fault
            )
        steps = [at for at, place, _ in runner.lines() if place == "step" and after is not None and at > after]
        trial.recovery = steps[0] - fault if steps and fault is not None else None
        found = runner.result()
        # A process that was stopped and goes on by itself is a trial all the same.
        trial.no_effect = fault is None or (trial.fault not in ("STOP", NODE) and trial.codes[:1] == [0])
        if found != expected and not (runner.nodes and _agree(found, expected)):
            trial.lost = f"{found} for {expected}"
    finally:
        if full is not None:
            full.close()
    if not trial.lost and not trial.hung:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


def _agree(found: Any, expected: Any) -> bool:
    """Returns whether two results differ by rounding alone."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_agree(found[key], expected[key]) for key in found)
    is_float = isinstance(found, float) and isinstance(expected, float)
    return math.isclose(found, expected, rel_tol=ROUNDING) if is_float else found == expected


def _bring_about(trial: Trial, runner: Runner, process: Process, disk: _Disk | None) -> float | None:
    """Waits for the place, and does what the trial says; returns when, or None where the run had ended before."""
    wanted = {"compile": "batch", "start": ""}.get(trial.place, trial.place)
    after = random.Random(trial.delay).randint(1, 40) if trial.place == "step" else 1
    while wanted and process.poll() is None:
        if sum(place == wanted for _, place, _ in runner.lines()) >= after:
            break
        time.sleep(0.01)
    time.sleep(trial.delay)
    if process.poll() is not None:
        return None
    at = time.time()
    ranks = runner.ranks()
    target = random.Random(trial.delay).choice(ranks or [process.pid])
    if trial.fault == "full disk":
        assert disk is not None
        disk.fill([process.pid, *ranks])
    elif isinstance(process, Nodes):
        process.lose(*random.Random(trial.delay).choice([(1, 2.0), (2, 2.0), (1, 20.0), (2, 20.0)]))
    elif trial.fault == "STOP":
        if not _is_running(target):
            return None
        os.kill(target, signal.SIGSTOP)
        time.sleep(3.0)
        # Nobody can miss it where no other rank runs: before ranks watch each other, and when the others have ended.
        if trial.delay * 1000 % 2 < 1 or not any(_is_running(rank) for rank in ranks if rank != target):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGCONT)
    else:
        # A terminal tells all processes of the job of Ctrl-C; TERM and KILL hit one.
        signum = getattr(signal, f"SIG{trial.fault.partition(' ')[0]}")
        for number in range(2 if "twice" in trial.fault else 1):
            time.sleep(0.5 * number)
            for pid in {process.pid, *ranks} if signum == signal.SIGINT else {target}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
    return at


def _is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class _Disk:
    """A small file system for a run, which can be filled; where none may be mounted, a limit on the size of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0

    def fill(self, pids: list[int]) -> None:
        """Leaves no room."""
        if not self.mounted:
            for pid in set(pids):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Makes room again."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the file system back."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)

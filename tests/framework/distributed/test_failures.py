"""What happens to all ranks when one of them fails, is killed, is stopped or gets a signal: real processes, real kills.

Under load a rank takes half a minute to start, so times are counted from the fault, which says when it happens.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlo_framework.checkpoint import load
from support.checkpoints import check_same
from support.launchers import free_port, slurm_task, wait_until

FAULTY = Path(__file__).with_name("faulty.py")
CONFIG = f"""
plugins: [{FAULTY}]
trainer:
  max_epochs: 2
  accelerator: cpu
  devices: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
model: {{class_path: FaultyNet}}
data: {{class_path: FaultyData}}
"""
STRATEGIES = {
    "ddp": "{class_path: DataParallelStrategy, init_args: {timeout_minutes: MINUTES}}",
    "zero1": "{class_path: ZeroStrategy, init_args: {stage: 1, timeout_minutes: MINUTES}}",
    "zero3": "{class_path: ZeroStrategy, init_args: {stage: 3, timeout_minutes: MINUTES}}",
    "fsdp": "{class_path: FSDPStrategy, init_args: {timeout_minutes: MINUTES}}",
    "deepspeed2": "{class_path: DeepSpeedBridge, init_args: {stage: 2, timeout_minutes: MINUTES}}",
    "deepspeed3": "{class_path: DeepSpeedBridge, init_args: {stage: 3, timeout_minutes: MINUTES}}",
    "pp": "{class_path: MeshStrategy, init_args: {pp: 2, dp_shard: 1, micro_batches: 2, timeout_minutes: MINUTES}}",
    "tp": "{class_path: MeshStrategy, init_args: {tp: 2, dp_shard: 1, timeout_minutes: MINUTES}}",
}
#: On four ranks.
SQUARE = STRATEGIES["pp"].replace("pp: 2", "pp: 2, tp: 2")
SILENCE = 12.0


@dataclass
class End:
    """How a command ended.

    Attributes:
        code: its exit code.
        err: what it printed to stderr, without gloo's own words.
        seconds: from the fault to its end.
    """

    code: int
    err: str
    seconds: float

    @property
    def last(self) -> str:
        return self.err.splitlines()[-1]


def config(folder: Path, strategy: str, minutes: float = 30, **parts: str) -> str:
    """Writes a config; ``parts`` are YAML: arguments of ``fault``, ``model`` and ``data``, and more ``callbacks``."""
    callbacks = [f"{{class_path: Fault, init_args: {parts['fault']}}}"] if "fault" in parts else []
    callbacks += [parts["callbacks"]] if "callbacks" in parts else []
    text = CONFIG.replace("trainer:\n", f"trainer:\n  callbacks: [{', '.join(callbacks)}]\n")
    chosen = STRATEGIES.get(strategy, SQUARE).replace("MINUTES", str(minutes))
    text = text.replace("trainer:\n", f"trainer:\n  strategy: {chosen}\n")
    if strategy == "alone":
        text = text.replace(chosen, "auto").replace("devices: 2", "devices: 1")
    if strategy == "pp x tp":
        text = text.replace("devices: 2", "devices: 4")
    for name in ("model", "data"):
        if name in parts:
            text = re.sub(rf"^({name}: .*)}}$", rf"\1, init_args: {parts[name]}}}", text, flags=re.MULTILINE)
    (folder / "run.yaml").write_text(text)
    return "run.yaml"


def finish(process: subprocess.Popen, within: float) -> End:
    """Waits for a command; it has to end within that many seconds of the fault, with nobody left behind."""
    lines = []
    assert process.stdout is not None
    fault = None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("FAULT"):
            fault = float(line.split()[2])
            break
    assert fault is not None, (lines, process.stderr.read() if process.stderr else "")
    try:
        out, err = process.communicate(timeout=max(1.0, fault + within - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    seconds = time.time() - fault
    err = "\n".join(line for line in err.splitlines() if line and not line.startswith("[Gloo]"))
    found = [int(pid) for pid in re.findall(r"^PID (\d+)", "".join(lines) + out, flags=re.MULTILINE)]
    assert len(found) >= 2
    wait_until(lambda: not any(map(alive, found)), 10, lambda: f"left behind: {list(filter(alive, found))}")
    return End(process.returncode, err, seconds)


def alive(pid: int) -> bool:
    """Returns whether a process is there, and no corpse that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def fails(dlo, path: str, within: float = 30.0) -> End:
    end = finish(dlo.start("fit", "--config", path), within)
    print(f"{end.seconds:.1f} s after the fault: exit code {end.code}: {end.last}")
    assert end.code != 0
    return end


# --- a rank raises ---------------------------------------------------------------------------------------------


def check_boom(end: End, rank: int, ranks: int = 2) -> None:
    assert end.code == 1
    assert end.last == f"dlo 0.3.0: rank {rank} of {ranks} failed: ValueError: boom"
    assert end.err.count("Traceback") == 1  # The first error's, and no wall of closed connections.
    assert "boom" in end.err.splitlines()[-2]


def test_an_error_on_one_rank_ends_all_and_is_the_last_word(dlo):
    """A checkpoint on exceptions, which ranks can only save together, must not keep them."""
    arguments = f"{{save_on_exception: true, every_n_train_steps: 100, dirpath: {dlo.folder}/ex}}"
    callbacks = f"{{class_path: ModelCheckpoint, init_args: {arguments}}}"
    check_boom(fails(dlo, config(dlo.folder, "ddp", fault="{at: callback}", callbacks=callbacks)), 1)
    assert not (dlo.folder / "ex").exists()
    assert not [*dlo.folder.glob("runs/*/*/checkpoints/last.ckpt")]


def test_an_error_of_all_ranks_is_printed_once_and_the_state_before_it_is_saved(dlo):
    end = fails(dlo, config(dlo.folder, "zero3", fault="{at: callback, rank: -1}"))
    assert end.code == 1
    assert end.err.count("ValueError: boom") == 1
    assert end.err.count("Traceback") == 1
    assert end.err.count("saved the state before the error, of step 3") == 1
    (saved,) = dlo.folder.glob("runs/*/*/checkpoints/last.ckpt")
    assert load(saved)["global_step"] == 3


@pytest.mark.slow
def test_an_error_inside_a_collective_ends_all_and_saves_nothing(dlo):
    end = fails(dlo, config(dlo.folder, "ddp", fault="{at: callback, rank: -1, what: mismatch}"))
    assert end.code == 1
    assert not [*dlo.folder.glob("runs/*/*/checkpoints/last.ckpt")]


def test_bad_input_on_one_rank_is_one_line(dlo):
    end = fails(dlo, config(dlo.folder, "zero3", data="{raise_on: 1, num_workers: 1}", fault="{after: 100}"))
    assert end.code == 2
    assert re.fullmatch(r"dlo 0.3.0: error \(rank 1\): image \d+ is broken; mend it", end.last)
    assert "Traceback" not in end.err


#: Strategies and ranks that fail: one in the middle of a pipeline too.
VICTIMS = [*((strategy, rank) for strategy in STRATEGIES for rank in (0, 1)), ("pp x tp", 2)]


def count(strategy: str) -> int:
    return 4 if strategy == "pp x tp" else 2


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank"), VICTIMS)
@pytest.mark.parametrize("at", ["step", "validation", "callback", "end"])
def test_errors_anywhere(dlo, strategy, at, rank):
    after = 8 if at == "validation" else 3
    end = fails(dlo, config(dlo.folder, strategy, fault=f"{{at: {at}, rank: {rank}, after: {after}}}"))
    check_boom(end, rank, count(strategy))


# --- a rank is killed, or stops answering ----------------------------------------------------------------------


def check_killed(end: End, rank: int, ranks: int = 2) -> None:
    assert end.code == (137 if rank else -signal.SIGKILL)
    what = "its process was killed by SIGKILL" if rank else "its process ended without a message"
    assert f"rank {rank} of {ranks} failed: {what}" in end.last
    assert "Traceback" not in end.err


def test_a_killed_rank_is_named_and_nobody_is_left(dlo):
    """The rank has a loader's worker, which inherits its connections."""
    path = config(dlo.folder, "ddp", fault="{what: SIGKILL}", data="{num_workers: 1}")
    check_killed(fails(dlo, path, within=10), 1)


def test_if_the_main_process_is_killed_the_others_end(dlo):
    check_killed(fails(dlo, config(dlo.folder, "zero3", fault="{what: SIGKILL, rank: 0}"), within=10), 0)


@pytest.mark.slow
def test_a_main_process_that_is_stopped_is_ended_after_the_timeout(dlo):
    end = fails(dlo, config(dlo.folder, "zero3", 0.1, fault="{what: SIGSTOP, rank: 0}"), within=20)
    assert end.code == -signal.SIGKILL
    assert "rank 0 of 2 failed: it sent no heartbeat for 6 s" in end.last


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank"), VICTIMS)
@pytest.mark.parametrize("at", ["step", "validation"])
def test_kills_anywhere(dlo, strategy, rank, at):
    after = 8 if at == "validation" else 3
    fault = f"{{what: SIGKILL, rank: {rank}, at: {at}, after: {after}}}"
    check_killed(fails(dlo, config(dlo.folder, strategy, fault=fault), within=10), rank, count(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at", ["step", "end"])
def test_silence_anywhere(dlo, strategy, at):
    path = config(dlo.folder, strategy, SILENCE / 60, fault=f"{{what: SIGSTOP, at: {at}}}")
    end = fails(dlo, path, SILENCE + 5)
    assert end.code == 1
    assert "rank 1 of 2 failed: it sent no heartbeat for 12 s" in end.last
    assert "Traceback" not in end.err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_by_those_that_wait(dlo, strategy, rank):
    path = config(dlo.folder, strategy, SILENCE / 60, fault=f"{{what: hang, rank: {rank}}}")
    end = fails(dlo, path, within=30 + SILENCE)
    assert f"rank {rank} of 2 failed: it is still in batch" in end.last
    assert end.code == 1
    assert len(re.findall(r"^dlo: rank \d of 2 \(pid .*\) was ", end.err, flags=re.MULTILINE)) == 2
    assert "in _fault\n    time.sleep(600)" in end.err


# --- signals ---------------------------------------------------------------------------------------------------


def signalled(dlo, strategy: str, name: str, to: str, signum: int, times: int = 1) -> float:
    """Sends a signal to ranks of a run, and compares it, resumed, with one that was not stopped.

    Returns:
        Seconds from the signal to the run's end.
    """
    path = config(dlo.folder, strategy, model="{pause: 0.3}", fault="{after: 1000}")
    process = dlo.start("fit", "--config", path, "--run.name", name)
    run = dlo.folder / "runs" / name / "version_0"
    pids = []
    assert process.stdout is not None
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        pids += [int(line.split()[1])] if line.startswith("PID") else []
    wait_until(lambda: any(len(file.read_bytes()) > 1000 for file in run.glob("events.*")))  # A step has been logged.
    time.sleep(0.5)
    others = [pid for pid in pids if pid != process.pid]
    targets = {"rank 0": [process.pid], "rank 1": others, "all": pids}[to]
    before = time.monotonic()
    for _ in range(times):
        for pid in targets:
            os.kill(pid, signum)
        time.sleep(0.1)
    _, err = process.communicate(timeout=15)
    seconds = time.monotonic() - before
    print(f"{strategy}: {signal.Signals(signum).name} x {times} to {to}: ended {seconds:.1f} s later")
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert err.splitlines()[-1].startswith("stopped at step")
    step = int(re.search(r"stopped at step (\d+)", err).group(1))
    assert 0 < step < 16
    assert load(run / "checkpoints" / "last.ckpt")["global_step"] == step
    dlo("fit", "--config", path, "--run.name", name, "--ckpt_path", "last")
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "to", "signum", "times"),
    [
        ("ddp", "rank 1", signal.SIGUSR1, 1),
        ("ddp", "all", signal.SIGTERM, 2),
        ("zero1", "rank 0", signal.SIGTERM, 1),
        ("zero3", "all", signal.SIGTERM, 2),
        ("zero3", "rank 1", signal.SIGTERM, 1),
        ("fsdp", "all", signal.SIGTERM, 2),
        ("fsdp", "rank 1", signal.SIGUSR1, 1),
        ("pp", "all", signal.SIGTERM, 2),
        ("tp", "rank 0", signal.SIGTERM, 1),
    ],
)
def test_a_signal_leads_to_one_checkpoint_and_an_equal_run(dlo, curve, strategy, to, signum, times):
    signalled(dlo, strategy, "cut", to, signum, times)
    path = config(dlo.folder, strategy, fault="{after: 1000}")
    dlo("fit", "--config", path, "--run.name", "whole")
    cut, whole = (curve(dlo.folder / "runs" / name / "version_0") for name in ("cut", "whole"))
    assert len(whole) == 16
    assert cut == whole


def interrupted(dlo, path: str, signals: list[int], within: float, *words: str) -> tuple[float, subprocess.Popen, str]:
    """Sends signals to the main process some time after its fault; returns the seconds it took from the last."""
    process = dlo.start("fit", "--config", path, *words)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("FAULT"):
        assert line, process.communicate()
    for signum in signals:
        time.sleep(0.5)
        process.send_signal(signum)
    before = time.monotonic()
    try:
        _, err = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return time.monotonic() - before, process, err


def test_a_second_interrupt_ends_ranks_that_hang_and_each_says_where_it_was(dlo):
    path = config(dlo.folder, "zero3", fault="{what: hang}")
    _, process, err = interrupted(dlo, path, [signal.SIGINT, signal.SIGINT], 20)
    assert process.returncode == 130
    # Its last line, but where the main thread comes to its handler of the first Ctrl-C as late.
    assert "dlo 0.3.0: rank 0 of 2: ended by a second Ctrl-C" in err.splitlines()
    assert re.search(r"rank 0 of 2 \(pid .*\) was in training_step of ZeroStrategy, waiting in wait at", err)
    assert re.search(r"rank 1 of 2 \(pid .*\) was in on_train_batch_start of Fault:", err)
    assert "in _fault\n    time.sleep(600)" in err


def test_a_second_interrupt_ends_a_single_process_whose_exit_takes_long(dlo):
    fault = "{what: hang, rank: 0}"
    path = config(dlo.folder, "alone", fault=fault, callbacks="{class_path: SlowExit}")
    seconds, process, err = interrupted(dlo, path, [signal.SIGINT, signal.SIGINT], 30)
    assert process.returncode == 130
    assert "interrupted; " in err.splitlines()[-1]
    assert seconds < 5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp", "tp", "pp", "deepspeed3"])
@pytest.mark.parametrize("at", ["step", "validation", "save", "item", "compile"])
def test_signals_end_a_run_that_hangs_anywhere(dlo, strategy, at):
    data = "{hang_on: 1}" if at == "item" else "{}"
    faults = {"item": "{after: 1000}", "compile": "{what: compile, after: 4}"}
    fault = faults.get(at, f"{{what: hang, at: {at}, after: {8 if at == 'validation' else 4}}}")
    save = f"{{class_path: ModelCheckpoint, init_args: {{every_n_train_steps: 4, dirpath: {dlo.folder}/kept}}}}"
    path = config(dlo.folder, strategy, fault=fault, data=data, callbacks=save)
    seconds, process, err = interrupted(dlo, path, [signal.SIGINT, signal.SIGINT], 30)
    print(f"{strategy}, {at}: ended {seconds:.1f} s after the second Ctrl-C")
    assert process.returncode == 130, err
    seconds, process, err = interrupted(dlo, path, [signal.SIGTERM], 60, "--run.stop_grace", "4")
    print(f"{strategy}, {at}: ended {seconds:.1f} s after SIGTERM")
    assert process.returncode == 143, err
    assert "SIGTERM asked the run to stop" in err.splitlines()[-1]
    assert len(re.findall(r"rank \d of 2 \(pid", err)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_that_hangs_under_other_launchers(dlo, launcher, signum):
    """A terminal sends Ctrl-C to all processes; torchrun and srun pass SIGTERM on to the ranks."""
    path = config(dlo.folder, "zero3", fault="{what: hang}")
    words = ["-m", "dlo_framework", "fit", "--config", path, "--run.stop_grace", "3"]
    port = free_port()
    commands = [([sys.executable, *words], slurm_task(rank, 2, port)) for rank in range(2)]
    if launcher == "torchrun":
        commands = [([sys.executable, *TORCHRUN, *words], {})]
    logs = [(dlo.folder / f"{number}.log").open("w+") for number in range(len(commands))]
    started = [
        subprocess.Popen(c, cwd=dlo.folder, env=dlo.environment() | e, stdout=log, stderr=log, start_new_session=True)
        for (c, e), log in zip(commands, logs, strict=True)
    ]

    def said() -> str:
        return "".join(Path(log.name).read_text() for log in logs)

    wait_until(lambda: re.search(r"^FAULT", said(), flags=re.MULTILINE), said=said)
    for _ in range(2 if signum == signal.SIGINT else 1):
        time.sleep(1.0)
        for process in started:
            if signum == signal.SIGINT:
                os.killpg(process.pid, signum)
            else:
                process.send_signal(signum)
    before = time.monotonic()
    codes = [process.wait(timeout=60) for process in started]
    print(f"{launcher}, {signum.name}: ended {time.monotonic() - before:.1f} s after the signal with {codes}")
    pids = [int(pid) for pid in re.findall(r"^PID (\d+)", said(), flags=re.MULTILINE)]
    assert len(pids) >= 2
    assert not [pid for pid in pids if alive(pid)]
    assert all(codes), said()
    assert launcher == "torchrun" or codes == [128 + signum] * 2, said()
    # At Ctrl-C a rank whose main thread hears it shows a traceback, and another may end because of it.
    assert signum == signal.SIGINT or len(set(re.findall(r"rank (\d) of 2 \(pid", said()))) == 2, said()


# --- a model called on one rank --------------------------------------------------------------------------------


CALLED = "must be called on all ranks, got one on rank 0 in on_train_epoch_end of Fault (faulty.py:"
READ = "must be used and written on all ranks alike, got a use in on_train_epoch_end of Fault on rank 0, while"


@pytest.mark.parametrize(
    ("strategy", "what", "message"),
    [
        ("zero3", "call", CALLED),
        *(pytest.param(name, "call", CALLED, marks=pytest.mark.slow) for name in ("fsdp", "tp", "pp", "deepspeed3")),
        pytest.param("zero3", "read", READ, marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_does_by_itself_with_a_model_is_found_in_seconds(dlo, strategy, what, message):
    end = fails(dlo, config(dlo.folder, strategy, fault=f"{{what: {what}, at: epoch, rank: 0, after: 8}}"), 40)
    assert end.code == 2
    assert message in end.last


# --- torchrun --------------------------------------------------------------------------------------------------


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def torchrun(dlo, restarts: int, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *TORCHRUN, f"--max-restarts={restarts}", "-m", "dlo_framework", "fit", *words]
    options = {"capture_output": True, "text": True, "timeout": 280, "check": False}
    return subprocess.run(command, cwd=dlo.folder, env=dlo.environment(), **options)


def check_alike(*runs: Path) -> None:
    """Asserts that runs end with the same weights and moments, to the bit."""
    check_same(*(run / "checkpoints" / "last.ckpt" for run in runs))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_torchrun_restarts_a_killed_run_which_goes_on_by_itself(dlo, curve, strategy):
    """Killed in the first epoch, before any checkpoint, and in the second: it starts again, and goes on."""
    once = f"once: {dlo.folder}/killed"
    callbacks = f"{{class_path: SecondFault, init_args: {{what: SIGKILL, rank: 0, after: 11, {once}}}}}"
    path = config(dlo.folder, strategy, fault=f"{{what: SIGKILL, after: 3, {once}}}", callbacks=callbacks)
    done = torchrun(dlo, 3, "--config", path, "--run.name", "torn", "--ckpt_path", "auto")
    assert done.returncode == 0, done.stderr[-6000:]
    assert sorted(file.name for file in dlo.folder.glob("killed.*")) == ["killed.11", "killed.3"]
    assert "rank 1 of 2 failed" in done.stderr
    whole = config(dlo.folder, strategy)
    dlo("fit", "--config", whole, "--run.name", "whole")
    runs = [dlo.folder / "runs" / "torn" / "version_1", dlo.folder / "runs" / "whole" / "version_0"]
    check_alike(*runs)
    assert curve(runs[0]) == curve(runs[1])
    assert len(curve(runs[0])) == 16


@pytest.mark.slow
def test_torchrun_names_the_first_failure(dlo):
    done = torchrun(dlo, 0, "--config", config(dlo.folder, "zero3", fault="{}"))
    assert done.returncode == 1
    assert "dlo 0.3.0: rank 1 of 2 failed: ValueError: boom" in done.stderr
    assert "dlo 0.3.0: rank 0 ends because rank 1 of 2 failed: ValueError: boom" in done.stderr
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 ", root)
    assert "ValueError: boom" in root

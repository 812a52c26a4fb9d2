"""torchrun across hosts, rehearsed: network namespaces of this machine, joined by virtual cards and a bridge.

Each has its own loopback, addresses and ports, so that whatever takes another for itself fails as it would there. Needs
root and `ip`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlo_framework import DloError
from dlo_framework.checkpoint import load
from framework.distributed import test_failures as failures
from support.launchers import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces, which needs root and ip"
    ),
]

CARD, PORT = "lan0", 29400
SILENCE = 12.0


class Host:
    """One of the namespaces; ``meeting`` is the host whose torchrun has the store in which all meet."""

    meeting = 0

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"dlo{os.getpid()}-{number}"
        self.address = f"10.77.0.{number + 1}"

    def run(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True, text=True)

    def start(
        self, folder: Path, ranks: int, config: str, *words: str, nodes: str = "2", restarts: int = 0, more: str = ""
    ) -> subprocess.Popen:
        """Starts torchrun with this host's ranks of a `dlo fit`; ``more`` are options of its rendezvous."""
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
        launcher += [f"--max-restarts={restarts}", "--rdzv-backend=c10d"]
        launcher += [f"--rdzv-endpoint=10.77.0.{self.meeting + 1}:{PORT}", "--rdzv-id=hosts"]
        launcher += [f"--rdzv-conf=is_host={str(self.number == self.meeting).lower()}{more}"]
        launcher += [f"--local-addr={self.address}", "-m", "dlo_framework", "fit", "--config", config, *words]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
        environment |= {"GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ":" in nodes else {}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *launcher],
            cwd=folder,
            env=environment,
            stdout=(folder / f"out{self.number}").open("w"),
            stderr=(folder / f"err{self.number}").open("w"),
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        left = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in left.stdout.split()]

    def kill(self) -> None:
        """Kills all that runs on this host."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def joined(number: int) -> Iterator[list[Host]]:
    """Makes that many hosts, and a bridge in the namespace of one more."""
    *hosts, switch = made = [Host(each) for each in range(number + 1)]
    try:
        for host in made:
            subprocess.run(["ip", "netns", "add", host.name], check=True, capture_output=True)
        switch.run("link", "add", "bridge", "type", "bridge")
        switch.run("link", "set", "bridge", "up")
        for host in hosts:
            port = f"port{host.number}"
            host.run("link", "add", CARD, "type", "veth", "peer", "name", port, "netns", switch.name)
            host.run("addr", "add", f"{host.address}/24", "dev", CARD)
            host.run("link", "set", CARD, "up")
            host.run("link", "set", "lo", "up")
            switch.run("link", "set", port, "master", "bridge", "up")
        yield hosts
    finally:
        for host in made:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined(2) as pair:
        yield pair


def write_config(folder: Path, strategy: str, ranks: int, minutes: float = 30, **parts: str) -> str:
    """Writes a config for two hosts of that many ranks; 2 and `pp x tp` is a 2x2 mesh."""
    name = failures.config(folder, strategy, minutes=minutes, **parts)
    text = (folder / name).read_text()
    text = text.replace("  devices: 4\n" if ranks == 2 else "  devices: 2\n", f"  devices: {ranks}\n  num_nodes: 2\n")
    (folder / "hosts.yaml").write_text(text)
    return "hosts.yaml"


def ended(processes: list[subprocess.Popen], folder: Path, within: float) -> list[tuple[int, str]]:
    """Waits for both hosts' commands; returns exit codes and what they printed to stderr."""
    until = time.monotonic() + within
    found = []
    for number, process in enumerate(processes):
        try:
            code = process.wait(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError((folder / f"err{number}").read_text()[-4000:]) from None
        found.append((code, (folder / f"err{number}").read_text()))
    return found


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("zero3", 1), ("pp x tp", 2)])
def test_two_hosts_train_as_one_does(dlo, hosts, strategy, ranks):
    path = write_config(dlo.folder, strategy, ranks)
    running = [host.start(dlo.folder, ranks, path, "--run.name", "two") for host in hosts]
    for code, err in ended(running, dlo.folder, 300):
        assert code == 0, err[-4000:]
    dlo("fit", "--config", failures.config(dlo.folder, strategy), "--run.name", "one")
    failures.check_alike(*(dlo.folder / "runs" / run / "version_0" for run in ("two", "one")))


def test_a_link_that_goes_down_ends_the_ranks_of_both_hosts(dlo, hosts):
    path = write_config(dlo.folder, "zero3", 1, minutes=SILENCE / 60, model="{pause: 0.5}", fault="{after: -1}")
    running = [host.start(dlo.folder, 1, path, "--run.name", "cut", "--trainer.max_epochs", "500") for host in hosts]
    last = dlo.folder / "runs" / "cut" / "version_0" / "checkpoints" / "last.ckpt"
    wait_until(last.exists, said=(dlo.folder / "err0").read_text)
    ranks = [int(re.findall(r"^PID (\d+)", (dlo.folder / f"out{n}").read_text(), re.MULTILINE)[0]) for n in range(2)]
    hosts[1].run("link", "set", CARD, "down")
    down = time.monotonic()
    while any(failures.alive(pid) for pid in ranks):
        assert time.monotonic() < down + SILENCE + 10
        time.sleep(0.1)
    assert time.monotonic() > down + SILENCE - 3  # The last word may have come a while before.
    hosts[1].run("link", "set", CARD, "up")  # torchrun itself waits minutes for its own store.
    for number, (code, err) in enumerate(ended(running, dlo.folder, 240)):
        assert code != 0
        named = 1 - number
        assert f"rank {named} of 2 failed: it sent no heartbeat for {SILENCE:g} s" in err, err[-3000:]


def test_a_run_is_brought_back_on_both_hosts_after_one_s_rank_was_killed(dlo, hosts):
    fault = f"{{what: SIGKILL, after: 11, once: {dlo.folder}/killed}}"
    path = write_config(dlo.folder, "zero3", 1, fault=fault)
    words = ("--run.name", "back", "--ckpt_path", "auto")
    running = [host.start(dlo.folder, 1, path, *words, restarts=2) for host in hosts]
    for code, err in ended(running, dlo.folder, 400):
        assert code == 0, err[-4000:]
    assert (dlo.folder / "killed.11").exists()
    dlo("fit", "--config", failures.config(dlo.folder, "zero3"), "--run.name", "whole")
    runs = sorted((dlo.folder / "runs" / "back").glob("version_*"))
    failures.check_alike(runs[-1], dlo.folder / "runs" / "whole" / "version_0")


def newest_curve(run: Path) -> dict[int, float]:
    """Returns the loss of each step; of one that other ranks have repeated, the last."""
    found: dict[int, float] = {}
    for file in sorted(run.glob("events.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        found |= {event.step: event.value for event in events.Scalars("train/loss")}
    return found


@pytest.mark.parametrize("strategy", ["ZeroStrategy, init_args: {stage: 3,", "MeshStrategy, init_args: {dp_shard: -1,"])
def test_a_run_goes_on_with_the_hosts_that_are_there(dlo, monkeypatch, strategy):
    """Two of three hosts are killed, rank 0's among them, and one comes back: rank 0 moves to another host and back.

    The curve is that of runs which had as many ranks for the same steps.
    """
    path = failures.config(dlo.folder, "zero3", model="{pause: 0.2}", data="{batch_size: 12}")
    config = (dlo.folder / path).read_text().replace("  devices: 2\n", "  devices: auto\n")
    config = config.replace("ZeroStrategy, init_args: {stage: 3,", strategy)
    (dlo.folder / path).write_text(config.replace("max_epochs: 2", "max_epochs: 40"))
    words = ("--run.name", "elastic", "--ckpt_path", "auto")
    options = {"nodes": "1:3", "restarts": 5, "more": ",last_call_timeout=5,keep_alive_interval=1"}
    run = dlo.folder / "runs" / "elastic" / "version_0"

    def has_saved_on(ranks: int) -> bool:
        with contextlib.suppress(OSError, DloError):  # It may be replaced meanwhile.
            return load(run / "checkpoints" / "last.ckpt")["callbacks"]["RunRecord"]["world_sizes"][-1][1] == ranks
        return False

    with joined(3) as hosts:
        monkeypatch.setattr(Host, "meeting", 1)
        agents = [host.start(dlo.folder, 1, path, *words, **options) for host in hosts]
        said = (dlo.folder / "err1").read_text
        wait_until(lambda: has_saved_on(3), said=said)
        for number in (0, 2):
            hosts[number].kill()
        wait_until(lambda: has_saved_on(1), said=said)
        agents[0] = hosts[0].start(dlo.folder, 1, path, *words, **options)
        for code, err in ended(agents[:2], dlo.folder, 400):
            assert code == 0, err[-4000:]
    summary = json.loads((run / "summary.json").read_text())
    sizes = summary["world_sizes"]
    assert [entry["ranks"] for entry in sizes] == [3, 1, 2]
    assert summary["steps"] == 200
    ends = [entry["from_step"] for entry in sizes[1:]] + [200]
    for entry, last in zip(sizes, ends, strict=True):
        steps = ("--trainer.max_steps", str(last), "--trainer.devices", str(entry["ranks"]))
        start = ("--ckpt_path", "last") if entry["from_step"] else ()
        dlo("fit", "--config", path, "--run.name", "planned", *steps, *start)
    expected = newest_curve(dlo.folder / "runs" / "planned" / "version_0")
    assert len(expected) == 200
    assert newest_curve(run) == expected

"""torchrun across two hosts, rehearsed: two network namespaces of this machine, joined by a pair of virtual cards.

Each has its own loopback, addresses and ports, so that whatever takes the other for itself fails as it would there.
Needs root and `ip`.
"""

from __future__ import annotations

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
import torch

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
    """One of two namespaces."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.address = number, name, f"10.77.0.{number + 1}"

    def run(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True, text=True)

    def start(self, folder: Path, ranks: int, config: str, *words: str, restarts: int = 0) -> subprocess.Popen:
        """Starts torchrun with this host's ranks of a `dlo fit`."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
        launcher += [f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}"]
        launcher += ["--rdzv-id=two-hosts", f"--rdzv-conf=is_host={'true' if self.number == 0 else 'false'}"]
        launcher += [f"--local-addr={self.address}", "-m", "dlo_framework", "fit", "--config", config, *words]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
        environment |= {"GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *launcher],
            cwd=folder,
            env=environment,
            stdout=(folder / f"out{self.number}").open("w"),
            stderr=(folder / f"err{self.number}").open("w"),
            start_new_session=True,
        )


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    pair = [Host(number, f"dlo{os.getpid()}{'ab'[number]}") for number in range(2)]
    made = []
    try:
        for host in pair:
            subprocess.run(["ip", "netns", "add", host.name], check=True, capture_output=True)
            made.append(host)
        first, second = pair
        first.run("link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", second.name)
        for host in pair:
            host.run("addr", "add", f"{host.address}/24", "dev", CARD)
            host.run("link", "set", "lo", "up")
            host.run("link", "set", CARD, "up")
        yield pair
    finally:
        for host in made:
            left = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.name], check=True, capture_output=True)


def write_config(folder: Path, strategy: str, ranks: int, minutes: float = 30, **parts: str) -> str:
    """Writes a config for two hosts of so many ranks; 2 and `pp x tp` is a 2x2 mesh."""
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
    found, expected = (failures.weights(dlo.folder / "runs" / run / "version_0") for run in ("two", "one"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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
    found, expected = failures.weights(runs[-1]), failures.weights(dlo.folder / "runs" / "whole" / "version_0")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

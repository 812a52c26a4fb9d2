"""How ranks find each other, what a user is told where they cannot, and the next run after an error."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.distributed.launcher import RankLauncher, _listen, join_group
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.on_ranks import on_ranks
from support.trainers import Squares, quiet_trainer


def _listeners(rank: int, world_size: int) -> list[str]:
    """Returns the local addresses, in hexadecimal, that listen on the store's port."""
    strategy = DataParallelStrategy()
    Trainer(accelerator="cpu", devices=world_size, strategy=strategy, logger=False, enable_checkpointing=False)
    strategy.setup_environment()
    tables = "".join(Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    sockets = [line.split() for line in tables.splitlines()]
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    found = [words[1] for words in sockets if words[1].endswith(port) and words[3] == "0A"]
    strategy.barrier()
    leave_group()
    return [address.split(":")[0] for address in found]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux lists its sockets there")
def test_the_store_of_one_hosts_ranks_listens_on_the_loopback_alone() -> None:
    assert run_distributed(_listeners, 2, backend=None) == [["0100007F"], ["0100007F"]]


def test_the_store_of_several_hosts_listens_where_others_reach_it() -> None:
    assert _listen("localhost", 0) is None, "a name of the loopback is not the others' address"
    assert _listen("203.0.113.1", 0) is None, "an address behind a router is not this host's"


def test_a_port_that_another_process_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        strategy = SimpleNamespace(
            cluster_environment=LightningEnvironment(), world_size=1, global_rank=0, num_nodes=1, root_device=None
        )
        with pytest.raises(DloError, match=rf"MASTER_PORT must be a free port .* got {port}, .*unset it"):
            join_group(strategy)


def test_tasks_of_a_job_that_are_not_the_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NODEID": 0, "LOCALID": 0, "PROCID": 0, "JOB_NAME": "x", "JOB_ID": 7}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    launcher = RankLauncher(SLURMEnvironment(), 4, 1)
    with pytest.raises(DloError, match=r"trainer.devices and trainer.num_nodes must be .* got 4 and 1; .*devices=2"):
        launcher.launch(lambda: None)


def test_spawned_ranks_are_refused_at_the_start() -> None:
    with pytest.raises(DloError, match=r"start_method must be popen or fork, got spawn.*ddp_notebook"):
        Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy(start_method="spawn"), logger=False)


# --- A script that catches the error of a run of several ranks can start the next run --------------------------------


class Fails(Squares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("no training")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())


@on_ranks(2, backend=None)
def test_the_next_run_starts_at_once(rank: int, world_size: int) -> None:
    """It ended the process where it began before the failed run's thread had looked at its event."""
    trainer = quiet_trainer(devices=2, strategy=ZeroStrategy(1), max_steps=1, num_sanity_val_steps=0)
    module, data = Fails(torch.nn.Linear(8, 4)), DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=2)
    for _ in range(3):
        with pytest.raises(ValueError, match="no training"):
            trainer.fit(module, data)
        assert [*trainer.validate(module, data, verbose=False)[0]] == ["val_loss"]
    time.sleep(3)  # Longer than a rank waits for the end of callbacks.

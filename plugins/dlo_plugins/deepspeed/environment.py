"""Where DeepSpeed runs: its accelerator, its launcher, and its part of the process group."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlo_framework.distributed.launcher import set_collective_timeout
from dlo_framework.errors import DloError

ACCELERATOR = "DS_ACCELERATOR"


def check_installed() -> None:
    """Looks for DeepSpeed, without importing it.

    Raises:
        DloError: if it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise DloError("DeepSpeedBridge needs DeepSpeed, which is not installed: pip install deepspeed")


def adopt_launcher() -> None:
    """Tells Lightning which node this is, where the ``deepspeed`` launcher has started this process.

    That launcher sets RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*, as torchrun does, but calls the node's number
    CROSS_RANK, which Lightning (2.6) reads as NODE_RANK.
    """
    if "CROSS_RANK" in os.environ and "LOCAL_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])


def use_accelerator(device_type: str) -> None:
    """Makes DeepSpeed compute on the kind of device that the trainer does, whatever else the machine has.

    Args:
        device_type: ``cpu``, ``cuda``, ...
    """
    if "deepspeed" not in sys.modules:
        os.environ[ACCELERATOR] = device_type  # Else it looks for devices by itself, and warns where it finds none.
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type:
        return
    os.environ[ACCELERATOR] = device_type
    if device_type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    elif device_type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())
    else:
        raise DloError(
            f"DeepSpeed was set up for {get_accelerator().device_name()} in this process, the trainer is on"
            f" {device_type}; start a new process with {ACCELERATOR}={device_type}"
        )


def join(backend: str, port: int, timeout: timedelta | None) -> None:
    """Gives DeepSpeed the process group that there is; called on all ranks once they are in it.

    Args:
        backend: of the group: gloo, nccl.
        port: of the rendezvous.
        timeout: of its collectives; None leaves torch's.
    """
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    without_shared_memory_op()
    _forget_old_groups()
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, distributed_port=port, verbose=False, **given)


def without_shared_memory_op() -> None:
    """Keeps DeepSpeed from compiling an operation that training on a CPU does not use.

    DeepSpeed (0.15 to 0.19) builds ``deepspeed_shm_comm``, an all-reduce for inference, when a CPU joins a process
    group: a minute of a compiler without a word, and a wait without end where a killed build has left its lock. It
    has no option for that; it asks its table of what can be built here.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_old_groups() -> None:
    """Makes DeepSpeed ask for its groups anew, where the process group it knew has been taken down.

    DeepSpeed (0.15 to 0.19) keeps groups in module variables of ``deepspeed.utils.groups`` and never asks whether
    they are alive.
    """
    from deepspeed.utils import groups

    world = getattr(groups, "_WORLD_GROUP", None)
    if world is not None and world not in dist.distributed_c10d._world.pg_map:
        groups._WORLD_GROUP = None


def limit_groups(engine: Any, limit: timedelta | None) -> None:
    """Lets the groups that DeepSpeed has made give up as soon as the strategy's own.

    Args:
        engine: DeepSpeed's.
        limit: how long a collective may take; None leaves torch's.
    """
    if limit is None:
        return
    for name in ("data_parallel_group", "seq_data_parallel_group"):
        group = getattr(engine, name, None)
        if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
            set_collective_timeout(limit, group)


def device_index(device: torch.device) -> int:
    """Returns what DeepSpeed calls a device: its index, 0 for the CPU."""
    return device.index if device.index is not None else 0

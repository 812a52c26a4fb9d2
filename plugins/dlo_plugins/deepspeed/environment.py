"""DeepSpeed's environment: its accelerator, launcher and process groups, and Lightning's strategy on any device."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from dlo_framework.distributed.launcher import set_collective_timeout
from dlo_framework.errors import DloError

ACCELERATOR = "DS_ACCELERATOR"


def check_installed() -> None:
    """Checks that DeepSpeed is installed, without importing it.

    Raises:
        DloError: If it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise DloError(
            "DeepSpeedBridge needs DeepSpeed, which is not installed; pip install 'dlo_framework[deepspeed]'"
        )


def adopt_launcher() -> None:
    """Sets NODE_RANK for Lightning if the ``deepspeed`` launcher has started this process.

    That launcher sets RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*, as torchrun does, but names the node's rank
    CROSS_RANK, where Lightning (2.6) reads NODE_RANK.
    """
    if "CROSS_RANK" in os.environ and "LOCAL_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])


def use_accelerator(device_type: str) -> None:
    """Makes DeepSpeed use the trainer's type of device, whatever else the machine has.

    Args:
        device_type: Type of device, such as ``cpu`` or ``cuda``.
    """
    if "deepspeed" not in sys.modules:
        os.environ[ACCELERATOR] = device_type  # Otherwise DeepSpeed searches for devices, and warns if it finds none.
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
            f"{ACCELERATOR} must be {device_type}, the trainer's device, got {get_accelerator().device_name()}, which"
            f" this process has set up; start a new process with {ACCELERATOR}={device_type}"
        )


def join_process_group(backend: str, port: int, timeout: timedelta | None) -> None:
    """Passes the existing process group to DeepSpeed; called on all ranks after they have joined it.

    Args:
        backend: Backend of the group: gloo or nccl.
        port: Port of the rendezvous.
        timeout: Time limit of its collectives; None keeps torch's.
    """
    import deepspeed.ops
    from deepspeed.utils import groups

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    # DeepSpeed (0.15 to 0.19) builds `deepspeed_shm_comm`, an all-reduce for inference, when a CPU joins a process
    # group: a minute of silent compilation, and an endless wait if a killed build has left its lock. It has no option
    # for that; it looks in its table of operators that can be built.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It keeps groups in module variables and never checks whether they still exist.
    if groups._WORLD_GROUP not in (None, *dist.distributed_c10d._world.pg_map):
        groups._WORLD_GROUP = None
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, distributed_port=port, verbose=False, **given)


def limit_groups(engine: Any, limit: timedelta | None) -> None:
    """Sets the strategy's time limit on the groups that DeepSpeed has created.

    Args:
        engine: DeepSpeed's engine.
        limit: Time limit of a collective; None keeps torch's.
    """
    if limit is None:
        return
    for name in ("data_parallel_group", "seq_data_parallel_group"):
        group = getattr(engine, name, None)
        if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
            set_collective_timeout(limit, group)


class AnyDeviceDeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy for any device, with process groups and optimizers as in its other strategies.

    Lightning's class (2.6) requires CUDA, imports DeepSpeed in its constructor, before the device is known, and leaves
    building the optimizers to DeepSpeed. Of that class only its type is used: the Trainer chooses the precision plug-in
    by it, and some callbacks refuse it.
    """

    def __init__(self, timeout: timedelta | None, config: dict[str, Any]) -> None:
        super(DeepSpeedStrategy, self).__init__(timeout=timeout)
        self.config: dict[str, Any] = config
        self.remote_device = None
        self.load_full_weights = self.exclude_frozen_parameters = False
        self._config_initialized = True

    def setup_environment(self) -> None:
        """Joins the process group."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Joins the process group and passes it to DeepSpeed."""
        use_accelerator(self.root_device.type)
        super(DeepSpeedStrategy, self).setup_distributed()
        assert self.cluster_environment is not None
        self._set_node_environment_variables()
        join_process_group(dist.get_backend(), self.cluster_environment.main_port, self._timeout)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers that the module configures."""
        super(DeepSpeedStrategy, self).setup_optimizers(trainer)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds tensors on the CPU; :meth:`shard` moves or partitions them one by one."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Builds full models, without partitioning."""
        yield

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether DeepSpeed counts the micro-batches of a window: False, Lightning counts them."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning calls for loading the optimizers' state."""
        return True

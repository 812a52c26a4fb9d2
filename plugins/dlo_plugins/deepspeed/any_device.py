"""Lightning's DeepSpeedStrategy for any device, CPUs included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from dlo_plugins.deepspeed import environment


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
        environment.use_accelerator(self.root_device.type)
        super(DeepSpeedStrategy, self).setup_distributed()
        assert self.cluster_environment is not None
        self._set_node_environment_variables()
        environment.join_process_group(dist.get_backend(), self.cluster_environment.main_port, self._timeout)

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

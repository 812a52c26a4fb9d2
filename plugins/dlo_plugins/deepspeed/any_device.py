"""Lightning's DeepSpeedStrategy, on any device."""

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
    """Lightning's DeepSpeedStrategy on any device, with the process group and the optimizers of its other strategies.

    Lightning (2.6) takes CUDA alone, starts DeepSpeed's import with the strategy, before the device is known, and
    leaves the making of optimizers to DeepSpeed. What remains of its class is what others know it by: the precision
    that the Trainer chooses for it, and the callbacks that refuse it.
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
        """Joins the process group, and gives it to DeepSpeed."""
        environment.use_accelerator(self.root_device.type)
        super(DeepSpeedStrategy, self).setup_distributed()
        assert self.cluster_environment is not None
        self._set_node_environment_variables()
        environment.join(dist.get_backend(), self.cluster_environment.main_port, self._timeout)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers, as the module configures them."""
        super(DeepSpeedStrategy, self).setup_optimizers(trainer)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds tensors on the CPU; :meth:`shard` moves, or partitions, them one by one."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Builds models whole."""
        yield

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether DeepSpeed counts the micro-batches of a window: no, Lightning does."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning asks for the optimizers' state to be loaded."""
        return True

"""Callback that trains the routers of a model: their losses, and their loss-free biases.

Tasks with an option `experts` return it; see :mod:`dlo_framework.models.experts.routers` for the papers.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.callback import PluginCallback
from dlo_framework.models.experts.auxiliary_loss import set_scale
from dlo_framework.models.experts.balance import (
    RouterLoad,
    find_routers,
    move_biases,
    sum_loads,
    watch_losses,
)
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.strategy_contract import contract_of


def token_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that see other tokens; None where all see the same."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    group = contract_of(trainer.strategy).data_group or dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


class RouterTraining(PluginCallback):
    """Adds the losses of the routers to their gradients, and moves their loss-free biases after each optimizer step.

    The biases are buffers, and so in checkpoints. The load that moves them is that of all tokens of an optimizer step:
    of all ranks and of all accumulated micro-batches. The load-balancing loss of a micro-batch has the fractions of all
    ranks' tokens in the micro-batches of the step so far; see :mod:`dlo_framework.models.experts.auxiliary_loss`. A
    LightningModule other than a Task returns its loss through
    :func:`dlo_framework.models.experts.auxiliary_loss.follow_gradient`, for accumulation and loss scaling.

    Args:
        options: Options of the mixtures.
    """

    def __init__(self, options: MixtureOptions) -> None:
        self.options = options
        self._loads: list[RouterLoad] = []
        self._handles: list[RemovableHandle] = []
        self._routers: dict[str, nn.Module] = {}
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch the routers."""
        self._remove()
        set_scale(1.0)  # Of an earlier run, perhaps with a scaled loss.
        self._routers = find_routers(pl_module)
        self._loads, self._handles = watch_losses(pl_module, self.options, token_group(trainer))
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begins new counts, and moves the biases, if the batch ended an optimizer step."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        for load in self._loads:
            load.step.end_step()
        if not self.options.bias_rate:
            return
        found = sum_loads(self._loads, token_group(trainer), trainer.strategy.root_device)
        sums = {load.name: part for load, part in zip(self._loads, found, strict=True)}
        move_biases(self._routers, sums, self.options.bias_rate)

    def _remove(self, *_: Any, **__: Any) -> None:
        """Ends the watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._loads, self._routers = [], [], {}

    on_train_end = on_exception = _remove

"""Templates that ``dlo plugins new`` fills in: for each kind a small working plug-in, and its test.

They are examples to learn from: arguments are typed and documented (``dlo plugins show`` prints them),
and the constructor checks their values, with the fix in the message.
"""

from __future__ import annotations

from dlo_framework.cli.scaffold_task_and_data import DATA, DATA_TEST, FINDS_IT, TASK, TASK_TEST

_CALLBACK = '''"""Callback $class_name: logs the duration of training epochs."""

from __future__ import annotations

import time

from dlo_framework import DloError
from lightning.pytorch import Callback, LightningModule, Trainer


class $class_name(Callback):
    """Logs the seconds that a training epoch took, as `epoch_seconds`.

    Args:
        every: Number of epochs between two logs; 1 logs each epoch.

    Raises:
        DloError: If `every` is smaller than 1.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise DloError(f"every must be at least 1, got {every}; 1 logs each epoch")
        self.every = every
        self._start = 0.0

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Stores the time of the epoch's start."""
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the time since the epoch's start."""
        if (trainer.current_epoch + 1) % self.every == 0:
            pl_module.log("epoch_seconds", time.monotonic() - self._start)
'''

_CALLBACK_TEST = (
    '''"""Tests of $class_name."""

from pathlib import Path

import pytest
from dlo_framework import DloError
from dlo_framework.registry import Registry
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from $name import $class_name


def fit(callback: $class_name, max_epochs: int) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        max_epochs=max_epochs,
        limit_train_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return trainer


def test_every_second_epoch_is_logged() -> None:
    assert "epoch_seconds" not in fit($class_name(every=2), max_epochs=1).logged_metrics
    assert fit($class_name(every=2), max_epochs=2).logged_metrics["epoch_seconds"] > 0


def test_a_bad_value_is_refused() -> None:
    with pytest.raises(DloError, match="every must be at least 1, got 0"):
        $class_name(every=0)
'''
    + FINDS_IT % "callback"
)

_STRATEGY = '''"""Strategy $class_name: one device, with NaN gradients set to zero."""

from __future__ import annotations

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor


class $class_name(SingleDeviceStrategy):
    """Trains on one device, and sets gradients that are infinite or NaN to zero.

    Args:
        device: Device to train on, such as cpu or cuda:0.
    """

    strategy_name = "$name"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Replaces bad gradients after each backward pass, before clipping."""
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers `--trainer.strategy $name`, beside the class's own name."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)
'''

_STRATEGY_TEST = (
    '''"""Tests of $class_name."""

from pathlib import Path

import torch
from dlo_framework.registry import Registry
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from $name import $class_name


class ScaledLoss(BoringModel):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().loss(preds, labels) * self.scale


def weights_after_fit(strategy: $class_name | str, scale: float) -> Tensor:
    torch.manual_seed(0)
    model = ScaledLoss(scale)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_good_gradients_are_left_alone() -> None:
    ours = weights_after_fit($class_name(), scale=1.0)
    assert torch.equal(ours, weights_after_fit("auto", scale=1.0))


def test_gradients_that_are_not_numbers_change_nothing() -> None:
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in BoringModel().parameters()])
    assert torch.equal(weights_after_fit($class_name(), scale=float("nan")), start)
'''
    + FINDS_IT % "strategy"
)

_APPLIER = '''"""Applier $class_name: convolutions in the channels-last memory format."""

from __future__ import annotations

from typing import ClassVar

import torch
from dlo_framework import Applier, ParallelPlan, Phase
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class $class_name(Applier):
    """Stores weights of convolutions channels-last: equal results, faster on GPUs."""

    # Before the compiler looks at the model, and before it is sharded.
    phase: ClassVar[Phase] = Phase.CHECKPOINT

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Rewrites `module` in place; uses neither the mesh nor the plan."""
        for child in module.modules():
            if isinstance(child, nn.Conv2d):
                child.to(memory_format=torch.channels_last)
'''

_APPLIER_TEST = (
    '''"""Tests of $class_name."""

from pathlib import Path

import torch
from dlo_framework.registry import Registry
from torch import nn

from $name import $class_name


def test_the_order_changes_and_the_numbers_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3))
    images = torch.randn(2, 3, 16, 16)
    before = model(images)
    $class_name().apply(model, mesh=None, plan=None)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images), before)
'''
    + FINDS_IT % "applier"
)

#: Templates of the plug-in and its test, by kind; ``$name`` is the module's name, ``$class_name`` the class's.
TEMPLATES: dict[str, tuple[str, str]] = {
    "strategy": (_STRATEGY, _STRATEGY_TEST),
    "callback": (_CALLBACK, _CALLBACK_TEST),
    "task": (TASK, TASK_TEST),
    "data": (DATA, DATA_TEST),
    "applier": (_APPLIER, _APPLIER_TEST),
}

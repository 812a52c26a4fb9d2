"""Parameters that are unfrozen during a run: they train as in one process, or the strategy refuses it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_plugins.callbacks.gradient_compression import GradientCompression
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from support.fsdp_nets import Module, mine, trainer


class Unfreeze(Callback):
    """Freezes the stem, and unfreezes it before the third step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.net.stem.requires_grad_(False)  # type: ignore[union-attr]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            pl_module.net.stem.requires_grad_(True)  # type: ignore[union-attr]


class Finetuning(BaseFinetuning):
    """The same by Lightning's callback, in the second epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net.stem)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.stem, optimizer)


class Later(Module):
    """Adds nothing frozen to the optimizer, as Lightning's callback asks for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class All(Module):
    """Has one optimizer of all parameters, frozen ones too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


RUNS: dict[str, Any] = {"a callback": (All, Unfreeze), "Lightning's": (Later, Finetuning)}
TRAINS: dict[str, Any] = {
    "a callback": (DataParallelStrategy, FSDPStrategy, lambda: MeshStrategy(dp_replicate=2)),
    "Lightning's": (DataParallelStrategy,),
}
REFUSES = (lambda: ZeroStrategy(1), lambda: ZeroStrategy(3), lambda: DeepSpeedBridge(stage=1))


def _unfreeze(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": []}
    for name, (kind, callback) in RUNS.items():
        alone = kind()
        trainer(1, "auto", max_epochs=2, callbacks=[callback()]).fit(alone, mine(0, 1))
        expected = {key: value.clone() for key, value in alone.state_dict().items()}
        found[name] = []
        for strategy in TRAINS[name]:
            run, module = trainer(world, strategy(), max_epochs=2, callbacks=[callback()]), kind()
            run.fit(module, mine(rank, world))
            if isinstance(run.strategy, DataParallelStrategy):  # Each rank's own weights, not the first rank's.
                weights: dict[str, Any] = module.state_dict()
            else:
                weights = gather_full_weights(run) or expected
            found[name].append(max(float((weights[key] - expected[key]).abs().max()) for key in expected))
    options = {"callbacks": [Unfreeze(), GradientCompression("fp16")]}
    for strategy, more in [*((strategy, {}) for strategy in REFUSES), (DataParallelStrategy, options)]:
        run = trainer(world, strategy(), max_epochs=2, **{"callbacks": [Unfreeze()], **more})
        with pytest.raises(DloError) as error:
            run.fit(All(), mine(rank, world))
        found["refused"].append(str(error.value))
    return found


def test_what_is_unfrozen_trains_as_in_one_process_or_is_refused() -> None:
    for found in run_distributed(_unfreeze, 2, timeout=200):
        for name, strategies in TRAINS.items():
            assert found[name] == pytest.approx([0.0] * len(strategies), abs=1e-5), name
        assert len(found["refused"]) == len(REFUSES) + 1
        for message in found["refused"]:
            assert "net.stem.bias" in message
            assert "net.stem.weight" in message
        assert "GradientCompression's" in found["refused"][-1]

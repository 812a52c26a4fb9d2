"""DeepSpeed beside what else a run has: an average of the weights, finders, recomputation, evaluation, a second fit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.compile.callback import Compile
from dlo_tasks.imagenet.digits import DigitsData
from support.deepspeed_nets import STRATEGIES, Model, trainer


def _twice(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """Trains, validates and trains again with one trainer; then a new one evaluates what was saved."""
    register_data_parallel()
    found = {}
    for name in names:
        seed_everything(3, workers=True, verbose=False)
        net, data = Model(), DigitsData(image_size=16, batch_size=48)
        report = StateReport()
        made = trainer(world_size, STRATEGIES[name]() if world_size > 1 else "auto", [report], max_steps=3)
        made.fit(net, datamodule=data)
        made.limit_val_batches = 4
        made.validate(net, datamodule=data, verbose=False)
        made.limit_val_batches = 0
        made.fit_loop.epoch_loop.max_steps = 5
        made.fit(net, datamodule=data)
        made.save_checkpoint(folder / name)
        other = trainer(world_size, STRATEGIES[name]() if world_size > 1 else "auto", limit_val_batches=4)
        (measured,) = other.validate(Model(), datamodule=data, ckpt_path=folder / name, verbose=False)
        found[name] = measured["val_loss"], report.summary()
    return found


def test_one_trainer_trains_twice_and_another_evaluates_and_memory_is_counted(tmp_path: Path) -> None:
    names = ["deepspeed2", "deepspeed3_cut"]
    (alone,) = run_distributed(_twice, 1, tmp_path, ["ddp"], backend=None)
    found = run_distributed(_twice, 2, tmp_path, names, backend=None)[0]
    trained = sum(p.numel() for p in Model().parameters() if p.requires_grad) * 4
    for name, (loss, held) in found.items():
        assert loss == pytest.approx(alone["ddp"][0], rel=1e-5), name
        assert held["optimizer"] == pytest.approx(trained, rel=0.02)  # Two moments over two ranks.
        # DeepSpeed holds a master copy beside parameters that are in single precision already, halved in all stages.
        whole = 0.5 if name == "deepspeed3_cut" else 1.0
        assert held["parameters"] == pytest.approx(trained * (whole + 0.5), rel=0.1), name


class Unfreeze(Callback):
    """Lets a frozen block train from the second step on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        pl_module.blocks[1].requires_grad_(batch_idx > 0)


class Adversaries(Model):
    """Two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


class ByHand(Model):
    """Two backward passes a step, the first of them said to be one, or not."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.told = False, told

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=not self.told):
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class OwnClipping(Model):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


REFUSED: list[tuple[Any, str, Any]] = [
    (partial(Model, "lamb"), "deepspeed2", "got Lamb, which needs full tensors"),
    (partial(Model, "lookahead"), "deepspeed1", "got Lookahead around AdamW: DeepSpeed partitions only the outer one"),
    (Adversaries, "deepspeed2", "must return one optimizer under DeepSpeed, got 2"),
    (partial(ByHand, told=False), "deepspeed2", "must run one synchronised backward pass per optimizer step"),
    (OwnClipping, "deepspeed3", "must clip by norm to 0.0, as DeepSpeed does"),
    (Model, "deepspeed3", (Compile, "it gathers a block's parameters layer by layer")),
    (Model, "deepspeed3_cut", (Unfreeze, "requires_grad of blocks.1.0.bias, blocks.1.0.weight")),
]


def _refused(rank: int, world_size: int) -> list[str]:
    found = []
    for module, name, what in REFUSED:
        callbacks = [what[0]()] if isinstance(what, tuple) else []
        try:
            trainer(world_size, STRATEGIES[name](), callbacks, max_steps=2).fit(
                module(), datamodule=DigitsData(image_size=16, batch_size=48)
            )
            found.append("taken")
        except DloError as error:
            found.append(str(error))
    allowed = trainer(world_size, STRATEGIES["deepspeed2"](), max_steps=2)
    allowed.fit(ByHand(told=True), datamodule=DigitsData(image_size=16, batch_size=48))
    assert allowed.global_step == 2
    return found


def test_what_deepspeed_would_get_wrong_is_refused() -> None:
    for found in run_distributed(_refused, 2, backend=None):
        for message, (_, _, what) in zip(found, REFUSED, strict=True):
            assert (what[1] if isinstance(what, tuple) else what) in message

"""DeepSpeed beside what else a run has: an average of the weights, finders, recomputation, evaluation, a second fit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss
from dlo_framework.progress import AccumulationTail
from dlo_framework.testing import run_distributed
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.compile.callback import Compile
from dlo_plugins.schedules.lr_finder import LRFinder
from dlo_tasks.imagenet.digits import DigitsData
from support.deepspeed_nets import STRATEGIES, Model, trainer

NAMES = ("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3_cut", "deepspeed2_offload", "deepspeed3_offload")


class Poison(Callback):
    """Makes a rank's loss NaN in one step."""

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            loss.data.fill_(float("nan"))


SCENES: dict[str, Any] = {
    "ema": (Model, lambda: [WeightEMA(0.8)], {}),
    "finder": (Model, lambda: [LRFinder(num_steps=20, apply=False)], {}),
    "recompute": (partial(Model, recompute=True), lambda: [], {"gradient_clip_val": 0.5}),
    "adapters": (partial(Model, adapters=True), lambda: [], {}),
    # Windows of 4 in epochs of 6 batches: the second has 2.
    "tail": (Model, lambda: [AccumulationTail()], {"limit_train_batches": 6, "accumulate_grad_batches": 4}),
    "skip": (Model, lambda: [Poison(), FiniteLoss("skip")], {"accumulate_grad_batches": 2}),
}


def scene(rank: int, world_size: int, folder: Path, jobs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Returns validation losses; leaves a checkpoint a scene in the folder."""
    register_data_parallel()
    found = {}
    for name, which in jobs:
        module, callbacks, options = SCENES[which]
        seed_everything(3, workers=True, verbose=False)
        net, data = module(), DigitsData(image_size=16, batch_size=48)
        made = trainer(
            world_size,
            STRATEGIES[name]() if world_size > 1 else "auto",
            callbacks(),
            folder,
            limit_val_batches=4,
            **options,
        )
        made.fit(net, datamodule=data)
        made.save_checkpoint(folder / f"{name}-{which}")
        (measured,) = made.validate(net, datamodule=data, verbose=False)
        found[name, which] = measured["val_loss"]
    return found


def weights(path: Path) -> dict[str, torch.Tensor]:
    content = load(path)
    found = dict(content["state_dict"].items())
    return found | {f"trained {name}": value for name, value in content.get("current_model_state", {}).items()}


@pytest.mark.slow
def test_each_stage_is_one_process_with_what_else_a_run_has(tmp_path: Path) -> None:
    (alone,) = run_distributed(scene, 1, tmp_path, [("ddp", which) for which in SCENES], backend=None)
    jobs = [(name, which) for which in SCENES for name in NAMES]
    found = run_distributed(scene, 2, tmp_path, jobs, backend=None, timeout=3000)[0]
    for (name, which), loss in found.items():
        assert loss == pytest.approx(alone["ddp", which], rel=1e-5), (name, which)
        expected, held = weights(tmp_path / f"ddp-{which}"), weights(tmp_path / f"{name}-{which}")
        assert expected.keys() == held.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                held[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=(name, which, key): f"{at}: {text}"
            )


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
    names = ["deepspeed1", "deepspeed2", "deepspeed3_cut"]
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


class Layerwise(Model):
    """An optimizer that needs whole tensors."""

    def configure_optimizers(self):
        from timm.optim import Lamb

        return Lamb([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Ahead(Model):
    """An optimizer around another."""

    def configure_optimizers(self):
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2([p for p in self.parameters() if p.requires_grad], opt="lookahead_adamw", lr=1e-3)


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
    (Layerwise, "deepspeed2", "got Lamb, which needs full tensors"),
    (Ahead, "deepspeed1", "got Lookahead around AdamW: DeepSpeed partitions only the outer one"),
    (Adversaries, "deepspeed2", "must return one optimizer under DeepSpeed, got 2"),
    (partial(ByHand, told=False), "deepspeed2", "must run one synchronised backward pass per optimizer step"),
    (OwnClipping, "deepspeed3", "must clip by norm to 0.0, as DeepSpeed does"),
    (Model, "deepspeed3", (Compile, "got DeepSpeed's stage 3, whose hooks gather them layer by layer")),
    *(
        (Model, name, (Unfreeze, "requires_grad of blocks.1.0.bias, blocks.1.0.weight"))
        for name in ("deepspeed2", "deepspeed3_cut")
    ),
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

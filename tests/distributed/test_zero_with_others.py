"""ZeRO beside what else a run has: two optimizers by hand, a weight average, finders, recomputation, evaluation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.testing import run_distributed
from dlo_plugins.compile.callback import Compile
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_finder import LRFinder
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

STAGES = (1, 2, 3)


class Net(LightningModule):
    """Blocks in a residual stream; ``recompute`` checkpoints them."""

    def __init__(self, recompute: bool = False, frozen_first: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.inward = nn.Linear(64, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)
        if frozen_first:  # As with adapters: most of the model is frozen, a little beside it is trained.
            self.inward.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
            self.blocks[1][0].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inward(images.mean(1)[:, ::2, ::2].flatten(1))
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], ignore_index=-1, reduction="sum")
        self.log("val_loss", loss, sync_dist=True, reduce_fx="sum")  # Ranks share the last batch unevenly.

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


class Adversaries(Net):
    """Two optimizers, stepped by hand in turns, as a GAN's are; the second trains the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        for optimizer, sign in ((body, 1.0), (head, 0.5)):
            self.toggle_optimizer(optimizer)
            loss = sign * nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss.detach()

    def configure_optimizers(self):
        head = list(self.head.parameters())
        body = [p for p in self.parameters() if all(p is not other for other in head)]
        return torch.optim.AdamW(body, lr=3e-3), torch.optim.SGD(head, lr=0.1, momentum=0.9)


def train(world_size: int, strategy: Any, module: LightningModule, save: Path, **options: Any) -> float:
    """Trains, saves, and returns the last validation's loss."""
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        max_epochs=2,
        limit_train_batches=4,
        default_root_dir=save.parent,
        **options,
    )
    use_canonical_checkpoints(trainer)
    data = DigitsData(image_size=16, batch_size=32)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(save)
    (found,) = trainer.validate(module, datamodule=data, verbose=False)
    return found["val_loss"]


MODULES = {
    "net": Net,
    "recompute": partial(Net, recompute=True),
    "adapters": partial(Net, frozen_first=True),
    "adversaries": Adversaries,
}
CALLBACKS = {
    "": list,
    "ema": lambda: [WeightEMA(0.8)],
    "finder": lambda: [LRFinder(num_steps=20, apply=False)],
    "compile": lambda: [Compile(scope="blocks", backend="aot_eager")],
}
SCENES = [("net", "ema"), ("net", "finder"), ("recompute", ""), ("adapters", ""), ("adversaries", "")]
SCENES += [("net", "compile"), ("recompute", "compile")]


def _runs(rank: int, world_size: int, folder: Path, stages: tuple[int, ...], scenes: list[tuple[str, str]]) -> Any:
    register_data_parallel()
    losses = {}
    for stage in stages:
        for module, callbacks in scenes:
            seed_everything(3, workers=True, verbose=False)
            strategy = ZeroStrategy(stage) if world_size > 1 else "auto"  # type: ignore[arg-type]
            path = folder / f"{stage}-{module}-{callbacks}"
            options = {"callbacks": CALLBACKS[callbacks]()}
            losses[stage, module, callbacks] = train(world_size, strategy, MODULES[module](), path, **options)
    return losses


def tensors(path: Path) -> dict[str, Tensor]:
    content = load(path)
    found = dict(content["state_dict"].items())
    found |= {f"trained {name}": value for name, value in content.get("current_model_state", {}).items()}
    for number, optimizer in enumerate(content["optimizer_states"]):
        for name, state in optimizer["state"].items():
            found |= {f"{number} {name} {k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return found


@pytest.mark.slow
def test_each_stage_is_one_process_with_what_else_a_run_has(tmp_path: Path) -> None:
    (alone,) = run_distributed(_runs, 1, tmp_path / "one", (0,), SCENES, backend=None)
    found = run_distributed(_runs, 2, tmp_path / "two", STAGES, SCENES, backend=None, timeout=280)[0]
    for (stage, module, callbacks), loss in found.items():
        scene = f"{module}-{callbacks}"
        assert loss == pytest.approx(alone[0, module, callbacks], rel=1e-5), (stage, scene)
        expected, held = tensors(tmp_path / "one" / f"0-{scene}"), tensors(tmp_path / "two" / f"{stage}-{scene}")
        assert expected.keys() == held.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                held[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=(stage, scene, name): f"{at}: {text}"
            )

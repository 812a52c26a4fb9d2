"""DeepSpeed on several ranks trains as one process does: stages, optimizers, accumulation, clipping, offload."""

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_tasks.imagenet.digits import DigitsData
from support.deepspeed_nets import CUT_ALL, Model, ds

WARMUP = {"warmup_min_lr": 1e-4, "warmup_max_lr": 4e-3, "warmup_num_steps": 2, "warmup_type": "linear"}
ADAMW: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}
JSON: dict[str, Any] = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": ADAMW},
    "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
}


class AsInJson(Model):
    """Under what :data:`JSON` says, which replaces it on the ranks: torch's AdamW, DeepSpeed's own scheduler."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupDecayLR

        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **ADAMW)
        schedule = WarmupDecayLR(optimizer, self.trainer.max_steps, **WARMUP)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric) -> None:
        """Steps it: DeepSpeed's schedulers are not torch's, and Lightning leaves those to the module."""
        scheduler.step()


def build(kind: str = "adamw") -> tuple[LightningModule, LightningDataModule]:
    """Returns a task and its data by name."""
    return AsInJson() if kind == "json" else Model(kind), DigitsData(image_size=16, batch_size=48, val_fraction=0.03)


class HostStep(DeepSpeedBridge):
    """Steps offloaded state as beside an accelerator, by torch's fused kernel."""

    steps_on_host = True

    def shard(self, trainer: Trainer) -> None:
        super().shard(trainer)
        assert all(group["fused"] for group in self._running.deepspeed.basic_optimizer.param_groups)


def case(strategy: Any, kind: str = "adamw", **trainer: Any) -> Case:
    return Case(strategy, {"kind": kind}, trainer, f"{strategy.args}, {strategy.keywords}, {kind}, {trainer}")


OFFLOADED = {2: ds(2, offload_optimizer="cpu"), 3: ds(3, offload_optimizer="cpu", offload_parameters="cpu")}
ON_HOST = [functools.partial(HostStep, *bridge.args, **bridge.keywords) for bridge in OFFLOADED.values()]


def test_stages_are_one_process() -> None:
    cases = [
        case(ds(0), "sgd", accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ds(1, round_robin_gradients=True), accumulate_grad_batches=2),
        case(OFFLOADED[2], accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ds(3, config=CUT_ALL), "sgd", accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ON_HOST[1], gradient_clip_val=0.1),
        case(functools.partial(DeepSpeedBridge, config=JSON), "json", accumulate_grad_batches=2, gradient_clip_val=0.5),
        case(ds(0), "sgd", precision="bf16-mixed"),
    ]
    assert_parity(build, cases, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_fifty_steps(ranks: int) -> None:
    bridges = [*(ds(stage) for stage in range(4)), *OFFLOADED.values(), ds(3, config=CUT_ALL)]
    cases = [
        case(bridge, kind, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        for bridge in bridges
        for kind in ("adamw", "sgd")
        for accumulate, clip in ((1, 0.1), (4, None))
    ]
    assert_parity(build, cases, world_size=ranks, steps=50, rtol=1e-5, timeout=3500)
    halves = [case(ds(stage), "sgd", precision="bf16-mixed") for stage in range(4)]
    assert_parity(build, halves, world_size=ranks, steps=8)

"""DeepSpeed on several ranks trains as one process does: stages, optimizers, accumulation, clipping, offload."""

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.deepspeed_nets import CUT_ALL, Model, ds
from support.token_batches import FAMILIES, Tokens


class Momentum(Model):
    """Under SGD."""

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.02, momentum=0.9, nesterov=True)


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
    if kind == "vit":
        sizes = {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
        # Keys' biases have no gradient but rounding, of which Adam makes whole steps unless eps is larger.
        task = ImageClassifier("vit_tiny_patch16_224", sizes, optimizer_args={"eps": 1e-3}, log_images=0)
        return task, DigitsData(image_size=16, batch_size=32, val_fraction=0.02)
    if kind == "coatnet":
        sizes = {"embed_dim": [16, 64, 64, 64], "depths": [1, 1, 1, 1], "stem_width": 8, "img_size": 32}
        # Batch norm takes each rank's own statistics, so that only its use of them can be compared.
        return Still("coatnet_nano_rw_224", sizes, optimizer_args={"eps": 1e-3}, log_images=0), DigitsData(
            image_size=32, batch_size=16, val_fraction=0.01
        )
    if kind == "llama":
        config = {"model_type": "llama", **FAMILIES["llama"]}
        return CausalLM(config=config, lora=Lora(rank=4), lr=1e-3, optimizer_args={"eps": 1e-4}), Tokens(1)
    kinds = {"sgd": Momentum, "json": AsInJson, "adamw": Model}
    return kinds[kind](), DigitsData(image_size=16, batch_size=48, val_fraction=0.03)


class Still(ImageClassifier):
    """With the statistics of batch norm that it starts from."""

    def training_step(self, batch, batch_idx):
        for module in self.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        return super().training_step(batch, batch_idx)


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
        case(ds(2), "sgd", accumulate_grad_batches=2),
        case(ds(2), gradient_clip_val=0.1),
        case(OFFLOADED[2], accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ds(3, config=CUT_ALL), "sgd", accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(OFFLOADED[3]),
        *(case(bridge, gradient_clip_val=0.1) for bridge in ON_HOST),
        case(functools.partial(DeepSpeedBridge, config=JSON), "json", accumulate_grad_batches=2, gradient_clip_val=0.5),
    ]
    assert_parity(build, cases, steps=4, rtol=1e-5)


def test_stage_0_in_half_precision_has_the_gradient_norm_of_one_process() -> None:
    assert_parity(build, [case(ds(0), "sgd", precision="bf16-mixed")], steps=2)


@pytest.mark.slow
def test_tasks_and_mixed_precision_are_one_process() -> None:
    cases = [case(ds(2), "vit"), case(ds(3), "coatnet"), case(ds(3, config=CUT_ALL), "llama")]
    # What begins as zeros, biases and LoRA's second factors, is small in the first steps, and rounding is much of it.
    assert_parity(build, cases, steps=8, rtol=1e-5)
    assert_parity(build, [case(ds(stage), "sgd", precision="bf16-mixed") for stage in (0, 2, 3)], steps=4)


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
    cases += [case(ds(stage), kind) for stage in (1, 2, 3) for kind in ("vit", "coatnet")]
    assert_parity(build, cases, world_size=ranks, steps=50, rtol=1e-5, timeout=3500)
    assert_parity(build, [case(ds(stage), "llama") for stage in (2, 3)], world_size=ranks, steps=8, rtol=1e-5)
    halves = [case(ds(stage), "sgd", precision="bf16-mixed") for stage in range(4)]
    assert_parity(build, halves, world_size=ranks, steps=8)

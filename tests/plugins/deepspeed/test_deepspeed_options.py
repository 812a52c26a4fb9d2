"""What the bridge's options and a JSON promise: each trains, writes what it should, and changes no losses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_tasks.imagenet.digits import DigitsData
from support.deepspeed_nets import CUT_ALL, Model, ds, trainer
from support.runs import Watch

STEPS = 3


class NoSchedule(Model):
    """An optimizer without a schedule."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def _losses(world_size: int, strategy: Any, module: LightningModule, **options: Any) -> tuple[list[float], list[float]]:
    seed_everything(3, workers=True, verbose=False)
    watch = Watch()
    made = trainer(world_size, strategy, [watch], max_steps=STEPS, **options)
    made.fit(module, datamodule=DigitsData(image_size=16, batch_size=48))
    return watch.losses, [group["lr"] for group in made.optimizers[0].param_groups]


class Block(nn.Module):
    """Counts its forwards; its dropout draws the same numbers again where it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(27, 27), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return x + nn.functional.dropout(self.inner(x).tanh(), 0.1, self.training)


class Blocks(Task):
    """A task of blocks that its plan finds."""

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(
                nn.Flatten(), nn.Linear(768, 27), *(Block() for _ in range(3)), nn.Linear(27, 10)
            )

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("2", "3", "4"), stem=("1",), head=("5",))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def _recomputed(world_size: int) -> None:
    """`cpu_checkpointing` makes a task's blocks run twice a step, and changes no loss."""
    for stage in (2, 3):
        found = []
        for options in ({}, {"cpu_checkpointing": True}):
            bridge = ds(stage, config=CUT_ALL if stage == 3 else None, **options)()
            seed_everything(3, workers=True, verbose=False)
            task = Blocks()
            task.configure_model()
            losses, _ = _losses(world_size, bridge, task)
            found.append((losses, [task.model[number].calls for number in (2, 3, 4)]))  # type: ignore[index]
        (plain, once), (recomputed, twice) = found
        assert once == [STEPS] * 3, stage
        assert twice == [2 * STEPS] * 3, stage
        assert recomputed == plain, stage
    task.recompute = True  # As CausalLM has it.
    with pytest.raises(DloError, match="got recompute: true of Blocks too"):
        ds(2, cpu_checkpointing=True)()._checkpoint_activations(task)


def _options(rank: int, world_size: int, folder: Path) -> None:
    register_data_parallel()
    seed_everything(3, workers=True, verbose=False)
    expected, _ = _losses(world_size, "ddp", Model())
    buckets = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    profile = {"flops_profiler": {"output_file": str(folder / "flops.txt")}, "wall_clock_breakdown": True}
    accurate = {
        "small buckets": ds(2, overlap_comm=True, contiguous_gradients=False, **buckets),
        "small buckets, stage 1": ds(1, overlap_comm=False, contiguous_gradients=True, **buckets),
        "hpz": ds(3, hpz=2, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
        "profiled": ds(2, flops_profiler=2, comms_logger=True, config=profile),
    }
    for name, bridge in accurate.items():
        seed_everything(3, workers=True, verbose=False)
        strategy, model = bridge(), Model()
        found, _ = _losses(world_size, strategy, model)
        assert found == pytest.approx(expected, rel=1e-5), name
        numel = sum(p.ds_numel if strategy.stage == 3 else p.numel() for p in model.parameters() if p.requires_grad)
        found_size = strategy.engine.deepspeed.zero_reduce_bucket_size()
        assert found_size == (2000 if "small" in name else numel), name
    from deepspeed.comm import comm

    assert comm.cdb.shm_comm_op is None, "nothing is compiled when ranks meet"
    seed_everything(3, workers=True, verbose=False)
    rounded, _ = _losses(world_size, ds(2, communication_dtype="bf16")(), Model())
    assert rounded == pytest.approx(expected, rel=1e-2)
    assert rounded != expected
    _evaluated_alike(world_size)
    _recomputed(world_size)
    _json(world_size, folder)


def _evaluated_alike(world_size: int) -> None:
    """In half precision, evaluation beside the engine is what it is through it."""
    data, options = DigitsData(image_size=16, batch_size=48), {"limit_val_batches": 2, "val_check_interval": STEPS}
    made = trainer(
        world_size, ds(2)(), max_steps=STEPS, precision="bf16-mixed", check_val_every_n_epoch=None, **options
    )
    module = Model()
    made.fit(module, datamodule=data)
    inside = float(made.callback_metrics["val_loss"])
    (after,) = made.validate(module, datamodule=data, verbose=False)
    assert after["val_loss"] == pytest.approx(inside, rel=1e-6)


def _json(world_size: int, folder: Path) -> None:
    """A JSON as DeepSpeed's users have it, with everything in it."""
    content = {
        "train_batch_size": 48 * 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-3}},
    }
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(content))
    seed_everything(3, workers=True, verbose=False)
    bridge = DeepSpeedBridge(config=folder / f"{torch.distributed.get_rank()}.json")
    _, rates = _losses(world_size, bridge, Model(), accumulate_grad_batches=2)
    assert len(rates) == 1  # The JSON's optimizer has one group.
    assert 0 < rates[0] < 3e-3
    assert bridge.config["train_micro_batch_size_per_gpu"] == 24
    assert bridge.engine is not None
    assert bridge.engine.deepspeed.gradient_clipping() == 0.5
    assert type(bridge.optimizers[0]) is torch.optim.AdamW
    for told, options in (
        ("gradient_accumulation_steps must equal .* got 2", {}),
        ("gradient_clip_val", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ):
        with pytest.raises(DloError, match=told):
            _losses(world_size, DeepSpeedBridge(config=content), Model(), **options)
    alone = {key: value for key, value in content.items() if key != "scheduler"}
    with pytest.raises(DloError, match="optimizer and scheduler must be set together"):
        _losses(world_size, DeepSpeedBridge(config=alone), Model(), accumulate_grad_batches=2)
    _losses(world_size, DeepSpeedBridge(config=alone), NoSchedule(), accumulate_grad_batches=2)


def test_options_and_a_json_do_what_they_say(tmp_path: Path) -> None:
    run_distributed(_options, 2, tmp_path, backend=None)
    assert "DeepSpeed Flops Profiler" in (tmp_path / "flops.txt").read_text()


def test_short_names_are_presets() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    DeepSpeedBridge.register_strategies(StrategyRegistry)
    for name, stage in (("deepspeed", 2), ("deepspeed_0", 0), ("deepspeed_1", 1), ("deepspeed_3_offload", 3)):
        found = StrategyRegistry.get(name)
        assert type(found) is DeepSpeedBridge
        assert found.asked["zero_optimization"]["stage"] == stage
    assert StrategyRegistry.get("deepspeed_3_offload").asked["zero_optimization"]["offload_param"]["device"] == "cpu"

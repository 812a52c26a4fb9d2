"""What the tests of checkpoints from strategy to strategy, and of the DeepSpeed bridge, train, and how."""

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, seed_everything

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import Again
from support.plain_nets import Plain
from support.runs import Watch
from support.trainers import quiet_trainer


def ds(stage: int, **options: Any) -> partial:
    """Returns what makes a bridge; it travels to ranks."""
    return partial(DeepSpeedBridge, stage, **options)


#: Nothing stays whole in stage 3, and sub-groups are small.
CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 1500}}

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
    "zero3_offload": partial(ZeroStrategy, 3, offload="both"),
    "fsdp": FSDPStrategy,
    "deepspeed0": ds(0),
    "deepspeed1": ds(1),
    "deepspeed2": ds(2),
    "deepspeed3": ds(3),
    "deepspeed2_offload": ds(2, offload_optimizer="cpu", round_robin_gradients=True),
    "deepspeed3_cut": ds(3, config=CUT_ALL),
    "deepspeed3_offload": ds(3, offload_optimizer="cpu", offload_parameters="cpu"),
}
SAVED, STEPS = 5, 10


class Model(Plain):
    """With odd sizes, which no number of ranks divides."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, sizes=(27, 45))
        for parameter in self.frozen.parameters():
            # DeepSpeed rounds frozen weights to half precision, and keeps no master weights of them.
            parameter.data = parameter.data.bfloat16().float()


def trainer(world_size: int, strategy: Any, callbacks: list[Callback] | None = None, root: Any = None, **options: Any):
    """Returns a trainer for a few steps."""
    defaults: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 0}
    made = quiet_trainer(
        devices=world_size, strategy=strategy, callbacks=callbacks, default_root_dir=root, **(defaults | options)
    )
    use_canonical_checkpoints(made)
    return made


def train(
    world_size: int,
    strategy: Any,
    save: Path | None = None,
    resume: Path | None = None,
    after: int = SAVED,
    optimizer: str = "adamw",
    **options: Any,
) -> list[float]:
    """Returns the losses of the steps after a checkpoint, or of all; saves after a batch, or right after resuming."""
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save if resume is None else None, batch=after)
    again = [Again(save)] if resume is not None and save is not None else []
    made = trainer(world_size, strategy, [watch, ExactResume(), *again], **options)
    made.fit(Model(optimizer), datamodule=DigitsData(image_size=16, batch_size=48), ckpt_path=resume)
    return watch.losses


def runs(rank: int, world_size: int, jobs: list[tuple[Any, ...]]) -> list[list[float]]:
    """Trains one job after the other: a strategy's name, where to save, what to resume, and perhaps options."""
    register_data_parallel()
    found = []
    for name, save, resume, *rest in jobs:
        options = rest[0] if rest else {}
        found.append(train(world_size, STRATEGIES[name]() if world_size > 1 else "auto", save, resume, **options))
    return found

"""Runs of the optimizers that tasks name: under each strategy on two ranks, and the same in a plain loop."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.fsdp_nets import Batches, differ, trainer
from support.runs import Watch

STEPS, BATCH = 4, 8
#: Of the model's tensors, the MLPs' weights have 4096 elements, so that a quantised state is.
SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
#: A key's bias has no gradient but rounding, whose sign Lion steps by.
SIZES["qkv_bias"] = False

STRATEGIES: dict[str, Any] = {
    "ddp": DataParallelStrategy,
    "zero1": partial(ZeroStrategy, 1),
    "zero3": partial(ZeroStrategy, 3),
    "fsdp": FSDPStrategy,
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
}
#: Arguments of the optimizers that need some to be seen working in a few steps.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "soap": {"precondition_frequency": 2},
    "bnbsgd8bit": {"momentum": 0.9},
    "adamw_schedulefree": {"warmup_steps": 2},
    "radam_schedulefree": {"silent_sgd_phase": False},
}


def data(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


def task(name: str, kind: type[ImageClassifier] = ImageClassifier, **options: Any) -> ImageClassifier:
    seed_everything(7, verbose=False)
    return kind(
        "vit_tiny_patch16_224",
        model_args=SIZES,
        num_classes=10,
        optimizer=name,
        lr=1e-2,
        schedule="constant",
        optimizer_args=ARGUMENTS.get(name, {}),
        log_images=0,
        **options,
    )


def plain_loop(name: str, parts: int, skipped: int | None = None) -> dict[str, Tensor]:
    """Returns the weights after a loop in plain torch, with each batch in parts, as many ranks sum their gradients."""
    module = task(name)
    module.check(None)
    module.configure_model()
    optimizer: Any = module.configure_optimizers()
    first = {f"model.{key}": value.clone() for key, value in module.model.state_dict().items()}
    if hasattr(optimizer, "attended"):
        optimizer.attended = True
    for number, (x, y) in enumerate(data()):
        if number == skipped:
            continue
        for images, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (nn.functional.cross_entropy(module.model(images), targets) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "swap"):
        optimizer.swap(average=True)
    found = {f"model.{key}": value for key, value in module.model.state_dict().items()}
    assert differ(found, first) > 1e-4, f"{name} has not trained"
    return found


def train(
    name: str,
    strategy: str,
    rank: int,
    world: int,
    *callbacks: Any,
    resume: Path | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    share = (0, 1) if strategy == "tp" else (rank, world)
    batches = Batches([tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()])
    run = trainer(
        world, STRATEGIES[strategy](), max_steps=STEPS, max_epochs=-1, callbacks=[ExactResume(), *callbacks], **options
    )
    use_canonical_checkpoints(run)
    run.fit(task(name), batches, ckpt_path=resume)
    return {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}


def compare(rank: int, world: int, folder: Path, cases: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Returns, by optimizer and strategy, the differences from the plain loop and of a resumed run.

    Args:
        rank: This rank.
        world: Number of ranks.
        folder: Folder for checkpoints.
        cases: Strategies by optimizer.
    """
    found: dict[str, Any] = {}
    for name, strategies in cases.items():
        references = {parts: plain_loop(name, parts) for parts in {1 if one == "tp" else 2 for one in strategies}}
        for strategy in strategies:
            path = folder / f"{name}-{strategy}.ckpt"
            try:
                full = train(name, strategy, rank, world, Watch(path, 2))
                again = train(name, strategy, rank, world, resume=path)
                reference = references[1 if strategy == "tp" else 2]
                found[f"{name} {strategy}"] = (differ(full, reference), differ(full, again)) if full else (0.0, 0.0)
            except Exception:
                found[f"{name} {strategy}"] = traceback.format_exc()
    return found

"""Runs with a second model: tiny teachers and students of images and of text, and the outputs that a teacher gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.checkpoint import load
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.task import Task
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Batches, trainer

CLASSES, SIZE, ROWS, LENGTH, VOCABULARY, STEPS = 5, 16, 8, 16, 64, 3


def image_task(width: int = 32, **options: Any) -> ImageClassifier:
    arguments = {"patch_size": 4, "embed_dim": width, "depth": 4, "num_heads": 4}
    return ImageClassifier(
        "vit_tiny_patch16_224",
        model_args=arguments,
        num_classes=CLASSES,
        image_size=SIZE,
        log_images=0,
        schedule="constant",
        **options,
    )


def text_task(width: int = 32, **options: Any) -> CausalLM:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return CausalLM(config=config, schedule="constant", attention="sdpa", **options)


TASKS: dict[str, Callable[..., Task]] = {"images": image_task, "text": text_task}


def batches(kind: str, rows: int = ROWS, steps: int = STEPS) -> list[Any]:
    """Returns the global batches of a run."""
    generator = torch.Generator().manual_seed(5)
    if kind == "images":
        return [
            (
                torch.randn(rows, 3, SIZE, SIZE, generator=generator),
                torch.randint(CLASSES, (rows,), generator=generator),
            )
            for _ in range(steps)
        ]
    found = []
    for _ in range(steps):
        ids = torch.randint(3, VOCABULARY, (rows, LENGTH + 1), generator=generator)
        positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None].repeat(rows, 1)
        labels = ids[:, 1:].clone()
        labels[:, 5] = -100
        found.append({"input_ids": ids[:, :-1].clone(), "labels": labels, "position_ids": positions})
    return found


def slice_rows(batch: Any, share: int, shares: int) -> Any:
    if isinstance(batch, dict):
        return {name: value.chunk(shares)[share] for name, value in batch.items()}
    return tuple(value.chunk(shares)[share] for value in batch)


def loader(kind: str, rank: int = 0, world: int = 1, steps: int = STEPS) -> Batches:
    """Returns a rank's batches of a run."""
    return Batches([slice_rows(batch, rank, world) for batch in batches(kind, steps=steps)])


def make_teacher(kind: str, folder: Path, **options: Any) -> Path:
    """Trains a teacher for a step, and returns its run folder."""
    torch.manual_seed(11)
    task = TASKS[kind](width=48, lr=1e-2, **options)
    run = make_trainer("auto", max_steps=1)
    run.fit(task, loader(kind, steps=1))
    run.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    kind_of_task = f"{type(task).__module__}.{type(task).__qualname__}"
    (folder / "config.yaml").write_text(f"model: {{class_path: {kind_of_task}}}")
    return folder


def expected_outputs(kind: str, folder: Path, batch: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a teacher's outputs, computed with nothing but its task and its weights."""
    torch.manual_seed(0)
    task = TASKS[kind](width=48)
    task.configure_model()
    saved = load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    task.load_state_dict({name: saved[name] for name in saved})
    task = (task if dtype is None else task.to(dtype)).eval()
    with torch.no_grad():
        arguments, named = task.inputs(batch)
        return task.forward(*arguments, **named)


def expected_logits(folder: Path, batch: Any) -> Tensor:
    """Returns the logits of a teacher of text, from its outputs."""
    saved = load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    with torch.no_grad():
        return expected_outputs("text", folder, batch) @ saved["model.lm_head.weight"].T


class Teacher(BatchTransform):
    """Computes a second model's outputs for each batch, and keeps them; training is as without it."""

    order = 30

    def __init__(self, frozen: FrozenModel) -> None:
        self.frozen = frozen
        self.found: list[Any] = []
        self.notes: dict[str, Any] = {}
        self.look: Callable[[Teacher, Trainer], None] | None = None

    @property
    def frozen_models(self) -> list[FrozenModel]:
        return [self.frozen]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.frozen.start(trainer, pl_module)

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        outputs = self.frozen.outputs(batch)
        self.found.append(None if outputs is None else outputs.clone())
        if self.look is not None:
            self.look(self, trainer)
        return batch

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self.frozen.stop()


def make_trainer(strategy: Any, devices: int = 1, callbacks: Any = (), **options: Any) -> Trainer:
    return trainer(devices, strategy, **({"num_sanity_val_steps": 0, "callbacks": list(callbacks)} | options))

"""Students and teachers for tests of distillation: small ViTs on digits, and small language models on tokens."""

from __future__ import annotations

from typing import Any

import torch

from dlo_framework.data import ResumableDataModule
from dlo_plugins.distill.callback import Distill
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES, LENGTH, Tokens

#: Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "schedule": "constant"}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}


def vit(
    depth: int = 2,
    embed_dim: int = 32,
    model: str = "vit_tiny_patch16_224",
    kind: type[ImageClassifier] = ImageClassifier,
    patch_size: int = 4,
    **options: Any,
) -> ImageClassifier:
    args = {**VIT, "depth": depth, "embed_dim": embed_dim, "patch_size": patch_size}
    return kind(model, model_args=args, **{"num_classes": 10, "image_size": 16, **OPTIMIZER, **options})


def digits(batch_size: int = 8) -> ResumableDataModule:
    return DigitsData(image_size=16, batch_size=batch_size, val_fraction=0.01)


def lm(layers: int = 2, family: str = "llama", kind: type[CausalLM] = CausalLM, **config: Any) -> CausalLM:
    return kind(config={"model_type": family, **FAMILIES[family], "num_hidden_layers": layers, **config}, **OPTIMIZER)


def tokens(micro_batches: int = 1, length: int = LENGTH) -> Tokens:
    return Tokens(micro_batches, True, False, length=length)


def seeded(task: Any, seed: int = 3) -> Any:
    """Returns a task with a model whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task.configure_model()
    return task


def sharp(task: Any, factor: float = 30.0) -> Any:
    """Returns a task with a model whose predictions are far from uniform: its last weights are large."""
    seeded(task, seed=7)
    head = task.model.get_classifier() if isinstance(task, ImageClassifier) else task.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(factor)
    return task


class _Distilled:
    """Task that brings its Distill to any trainer."""

    distill: Distill

    def configure_callbacks(self) -> list[Any]:
        return [self.distill]


class DistilledViT(_Distilled, ImageClassifier):
    """Image classifier with a teacher."""


class DistilledLM(_Distilled, CausalLM):
    """Language model with a teacher."""

"""Profiles on fake tensors: parameters, products and saved bytes are those of the papers' formulas and of torch."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.plan.model_profile import profile_model
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.planner_models import gpt, llama


def test_saved_bytes_are_those_of_korthikanti() -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, section 4: 34 sbh + 5 as^2 b bytes a layer, 10 sbh undivided."""
    width, heads, length = 1024, 16, 512
    block = gpt(width, 2, heads, length, 1024).blocks[0]
    kept = block.modes["none"].saved.plus(block.output)
    assert kept.total == pytest.approx(34 * length * width + 5 * heads * length**2, rel=0.01)
    assert kept.outside == pytest.approx(10 * length * width, rel=0.02)
    selective = block.modes["attention"].saved.plus(block.output)
    assert selective.total == pytest.approx(34 * length * width, rel=0.01)
    assert block.modes["full"].saved.total == 0
    assert block.modes["full"].repeated.flops == block.forward.flops


def test_products_and_parameters_of_a_llama() -> None:
    width, hidden, length, vocabulary = 512, 1536, 256, 1000
    found = llama(width, hidden, 3, 8, 4, length, vocabulary)
    block_size = 2 * width * width + 2 * width * (width // 2) + 3 * width * hidden + 2 * width
    assert found.parameters == 3 * block_size + 2 * vocabulary * width + width
    assert (found.tp, found.pp, found.cp, found.length) == ((1, 2, 4), 3, True, length)
    assert found.blocks[0] is found.blocks[2]
    block = found.blocks[0]
    weights = 2 * length * (block_size - 2 * width)
    attention = 2 * 2 * 8 * length**2 * (width // 8) / 2
    assert block.forward.flops == pytest.approx(weights + attention)
    assert block.backward.flops == pytest.approx(2 * weights + 2.5 * attention)
    assert found.head.forward.flops == 2 * length * width * vocabulary
    assert block.parameters.inside == block_size - 2 * width
    assert block.parameters.outside == 2 * width
    assert block.collectives == 2


def test_selective_recomputation_keeps_products_and_compiled_code_keeps_less() -> None:
    block = llama(512, 1536, 3, 8, 4, 256, 1000).blocks[0]
    none, selective, alternate = (block.modes[name] for name in ("none", "selective", "alternate"))
    assert none.saved.total > none.fused.total > selective.saved.total > alternate.saved.total > 0
    # Eager code keeps the last product's result, which is only added to the residual; compiled code does not.
    assert selective.saved.total - selective.fused.total == block.output.total
    assert selective.repeated.flops == 0 < alternate.repeated.flops < block.forward.flops / 2
    assert block.forward.eager.moved.total > block.forward.compiled.moved.total
    assert block.forward.eager.number > block.forward.compiled.number > 0


def test_images_are_profiled_too() -> None:
    task = ImageClassifier(model="vit_tiny_patch16_224", num_classes=10).on_meta()
    profile = profile_model(task, task.example_batch(None) or _images(), task.parallel_plan(), dtype=torch.float32)
    assert profile.parameters == sum(p.numel() for p in task.model.parameters())
    assert len(profile.blocks) == 12
    assert profile.length is None
    assert not profile.cp
    assert profile.flops == pytest.approx(3 * 2 * 1.26e9, rel=0.1)  # 1.26 billion multiply-adds


def _images() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 3, 224, 224), torch.zeros(1, dtype=torch.long)


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_plain_module_has_data_parallelism_alone() -> None:
    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    profile = profile_model(_Plain(), batch, None, dtype=torch.float32)
    assert (profile.tp, profile.pp, profile.cp, profile.blocks) == ((1,), 1, False, ())
    assert profile.parameters == 8 * 16 + 16 + 16 * 4 + 4
    # Forward, gradients of both weights, and of the second layer's input alone.
    assert profile.flops == 2 * (2 * (8 * 16 + 16 * 4) + 16 * 4)


class _Detached(_Plain):
    def training_step(self, batch: Any, _: int) -> Tensor:
        return super().training_step(batch, 0).detach()


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(DloError, match="must return a loss with a gradient"):
        profile_model(_Detached(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), ParallelPlan())

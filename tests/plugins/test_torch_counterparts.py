"""Why pipeline/, tensor/ and context/ are not torch's own: models that torch's refuse, and ours train as one process.

If one of the refusals goes away in a new torch, this fails: then look again whether the package is still needed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import run_distributed
from dlo_plugins.pipeline.pipeline_engine import Pipeline
from support.tensor_models import VIT, compare, image_loss, image_model


class BranchingBlock(nn.Linear):
    """A layer whose forward asks for a value: it scales down what has grown too large."""

    def forward(self, hidden: Tensor) -> Tensor:  # [B, 8] -> [B, 8]
        hidden = super().forward(hidden)
        return hidden / 2 if hidden.abs().max() > 0.5 else hidden


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BranchingBlock(8, 8) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:  # [B, 8] -> [B, 8]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - batch[1]).square().mean()


def _pipeline(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Branching()
    with pytest.raises(RuntimeError, match="cannot capture your model as a full graph"):
        pipeline(model, mb_args=(torch.zeros(2, 8),), split_spec={"blocks.2": SplitPoint.BEGINNING})

    # Ours: that model, and micro-batches of 3, 1 and 2 samples.
    batches = [(torch.randn(size, 8), torch.randn(size, 8)) for size in (3, 1, 2)]
    alone = copy.deepcopy(model)
    weights = [len(inputs) / 6 for inputs, _ in batches]
    for weight, batch in zip(weights, batches, strict=True):
        (weight * _loss(alone(batch[0]), batch)).backward()
    ours = Pipeline(model, ParallelPlan(blocks=("blocks.*",)), dist.group.WORLD, schedule="1F1B")
    ours.train_step(batches, lambda batch: model(batch[0]), _loss, weights)
    expected = dict(alone.named_parameters())
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, expected[name].grad)


def _tensor(rank: int, world_size: int) -> None:
    theirs: Any = image_model("vit_tiny_patch16_224", **VIT)
    rules = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
    rules |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
    plan = {f"blocks.{number}.{name}": rule for number in range(len(theirs.blocks)) for name, rule in rules.items()}
    parallelize_module(theirs, init_device_mesh("cpu", (world_size,)), plan)
    for block in theirs.blocks:
        block.attn.num_heads //= world_size
    with pytest.raises(RuntimeError, match="is invalid for input of size"):  # timm's attention reshapes to its width.
        image_loss(theirs)
    compare(lambda: image_model("vit_tiny_patch16_224", **VIT), image_loss, False, "timm's ViT")


def _context(rank: int, world_size: int) -> None:
    query, key, value = (torch.randn(1, 4, 16, 8) for _ in range(3))  # [B, heads, L, features]
    documents = torch.block_diag(torch.ones(10, 10), torch.ones(6, 6)).bool().tril()  # [L, L]
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2])
    with pytest.raises((RuntimeError, NotImplementedError)), sharded:
        scaled_dot_product_attention(query, key, value, attn_mask=documents)
    # Ours trains packed documents, windows and softcapped logits: tests/plugins/context/test_models.py.


def _all(rank: int, world_size: int) -> None:
    _pipeline(rank, world_size)
    _tensor(rank, world_size)
    _context(rank, world_size)


def test_torchs_own_refuse_what_ours_train() -> None:
    run_distributed(_all, 2)

"""Every plan on every page trains under tp and under pp as one process does."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework import ParallelPlan, Task
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.mesh.strategy import MeshStrategy

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH, LENGTH, CLASSES = 16, 4, 6


class Attention(nn.Module):
    """Attention with one projection of queries, keys and values, or three, under a page's names."""

    head_dim = 8

    def __init__(self, inward: tuple[str, ...], outward: str) -> None:
        super().__init__()
        self.inward, self.outward = inward, outward
        for name in inward:
            self.add_module(name, nn.Linear(WIDTH, 3 // len(inward) * WIDTH))
        self.add_module(outward, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.stack([getattr(self, name)(x) for name in self.inward]) if len(self.inward) == 3 else None
        if fused is None:
            fused = getattr(self, self.inward[0])(x).unflatten(-1, (3, -1)).movedim(-2, 0)
        q, k, v = fused.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # each [B, heads, L, head_dim]
        return getattr(self, self.outward)(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Pictures(nn.Module):
    """Model of the plan in `concepts/task.md`."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(("qkv",), "proj")

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([self.Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


class Texts(nn.Module):
    """Model of the plan in `plugins/tensor-parallel.md`."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Module()
            self.attention = Attention(("q", "k", "v"), "o")
            layers = {"up": nn.Linear(WIDTH, 32), "act": nn.GELU(), "down": nn.Linear(32, WIDTH)}
            self.mlp = nn.Sequential()
            for name, layer in layers.items():
                self.mlp.add_module(name, layer)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(3, WIDTH), nn.ModuleList([self.Block() for _ in range(4)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x.argmax(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


MODELS = {"concepts/task.md": Pictures, "plugins/tensor-parallel.md": Texts}


def plan_of(page: str) -> ParallelPlan:
    (code,) = re.findall(r"^plan = (ParallelPlan\(.+?^\))", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    found: ParallelPlan = eval(code)
    return found


class OfAPage(Task):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = MODELS[self.page]()

    def parallel_plan(self) -> ParallelPlan:
        return plan_of(self.page)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def build(page: str) -> tuple[Any, Any]:
    if page == "write/task.md":
        sys.path.insert(0, str(DOCS.parent / "examples"))
        module = importlib.import_module("own_data")
        return module.TumourClassifier(width=8), module.TumourData(batch_size=32)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(64, LENGTH, 3, generator=generator), torch.randint(CLASSES, (64,), generator=generator)
    return OfAPage(page), DataLoader(TensorDataset(*rows), batch_size=16)


def test_the_plan_of_each_page_trains_under_tp_and_pp_as_one_process() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "ParallelPlan(\n" in path.read_text()}
    # The plan of `write/plan.md` has tests of its own: test_docs_own_transformer.
    assert pages == {*MODELS, "write/task.md", "write/plan.md"}
    axes: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2, "micro_batches": 4}]
    strategies = [partial(MeshStrategy, dp_shard=1, **one) for one in axes]
    cases = [Case(one, {"page": page}) for page in sorted(pages - {"write/plan.md"}) for one in strategies]
    assert_parity(build, cases, steps=2)

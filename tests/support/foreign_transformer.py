"""A transformer that nobody wrote for tensor parallelism: its heads are an argument, its sizes those of its input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.task import Task


class Mix(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, mixes_heads: bool, one_key: bool) -> None:
        super().__init__()
        self.h, self.fused, self.one_key = heads, fused, one_key
        if fused:
            self.qkv = nn.Linear(width, width + 2 * width // heads if one_key else 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.talk = nn.Linear(heads, heads) if mixes_heads else None
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        B, L, D = x.shape
        width = D // self.h
        if self.one_key:
            q, k, v = self.qkv(x).split([D, width, width], dim=-1)
            q = q.view(B, L, self.h, width).transpose(1, 2)
            k, v = (part.unsqueeze(1).expand(B, self.h, L, width) for part in (k, v))
        else:
            parts = self.qkv(x).split(D, dim=-1) if self.fused else (self.q(x), self.k(x), self.v(x))
            q, k, v = (part.view(B, L, self.h, width).transpose(1, 2) for part in parts)
        scores = q @ k.mT / width**0.5
        scores = (scores if bias is None else scores + bias).softmax(dim=-1)  # [B, heads, L, L]
        if self.talk is not None:
            scores = self.talk(scores.movedim(1, -1)).movedim(-1, 1)
        return self.out((scores @ v).transpose(1, 2).reshape(B, L, D))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, normalises: bool, **of_mix: bool) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Mix(width, heads, **of_mix)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.normalises = normalises

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.mix(self.before(x), bias)
        hidden = F.gelu(self.up(self.after(x)))
        return x + self.down(hidden.softmax(dim=-1) if self.normalises else hidden)


class Foreign(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2, bias: bool = False, **more: bool) -> None:
        super().__init__()
        #: Bias of each head by distance, which all layers share.
        self.distances = nn.Parameter(torch.zeros(heads, 64)) if bias else None
        self.embed = nn.Embedding(64, width)
        flags = {**dict.fromkeys(("fused", "mixes_heads", "normalises", "one_key"), False), **more}
        self.layers = nn.ModuleList(Layer(width, heads, **flags) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        if self.distances is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            bias = self.distances[:, (places[:, None] - places).abs()]  # [heads, L, L]
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


class ForeignTask(Task):
    """Task of a :class:`Foreign`, which takes its options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = Foreign(**self.options)

    def example_batch(self, datamodule: Any) -> Any:
        return torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

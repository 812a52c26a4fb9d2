"""Modules that write to their own parameters in a step, in ways that users do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.fsdp_nets import WIDTH, Block, Module


class Momentum(Module):
    """A momentum encoder (MoCo, BYOL) that a training step updates: in place, through ``data``, by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList([Block() for _ in range(2)]).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        pairs = zip(self.teacher.parameters(), self.net.blocks.parameters(), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            if number % 4 == 0:
                mine.lerp_(theirs, 0.1)
            elif number % 4 == 1:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            elif number % 4 == 2:
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            else:
                torch._foreach_lerp_([mine], [theirs], 0.1)

    def loss(self, batch: Any) -> Tensor:
        self.update()
        x = y = self.net.stem(batch[0])
        for mine, theirs in zip(self.net.blocks, self.teacher, strict=True):
            x, y = mine(x), theirs(y)
        return nn.functional.cross_entropy(self.net.head(x), batch[1]) + (x - y.detach()).square().mean()


class Writing(nn.Module):
    """A block that writes to its own weights in its forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.count = way, 0
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5 if way == "max_norm" else None)
        self.state = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        weight = self.layer.weight
        with torch.no_grad():
            if self.way == "normalised":
                weight.copy_(nn.functional.normalize(weight, dim=1))
            elif self.way == "data" and self.count > 1:  # From the second step on.
                weight.data.mul_(0.9)
            elif self.way == "first" and self.count == 1:
                self.layer.bias.copy_(torch.linspace(0, 1, WIDTH))
                weight.data.fill_(0.1)
            elif self.way == "view":
                weight.view(-1)[3:20] = 0.2
                weight.data[0, 1] = 0.3
            elif self.way == "state":
                self.state.add_(0.1)
        return torch.tanh(self.layer(x)) * self.state + self.table(torch.arange(5, device=x.device)).mean(0)


class Forward(Module):
    """Weights of blocks, and of none, that are written in the forward, one way after the other."""

    ways: tuple[str, ...] = ("normalised", "data", "first", "view", "state", "max_norm")

    def __init__(self) -> None:
        super().__init__()
        self.extra = Writing(self.ways[0])  # Outside of the blocks.
        self.net.blocks = nn.ModuleList([Writing(way) for way in self.ways])

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net.head(self.blocks(self.net.stem(batch[0]))), batch[1])

    def blocks(self, x: Tensor) -> Tensor:
        for block in (*self.net.blocks, self.extra):
            x = block(x)
        return x


class ByHand(Module):
    """Weights that are bounded after a step by hand, or before it."""

    way = "after"

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @torch.no_grad()
    def bound(self) -> None:
        for parameter in self.net.parameters():
            if self.way == "data":
                parameter.data.clamp_(-0.2, 0.2)
            else:
                parameter.clamp_(-0.2, 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.way == "before":
            self.bound()
        optimizer.step()
        if self.way != "before":
            self.bound()


class ByHandBefore(ByHand):
    """The same before the step."""

    way = "before"


class ByHandData(ByHand):
    """The same after the step, through ``data``."""

    way = "data"


class Normalising(Forward):
    """Weights that are normalised in the forward."""

    ways = ("normalised", "normalised")

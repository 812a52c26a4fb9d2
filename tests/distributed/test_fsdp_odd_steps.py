"""Steps under FSDP that write to weights or use them outside of a forward: as in one process, or refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from support.fsdp_nets import WIDTH, Block, Module, differ, mine, trainer


class Odd(Module):
    """The common module, whose parts a case replaces."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.by_hand
        self.build()

    def build(self) -> None:
        """Changes the net, or adds to it."""

    def outputs(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.outputs(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.by_hand:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.between()
            optimizer.step()
            self.after()
        return loss

    def between(self) -> None:
        """Runs between backward and step."""

    def after(self) -> None:
        """Runs after a step by hand."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Normed(torch.optim.Optimizer):
    """An optimizer of full tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad / (parameter.grad.norm() + 0.1))


class WritingBlock(Block):
    """Writes to its weight in its forward."""

    way, count = "place", 0

    def forward(self, x: Tensor) -> Tensor:
        weight, self.count = self.one.weight, self.count + 1
        if self.way == "place":
            with torch.no_grad():
                weight.div_(weight.norm(dim=1, keepdim=True))
        elif self.way == "data":
            weight.data.div_(weight.data.norm(dim=1, keepdim=True))
        elif self.way == "assigned":
            weight.data = weight.data / 2
        elif self.way == "by batch" or (self.way == "by batch, later" and self.count == 3):
            with torch.no_grad():
                weight.mul_(x.mean())
        elif self.way == "empty":
            x = x + self.extra.sum()
        return super().forward(x)


class Encoder(nn.Module):
    """A module that is used by another method than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(WIDTH, WIDTH), nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scales[0]) * self.scales[1]


def writing(way: str) -> type[Odd]:
    def build(self: Any) -> None:
        self.net.blocks = nn.ModuleList([WritingBlock() for _ in range(2)])
        for block in self.net.blocks:
            block.way = way
            if way == "empty":
                block.extra = nn.Parameter(torch.zeros(0, 3))

    return type(f"in a block: {way}", (Odd,), {"build": build})


def momentum(way: str, **more: Any) -> type[Odd]:
    class Momentum(Odd):
        def build(self) -> None:
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
            if way == "held":
                self.pairs = list(zip(self.net.parameters(), self.slow.parameters(), strict=True))

        @torch.no_grad()
        def loss(self, batch: Any) -> Tensor:
            pairs = self.pairs if way == "held" else zip(self.net.parameters(), self.slow.parameters(), strict=True)
            for fast, slow in pairs:
                if way == "data":
                    slow.data = slow.data * 0.9 + fast.data * 0.1
                else:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.slow(batch[0])
            with torch.enable_grad():
                return super().loss(batch) + F.mse_loss(self.net(batch[0]), target)

    return type(f"momentum: {way} {more}", (Momentum,), more)


def with_methods(name: str, **methods: Any) -> type[Odd]:
    return type(name, (Odd,), methods)


def _table(self: Any) -> None:
    self.table = nn.Embedding(40, WIDTH, max_norm=0.5)


def _looked_up(self: Any, x: Tensor) -> Tensor:
    return self.net(self.table((x * 7).abs().long().clamp(max=39)).sum(1))


def _encoders(self: Any) -> None:
    self.encoders = nn.ModuleList([Encoder() for _ in range(3)])


def _encoded(self: Any, x: Tensor) -> Tensor:
    for encoder in self.encoders:
        x = encoder.encode(x)
    return self.net(x)


def _penalty(self: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    outputs = self.net(x)
    (gradient,) = torch.autograd.grad(outputs.tanh().sum(), x, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + (gradient.norm(dim=1) - 1).square().mean()


def _bounded(self: Any) -> None:
    for parameter in self.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _forward_without_gradients(self: Any) -> None:
    with torch.no_grad():
        self.net(torch.ones(2, WIDTH, dtype=torch.float64))


def _hooks(name: str) -> Callable[[Any], None]:
    def register(self: Any) -> None:
        for parameter in self.net.parameters():
            if name == "register_hook":
                parameter.register_hook(lambda gradient: gradient * 2)
            else:
                parameter.register_post_accumulate_grad_hook(_double)

    return register


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _doubled(assigns: bool) -> Callable[..., None]:
    def change(self: Any, *_: Any) -> None:
        for parameter in self.net.parameters():
            if assigns:
                parameter.grad = parameter.grad * 2
            else:
                parameter.grad.mul_(2)

    return change


def _clipped(self: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def _scaled(self: Any) -> None:
    self.scale = nn.Parameter(torch.tensor(1.0))


def _penalised(self: Any, batch: Any) -> Tensor:
    return Odd.loss(self, batch) + 0.1 * sum(parameter.norm() for parameter in self.parameters())


def _full_tensors(self: Any) -> Any:
    return Normed(self.parameters())


def _held(self: Any) -> None:
    weights = list(self.net.parameters())
    self.penalty = lambda: sum(weight.square().sum() for weight in weights)


def _add_head(self: Any) -> None:
    self.optimizers().optimizer.add_param_group({"params": list(self.net.head.parameters()), "lr": 0.05})


def _without_head(self: Any) -> Any:
    return torch.optim.AdamW([p for name, p in self.named_parameters() if "head" not in name], lr=0.01)


FEW: list[type[Odd]] = [
    momentum("place"),
    writing("data"),
    with_methods("max_norm", build=_table, outputs=_looked_up),
    with_methods("a hook", build=_hooks("register_hook")),
    with_methods("another method", build=_encoders, outputs=_encoded),
]
MORE: list[type[Odd]] = [
    with_methods("a later hook", build=_hooks("register_post_accumulate_grad_hook")),
    with_methods("a penalty by hand", loss=_penalty, by_hand=True),
    with_methods("stale", between=_forward_without_gradients, by_hand=True),
    *(momentum(way, **more) for way, more in (("place", {"by_hand": True}), ("data", {}))),
    *(writing(way) for way in ("place", "assigned", "empty")),
    with_methods("bounded", after=_bounded, by_hand=True),
    with_methods("hooks of the run", on_fit_start=_hooks("register_hook")),
    with_methods("another method by hand", build=_encoders, outputs=_encoded, by_hand=True),
    with_methods("a penalty", loss=_penalty),
    with_methods("of all weights", loss=_penalised),
    with_methods("changed", on_after_backward=_doubled(False)),
    with_methods("assigned", on_after_backward=_doubled(True), configure_optimizers=_full_tensors),
    with_methods("clipped", on_before_optimizer_step=_clipped, build=_scaled),
    with_methods("clipped early", on_after_backward=_clipped, build=_scaled),
    with_methods("clipped by hand", between=_clipped, by_hand=True),
    with_methods("added", on_train_start=_add_head, configure_optimizers=_without_head),
]
for scaled in MORE[-4:-2]:
    scaled.outputs = lambda self, x: self.net(x) * self.scale  # type: ignore[method-assign, attr-defined]

REFUSED: dict[type[Odd], str] = {
    momentum("held"): "must not hold parameters .* got net.stem.weight in .*pairs; take them from",
    with_methods("closure", build=_held): "must not hold parameters .* got net.stem.weight in closure.penalty; take",
    writing("by batch"): "must be the same on all ranks, got other values on each for net.blocks.0.one.weight",
    writing("by batch, later"): "must be the same on all ranks, got other values on each for net.blocks.0.one.weight",
    with_methods("late", on_before_optimizer_step=_doubled(True)): "got that of net.stem.weight replaced after it;",
    with_methods(
        "late in place", on_before_optimizer_step=_clipped, configure_optimizers=_full_tensors
    ): "got that of net.stem.weight written after it; change it in on_after_backward",
}


def _fit(kind: type[Odd], rank: int, world: int, strategy: Any) -> tuple[Any, LightningModule]:
    module, run = kind(), trainer(world, strategy, precision="64-true")
    run.fit(module, mine(rank, world))
    return run, module


def _compare(rank: int, world: int, kinds: list[int], strategy: Any) -> dict[str, float]:
    found = {}
    for number in kinds:
        kind = [*FEW, *MORE][number]
        _, alone = _fit(kind, 0, 1, "auto")
        expected = {name: value.clone() for name, value in alone.state_dict().items()}
        run, _ = _fit(kind, rank, world, strategy())
        weights = gather_full_weights(run)
        found[kind.__name__] = differ(weights, expected) if weights else 0.0
    return found


def _refuse(rank: int, world: int) -> list[str]:
    found = []
    for kind in REFUSED:
        with pytest.raises(DloError) as error:
            _fit(kind, rank, world, FSDPStrategy())
        found.append(str(error.value))
    return found


def test_odd_steps_train_as_in_one_process() -> None:
    for found in run_distributed(_compare, 2, list(range(len(FEW))), FSDPStrategy, timeout=200):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)


def test_what_would_train_otherwise_is_refused() -> None:
    for found in run_distributed(_refuse, 2, timeout=200):
        for message, expected in zip(found, REFUSED.values(), strict=True):
            assert re.search(expected, message), message


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDPStrategy, MeshStrategy], ids=["fsdp", "mesh"])
def test_more_odd_steps_train_as_in_one_process(strategy: Any) -> None:
    for found in run_distributed(_compare, 2, list(range(len(FEW) + len(MORE))), strategy, timeout=380):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)

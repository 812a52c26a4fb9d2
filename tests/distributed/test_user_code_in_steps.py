"""What the user's own code does to parameters and gradients in a step: as in one process, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Block, Module, differ, found_by, mine, of, trainer
from support.parameter_writes import ByHand, ByHandBefore, ByHandData, Forward, Momentum, Normalising


class Hooked(Module):
    """Hooks on parameters, set before the strategy takes them, and after."""

    def __init__(self) -> None:
        super().__init__()
        for number, parameter in enumerate(self.net.parameters()):
            if number % 3 == 0:
                parameter.register_hook(lambda gradient: 2 * gradient)
            elif number % 3 == 1:
                parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def on_train_start(self) -> None:
        for parameter in self.net.blocks.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)


class Sparse(Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] + self.table(batch[1])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _deeper(net: Any) -> None:
    net.blocks = nn.ModuleList([Block() for _ in range(4)])


class Penalty(Module):
    """A gradient penalty, which differentiates a backward."""

    prepare = staticmethod(_deeper)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].detach().requires_grad_()
        scores = self.net(x)
        (gradient,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
        return nn.functional.cross_entropy(scores, batch[1]) + gradient.square().sum(1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Does nothing: there are no gradients."""


class Chosen(Module):
    """Blocks that one rank alone calls."""

    prepare = staticmethod(_deeper)

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch[0])
        if dist.is_initialized():
            return self._half(x, dist.get_rank())
        return torch.stack([self._half(half, rank) for rank, half in enumerate(x.chunk(2))]).mean()

    def _half(self, x: Tensor, rank: int) -> Tensor:
        for number in ((0, 2), (1, 2, 3))[rank]:
            x = self.net.blocks[number](x)
        return self.net.head(x).square().mean()


class Inside(Chosen):
    """Parameters of blocks that both ranks call, and one alone uses."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.forward = self._make_forward(block)  # type: ignore[method-assign]

    @staticmethod
    def _make_forward(block: Any) -> Any:
        def forward(x: Tensor, rank: int) -> Tensor:
            x = torch.tanh(block.one(x))
            return block.two(x) if rank else x[:, :WIDTH] * block.two.bias

        return forward

    def _half(self, x: Tensor, rank: int) -> Tensor:
        for block in self.net.blocks:
            x = block(x, rank)
        return self.net.head(x).square().mean()


class Scalar(Module):
    """A parameter without dims, which the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.0), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.count.add_(0.1)
        return nn.functional.cross_entropy(self.scale * self.net(batch[0]) * self.count, batch[1])


class Empty(Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.none.sum()


class Twice(Module):
    """A block that a forward calls twice."""

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch[0])
        for number in (0, 0, 1, 0):
            x = self.net.blocks[number](x)
        return nn.functional.cross_entropy(self.net.head(x), batch[1])


def _zero(stage: int, **options: Any) -> Any:
    return lambda: ZeroStrategy(stage, **options)


def _deepspeed(stage: int) -> Any:
    return lambda: DeepSpeedBridge(stage=stage)


RIGHT: list[tuple[type[Module], list[Any]]] = [
    *((kind, [_zero(3, find_unused=True)]) for kind in (Momentum, ByHandBefore, ByHandData, Chosen, Inside)),
    *((kind, [_zero(3)]) for kind in (Penalty, Scalar, Twice)),
    *((kind, [_zero(1, bucket_mb=1e-5), _zero(3)]) for kind in (Hooked, Sparse)),
    (Empty, [_zero(1)]),
    (Forward, [_zero(3, find_unused=True), _deepspeed(1)]),
    (ByHand, [_zero(3), _deepspeed(2)]),
]


def _right(rank: int, world: int, folder: Path) -> list[list[Any]]:
    found = []
    for kind, strategies in RIGHT:
        found.append([])
        for strategy in strategies:
            run = trainer(world, strategy(), max_epochs=2, limit_val_batches=1)
            run.fit(kind(), mine(rank, world), mine(rank, world))
            found[-1].append(gather_full_weights(run))
    return found


class Reads(Callback):
    """Changes gradients of the parameters from the third step on, as the name says."""

    def __init__(self, where: str, way: str) -> None:
        self.way = way
        setattr(self, where, self._change)

    def _change(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.way != "group" and trainer.global_step < 2:
            return
        parameters = list(module.parameters())
        if self.way == "clip":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif self.way == "scale":
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        elif self.way == "drop":
            parameters[0].grad = None
        else:
            for optimizer in trainer.optimizers:
                optimizer.add_param_group({"params": parameters[:1]})


class ClipsByHand(ByHand):
    """Clips the parameters' gradients in manual optimization, from the third step on."""

    def bound(self) -> None:
        if self.global_step > 1:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    way = "before"


class ClampsInHook(Module):
    """Weights that a hook between steps bounds through ``data``."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.05, 0.05)


BF16 = {"precision": "bf16-mixed"}
BY_OPTIMIZER, FROM_GROUP = "must be written by its optimizer alone", "from add_param_group"
GRADIENTS = "must be read and changed through the optimizer"
#: Cases: module, strategy, the Trainer's arguments, and the error.
REFUSED: list[tuple[type[Module], Any, dict[str, Any], str]] = [
    (Module, _zero(1), {"callbacks": [Reads("on_after_backward", "scale")]}, GRADIENTS),
    (Module, _zero(3), {"callbacks": [Reads("on_after_backward", "drop")]}, GRADIENTS),
    (Module, _zero(3), {"callbacks": [Reads("on_before_optimizer_step", "clip")]}, GRADIENTS),
    (Module, _deepspeed(1), {"callbacks": [Reads("on_before_optimizer_step", "clip")]}, GRADIENTS),
    (Module, _deepspeed(3), {"callbacks": [Reads("on_after_backward", "scale")]}, GRADIENTS),
    (ClipsByHand, _zero(2), {}, GRADIENTS),
    (Module, _zero(2), {"callbacks": [Reads("on_train_start", "group")]}, FROM_GROUP),
    (Module, _deepspeed(2), {"callbacks": [Reads("on_train_start", "group")]}, FROM_GROUP),
    *(
        (kind, _zero(stage, param_dtype="bfloat16"), BF16, "must be gathered in torch.float32")
        for stage in (1, 3)
        for kind in (Normalising, ClampsInHook)
    ),
    *((kind, _deepspeed(1), BF16, BY_OPTIMIZER) for kind in (Normalising, ClampsInHook)),
    (Normalising, _deepspeed(3), {}, BY_OPTIMIZER),
    (Momentum, _deepspeed(3), {}, BY_OPTIMIZER),
    (Empty, _zero(3), {}, "stage 3 must have elements, got none of shape [0, 3]"),
    (Scalar, _deepspeed(1), {}, "must have a dim, got scale, count"),
    (Sparse, _deepspeed(2), {}, "sparse=True of table"),
]


def _refused(rank: int, world: int, folder: Path) -> list[str]:
    found = []
    for kind, strategy, options, _ in REFUSED:
        with pytest.raises(DloError) as error:
            trainer(world, strategy(), **options).fit(kind(), mine(rank, world))
        found.append(str(error.value))
    return found


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_right, _refused), rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("user_code"), timeout=280, group_timeout=60.0)


def test_what_a_step_writes_or_hooks_counts_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for (kind, _), runs in zip(RIGHT, of(ranks, "_right")[0], strict=True):
        module = kind()
        trainer(1, "auto", max_epochs=2, limit_val_batches=1).fit(module, mine(0, 1), mine(0, 1))
        differences = [differ(weights, module.state_dict()) for weights in runs]
        assert differences == pytest.approx([0.0] * len(runs), abs=2e-6), kind.__name__


def test_what_would_be_lost_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in of(ranks, "_refused"):
        for message, (*_, expected) in zip(found, REFUSED, strict=True):
            assert expected in message

"""Steps that are left out or replaced: weights stay, hooks run, and the next step is an ordinary one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.profiler import profile

from dlo_framework.distributed.optimizer_steps import StepOverride
from dlo_framework.distributed.step_primitives import agreed_gradient_norm, skip_step
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.finite import FiniteLoss
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.gradients.skip_spikes import SkipSpikes
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.fsdp_nets import Batches, differ, trainer
from support.on_ranks import on_ranks
from support.optimizer_runs import STEPS, STRATEGIES, data, plain_loop, task

SKIPPED, SPIKE = 1, 2


class Skipping(ImageClassifier):
    """Steps by itself: Lightning refuses a `training_step` that returns None on several ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx != SKIPPED:
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()
        optimizer.zero_grad()


class Returning(ImageClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == SKIPPED else super().training_step(batch, batch_idx)


def model_weights(run: Any) -> dict[str, Tensor]:
    return {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}


def _skips(rank: int, world: int, kind: type[ImageClassifier]) -> None:
    # Of full tensors, and elementwise.
    for name, strategies in (("lamb8bit", ["zero1", "fsdp"]), ("adamw", ["zero3", *(["tp"] if world == 2 else [])])):
        for strategy in strategies:
            share = (0, 1) if strategy == "tp" else (rank, world)
            batches = Batches([tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()])
            run = trainer(world, STRATEGIES[strategy](), max_steps=STEPS)
            run.fit(task(name, kind), batches)
            weights, near = model_weights(run), 5e-3 if strategy == "tp" else 0.0
            assert rank or differ(weights, plain_loop(name, share[1], SKIPPED)) <= near, (name, strategy)


@pytest.mark.parametrize(("kind", "ranks"), [(Skipping, 2), (Returning, 1)])
def test_a_step_without_a_backward_changes_nothing(kind: type[ImageClassifier], ranks: int) -> None:
    run_distributed(_skips, ranks, kind, timeout=200)


class Poisoned(ImageClassifier):
    """A finite loss whose gradient is NaN, on the last rank alone."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if self.trainer.global_rank == self.trainer.world_size - 1 and self.trainer.global_step == SKIPPED:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss


class Spiked(ImageClassifier):
    """A gradient that is 30 times as large, after a window of two steps."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs, batch) * (30.0 if self.trainer.global_step == SPIKE else 1.0)


class Judge(Callback):
    """Skips a step by itself, and records norms."""

    def __init__(self, skips: bool) -> None:
        self.skips, self.norms = skips, list[float]()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(agreed_gradient_norm(trainer, optimizer)))
        if self.skips and trainer.global_step == SKIPPED:
            skip_step(trainer, optimizer)


#: Strategies, each with an optimizer that counts in its parameter groups, or keeps counts beside its moments.
LEFT_OUT = {
    "ddp": ("adamw_schedulefree", DataParallelStrategy, "value"),
    "zero2": ("adamw_schedulefree", lambda: ZeroStrategy(2), "norm"),
    "zero3": ("lamb", lambda: ZeroStrategy(3), "norm"),
    "fsdp": ("lamb", STRATEGIES["fsdp"], "value"),
    "pp": ("adamw", lambda: MeshStrategy(pp=2, micro_batches=2), "value"),
}
#: Of them, those whose gradients have spikes: in full, in shards, and of a stage.
SPIKED = ("ddp", "zero3", "pp")


def _left_out(rank: int, world: int, strategy: str, case: str) -> tuple[dict[str, Tensor], list[float], int]:
    """Returns the weights, each step's norm, and the number of ranks with other samples."""
    name, make, clip = LEFT_OUT[strategy]
    share = (0, 1) if strategy == "pp" else (rank, world)
    batches = [tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()]
    own = batches[:SKIPPED] + batches[SKIPPED + 1 :] if "without" in case else batches
    judge = Judge(skips=case == "scaler")
    kind, callbacks = {
        "finite": (Poisoned, [FiniteLoss("skip"), judge]),
        "spike": (Spiked, [judge, SkipSpikes(window=SPIKE)]),
    }.get(case, (ImageClassifier, [judge]))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    half = [MixedPrecision("16-mixed", "cpu", scaler)] if "scaler" in case else []
    clipping = {"gradient_clip_val": 1e9, "gradient_clip_algorithm": clip}
    run = trainer(world, make(), max_steps=len(own), callbacks=callbacks, plugins=half, **clipping)
    run.fit(task(name, kind), Batches(own))
    norms: list[Any] = [None] * world
    dist.all_gather_object(norms, judge.norms)
    assert norms[0] == norms[-1] or "without" in case, f"{strategy}, {case}: norms differ between ranks"
    return model_weights(run), judge.norms, share[1]


def others(norms: list[float]) -> list[float]:
    return [*norms[:SKIPPED], *norms[SKIPPED + 1 :]]


@on_ranks(2, timeout=300)
def test_a_skipped_step_changes_nothing_under_any_strategy(rank: int, world: int) -> None:
    for strategy, (name, *_) in LEFT_OUT.items():
        weights, plain, parts = _left_out(rank, world, strategy, "finite")
        near = 5e-3 if parts == 1 else 1e-6
        # The step's own norm is NaN until its gradients are dropped, and 0 then.
        assert rank or differ(weights, plain_loop(name, parts, SKIPPED)) <= near, strategy
        if strategy in SPIKED:
            weights, norms, _ = _left_out(rank, world, strategy, "spike")
            assert rank or differ(weights, plain_loop(name, parts, SPIKE)) <= near, strategy
            assert norms[SPIKE] > 10 * max(norms[:SPIKE]), strategy
        if strategy in ("zero3", "fsdp"):
            weights, norms, _ = _left_out(rank, world, strategy, "scaler")
            without, rest, _ = _left_out(rank, world, strategy, "scaler, without")
            assert rank or differ(weights, without) == 0.0, strategy
            assert others(norms) == rest, strategy
            assert others(norms) == pytest.approx(others(plain), rel=0.05), f"{strategy}: unscaled?"


# --- A step that replaces an optimizer's own calls hooks as torch does, and is named in a profile --------------------


@pytest.mark.parametrize("overrides", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_hooks_get_what_torchs_get(closed: bool, overrides: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    if overrides:
        StepOverride(optimizer, lambda: parameter.sub_(0.5 * parameter.grad))
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(given))
    optimizer.register_step_post_hook(lambda *given: seen.append(given))

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 3.0

    with profile() as found:
        loss = optimizer.step(closure) if closed else optimizer.step()
    args = (optimizer, closure) if closed else (optimizer,)
    assert seen == [(optimizer, args, {}), *([True] if closed else []), (optimizer, args, {})]
    assert loss == (3.0 if closed else None)
    assert parameter.tolist() == [0.5, 0.5]
    assert any(event.name == "Optimizer.step#SGD.step" for event in found.events())

"""Steps that are left out or replaced: weights stay, hooks run, and the next step is an ordinary one."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
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


def _differences(rank: int, world: int, kind: type[ImageClassifier]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Of full tensors, and elementwise.
    for name, strategies in (("lamb8bit", ["zero1", "fsdp"]), ("adamw", ["zero3", *(["tp"] if world == 2 else [])])):
        for strategy in strategies:
            share = (0, 1) if strategy == "tp" else (rank, world)
            batches = Batches([tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()])
            run = trainer(world, STRATEGIES[strategy](), max_steps=STEPS, max_epochs=1)
            try:
                run.fit(task(name, kind), batches)
                weights = {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}
                if rank == 0:
                    found[f"{name} {strategy}"] = differ(weights, plain_loop(name, share[1], SKIPPED))
            except Exception:
                found[f"{name} {strategy}"] = traceback.format_exc()
    return found


@pytest.mark.parametrize(("kind", "ranks"), [(Skipping, 2), (Returning, 1)])
def test_a_step_without_a_backward_changes_nothing(kind: type[ImageClassifier], ranks: int) -> None:
    found = run_distributed(_differences, ranks, kind, timeout=200)[0]
    raised = [value for value in found.values() if isinstance(value, str)]
    assert not raised, raised[0]
    assert len(found) == (4 if ranks == 2 else 3)
    for name, difference in found.items():
        assert difference <= (5e-3 if name.endswith("tp") else 0.0), name


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


def _left_out(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy, (name, make, clip) in LEFT_OUT.items():
        share = (0, 1) if strategy in ("tp", "pp") else (rank, world)
        batches = [tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()]
        for case in ("finite", "spike", "scaler", "scaler, without"):
            if "scaler" in case and strategy not in ("zero3", "fsdp"):
                continue
            if case == "spike" and strategy not in SPIKED:
                continue
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
            try:
                run.fit(task(name, kind), Batches(own))
                weights = {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}
                found[f"{strategy} {case}"] = weights, judge.norms, share[1], name
            except Exception:
                found[f"{strategy} {case}"] = traceback.format_exc()
    return found


def test_a_skipped_step_changes_nothing_under_any_strategy() -> None:
    ranks = run_distributed(_left_out, 2, timeout=300)
    raised = [value for found in ranks for value in found.values() if isinstance(value, str)]
    assert not raised, raised[0]
    assert len(ranks[0]) == len(LEFT_OUT) + len(SPIKED) + 2 * 2
    for case, (weights, norms, parts, name) in ranks[0].items():
        others, finite = ranks[1][case][1], [*norms[:SKIPPED], *norms[SKIPPED + 1 :]]
        if case.endswith("finite"):  # The step's own norm is NaN until its gradients are dropped, and 0 then.
            assert differ(weights, plain_loop(name, parts, SKIPPED)) <= (5e-3 if parts == 1 else 1e-6), case
            assert norms == others, f"{case}: norms differ between ranks"
        elif case.endswith("spike"):
            assert differ(weights, plain_loop(name, parts, SPIKE)) <= (5e-3 if parts == 1 else 1e-6), case
            assert norms == others, f"{case}: norms differ between ranks"
            assert norms[SPIKE] > 10 * max(norms[:SPIKE]), case
        elif case.endswith("scaler"):
            without, rest, *_ = ranks[0][f"{case}, without"]
            assert norms == others, f"{case}: norms differ between ranks"
            assert differ(weights, without) == 0.0, case
            assert finite == rest, case
            plain = ranks[0][f"{case.removesuffix('scaler')}finite"][1]
            assert finite == pytest.approx([*plain[:SKIPPED], *plain[SKIPPED + 1 :]], rel=0.05), f"{case}: unscaled?"


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

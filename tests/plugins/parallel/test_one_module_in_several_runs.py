"""A module goes from one Trainer's strategy to another's in one script, and outlives its run."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from dlo_framework import DloError
from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import Module, fit, mine, trainer
from support.strategies import STRATEGIES


class ByHand(Module):
    """Runs backward past Lightning, which works in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class AskingForAClosure(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class Closing(Module):
    def configure_optimizers(self) -> Any:
        return AskingForAClosure(self.parameters(), lr=0.1)


class Twice(ByHand):
    """Has two optimizers step all parameters in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters(), lr=0.01)]


MAKE: dict[str, Any] = {**STRATEGIES, "ddp": DataParallelStrategy}
EVERY = ["ddp", "zero1", "zero2", "zero3", "deepspeed_1", "deepspeed_3", "fsdp", "copies"]
AVERAGES = (partial(StochasticWeightAveraging, swa_lrs=0.01), EMAWeightAveraging)
PAIRS = ["zero3 zero3", "zero1 ddp", "zero2 zero3", "zero3 ddp", "zero3 fsdp", "ddp zero3", "deepspeed_1 ddp"]
PAIRS += ["deepspeed_3 zero3", "fsdp fsdp"]
#: What runs each time, in turn and around runs: whole, owned and divided parameters; the slow test has all.
SOME = ["zero1 ddp", "ddp zero3", "zero3 fsdp", "fsdp fsdp"]
SOME_AROUND = ["ddp", "zero3", "fsdp"]


def _in_turn(rank: int, world: int, pairs: list[str]) -> None:
    """Fits one module under each pair's strategies in turn, by two Trainers; the first is gone by then, or not."""
    expected: Any = None
    for pair in ["ddp ddp", *pairs]:
        module, kept = Module(), []
        for name in pair.split():
            run = fit(rank, world, module, MAKE[name]())
            kept += [run] if pair != "zero1 ddp" else []
        found = torch.tensor(module.losses), gather_full_weights(run)
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text, pair=pair: pair + text)


def _around(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """What is there of a module before a run, and once it has ended."""
    module = Module()
    run = fit(rank, world, module, ZeroStrategy(3))
    weight = module.net.stem.weight
    assert (weight.shape, bool(weight.isnan().all())) == (torch.Size([6, 6]), True)
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.add_(1)
    with pytest.raises(DloError, match="must be taken of a module whose parameters are gathered"):
        module.net.state_dict()
    assert run.strategy.state_names() == set(Module().state_dict())
    assert copy.deepcopy(module)._dlo_owner is pickle.loads(pickle.dumps(module._dlo_owner)) is None
    with pytest.raises(DloError, match=r"must have full parameters for SingleProcessStrategy on 1 ranks, .* among 2"):
        fit(0, 1, module, "auto")
    sharded = Module()
    fit(rank, world, sharded, FSDPStrategy())
    with pytest.raises(DloError, match="parameters that FSDPStrategy has divided"):
        fit(rank, world, sharded, ZeroStrategy(1))
    for name, average in zip(("zero3", "fsdp", "copies"), itertools.cycle(AVERAGES)):
        with pytest.raises(DloError, match=r"under \w+Strategy must be taken of each rank's shards, got .*Averaging"):
            fit(rank, world, Module(), MAKE[name](), callbacks=[average()])
    for name in names:
        early = trainer(world, MAKE[name]())
        early.strategy.connect(Module())
        early.save_checkpoint(folder / f"{name}.ckpt")
        saved = load(folder / f"{name}.ckpt")["state_dict"]
        torch.testing.assert_close({key: saved[key] for key in saved}, dict(Module().state_dict()), rtol=0, atol=0)
    losses = {name: _evaluate(rank, world, name, folder / f"{name}-fitted.ckpt") for name in names}
    first, other, *others = losses["ddp"]
    assert others == pytest.approx([first, first])
    assert abs(first - other) > 0.1
    for name in names:
        assert losses[name] == pytest.approx(losses["ddp"], rel=1e-4), name
        refused = pytest.raises(DloError, match=r"must come from self\.manual_backward")
        with contextlib.nullcontext() if name == "ddp" else refused:
            fit(rank, world, ByHand(), MAKE[name]())
    with pytest.raises(DloError, match=r"without a closure, got AskingForAClosure"):
        fit(rank, world, Closing(), DeepSpeedBridge(stage=1))
    fit(rank, world, Closing(), ZeroStrategy(2))
    with pytest.raises(DloError, match=r"got net.stem.weight in optimizers 0 \(SGD\) and 1 \(Adam\)"):
        fit(rank, world, Twice(), ZeroStrategy(2))
    sharded, full = Twice(), Twice()
    fit(rank, world, sharded, FSDPStrategy())
    fit(rank, world, full, DataParallelStrategy())
    assert sharded.losses == pytest.approx(full.losses, rel=1e-5)


def _evaluate(rank: int, world: int, name: str, path: Path) -> list[float]:
    """Losses by the Trainer of a fit: of its module, of another one, of that with the fit's weights, and back."""
    module, other = Module(), Module()
    run = fit(rank, world, module, MAKE[name](), limit_val_batches=1)
    run.save_checkpoint(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    turns = ((module, None), (other, None), (other, path), (module, None))
    return [run.validate(of, mine(rank, world), ckpt_path=at, verbose=False)[0]["val"] for of, at in turns]


@pytest.mark.parametrize(
    ("pairs", "names"),
    [(SOME, SOME_AROUND), pytest.param(PAIRS, EVERY, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_module_goes_from_run_to_run_as_under_ddp(tmp_path: Path, pairs: list[str], names: list[str]) -> None:
    run_distributed(_in_turn, 2, pairs, timeout=300)
    run_distributed(_around, 2, tmp_path, names, timeout=300)

"""Sharded strategies wait for what runs beside the computation: losses are the same where all of it runs late."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from dlo_framework.copy_streams import copy_streams
from dlo_framework.finite import _message
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Module, WithAdafactor, fit, mine, trainer
from support.late import DEVICE, LateCopied, OnDevice, late, late_along_axes
from support.on_ranks import on_ranks
from support.token_batches import GROUPED, Tokens

#: Another name of the CPU's memory, which passes for an accelerator's: copies between the two go by the side streams.
#: So small that several buckets have one length, and take turns in one buffer.
BUCKET_MB = 2e-4


def _zero(stage: Any, offload: Any = None) -> Callable[[], Any]:
    return lambda: OnDevice(stage, offload=offload, bucket_mb=BUCKET_MB)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "zero1": _zero(1),
    "zero1 optimizer": _zero(1, "optimizer"),
    "zero2": _zero(2),
    "zero2 optimizer": _zero(2, "optimizer"),
    "zero3": _zero(3),
    "zero3 optimizer": _zero(3, "optimizer"),
    "zero3 parameters": _zero(3, "parameters"),
    "zero3 both": _zero(3, "both"),
    "fsdp": FSDPStrategy,
    "fsdp offload": lambda: FSDPStrategy(offload=True),
}


class Penalised(Module):
    """Uses a block's weights before that block's forward."""

    def loss(self, batch: Any) -> Tensor:
        penalty = self.net.blocks[1].one.weight.square().mean()
        return super().loss(batch) + 0.1 * penalty


class PenalisedLater(Penalised):
    """Begins with that in its fourth step, in a run without the double."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) if len(self.losses) >= 3 else Module.loss(self, batch)


class Pending(Module):
    """Notes, as a step begins, which blocks' parameters are on their way, and after it, whether any are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        groups = self.trainer.strategy.engine.groups
        self.__dict__.setdefault("before", []).append([name for g in groups if g._gathering for name in g.names])
        loss = super().training_step(batch, batch_idx)
        self.__dict__.setdefault("after", []).append([name for g in groups if g._gathering for name in g.names])
        return loss


class ReadsWeights(Pending):
    """May read its weights after a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norm = sum(float(p.detach().norm()) for p in self.parameters())


class Foreign(Callback):
    """Somebody's callback, which may read weights at any time that it has a hook."""

    def on_train_batch_start(self, *_: Any) -> None:
        pass


@on_ranks(2)
def test_parameters_arrive_while_forward_runs_unless_somebody_may_read_them(rank: int, world_size: int) -> None:
    for kind, callbacks in ((Pending, []), (ReadsWeights, []), (Pending, [Foreign()])):
        module = kind()
        with late():
            fit(rank, world_size, module, OnDevice(2, bucket_mb=BUCKET_MB), callbacks=callbacks)
        first, *later = module.before
        assert first == []
        if kind is ReadsWeights or callbacks:
            assert not any(later)
            continue
        for names in later:
            assert names
            assert all(name.startswith("net.blocks.") for name in names), names  # All else is waited for by then.
        assert not any(module.after)
    for stage in (1, 2):
        module = PenalisedLater()
        run = fit(rank, world_size, module, OnDevice(stage, bucket_mb=BUCKET_MB))
        assert f"under zero{stage}, weights read as NaN" in _message(run, 0)
        # Never the values of the step before, without a word.
        assert [math.isnan(loss) for loss in module.losses] == [False] * 3 + [True], module.losses


class Blocking(Module):
    """Notes, as each step begins, how often the host has waited for copies."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.__dict__.setdefault("blocked", []).append(LateCopied.blocked)
        return super().training_step(batch, batch_idx)


def _blocks(rank: int, world_size: int) -> dict[str, tuple[list[int], int]]:
    """Returns how often the host waits for a copy in each step, and the buckets whose gradients it steps with."""
    found = {}
    for name, make in STRATEGIES.items():
        if name.startswith("zero"):
            module = Blocking()
            with late():
                groups = fit(rank, world_size, module, make(), max_epochs=2).strategy.engine.groups
            landing = sum(group.trains and group.step_device != DEVICE for group in groups)
            found[name] = [after - before for before, after in pairwise(module.blocked)], landing
    return found


def _losses(rank: int, world_size: int, make: Callable[[], Any], module: Module) -> list[float]:
    run = trainer(world_size, make(), max_epochs=2, accumulate_grad_batches=2, limit_val_batches=1)
    run.fit(module, mine(rank, world_size), mine(rank, world_size, steps=1))
    return module.losses


def _masters(rank: int, world_size: int) -> dict[str, list[float]]:
    """Returns losses with master weights in the CPU's memory, of an optimizer of full tensors."""
    found = {}
    for stage, offload in ((2, "optimizer"), (3, "both")):
        strategy = OnDevice(stage, offload=offload, bucket_mb=BUCKET_MB, param_dtype="bfloat16")
        module = WithAdafactor()
        fit(rank, world_size, module, strategy, precision="bf16-mixed", overfit_batches=1, max_epochs=4)
        found[f"zero{stage} {offload}"] = module.losses
    return found


def _both_ways(rank: int, world_size: int, cases: list[tuple[str, type[Module]]]) -> None:
    for name, kind in cases:
        in_order = _losses(rank, world_size, STRATEGIES[name], kind())
        with late() as started:
            assert _losses(rank, world_size, STRATEGIES[name], kind()) == in_order, (name, kind)
        # The double was in their place.
        assert all(started.values()) or not name.startswith("zero"), (name, kind, started)


#: Strategies along the axes of a mesh, with what each starts before it waits.
AXES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "tp": ({"tp": 2}, {"start_all_reduce"}),
    "tp, sequence": (
        {"tp": 2, "sequence_parallel": True},
        {"start_all_reduce", "start_all_gather_parts", "start_reduce_scatter_parts"},
    ),
    "tp, asynchronous": ({"tp": 2, "async_tp": 2}, {"start_all_reduce"}),
    "tp, sequence, asynchronous": (
        {"tp": 2, "sequence_parallel": True, "async_tp": 4},
        {"start_all_gather_parts", "start_reduce_scatter_parts"},
    ),
    "cp": ({"cp": 2}, {"transfers"}),
    "pp": ({"pp": 2, "micro_batches": 2}, {"sends", "receives"}),
    "pp, interleaved": (
        {"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2, "micro_batches": 4},
        {"sends", "receives"},
    ),
}


class Language(CausalLM):
    """Notes the sum of this rank's weights before each backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        own = [p.detach().double().sum() for p in self.parameters() if not p.is_meta]
        self.__dict__.setdefault("sums", []).append(float(torch.stack(own).sum()))


def _along_axes(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        options, expected = AXES[name]

        def weights(options: dict[str, Any] = options) -> list[float]:
            torch.manual_seed(0)
            task = Language(config={"model_type": "llama", **GROUPED, "num_hidden_layers": 4})
            run = trainer(world_size, MeshStrategy(**options), max_steps=3)
            run.fit(task, datamodule=Tokens(1, steps=3))
            return task.sums

        in_order = weights()
        assert len(set(in_order)) == len(in_order) > 2, name
        with late_along_axes() as started:
            assert weights() == in_order, name
        assert {what for what, times in started.items() if times} >= expected, (name, started)


@pytest.mark.parametrize(
    "names",
    [["tp, sequence", "pp, interleaved"], pytest.param(list(AXES), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_weights_are_the_same_where_messages_along_the_axes_of_a_mesh_arrive_late(names: list[str]) -> None:
    run_distributed(_along_axes, 2, names, timeout=280)


#: Each stage, each place of offloading, and FSDP.
SOME: list[tuple[str, type[Module]]] = [
    ("zero1", Penalised),
    ("zero2 optimizer", WithAdafactor),
    ("zero3 both", Penalised),
    ("fsdp offload", WithAdafactor),
]
#: Outside units' forward FSDP2 leaves DTensors, which do not mix with tensors.
ALL = [
    (name, kind)
    for name in STRATEGIES
    for kind in (Module, WithAdafactor, Penalised)
    if name.startswith("zero") or kind is not Penalised
]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, SOME), *(pytest.param(ranks, ALL, marks=pytest.mark.slow) for ranks in (1, 2))]
)
def test_losses_are_the_same_where_copies_and_collectives_run_late(ranks: int, cases: list[Any]) -> None:
    run_distributed(_both_ways, ranks, cases, timeout=280)


def _alone(rank: int, world_size: int) -> tuple[Any, Any]:
    return _masters(rank, world_size), _blocks(rank, world_size)


def test_one_rank_steps_master_weights_in_full_and_waits_for_nothing_but_the_gradients_that_it_steps_with() -> None:
    ((masters, blocks),) = run_distributed(_alone, 1, timeout=100)
    assert masters["zero2 optimizer"] == pytest.approx(masters["zero3 both"], rel=1e-2)
    for losses in masters.values():
        assert len(set(losses)) == len(losses) > 2, losses  # Each step was taken, and seen.
    assert {landing > 0 for _, landing in blocks.values()} == {True, False}
    for name, ((first, *later), landing) in blocks.items():
        # At most once a bucket: a wait for one copy is a wait for those before it.
        assert all(0 < waits <= landing if landing else waits == 0 for waits in later), (name, later, landing)
        # What the CPU steps is a copy of the device's values, brought before the first step.
        assert first <= landing * (2 if name == "zero3 optimizer" else 1), name


def test_copies_of_each_direction_have_a_stream_and_nothing_but_streams_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, device: Any = None, name: str = "") -> None:
            self.device, self.name = device, name or f"side {next(numbers)}"

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Any) -> None:
            calls.append(f"{self.name} waits for {event.name}")

        def record_event(self) -> Any:
            return SimpleNamespace(name=f"a copy on {self.name}", synchronize=lambda: calls.append("host waits"))

    @contextlib.contextmanager
    def stream(on: Stream) -> Iterator[None]:
        calls.append(f"{on.name} copies")
        yield

    numbers, main = itertools.count(1), Stream(name="main")
    module = SimpleNamespace(Stream=Stream, current_stream=lambda device: main, stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    streams = copy_streams.__wrapped__(torch.device("cuda"))
    copied = [copier.copy(torch.zeros(2), torch.ones(2)) for copier in streams]
    assert calls == ["side 1 waits for main", "side 1 copies", "side 2 waits for main", "side 2 copies"]
    calls.clear()
    copied[0].wait()
    assert calls == ["main waits for a copy on side 1"]
    copied[1].synchronize()
    assert calls[1:] == ["host waits"]

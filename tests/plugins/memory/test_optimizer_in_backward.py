"""OptimizerInBackward: the weights of the ordinary step, in one process, on ranks and meshes; the gradients' peak."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from dlo_framework.callback import PluginCallback
from dlo_framework.copy_streams import CopyHandle
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.run.resume import ExactResume
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.compile.callback import Compile
from dlo_plugins.gradients.clipping_and_noise import GradientNoise
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.flat_group import FlatGroup
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_curves import OneCycle
from support import fsdp_nets
from support.curricula_runs import apart, fit, prepare_texts, saved_state, seeded, texts
from support.fsdp_nets import Module, differ
from support.runs import Watch

STRATEGIES: dict[str, Any] = {
    "ddp": DataParallelStrategy,
    "zero2": partial(ZeroStrategy, 2, bucket_mb=1e-4),
    "zero3": partial(ZeroStrategy, 3),
    "fsdp": FSDPStrategy,
    "zero1": partial(ZeroStrategy, 1),
    "zero2 offload": partial(ZeroStrategy, 2, offload="optimizer"),
    "zero3 offload": partial(ZeroStrategy, 3, offload="both"),
    "zero3 offloaded parameters": partial(ZeroStrategy, 3, offload="parameters"),
    "fsdp offload": partial(FSDPStrategy, offload=True),
}


class Scaled(Module):
    """With a scalar parameter, which FSDP does not shard, and a buffer that changes."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.net.scale, batch[1])


class ReadsDetached(Module):
    """Whose backward reads the head once more after its gradient is complete, by an operation without a gradient."""

    def loss(self, batch: Any) -> Any:
        inputs = batch[0] @ self.net.head.weight.detach().t() @ self.net.head.weight.detach()
        read = torch.nn.functional.linear(self.net.stem(inputs), self.net.head.weight.detach())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + 1e-3 * read.square().sum()


class LateCopy(CopyHandle):
    """Copy to the CPU that has not ended when it is asked."""

    has_ended = False


def _arrive_late(group: FlatGroup, segment: torch.Tensor) -> CopyHandle:
    copied = LateCopy()
    group._arriving.append((segment.clone(), copied))
    return copied


class Momentum(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, fused=True)


class FullTensors(Scaled):
    """Whose optimizer needs full tensors, which ranks step as owners, each tensor by itself."""

    def configure_optimizers(self) -> Any:
        from timm.optim import Muon

        return Muon(self.net.parameters(), lr=0.05)


class GroupCounts(Scaled):
    """Whose optimizer needs full tensors and counts its steps in the parameter groups."""

    def configure_optimizers(self) -> Any:
        from timm.optim import Lamb

        biases = [p for p in self.net.parameters() if p.ndim < 2]
        matrices = [p for p in self.net.parameters() if p.ndim > 1]
        return Lamb([{"params": matrices}, {"params": biases}], lr=0.05, max_grad_norm=None)


def train(strategy: Any, world: int, rank: int, *callbacks: Any, module: type[Module] = Scaled, **options: Any) -> Any:
    """Returns the weights, and the module."""
    built, callbacks = module(), (ExactResume(), OneCycle(), *callbacks)
    made = fsdp_nets.fit(rank, world, built, strategy, max_epochs=2, callbacks=[*callbacks], **options)
    return gather_full_weights(made), built


#: By module and limit of gradients, the strategies of the ordinary test; the slow one has all.
SOME: dict[tuple[type[Module], float | None], Any] = {
    (Scaled, 0.01): ("ddp", "zero2", "fsdp"),
    (GroupCounts, None): ("zero3 offload",),
}
ALL = {(module, clip): STRATEGIES for module in (Scaled, GroupCounts, Momentum, FullTensors) for clip in (None, 0.01)}


def _compare(rank: int, world: int, folder: Path, runs: dict[tuple[type[Module], float | None], Any]) -> None:
    for (module, clip), strategies in runs.items():
        for name in strategies:
            make = STRATEGIES[name]
            options = {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": "value"}
            plain, _ = train(make(), world, rank, module=module, **options)
            stepping = OptimizerInBackward()
            path = folder / f"{name}-{module.__name__}-{clip}"
            fused, _ = train(make(), world, rank, stepping, Watch(path, 3), module=module, **options)
            again, _ = train(make(), world, rank, OptimizerInBackward(), module=module, resume=path, **options)
            assert stepping.steps >= 8, path
            assert rank or differ(fused, plain) == differ(again, plain) == 0, path
    plain, _ = train(ZeroStrategy(2), world, rank, module=Scaled)
    stepping = OptimizerInBackward()
    with mock.patch.object(FlatGroup, "add_gradient", _arrive_late):
        late, _ = train(ZeroStrategy(2, bucket_mb=1e-4), world, rank, stepping, module=Scaled)
    assert stepping.steps >= 8
    assert rank or differ(late, plain) == 0
    for strategy in (
        ZeroStrategy(3, find_unused=True),
        FSDPStrategy(find_unused=True),
        DataParallelStrategy(find_unused_parameters=True),
    ):
        with pytest.raises(DloError, match="parameters may have no gradient on some ranks"):
            train(strategy, world, rank, OptimizerInBackward())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(ZeroStrategy(2, bucket_mb=1e-4), world, rank, OptimizerInBackward(), module=ReadsDetached)


@pytest.mark.parametrize("runs", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_two_ranks_have_the_weights_of_the_ordinary_step_to_the_bit(tmp_path: Path, runs: Any) -> None:
    run_distributed(_compare, 2, tmp_path, runs, timeout=400)


class Peak(Callback):
    """Largest number of bytes of this rank's gradients, looked at whenever one arrives."""

    def __init__(self) -> None:
        self.bytes = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        contract = contract_of(trainer.strategy)

        def look(*_: Any) -> None:
            self.bytes = max(self.bytes, contract.state_bytes()["gradients"])

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(look)


@pytest.mark.parametrize("module", [Scaled, Momentum, FullTensors, GroupCounts])
def test_one_process_has_the_weights_of_the_ordinary_step_and_one_gradient_at_a_time(module: type[Module]) -> None:
    plain_peak, peak, stepping = Peak(), Peak(), OptimizerInBackward()
    plain, _ = train("auto", 1, 0, plain_peak, module=module)
    fused, built = train("auto", 1, 0, peak, stepping, RunMonitor(), module=module)
    assert differ(fused, plain) == 0.0
    sizes = [p.nbytes for p in built.parameters()]
    assert (stepping.steps, plain_peak.bytes, peak.bytes) == (8 * len(sizes), sum(sizes), max(sizes))


class Clipping(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Declaring(PluginCallback):
    """Has none of the hooks that are given gradients."""

    needs_gradients = True


class AllTensors(Module):
    def configure_optimizers(self) -> Any:
        from timm.optim import Lamb

        return Lamb(self.parameters(), lr=0.01)


class LargestGradient(torch.optim.SGD):
    """Which keeps the largest gradient so far in its parameter groups, as if its rate depended on it."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            largest = (float(p.grad.abs().max()) for p in group["params"] if p.grad is not None)
            group["largest"] = max(largest, default=group.get("largest", 0.0))
        return found


class Measuring(Module):
    def configure_optimizers(self) -> Any:
        return LargestGradient(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "message"),
    [
        (Module, (), {"accumulate_grad_batches": 2}, "accumulate_grad_batches must be 1, got 2"),
        (Module, (), {"gradient_clip_val": 1.0}, "gradient_clip_algorithm must be value, got norm"),
        (Module, (GradientNoise(eta=0.1),), {}, "must not read gradients .*, got GradientNoise"),
        (Module, (DynamicBatchSize({0: 8}),), {}, "must not read gradients .*, got DynamicBatchSize"),
        (Module, (Declaring(),), {}, "must not read gradients .*, got Declaring"),
        (Module, (Compile(optimizer=True),), {}, "optimizer of Compile must be false, got true"),
        (Clipping, (), {}, "must not read gradients .*, got Clipping"),
        (AllTensors, (), {}, "must update each tensor without the others, got Lamb"),
        (Measuring, (), {}, "without the others, got LargestGradient, whose step changes largest .* by the gradients"),
    ],
)
def test_what_needs_all_gradients_is_refused(module: Any, callbacks: Any, options: Any, message: str) -> None:
    with pytest.raises(DloError, match=message):
        train("auto", 1, 0, OptimizerInBackward(), *callbacks, module=module, **options)


# --- OptimizerInBackward on meshes: the weights of the ordinary step, with tp, cp, experts and shards of data --------


EXPERTS: dict[str, Any] = {"experts": MixtureOptions(count=4, aux_loss=0.01, z_loss=0.01)}
#: LAMB needs full tensors, and counts its steps in the parameter groups.
LAMB: dict[str, Any] = {"optimizer": "lamb", "optimizer_args": {"max_grad_norm": None}}


ON_FOUR = [("shard x sp", {}), ("cp x tp", {}), ("copies x shard", LAMB), ("ep x tp", EXPERTS | LAMB)]


def _compare_on_mesh(rank: int, world: int, folder: Path, cells: list[tuple[str, dict[str, Any]]]) -> None:
    for strategy, options in cells:
        peaks, homes = [], []
        for stepping in ([], [OptimizerInBackward()]):
            homes.append(folder / f"{strategy} {len(options)} {len(stepping)}")
            homes[-1].mkdir(exist_ok=True)
            seeded()
            peak = Peak()
            run = {"precision": "64-true", "epochs": 1, "batches": 3}
            losses, _ = fit(homes[-1], texts(folder, **options), strategy, world, [peak, *stepping], **run)
            peaks.append(peak.bytes)
        # Full tensors are stepped by unit: a rank owns tensors of four to six of the six.
        assert stepping[0].steps >= 3 * 4, strategy
        assert losses[-1] != losses[0], strategy
        assert peaks[1] < 0.7 * peaks[0], (strategy, peaks)
        # Sums over four ranks of tp take another order where they are sent one by one.
        difference = apart(*(saved_state(home / "last.ckpt") for home in homes)) if rank == 0 else {}
        assert max(difference.values(), default=0.0) <= (0.0 if world == 2 else 1e-12), strategy
    if world == 2:
        with pytest.raises(DloError, match="pp=2 adds up the gradients of micro-batches"):
            fit(folder, texts(folder), "pp", world, [OptimizerInBackward()], batches=1, check=False)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "cells"),
    [
        (2, [("sp", {}), ("ep", EXPERTS | LAMB)]),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "four ranks"],
)
def test_a_mesh_has_the_weights_of_the_ordinary_step(tmp_path: Path, world: int, cells: list[Any]) -> None:
    prepare_texts(tmp_path)
    run_distributed(_compare_on_mesh, world, tmp_path, cells, timeout=350)

"""bf16 weights with master weights, or with stochastic rounding, are one option of ZeRO, FSDP and the mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.local_memory import local_tensor, memory_of, optimizer_bytes
from dlo_framework.shards import FlatShard, SlicedShard, TensorSlice
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.testing.training import leave_group
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps, element_indices, hash_bits, round_stochastically
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support import fsdp_nets
from support.fsdp_nets import Module, WithAdafactor, trainer
from support.on_ranks import on_ranks

HALF, RATE, MOMENTUM = torch.bfloat16, 2.0**-9, 0.5
STRATEGIES: dict[str, Any] = {
    "zero2": lambda **o: ZeroStrategy(2, bucket_mb=2e-4, **o),
    "zero3": lambda **o: ZeroStrategy(3, **o),
    "fsdp": lambda **o: FSDPStrategy(**o),
    "mesh": lambda **o: MeshStrategy(dp_shard=2, **o),
    "zero3_offload": lambda **o: ZeroStrategy(3, offload="both", **o),
    "hsdp": lambda **o: FSDPStrategy(replicate=2, shard=1, **o),
}


#: Strategies that train on data, and the kind of their weights; the first is what others are compared with.
TRAINED = [(name, kind) for name in ("zero2", "fsdp") for kind in ("masters", "stochastic")]
#: In the slow test alone: the ordinary ones have it in test_every_strategy_rounds_alike and beside OptimizerInBackward.
LEFT = ("zero2", "stochastic")


class Sums(nn.Module):
    """Sums of its parameters and of its blocks, whose gradients are numbers that bf16 has."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5))
        self.blocks = nn.ModuleList([Sums(depth - 1) for _ in range(2 * depth)])

    def forward(self) -> Tensor:
        own = 2 * self.weight.float().sum() + self.bias.float().sum()
        return torch.stack([own, *(block() for block in self.blocks)]).sum()


class Exact(Module):
    """Ranks have the same gradients, so that only rounding can differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net: Any = Sums(1)

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.net()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=MOMENTUM)


def fit(rank: int, world: int, module: Any, strategy: Any, **options: Any) -> Any:
    seed_everything(5, verbose=False)
    return fsdp_nets.fit(rank, world, module, strategy, **{"precision": "bf16-mixed"} | options)


def expected(steps: int) -> dict[str, Tensor]:
    """Returns the weights of SGD in single precision whose result is rounded, in plain torch."""
    seed_everything(5, verbose=False)
    module = Exact()
    named = {name: p.detach().to(HALF) for name, p in module.named_parameters()}
    momentum = {name: torch.zeros(p.shape) for name, p in named.items()}
    taken = 0
    rounding = StochasticSteps(lambda: taken)
    for taken in range(steps):  # noqa: B007
        for name, p in named.items():
            momentum[name] = momentum[name] * MOMENTUM + (2 if "weight" in name else 1)
            p.requires_grad_()
            optimizer = torch.optim.SGD([p], lr=0.0)
            rounding.attach(optimizer, {name: p}, lambda _, value: value)
            p.grad = momentum[name].to(HALF)
            rounding.widen([p])
            p.data.sub_(RATE * momentum[name])
            rounding.narrow([p])
    return {name: p.detach() for name, p in named.items()}


def _equal(found: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in other)


@on_ranks(2)
def test_every_strategy_rounds_alike(rank: int, world: int) -> None:
    wanted = expected(8)
    assert not _equal(wanted, expected(7))
    for name, make in STRATEGIES.items():
        run = fit(rank, world, Exact(), make(bf16_weights="stochastic"), max_epochs=2)
        weights = gather_full_weights(run)
        assert rank or _equal(weights, wanted), name
        states = [state for one in run.optimizers for state in one.state.values()]
        assert {v.dtype for state in states for v in state.values() if isinstance(v, Tensor)} == {torch.float32}, name


def _trains(rank: int, world: int, folder: Path, every: bool) -> None:
    losses, stored = {}, {}
    window: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for name, kind in (of for of in TRAINED if every or of != LEFT):
        make, module = STRATEGIES[name], Module()
        run = fit(rank, world, module, make(bf16_weights=kind), max_epochs=3, **window)
        weights = gather_full_weights(run)
        assert {v.dtype for v in weights.values()} <= {torch.float32 if kind == "masters" else HALF}, (name, kind)
        losses[name, kind] = module.losses
        assert module.losses == pytest.approx(losses.get(("zero2", "masters"), module.losses), rel=0.03), (name, kind)
        assert sum(module.losses[-4:]) < sum(module.losses[:4]), (name, kind)  # The last epoch, and the first.
        if name == "fsdp":
            stored[kind] = _held(run, module)
            assert rank or stored[kind] == _described(run, rank), kind  # The other rank's shards are padded.
        if (name, kind) != ("fsdp", "masters"):
            run = fit(rank, world, Module(), make(bf16_weights=kind), max_epochs=2, **window)
            run.save_checkpoint(folder / f"{name} {kind}")
        if kind == "stochastic":
            options = {"max_epochs": 3, "resume": folder / f"{name} {kind}", **window}
            resumed = gather_full_weights(fit(rank, world, Module(), make(bf16_weights=kind), **options))
            assert _equal(resumed, weights), name
    assert stored["masters"] == (2 * stored["stochastic"][0], stored["stochastic"][1])
    for name in ("fsdp", "zero2") if every else ("zero2",):
        make, ordinary = STRATEGIES[name], Module()
        fit(rank, world, ordinary, make(bf16_weights="stochastic"))
        early = Module()
        fit(rank, world, early, make(bf16_weights="stochastic"), callbacks=[OptimizerInBackward()])
        assert early.losses == ordinary.losses
        assert len(set(early.losses)) > 1
    for name in ("fsdp", "zero3") if every else ("fsdp",):
        make, moved, full = STRATEGIES[name], Module(), WithAdafactor()
        options = {"max_epochs": 3, "resume": folder / "zero2 masters", **window}
        fit(rank, world, moved, make(bf16_weights="stochastic"), **options)
        assert moved.losses == pytest.approx(losses["zero2", "masters"][-4:], rel=0.05)
        fit(rank, world, full, make(bf16_weights="stochastic"), max_epochs=2)
        assert sum(full.losses[-4:]) < sum(full.losses[:4])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_and_resumes_to_the_bit(tmp_path: Path, every: bool) -> None:
    run_distributed(_trains, 2, tmp_path, every)


def _held(run: Any, module: Any) -> tuple[int, int]:
    """Returns the bytes of parameters and of Adam's moments that this rank has."""
    counters = 4 * sum(len(one.state) for one in run.optimizers)
    return memory_of(local_tensor(p) for p in module.parameters()), optimizer_bytes(run.optimizers) - counters


def _described(run: Any, rank: int) -> tuple[int, int]:
    """Returns the bytes that `dlo mesh` prints."""
    bytes_of = run.strategy.describe(Module()).ranks[rank].state_bytes
    return bytes_of.parameters, bytes_of.optimizer


@on_ranks(1, backend=None)
def test_one_rank_rounds_as_several_do(rank: int, world: int) -> None:
    wanted = expected(8)
    for name, precision in (("zero2", "bf16-mixed"), ("fsdp", "bf16-mixed"), ("fsdp", "bf16-true")):
        make = STRATEGIES[name]
        run = fit(0, 1, Exact(), make(bf16_weights="stochastic"), max_epochs=2, precision=precision)
        assert _equal(gather_full_weights(run), wanted), precision
    leave_group()


@pytest.mark.parametrize(
    ("make", "precision", "message"),
    [
        (lambda: ZeroStrategy(2, bf16_weights="master"), "bf16-mixed", "got master; did you mean 'masters'"),  # type: ignore[arg-type]
        (lambda: FSDPStrategy(bf16_weights="masters"), "32-true", "precision must be bf16-mixed with bf16_weights"),
        (lambda: ZeroStrategy(3, bf16_weights="masters"), "bf16-true", "rounds the weights before masters are made"),
        (lambda: MeshStrategy(bf16_weights="stochastic"), "32-true", "must be bf16-mixed or bf16-true"),
        (lambda: FSDPStrategy(bf16_weights="masters", param_dtype="float32"), "bf16-mixed", "param_dtype must be bf"),
        (lambda: ZeroStrategy(2, param_dtype="bfloat16"), "32-true", "that precision 32-true casts to, got bfloat16"),
        (lambda: ZeroStrategy(2, param_dtype="float16"), "bf16-mixed", "set the trainer's precision to 16-mixed"),
        (lambda: ZeroStrategy(2, param_dtype="bfloat61"), "bf16-mixed", "got bfloat61; did you mean 'bfloat16'"),
        (lambda: ZeroStrategy(2, reduce_dtype="bfloat16"), "bf16-mixed", "reduce_dtype must come with a param_dtype"),
    ],
)
def test_what_does_not_fit_is_refused_before_processes_start(make: Any, precision: Any, message: str) -> None:
    with pytest.raises(DloError, match=message):
        trainer(2, make(), precision=precision)


class Mixing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        found = closure() if closure is not None else None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = sum(float(g.sum()) for g in grads)
        for g in grads:
            g.mul_(scale)
        super().step()
        return found


class WithMixing(Module):
    def configure_optimizers(self) -> Any:
        return Mixing(self.net.parameters(), lr=1e-3)


@on_ranks(1, backend=None)
def test_an_optimizer_that_mixes_tensors_is_refused(rank: int, world: int) -> None:
    with pytest.raises(DloError, match=r"stochastic must update each tensor without the others, got Mixing"):
        fit(0, 1, WithMixing(), FSDPStrategy(bf16_weights="stochastic"))


# --- stochastic rounding keeps the value in the mean, and its bits depend on the element's place alone ---------------


def test_the_mean_over_all_bits_is_the_value_and_both_neighbours_are_adjacent() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    for value in (1.0 + 2**-9, -3.14159, 1e-30, 0.0, 2.0**-133 + 2.0**-140):
        found = round_stochastically(torch.full((1 << 16,), value), bits).double()
        assert float(found.mean()) == float(torch.tensor(value).double())
        exact = float(torch.tensor(value).bfloat16()) == float(torch.tensor(value))
        assert len(found.unique()) == (1 if exact else 2)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    found = round_stochastically(special, torch.full((3,), -1, dtype=torch.int32))
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert bool(found[2].isnan())


def test_bits_are_uniform_and_independent_between_elements_and_keys() -> None:
    index = torch.arange(1 << 16, dtype=torch.int32)
    low = [(hash_bits(index, key) & 0xFFFF).double() / 65536 - 0.5 for key in ((1, 2), (2, 2), (1, 3))]
    bound = 5 / math.sqrt(index.numel())
    for one in low:
        assert abs(float(one.mean())) < bound / math.sqrt(12)
        assert abs(float(one.var()) - 1 / 12) < bound / 12
        assert abs(float((one[1:] * one[:-1]).mean())) < bound / 12
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((low[one] * low[other]).mean())) < bound / 12


def test_an_element_has_the_index_of_its_place_in_the_full_tensor() -> None:
    full = torch.arange(6 * 8, dtype=torch.int32).view(6, 8)
    flat = torch.empty(11, dtype=torch.int32)
    element_indices(FlatShard(flat, torch.Size([6, 8]), 13))
    assert torch.equal(flat, full.flatten()[13:24])
    for cut in (TensorSlice(1, 8, ((1, 2), (5, 2))), TensorSlice(0, 6, ((2, 3),))):
        part = cut.slice_tensor(full)
        found = torch.empty(7, dtype=torch.int32)
        element_indices(SlicedShard(FlatShard(found, part.shape, 3), cut))
        assert torch.equal(found, part.flatten()[3:10])
    scalar = torch.empty((), dtype=torch.int32)
    element_indices(scalar)
    assert int(scalar) == 0


def test_a_step_that_raised_leaves_the_bf16_value() -> None:
    rounding = StochasticSteps(lambda: 0)
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    rounding.attach(optimizer, {"weight": weight}, lambda _, value: value)
    memory = weight.data_ptr()
    weight.grad = torch.ones(4)
    rounding.widen([weight])
    weight.data.fill_(7)  # As of a step that raised half way.
    weight.grad = torch.ones(4)
    optimizer.step()
    assert (weight.dtype, weight.data_ptr(), weight.tolist()) == (torch.bfloat16, memory, [0.75] * 4)

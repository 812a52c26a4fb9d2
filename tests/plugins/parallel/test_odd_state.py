"""State that strategies divide in ways of its own: scalars, buffers, shared state, and complex parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.local_memory import optimizer_bytes
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.precision_policy import unit_policy
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.fsdp.torch_fsdp import ComplexReduceScatter
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Block, Module, alone, check_fit, data, fit, mine, trainer
from support.on_ranks import on_ranks

STRATEGIES = {
    "ddp": DataParallelStrategy,
    "zero1": lambda: ZeroStrategy(1),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
}


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


class Tempered(Module):
    """The net with a temperature, and blocks with a gate each."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.temperature = nn.Parameter(torch.tensor(0.7))
        net.blocks = nn.ModuleList([Gated() for _ in range(2)])

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.net.temperature, batch[1])


class Summed(Tempered):
    """Steps with an optimizer whose constructor makes state, where torch's Adagrad needs it in its step (2.11)."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02, initial_accumulator_value=0.1)


class Copying(torch.optim.SGD):
    """Makes state in its constructor that differs among a tensor's elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["first"] = parameter.detach().clone()


class Copied(Module):
    def configure_optimizers(self) -> Any:
        return Copying(self.parameters())


@on_ranks(2)
def test_state_of_a_constructor_that_cannot_be_divided_is_refused(rank: int, world: int) -> None:
    for name in ("zero1", "fsdp"):
        with pytest.raises(DloError) as error:
            fit(rank, world, Copied(), STRATEGIES[name]())
        told = str(error.value)
        assert "must be made in its first step, or be one value a tensor, got 'first' of '" in told
        assert told.endswith("from Copying's constructor; make it in step()")


@on_ranks(2)
def test_each_strategy_goes_on_from_the_one_before(rank: int, world: int, folder: Path) -> None:
    """With scalars, and state that a constructor has made."""
    expected, held = alone(Summed(), epochs=2), {}
    for first, then in zip(STRATEGIES, [*list(STRATEGIES)[1:], "ddp"], strict=True):
        half = folder / f"{first}.ckpt"
        fit(rank, world, Summed(), STRATEGIES[first]()).save_checkpoint(half)
        run = check_fit(rank, world, Summed(), STRATEGIES[then](), expected, resume=half, max_epochs=2)
        states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
        held[then] = sum(value.numel() for state in states for value in state.values())
    assert max(held[name] for name in ("zero1", "zero3", "fsdp")) <= 0.6 * held["ddp"]


# --- buffers ---------------------------------------------------------------------------------------------------


class Normed(Module):
    """The net with a batch norm before its head."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.head = nn.Sequential(nn.BatchNorm1d(WIDTH), net.head)


#: Not ``ddp``: torch's own wrapper shares its buffers.
SHARING = (*list(STRATEGIES.values())[1:], lambda: DeepSpeedBridge(1))


class Oddly(Module):
    """The net with buffers of the rank's own, which are no runs of memory."""

    @staticmethod
    def prepare(net: Any) -> None:
        rank = float(dist.get_rank())
        net.register_buffer("part", torch.full((3, 4), rank)[:, :2])
        net.register_buffer("scale", torch.full((1,), 1 + rank).expand(20_000))


@on_ranks(2)
def test_slices_and_expanded_buffers_are_shared_too(rank: int, world: int) -> None:
    for strategy in SHARING:
        state = fit(rank, world, Oddly(), strategy()).strategy.lightning_module_state_dict()
        part, scale = state["net.part"], state["net.scale"]
        assert (float(part.abs().max()), float(scale.min()), float(scale.max())) == (0.0, 1.0, 1.0), strategy


@on_ranks(2)
def test_a_run_validates_what_its_checkpoints_hold(rank: int, world: int) -> None:
    found = set()
    for name, strategy in STRATEGIES.items():
        run, module = trainer(world, strategy(), limit_val_batches=1.0), Normed()
        run.fit(module, mine(rank, world), mine(rank, world))
        in_run = float(run.callback_metrics["val"])
        alone = Normed().eval()
        weights = gather_full_weights(run)
        if rank == 0:
            alone.load_state_dict(weights)
            with torch.no_grad():
                losses = [float(alone.loss(batch)) for batch in data()]
            assert in_run == pytest.approx(sum(losses) / len(losses), abs=1e-6), name
            found.add(round(in_run, 5))
    assert rank or len(found) == 1


# --- optimizers that share their state --------------------------------------------------------------------------

STEP_BYTES = 4  # AdamW's count of steps, for each parameter.


class Shared(Module):
    """AdamW, each rank with the state of some of the parameters."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=self.rate, eps=1e-5)


class Whole(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-5)


def zero_redundancy_optimizer(rank: int, world: int, folder: Path) -> tuple[int, float]:
    """Saves it and goes on, with plain AdamW too; returns the bytes of its state on this rank and those reported."""
    report, module = StateReport(), Shared()
    expected = alone(Whole(), epochs=2)
    run = check_fit(rank, world, module, DataParallelStrategy(), expected, max_epochs=2, callbacks=[report])
    fit(rank, world, Shared(), DataParallelStrategy()).save_checkpoint(folder / "half.ckpt")
    for make in (Shared, Whole):
        half = {"resume": folder / "half.ckpt", "max_epochs": 2}
        assert check_fit(rank, world, make(), DataParallelStrategy(), expected, **half).global_step == 8
    return optimizer_bytes(run.optimizers), report.found.optimizer


def test_zero_redundancy_optimizer_is_counted_on_each_rank_by_itself(tmp_path: Path) -> None:
    parameters = list(Module().parameters())
    held, reported = zip(*run_distributed(zero_redundancy_optimizer, 2, tmp_path, timeout=100), strict=True)
    assert sum(held) == 2 * 4 * sum(p.numel() for p in parameters) + STEP_BYTES * len(parameters)
    assert min(held) > 0
    assert set(reported) == {float(max(held))}


# complex parameters, as spectral layers have them, and scalars of other dtypes: trained as one process trains them


UNITS = ["net.blocks.*", "net.filter"]
DIVIDING = (
    DataParallelStrategy,
    lambda: ZeroStrategy(1),
    lambda: ZeroStrategy(3),
    lambda: FSDPStrategy(units=UNITS),
    lambda: FSDPStrategy(replicate=2, shard=1, units=UNITS),
    lambda: FSDPStrategy(units=UNITS, reduce_dtype="float32"),
)


class Filter(nn.Module):
    """Weighs frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.tensor(0.3 + 0.7j))  # no dims: each rank holds it whole

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight * self.phase, n=WIDTH)


class Spectral(Module):
    """The net behind a filter, with a temperature in double precision."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.filter = Filter()
        net.temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(self.net.filter(batch[0])) * self.net.temperature
        return nn.functional.cross_entropy(logits, batch[1])


@on_ranks(2)
def test_they_train_under_each_strategy_as_alone(rank: int, world: int) -> None:
    expected = alone(Spectral())
    moved = {name: float((value - expected[name]).abs().max()) for name, value in Spectral().state_dict().items()}
    assert min(moved.values()) > 1e-3
    for strategy in DIVIDING:
        check_fit(rank, world, Spectral(), strategy(), expected)


@on_ranks(2)
def test_scalars_gradients_are_averaged_in_a_dtype_that_holds_them(rank: int, world: int) -> None:
    """One is complex, the other too fine for single precision."""
    module = Spectral()
    fit(rank, world, module, FSDPStrategy(units=UNITS))
    phase, temperature = module.net.filter.phase, module.net.temperature
    phase.grad, temperature.grad = torch.full_like(phase, 2 + 6j * rank), torch.full_like(temperature, 1 + rank * 2e-12)
    ParallelState.of(module).sharded.average_gradients()
    assert complex(phase.grad) == 2 + 3j
    assert float(temperature.grad) == pytest.approx(1 + 1e-12, abs=1e-15)


@on_ranks(2)
def test_complex_among_real_ones_is_an_error_that_names_them(rank: int, world: int) -> None:
    with pytest.raises(DloError) as caught:
        fit(rank, world, Spectral(), FSDPStrategy())
    assert "complex64 net.filter.weight" in str(caught.value)
    assert "units: [net.blocks.0, net.blocks.1, net.filter]" in str(caught.value)


@on_ranks(2)
def test_they_are_summed_without_pairwise_exchange_too(rank: int, world: int) -> None:
    """As on NCCL."""
    communicator, torch_s = Communicator(), dist.reduce_scatter_tensor
    communicator._limit = None
    output, gradients = (torch.full((n,), 1 + 1j * rank) for n in (2, 4))

    def as_nccl(output: Tensor, input: Tensor, **options: Any) -> Any:
        assert not input.is_complex(), "Input tensor data type is not supported for NCCL process group: ComplexFloat"
        return torch_s(output, input, **options)

    assert dist.group.WORLD is not None
    with mock.patch.object(dist, "reduce_scatter_tensor", as_nccl):
        ComplexReduceScatter()(output, gradients, dist.group.WORLD, dist.ReduceOp.SUM)
        assert output.tolist() == communicator.reduce_scatter(gradients).wait().tolist() == [2 + 1j] * 2
    assert communicator.all_gather(torch.full((4,), float(rank))).wait().tolist() == [0, 0, 1, 1]


def test_a_unit_of_several_dtypes_is_refused_with_units_that_have_one() -> None:
    real, imaginary = torch.zeros(3), torch.zeros(3, dtype=torch.complex64)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    assert unit_policy(policy, {"a": real, "b": real}, []) is policy
    assert unit_policy(policy, {"a": imaginary}, []).reduce_dtype is None
    trained = {"net.stem.weight": real, "net.filter.weight": imaginary, "net.filter.phase": imaginary}
    told = r"got float32 net.stem.weight and complex64 net.filter.weight; .* \(units: \[net.blocks.0, net.filter\]\)"
    with pytest.raises(DloError, match=told):
        unit_policy(policy, trained, ["net.blocks.0"])
    with pytest.raises(DloError, match=r"complex64 w; .* units of their own \(units\), or use strategy zero3"):
        unit_policy(policy, {"a": real, "w": imaginary}, [])

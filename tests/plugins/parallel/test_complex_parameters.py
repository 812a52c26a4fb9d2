"""Complex parameters, as spectral layers have them, and scalars of other dtypes: trained as one process trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.precision_policy import unit_policy
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.fsdp.torch_fsdp import ComplexReduceScatter
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, alone, differ, found_by, mine, of, trainer

UNITS = ["net.blocks.*", "net.filter"]
STRATEGIES = {
    "ddp": DataParallelStrategy,
    "zero1": lambda: ZeroStrategy(1),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": lambda: FSDPStrategy(units=UNITS),
    "hsdp": lambda: FSDPStrategy(replicate=2, shard=1, units=UNITS),
    "fsdp in float32": lambda: FSDPStrategy(units=UNITS, reduce_dtype="float32"),
}


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


def they_train_under_each_strategy_as_alone(rank: int, world: int, folder: Path) -> None:
    expected = alone(Spectral())
    moved = {name: float((value - expected[name]).abs().max()) for name, value in Spectral().state_dict().items()}
    assert min(moved.values()) > 1e-3
    for name, strategy in STRATEGIES.items():
        run = trainer(world, strategy())
        run.fit(Spectral(), mine(rank, world))
        weights = gather_full_weights(run)
        assert rank or differ(weights, expected) < 1e-6, name


def scalars_gradients_are_averaged_in_a_dtype_that_holds_them(rank: int, world: int, folder: Path) -> None:
    """One is complex, the other too fine for single precision."""
    module, run = Spectral(), trainer(world, FSDPStrategy(units=UNITS))
    run.fit(module, mine(rank, world))
    sharded, phase, temperature = (
        ParallelState.of(module).sharded,
        module.net.filter.phase,
        module.net.temperature,
    )
    phase.grad, temperature.grad = torch.full_like(phase, 2 + 6j * rank), torch.full_like(temperature, 1 + rank * 2e-12)
    sharded.average_gradients()
    assert complex(phase.grad) == 2 + 3j
    assert float(temperature.grad) == pytest.approx(1 + 1e-12, abs=1e-15)


def complex_among_real_ones_is_an_error_that_names_them(rank: int, world: int, folder: Path) -> None:
    with pytest.raises(DloError) as caught:
        trainer(world, FSDPStrategy()).fit(Spectral(), mine(rank, world))
    assert "complex64 net.filter.weight" in str(caught.value)
    assert "units: [net.blocks.0, net.blocks.1, net.filter]" in str(caught.value)


def they_are_summed_without_pairwise_exchange_too(rank: int, world: int, folder: Path) -> None:
    """As on NCCL."""
    communicator, torch_s = Communicator(), dist.reduce_scatter_tensor
    communicator._pairwise = False
    output, gradients = (torch.full((n,), 1 + 1j * rank) for n in (2, 4))

    def as_nccl(output: Tensor, input: Tensor, **options: Any) -> Any:
        assert not input.is_complex(), "Input tensor data type is not supported for NCCL process group: ComplexFloat"
        return torch_s(output, input, **options)

    assert dist.group.WORLD is not None
    with mock.patch.object(dist, "reduce_scatter_tensor", as_nccl):
        ComplexReduceScatter()(output, gradients, dist.group.WORLD, dist.ReduceOp.SUM)
        assert output.tolist() == communicator.reduce_scatter(gradients).wait().tolist() == [2 + 1j] * 2


CHECKS = (
    they_train_under_each_strategy_as_alone,
    scalars_gradients_are_averaged_in_a_dtype_that_holds_them,
    they_are_summed_without_pairwise_exchange_too,
    complex_among_real_ones_is_an_error_that_names_them,
)


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by(CHECKS, rank, world, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("complex"), timeout=280)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(found: list[dict[str, Any]], check: Any) -> None:
    of(found, check.__name__)


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

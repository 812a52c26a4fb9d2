"""What FSDPStrategy does with models that are not plain: on two ranks, all in one start of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.gathered_dtype import default_param_dtype
from support.fsdp_nets import (
    STEPS,
    WIDTH,
    Module,
    Net,
    alone,
    data,
    differ,
    found_by,
    mine,
    of,
    trainer,
)

# --- models ---------------------------------------------------------------------------------------------------


class TiedModule(Module):
    """The head's weight is a block's; one block is frozen; a buffer and a parameter of whole numbers."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.head = nn.Linear(WIDTH, 9, bias=False)
        net.head.weight = net.blocks[1].one.weight
        net.blocks[0].requires_grad_(False)
        net.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        net.blocks[0].table = nn.Parameter(torch.arange(7), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        self.net.calls += 1
        return super().loss(batch)


class UnusedModule(Module):
    """A block's parameter that no loss depends on, and one that depends on the rank."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.blocks[0].never = nn.Linear(3, 3)
        net.now_and_then = nn.Parameter(torch.ones(WIDTH))
        net.now_and_never = nn.Parameter(torch.tensor(1.0))

    part = 0

    def loss(self, batch: Any) -> Tensor:
        x = batch[0] * self.net.now_and_then * self.net.now_and_never if self.part == 1 else batch[0]
        return nn.functional.cross_entropy(self.net(x), batch[1])


# --- what runs on the ranks -------------------------------------------------------------------------------------


def tied_frozen_and_whole_number_parameters(rank: int, world: int, folder: Path) -> None:
    run, module = trainer(world, FSDPStrategy()), TiedModule()
    run.fit(module, mine(rank, world))
    weights = gather_full_weights(run)
    assert run.strategy.engine.sharded.units == ["net.blocks.0"]  # The other one shares its weight with the head.
    assert rank or differ(weights, alone(TiedModule())) < 1e-6
    assert rank or int(weights["net.calls"]) == STEPS


def unused_parameters_stay_as_they_are_and_rank_dependent_ones_get_their_mean(
    rank: int, world: int, folder: Path
) -> None:
    run, module = trainer(world, FSDPStrategy(find_unused=True)), UnusedModule()
    module.part = rank
    run.fit(module, mine(rank, world))
    weights = gather_full_weights(run)
    assert rank or differ(weights, alone(UnusedModule(), parts=world)) < 1e-6


def unused_parameters_accumulate_with_gathered_halves(rank: int, world: int, folder: Path) -> None:
    """Gradients of the first micro-batches are accumulated in single precision; those of unused parameters are not."""
    strategy = FSDPStrategy(find_unused=True, param_dtype="bfloat16")
    run, module = trainer(world, strategy, precision="bf16-mixed", accumulate_grad_batches=2), UnusedModule()
    module.part = rank
    run.fit(module, mine(rank, world))
    weights = gather_full_weights(run)
    assert rank or differ(weights, alone(UnusedModule(), parts=world, accumulate=2)) < 0.05


def unused_parameters_are_named(rank: int, world: int, folder: Path) -> None:
    module = UnusedModule()
    module.part = rank
    with pytest.raises(DloError) as error:
        trainer(world, FSDPStrategy()).fit(module, mine(rank, world))
    message = str(error.value)
    assert rank or "net.now_and_then" in message
    assert rank or "net.now_and_never" in message
    assert "net.blocks.0.never.weight, net.blocks.0.never.bias" in message
    assert "find_unused: true" in message


def evaluation_around_fits(rank: int, world: int, folder: Path) -> None:
    """Evaluates before, between, within and after fits, which go on from each other, with the same module."""
    module, loader = Module(), mine(rank, world)
    run = trainer(world, FSDPStrategy(), limit_val_batches=1.0, max_epochs=2)
    reference = Module()
    losses = [torch.stack([reference.loss(batch).detach() for batch in data()]).mean()]
    found = [run.validate(module, loader, verbose=False)[0]["val"]]
    run.fit(module, loader, loader)
    expected = alone(reference, epochs=2)
    found.append(run.test(module, loader, verbose=False)[0]["val"])
    losses.append(torch.stack([reference.loss(batch).detach() for batch in data()]).mean())
    predicted = torch.cat(run.predict(module, loader))
    of_reference = torch.cat([reference.net(x.chunk(world)[rank]) for x, _ in data()]).detach()
    again = trainer(world, FSDPStrategy())
    again.fit(module, loader)
    twice = Module()
    twice.load_state_dict(expected)
    weights = gather_full_weights(again)
    assert found == pytest.approx([float(loss) for loss in losses], rel=1e-5)
    assert float((predicted - of_reference).abs().max()) < 1e-5
    assert rank or differ(weights, alone(twice)) < 1e-6


def a_module_that_is_sharded_keeps_its_options(rank: int, world: int, folder: Path) -> None:
    module = Module()
    trainer(world, FSDPStrategy()).validate(module, mine(rank, world), verbose=False)
    with pytest.raises(DloError, match="must be those of the earlier run that has sharded"):
        trainer(world, FSDPStrategy(offload=True)).fit(module, mine(rank, world))


class Large(Module):
    """Its gradient has millions of elements, whose squares cannot be added up one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head = nn.Sequential(nn.Linear(WIDTH, 2**20, bias=False), nn.Linear(2**20, 5, bias=False))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [t.grad.double().square().sum() for group in optimizer.param_groups for t in group["params"]]
        exact = self.trainer.strategy.reduce(torch.stack(grads).sum(), reduce_op="sum").sqrt()
        self.norms = float(self.trainer.strategy.gradient_norm(optimizer)), float(exact)


def the_norm_of_a_large_gradient(rank: int, world: int, folder: Path) -> None:
    run, module = trainer(world, FSDPStrategy(), max_steps=1), Large()
    run.fit(module, mine(rank, world))
    found, exact = module.norms
    assert found == pytest.approx(exact, rel=1e-6)


def the_applier_shards_a_model_by_itself(rank: int, world: int, folder: Path) -> None:
    """As strategies of users' own apply it."""
    torch.manual_seed(2)
    net = Net()
    whole = net(data()[0][0])
    FullyShard().apply(net, init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)), ParallelPlan.infer(net))
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in net.parameters())
    assert float((net(data()[0][0]) - whole).abs().max()) < 1e-6


CHECKS = (
    the_applier_shards_a_model_by_itself,
    the_norm_of_a_large_gradient,
    tied_frozen_and_whole_number_parameters,
    unused_parameters_stay_as_they_are_and_rank_dependent_ones_get_their_mean,
    unused_parameters_accumulate_with_gathered_halves,
    unused_parameters_are_named,
    evaluation_around_fits,
    a_module_that_is_sharded_keeps_its_options,
)


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by(CHECKS, rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("fsdp"), timeout=280)


def _one_rank(rank: int, world: int) -> dict[str, Any]:
    """Returns, for options, the dtype that one rank computes in, whether its weights are shards, and their error."""
    found = {}
    for name, (options, precision) in ALONE.items():
        module, seen = Module(), set()
        module.net.head.register_forward_pre_hook(lambda head, _, seen=seen: seen.add(head.weight.dtype))
        run = trainer(world, FSDPStrategy(**options), precision=precision)
        run.fit(module, mine(rank, world))
        sharded = all(isinstance(parameter, DTensor) for parameter in module.parameters())
        found[name] = seen, sharded, differ(gather_full_weights(run), alone(Module()))
    return found


ALONE: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing asked": ({}, "32-true"),
    "offload": ({"offload": True}, "32-true"),
    "gathered halves": ({"param_dtype": "bfloat16"}, "bf16-mixed"),
}


def test_one_rank_shards_where_an_option_asks_for_it() -> None:
    (found,) = run_distributed(_one_rank, 1, timeout=100)
    single, half = {torch.float32}, {torch.bfloat16}
    assert {name: value[:2] for name, value in found.items()} == {
        "nothing asked": (single, False),
        "offload": (single, True),
        "gathered halves": (half, True),
    }
    for name, (_, _, difference) in found.items():
        assert difference < (0.05 if name == "gathered halves" else 1e-6), name


def test_an_accelerator_gathers_halves_by_default_where_autocast_computes_in_them() -> None:
    cuda, cpu, plain = torch.device("cuda"), torch.device("cpu"), torch.nn.Linear(2, 2)
    assert default_param_dtype("bf16-mixed", cuda, plain) == "bfloat16"
    assert default_param_dtype("bf16-mixed", cuda, torch.nn.Sequential(torch.nn.BatchNorm1d(2))) is None
    assert default_param_dtype("bf16-mixed", cpu, plain) is None
    assert default_param_dtype("32-true", cuda, plain) is None
    run = "bf16-mixed", MeshSpec(dp_shard=2), cuda, plain
    assert FullyShard().options(*run).policy.param_dtype == torch.bfloat16
    assert FullyShard(param_dtype="float32").options(*run).policy.param_dtype == torch.float32


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(ranks: list[dict[str, Any]], check: Any) -> None:
    of(ranks, check.__name__)

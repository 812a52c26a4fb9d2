"""What FSDPStrategy decides before it starts, and that its ranks train as one process does."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from dlo_framework.distributed.meta_init import Initialiser, check_initialisable, on_meta
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.precision_policy import mixed_precision
from dlo_plugins.parallel.fsdp.row_shards import row_range
from dlo_plugins.parallel.fsdp.sharding import check_reshard, separable_units
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from support.plain_nets import plain

# --- the mesh -------------------------------------------------------------------------------------------------


def test_resharding_to_a_number_wants_a_divisor() -> None:
    for allowed in (None, True, False, 2, 4):
        check_reshard(allowed, 8)
    with pytest.raises(DloError, match=r"divisor of the 8 ranks .* got 3; use 2, 4, true or false"):
        check_reshard(3, 8)
    with pytest.raises(DloError, match="got 8; use 2, 4, true or false"):
        check_reshard(8, 8)
    with pytest.raises(DloError, match="got 2; use true or false"):
        check_reshard(2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate": 2, "shard": 3}, "world size must be replicate 2 x shard 3 = 6, got 4"),
        ({"reshard_after_forward": 3}, "divisor of the 4 ranks"),
        ({"forward_prefetch": -1}, "forward_prefetch must be a number of units"),
        ({"param_dtype": "float16"}, "must come with a loss scale"),
        ({"param_dtype": "bfloat61"}, "did you mean 'bfloat16'"),
    ],
)
def test_the_trainer_refuses_before_any_process_starts(options: dict, message: str) -> None:
    with pytest.raises(DloError, match=message):
        Trainer(accelerator="cpu", devices=4, strategy=FSDPStrategy(**options), logger=False)


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "sizes", "offload"), [("fsdp", (1, 4), False), ("hsdp", (2, 2), False), ("fsdp_offload", (1, 4), True)]
)
def test_the_short_names_mean_this_strategy(alias: str, sizes: tuple[int, int], offload: bool) -> None:
    registry = Registry()
    assert registry.load(alias, "strategy") is FSDPStrategy
    nodes = 2 if alias == "hsdp" else 1
    trainer = Trainer(accelerator="cpu", devices=4 // nodes, num_nodes=nodes, strategy=alias, logger=False)
    assert type(trainer.strategy) is FSDPStrategy  # Lightning's own is called fsdp too, and refuses a CPU
    assert tuple(trainer.strategy.mesh_spec().sizes.values())[1:3] == sizes
    assert trainer.strategy.appliers.shard.offload is offload
    assert StrategyRegistry[alias]["strategy"] is FSDPStrategy


# --- precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "param", "expected"),
    [
        ("bf16-mixed", None, (None, None)),
        ("bf16-mixed", "bfloat16", (torch.bfloat16, torch.float32)),
        ("16-mixed", "fp16", (torch.float16, torch.float32)),
        ("bf16-true", "bfloat16", (torch.bfloat16, torch.float32)),
    ],
)
def test_a_policy_follows_from_the_precision(precision: str, param: str | None, expected: tuple) -> None:
    policy = mixed_precision(precision, param, None, None)
    assert (policy.param_dtype, policy.reduce_dtype) == expected
    assert mixed_precision(precision, param, "bfloat16", "float32").reduce_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "param"),
    [("bf16-mixed", "float16"), ("bf16-true", "float32"), ("16-mixed", "bfloat16"), ("64-true", "bf16")],
)
def test_precisions_that_contradict_each_other_are_refused(precision: str, param: str) -> None:
    with pytest.raises(DloError, match=f"precision {precision}.* {param}"):
        mixed_precision(precision, param, None, None)


# --- units ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, between_blocks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        if between_blocks:
            self.blocks[2][1].weight = self.blocks[0][0].weight


def test_a_unit_that_shares_a_parameter_with_others_is_none() -> None:
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert separable_units(Tied(), names) == ["blocks.0", "blocks.1", "blocks.2"]
    assert separable_units(Tied(between_blocks=True), names) == ["blocks.1"]
    within = Tied()
    within.blocks[0][1].weight = within.blocks[0][0].weight
    assert separable_units(within, names) == ["blocks.0", "blocks.1", "blocks.2"]


@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 5))
def test_ranks_hold_the_rows_that_torch_gives_them(first: int, other: int, ranks: int) -> None:
    tensor = torch.arange(first * other).reshape(first, other)
    chunks = list(tensor.chunk(ranks)) if first else []
    for rank in range(ranks):
        start, length = row_range(tensor.shape, ranks, rank)
        expected = chunks[rank].flatten() if rank < len(chunks) else tensor.new_empty(0)
        assert torch.equal(tensor.flatten()[start : start + length], expected)
    assert sum(row_range(torch.Size([]), ranks, rank)[1] for rank in range(ranks)) == 1


# --- initial values -------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Modules that torch initialises in three ways, a tied weight, and a buffer that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


def whole(order: list[str], seed: int = 5) -> nn.Module:
    with torch.device("meta"):
        net = Attending()
    initialise = Initialiser(torch.device("cpu"), seed)
    for name in order:
        initialise(net.get_submodule(name), name)
    return net


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, other = whole([""]).state_dict(), whole(["norm", "attention", ""]).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["one.weight"], whole([""], seed=6).state_dict()["one.weight"])
    assert not any(torch.isnan(value).any() for value in one.values())
    assert not torch.equal(one["one.bias"], one["other.bias"])  # drawn from different seeds


def test_initial_values_are_those_that_the_modules_define() -> None:
    net = whole([""])
    assert not on_meta(net)
    assert net.one.weight is net.other.weight
    assert float(net.attention.out_proj.bias.abs().max()) == 0  # The attention sets it after its projection.
    limit = math.sqrt(6 / (8 + 24))  # Xavier's
    assert 0.5 * limit < float(net.attention.in_proj_weight.max()) <= limit
    assert torch.equal(net.norm.running_var, torch.ones(8))


def test_what_nothing_initialises_is_refused_by_name_unless_a_checkpoint_brings_it() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))
            self.inner = nn.Linear(2, 2)

    with torch.device("meta"):
        net = nn.Sequential(Bare())
    with pytest.raises(DloError, match=r"a reset_parameters\(\) that initialises them, got 0\.token without;"):
        check_initialisable(net, loads_weights=False)
    check_initialisable(net, loads_weights=True)
    net[0].register_buffer("mask", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(DloError, match=r"got 0\.mask without;"):
        check_initialisable(net, loads_weights=True)
    Initialiser(torch.device("cpu"), 0)(net, "")
    assert torch.isnan(net[0].token).all()  # so that a weight which the checkpoint lacks shows at once


# --- recomputation --------------------------------------------------------------------------------------------


# --- what a checkpoint amid an accumulation saves -------------------------------------------------------------


# FSDP on ranks trains as one process does: each option, optimizer, accumulation, precision, clipping, hybrid sharding


def case(optimizer: str = "adamw", accumulate: int = 1, trainer: dict[str, Any] | None = None, **options: Any) -> Case:
    trainer = {"accumulate_grad_batches": accumulate, **(trainer or {})}
    name = f"{options}, {optimizer}, {trainer}"
    return Case(partial(FSDPStrategy, **options), {"optimizer": optimizer}, trainer, name)


CLIPPED = {"gradient_clip_val": 0.1}
HALF = {"precision": "bf16-mixed"}


def test_each_option_and_optimizer_is_one_process() -> None:
    cases = [
        case(reshard_after_forward=False, accumulate=2),
        case(reshard_after_forward=True, accumulate=2),
        case(units=["blocks.1", "blocks.*.2", "head"], accumulate=2),
        case(units=[], trainer=CLIPPED),
        case(offload=True, recompute=True, forward_prefetch=1, sync_every_micro_batch=True, accumulate=2),
        case("lamb", offload=True),
        case("orthogonal", accumulate=2),
        case("sgd", accumulate=2, trainer=CLIPPED),
        case(accumulate=4, trainer=HALF),
        case(param_dtype="bfloat16", trainer=HALF),
    ]
    assert_parity(plain, cases, steps=3)


@pytest.mark.slow
def test_four_ranks_are_one_process() -> None:
    cases = [
        case(replicate=2, shard=-1, accumulate=2),
        case("lamb", replicate=-1, shard=2),
        case("orthogonal", replicate=2, shard=2, accumulate=2),
        case(replicate=2, trainer=CLIPPED),
        case(replicate=2, offload=True),
        case(accumulate=4),
        case(reshard_after_forward=2),
        case("sgd", units=["blocks.*"]),
    ]
    assert_parity(plain, cases, world_size=4, steps=4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_a_hundred_steps(ranks: int) -> None:
    optimizers = ("adamw", "sgd", "lamb", "orthogonal")
    axes: list[dict[str, Any]] = [{}, {"offload": True}, *([{"replicate": 2}] if ranks == 4 else [])]
    every = [(name, options, count) for name in optimizers for options in axes for count in (1, 4)]
    assert_parity(plain, [case(n, c, **o) for n, o, c in every], world_size=ranks, steps=100, rtol=1e-5, timeout=3500)
    assert_parity(plain, [case(n, c, HALF, **o) for n, o, c in every], world_size=ranks, steps=20, timeout=3500)

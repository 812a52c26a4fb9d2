"""What FSDPStrategy decides before it starts, that its ranks train as one process does, and what it does in runs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.meta_init import Initialiser, check_initialisable, on_meta
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.registry import Registry
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compile.callback import Compile
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.precision_policy import mixed_precision
from dlo_plugins.parallel.fsdp.row_shards import row_range
from dlo_plugins.parallel.fsdp.sharding import check_reshard, separable_units
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.gathered_dtype import default_param_dtype
from support.fsdp_nets import WIDTH, Module, Net, alone, check_fit, data, differ, fit, mine, trainer
from support.on_ranks import on_ranks
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


# FSDP on ranks trains as one process does: each option, optimizer, accumulation, precision, clipping, hybrid sharding


def case(optimizer: str = "adamw", accumulate: int = 1, trainer: dict[str, Any] | None = None, **options: Any) -> Case:
    trainer = {"accumulate_grad_batches": accumulate, **(trainer or {})}
    name = f"{options}, {optimizer}, {trainer}"
    return Case(partial(FSDPStrategy, **options), {"optimizer": optimizer}, trainer, name)


CLIPPED = {"gradient_clip_val": 0.1}
HALF = {"precision": "bf16-mixed"}


def test_each_option_and_optimizer_is_one_process() -> None:
    cases = [
        case("sgd", reshard_after_forward=False, accumulate=2, trainer=CLIPPED),
        case("orthogonal", reshard_after_forward=True, accumulate=2),
        case(units=["blocks.1", "blocks.*.2", "head"], accumulate=2),
        case(units=[], trainer=CLIPPED),
        case(offload=True, recompute=True, forward_prefetch=1, sync_every_micro_batch=True, accumulate=2),
        case(accumulate=2, trainer=HALF),
        case(param_dtype="bfloat16", trainer=HALF),
    ]
    assert_parity(plain, cases, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_a_hundred_steps(ranks: int) -> None:
    optimizers = ("adamw", "sgd", "lamb", "orthogonal")
    axes: list[dict[str, Any]] = [{}, {"offload": True}]
    axes += [{"replicate": 2}, {"replicate": 2, "offload": True}, {"reshard_after_forward": 2}] if ranks == 4 else []
    every = [(name, options, count) for name in optimizers for options in axes for count in (1, 4)]
    assert_parity(plain, [case(n, c, **o) for n, o, c in every], world_size=ranks, steps=100, rtol=1e-5, timeout=3500)
    assert_parity(plain, [case(n, c, HALF, **o) for n, o, c in every], world_size=ranks, steps=20, timeout=3500)


# --- what it does in runs on two ranks, and with models that are not plain -------------------------------------------


class Scaled(Module):
    """Its second rank alone overflows in the second step."""

    def loss(self, batch: Any) -> Tensor:
        overflow = dist.get_rank() == 1 and len(self.losses) == 1
        return super().loss(batch) * (float("inf") if overflow else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        total = sum(float(t.double().sum()) for t in self.trainer.strategy.local_tensors())
        self.seen = [*getattr(self, "seen", []), (self.trainer.precision_plugin.scaler.get_scale(), total)]


@on_ranks(2)
def test_one_rank_that_overflows_makes_all_skip_the_step(rank: int, world: int) -> None:
    # The Trainer takes bf16 for fp16 on a CPU, but torch's autocast and loss scale do not need an accelerator.
    half, module = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), Scaled()
    run = fit(rank, world, module, FSDPStrategy(), plugins=[half])
    scales, totals = zip(*module.seen, strict=True)
    assert scales == (65536.0, 32768.0, 32768.0, 32768.0)
    assert totals[0] == totals[1] != totals[2]
    assert all(bool(torch.isfinite(t).all()) for t in run.strategy.local_tensors())


class Meta(Module):
    """Built by ``configure_model``, after the strategy is there."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.losses = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Net()
            self.was_meta = self.net.head.weight.is_meta


def initialised_without_memory(rank: int, world: int, folder: Path) -> list[dict[str, Tensor]]:
    """Returns the first weights, of units and of all as one."""
    weights = []
    for number, options in enumerate(({}, {"units": [], "offload": True})):
        torch.manual_seed(11)
        run, module = trainer(world, FSDPStrategy(meta_init=True, **options)), Meta()
        if number:  # Something else has drawn random numbers.
            torch.rand(3)
        run.validate(module, mine(rank, world), verbose=False)
        assert module.was_meta
        weights.append(gather_full_weights(run))
        if number == 0:
            run.fit(module, mine(rank, world))
            run.save_checkpoint(folder / "meta.ckpt")
            trained = gather_full_weights(run)
    torch.manual_seed(12)
    run, module = trainer(world, FSDPStrategy(meta_init=True)), Meta()
    run.validate(module, mine(rank, world), ckpt_path=folder / "meta.ckpt", verbose=False)
    loaded = gather_full_weights(run)
    assert rank or differ(loaded, trained) == 0
    assert all(value.std() > 0.05 for value in weights[0].values())
    return weights


@on_ranks(2)
def test_blocks_are_compiled(rank: int, world: int) -> None:
    compiling = Compile(scope="blocks", backend="aot_eager")
    check_fit(rank, world, Module(), FSDPStrategy(recompute=True), alone(Module()), callbacks=[compiling])
    assert compiling.tally.graphs > 0


class Stumbles(Module):
    """Raises once in forward and once in backward, as a batch that does not fit memory does, and tries again."""

    def __init__(self, places: dict[int, str]) -> None:
        super().__init__()
        self.places = places
        self.stumbled: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        where = self.places.get(batch_idx)
        if where is None:
            return
        hook = self.fail if where == "forward" else self.fail_later
        handle = self.net.blocks[1].register_forward_hook(hook)
        try:
            strategy = self.trainer.strategy
            strategy.backward(strategy.training_step(batch, batch_idx)["loss"], None)
        except MemoryError:
            self.stumbled.append(where)
        finally:
            handle.remove()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}

    @staticmethod
    def fail(*_: Any) -> None:
        raise MemoryError

    @classmethod
    def fail_later(cls, module: Any, arguments: Any, output: Tensor) -> None:
        output.register_hook(cls.fail)


class Raises(Module):
    """Steps by hand, and raises before anything has been gathered."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise MemoryError


@on_ranks(2)
def test_a_step_that_raised_leaves_nothing_behind(rank: int, world: int) -> None:
    expected: dict[str, dict[str, Tensor]] = {}
    for options, precision, accumulate, places in (
        ({"reshard_after_forward": False}, "32-true", 1, {0: "backward", 2: "forward", 3: "backward"}),
        ({"forward_prefetch": 1, "backward_prefetch": 2}, "32-true", 1, {1: "backward", 2: "forward"}),
        ({}, "bf16-mixed", 2, {0: "backward", 2: "backward"}),
    ):
        stumbling, trained = Stumbles(places), {"precision": precision, "accumulate_grad_batches": accumulate}
        if precision not in expected:
            expected[precision] = gather_full_weights(fit(rank, world, Module(), FSDPStrategy(**options), **trained))
        check_fit(rank, world, stumbling, FSDPStrategy(**options), expected[precision], **trained)
        assert stumbling.stumbled == list(places.values())
    with pytest.raises(MemoryError) as raised:
        fit(rank, world, Raises(), FSDPStrategy())
    assert raised.value.__context__ is None  # Not one of FSDP2's, by dropping what is not there.


class Normed(Module):
    """A batch norm in a block and one outside."""

    @staticmethod
    def prepare(net: Any) -> None:
        for block in net.blocks:
            block.two = nn.Sequential(nn.BatchNorm1d(9), block.two)
        net.stem = nn.Sequential(net.stem, nn.BatchNorm1d(WIDTH))


@on_ranks(2)
def test_synchronised_batch_norms_come_before_the_first_sharding_and_stay(rank: int, world: int) -> None:
    """Evaluates, and sets up a fit: torch's synchronised norms do not train on a CPU."""
    run = trainer(world, FSDPStrategy(), sync_batchnorm=True, limit_train_batches=0, limit_val_batches=1.0)
    module, norms = Normed(), []
    for step in (run.validate, run.fit):
        step(module, mine(rank, world))
        norms.append([id(part) for part in module.modules() if isinstance(part, nn.SyncBatchNorm)])
    found = float(run.validate(module, mine(rank, world), verbose=False)[0]["val"])
    reference = Normed().eval()
    losses = [reference.loss(batch).detach() for batch in data()]
    assert len(norms[0]) == 3
    assert norms[1] == norms[0]
    assert found == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


class Even(Module):
    """Sizes that two ranks divide, and no parameter outside the units."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.stem, net.head = nn.Identity(), nn.Identity()
        net.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = self.trainer.strategy.state_bytes()


@on_ranks(2)
def test_what_passes_and_what_a_rank_holds_is_what_the_paper_says(rank: int, world: int) -> None:
    """All-gathers and reduce-scatters of a step, and bytes, both in units of psi."""
    for options, accumulate, gathered, reduced in (
        ({}, 1, 2, 1),
        ({"reshard_after_forward": False}, 1, 1, 1),
        ({}, 4, 8, 1),
        ({"sync_every_micro_batch": True}, 4, 8, 4),
    ):
        run, module = trainer(world, FSDPStrategy(**options), accumulate_grad_batches=accumulate), Even()
        run.fit(module, mine(rank, world, 8))
        psi = sum(parameter.numel() for parameter in module.parameters())
        each = psi * run.global_step
        assert run.strategy.engine.sharded.sharers.elements == {
            "all_gather": gathered * each,
            "reduce_scatter": reduced * each,
        }
        held = {what: count / psi / 4 for what, count in module.held.items()}
        assert held["parameters"] == held["gradients"] == 0.5
        assert held["optimizer"] == pytest.approx(1, abs=0.05)  # And a count of steps a parameter.


def test_first_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    weights, _ = run_distributed(initialised_without_memory, 2, tmp_path, timeout=100)
    (one,) = run_distributed(initialised_without_memory, 1, tmp_path)
    for found in [*weights, *one]:
        assert all(torch.equal(found[name], value) for name, value in weights[0].items())


# --- models that are not plain ---------------------------------------------------------------------------------


class UnusedModule(Module):
    """A block's parameter that no loss depends on, and one that depends on the rank."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.blocks[0].never = nn.Linear(3, 3)
        net.now_and_then = nn.Parameter(torch.ones(WIDTH))
        net.now_and_never = nn.Parameter(torch.tensor(1.0))

    def __init__(self, part: int = 0) -> None:
        super().__init__()
        self.part = part

    def loss(self, batch: Any) -> Tensor:
        x = batch[0] * self.net.now_and_then * self.net.now_and_never if self.part == 1 else batch[0]
        return nn.functional.cross_entropy(self.net(x), batch[1])


@on_ranks(2)
def test_unused_parameters_stay_and_rank_dependent_ones_get_their_mean(rank: int, world: int) -> None:
    """Gradients of first micro-batches are accumulated in single precision; those of unused parameters are not."""
    strategy, halves = FSDPStrategy(find_unused=True), FSDPStrategy(find_unused=True, param_dtype="bfloat16")
    check_fit(rank, world, UnusedModule(rank), strategy, alone(UnusedModule(), parts=world))
    expected, window = alone(UnusedModule(), parts=world, accumulate=2), {"accumulate_grad_batches": 2}
    check_fit(rank, world, UnusedModule(rank), halves, expected, near=0.05, precision="bf16-mixed", **window)


@on_ranks(2)
def test_unused_parameters_are_named(rank: int, world: int) -> None:
    with pytest.raises(DloError) as error:
        fit(rank, world, UnusedModule(rank), FSDPStrategy())
    message = str(error.value)
    assert rank or "net.now_and_then" in message
    assert rank or "net.now_and_never" in message
    assert "net.blocks.0.never.weight, net.blocks.0.never.bias" in message
    assert "find_unused: true" in message


@on_ranks(2)
def test_a_module_that_is_sharded_keeps_its_options(rank: int, world: int) -> None:
    module = Module()
    trainer(world, FSDPStrategy()).test(module, mine(rank, world), verbose=False)
    with pytest.raises(DloError, match="must be those of the earlier run that has sharded"):
        fit(rank, world, module, FSDPStrategy(offload=True))


@on_ranks(2)
def test_the_applier_shards_a_model_by_itself(rank: int, world: int) -> None:
    """As strategies of users' own apply it."""
    torch.manual_seed(2)
    net = Net()
    whole = net(data()[0][0])
    FullyShard().apply(net, init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)), ParallelPlan.infer(net))
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in net.parameters())
    assert float((net(data()[0][0]) - whole).abs().max()) < 1e-6


@on_ranks(1)
def test_one_rank_shards_where_an_option_asks_for_it(rank: int, world: int) -> None:
    for options, precision, dtype, is_sharded, near in (
        ({}, "32-true", torch.float32, False, 1e-6),
        ({"offload": True}, "32-true", torch.float32, True, 1e-6),
        ({"param_dtype": "bfloat16"}, "bf16-mixed", torch.bfloat16, True, 0.05),
    ):
        module, seen = Module(), set()
        module.net.head.register_forward_pre_hook(lambda head, _, seen=seen: seen.add(head.weight.dtype))
        check_fit(rank, world, module, FSDPStrategy(**options), alone(Module()), near=near, precision=precision)
        assert seen == {dtype}, options
        assert {isinstance(parameter, DTensor) for parameter in module.parameters()} == {is_sharded}, options


def test_an_accelerator_gathers_halves_by_default_where_autocast_computes_in_them() -> None:
    cuda, cpu, plain = torch.device("cuda"), torch.device("cpu"), torch.nn.Linear(2, 2)
    assert default_param_dtype("bf16-mixed", cuda, plain) == "bfloat16"
    assert default_param_dtype("bf16-mixed", cuda, torch.nn.Sequential(torch.nn.BatchNorm1d(2))) is None
    assert default_param_dtype("bf16-mixed", cpu, plain) is None
    assert default_param_dtype("32-true", cuda, plain) is None
    run = "bf16-mixed", MeshSpec(dp_shard=2), cuda, plain
    assert FullyShard().options(*run).policy.param_dtype == torch.bfloat16
    assert FullyShard(param_dtype="float32").options(*run).policy.param_dtype == torch.float32

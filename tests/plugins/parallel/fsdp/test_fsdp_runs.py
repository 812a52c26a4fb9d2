"""What FSDPStrategy does in runs and with models that are not plain: on two ranks, all in one start of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from timm.optim import Lamb
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compile.callback import Compile
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
from support.runs import Watch


class Scaled(Module):
    """Its second rank alone overflows in the second step."""

    def loss(self, batch: Any) -> Tensor:
        overflow = dist.get_rank() == 1 and len(self.losses) == 1
        return super().loss(batch) * (float("inf") if overflow else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.get_scale()]
        self.seen = [
            *getattr(self, "seen", []),
            sum(float(t.double().sum()) for t in self.trainer.strategy.local_tensors()),
        ]


def one_rank_that_overflows_makes_all_skip_the_step(rank: int, world: int, folder: Path) -> None:
    # The Trainer takes bf16 for fp16 on a CPU, but torch's autocast and loss scale do not need an accelerator.
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    run, module = trainer(world, FSDPStrategy(), plugins=[half]), Scaled()
    run.fit(module, mine(rank, world))
    assert module.scales == [65536.0, 32768.0, 32768.0, 32768.0]
    assert module.seen[1] == module.seen[0]
    assert module.seen[2] != module.seen[1]
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


def blocks_are_compiled(rank: int, world: int, folder: Path) -> None:
    compiling = Compile(scope="blocks", backend="aot_eager")
    run = trainer(world, FSDPStrategy(recompute=True), callbacks=[compiling])
    run.fit(Module(), mine(rank, world))
    weights = gather_full_weights(run)
    assert rank or differ(weights, alone(Module())) < 1e-6
    assert compiling.tally.graphs > 0


def an_accumulation_goes_on_after_a_resume(rank: int, world: int, folder: Path) -> None:
    for name, options in (("local", {}), ("reduced", {"sync_every_micro_batch": True})):
        path = folder / f"{name}.ckpt"
        weights = []
        for resume in (None, path):
            callbacks = [ExactResume(), *([Watch(path, batch=5)] if resume is None else [])]
            run = trainer(world, FSDPStrategy(**options), accumulate_grad_batches=4, callbacks=callbacks)
            run.fit(Module(), mine(rank, world, 8), ckpt_path=resume)
            weights.append(gather_full_weights(run))
        assert rank or differ(*weights) < 1e-6, name
        assert run.global_step == 2


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


def a_step_that_raised_leaves_nothing_behind(rank: int, world: int, folder: Path) -> None:
    weights, expected = {}, {}
    for name, options, precision, accumulate, places in (
        ("kept", {"reshard_after_forward": False}, "32-true", 1, {0: "backward", 2: "forward", 3: "backward"}),
        ("ahead", {"forward_prefetch": 1, "backward_prefetch": 2}, "32-true", 1, {1: "backward", 2: "forward"}),
        ("bf16", {}, "bf16-mixed", 2, {0: "backward", 2: "backward"}),
    ):
        stumbling = Stumbles(places)
        for module in (stumbling, *([Module()] if precision not in expected else [])):
            run = trainer(world, FSDPStrategy(**options), precision=precision, accumulate_grad_batches=accumulate)
            run.fit(module, mine(rank, world))
            (weights if module is stumbling else expected)[precision] = gather_full_weights(run)
        assert stumbling.stumbled == list(places.values())
        assert rank or differ(weights[precision], expected[precision]) < 1e-6, name
    with pytest.raises(MemoryError) as raised:
        trainer(world, FSDPStrategy()).fit(Raises(), mine(rank, world))
    assert raised.value.__context__ is None  # Not one of FSDP2's, by dropping what is not there.


class Lambs(Module):
    """Steps whole tensors, by the norms of each and of all."""

    def configure_optimizers(self) -> Any:
        return Lamb(self.net.parameters(), lr=self.rate, max_grad_norm=0.5)


class Adafactors(Module):
    """Keeps a row and a column of a matrix for its state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.net.parameters(), lr=self.rate)


def others_go_on_from_its_checkpoints_and_it_from_theirs(rank: int, world: int, folder: Path) -> None:
    ways = (
        ("fsdp", FSDPStrategy),
        ("ddp", DataParallelStrategy),
        ("offloaded, in other units", lambda: FSDPStrategy(offload=True, units=["net.head"])),
        ("back from ddp", FSDPStrategy),
    )
    for cls, chosen in ((Module, (ways[0], ways[1], ways[3])), (Lambs, ways[2:3]), (Adafactors, ways[1:2])):
        path = folder / f"{cls.__name__}.ckpt"
        run = trainer(world, FSDPStrategy(), callbacks=[Watch(path, batch=4)])
        run.fit(cls(), mine(rank, world, 8))
        expected = gather_full_weights(run)
        back = folder / f"{cls.__name__}-ddp.ckpt"
        for name, make in chosen:
            other = trainer(world, make(), callbacks=[Watch(back, batch=6)] if name == "ddp" else [])
            other.fit(cls(), mine(rank, world, 8), ckpt_path=back if name == "back from ddp" else path)
            weights = gather_full_weights(other)
            assert rank or differ(weights, expected) <= (0.0 if (cls, name) == (Module, "fsdp") else 1e-6), (cls, name)


class Normed(Module):
    """A batch norm in a block and one outside."""

    @staticmethod
    def prepare(net: Any) -> None:
        for block in net.blocks:
            block.two = nn.Sequential(nn.BatchNorm1d(9), block.two)
        net.stem = nn.Sequential(net.stem, nn.BatchNorm1d(WIDTH))


def synchronised_batch_norms_come_before_the_first_sharding_and_stay(rank: int, world: int, folder: Path) -> None:
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


def what_passes_and_what_a_rank_holds_is_what_the_paper_says(rank: int, world: int, folder: Path) -> None:
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
        passed = {
            what: count / psi / run.global_step for what, count in run.strategy.engine.sharded.sharers.elements.items()
        }
        assert passed == {"all_gather": gathered, "reduce_scatter": reduced}
        held = {what: count / psi / 4 for what, count in module.held.items()}
        assert held["parameters"] == held["gradients"] == 0.5
        assert held["optimizer"] == pytest.approx(1, abs=0.05)  # And a count of steps a parameter.


def test_first_weights_do_not_depend_on_the_number_of_ranks(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    weights = of(ranks, "initialised_without_memory")[0]
    (one,) = run_distributed(initialised_without_memory, 1, tmp_path)
    for found in [*weights, *one]:
        assert all(torch.equal(found[name], value) for name, value in weights[0].items())


# --- what FSDPStrategy does with models that are not plain: on two ranks, all in one start of them -------------------


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


CHECKS = (
    one_rank_that_overflows_makes_all_skip_the_step,
    initialised_without_memory,
    blocks_are_compiled,
    an_accumulation_goes_on_after_a_resume,
    a_step_that_raised_leaves_nothing_behind,
    what_passes_and_what_a_rank_holds_is_what_the_paper_says,
    others_go_on_from_its_checkpoints_and_it_from_theirs,
    synchronised_batch_norms_come_before_the_first_sharding_and_stay,
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
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("fsdp"), timeout=290)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(ranks: list[dict[str, Any]], check: Any) -> None:
    of(ranks, check.__name__)

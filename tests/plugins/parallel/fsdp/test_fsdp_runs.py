"""What FSDPStrategy does in runs that are not plain: on two ranks, all in one start of them."""

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

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compile.callback import Compile
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from support.fsdp_nets import (
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


CHECKS = (
    one_rank_that_overflows_makes_all_skip_the_step,
    initialised_without_memory,
    blocks_are_compiled,
    an_accumulation_goes_on_after_a_resume,
    a_step_that_raised_leaves_nothing_behind,
    what_passes_and_what_a_rank_holds_is_what_the_paper_says,
    others_go_on_from_its_checkpoints_and_it_from_theirs,
    synchronised_batch_norms_come_before_the_first_sharding_and_stay,
)


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by(CHECKS, rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("fsdp"), timeout=280)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(ranks: list[dict[str, Any]], check: Any) -> None:
    of(ranks, check.__name__)


def test_first_weights_do_not_depend_on_the_number_of_ranks(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    weights = of(ranks, "initialised_without_memory")[0]
    (one,) = run_distributed(initialised_without_memory, 1, tmp_path)
    for found in [*weights, *one]:
        assert all(torch.equal(found[name], value) for name, value in weights[0].items())

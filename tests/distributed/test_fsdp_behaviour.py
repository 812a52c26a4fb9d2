"""What FSDPStrategy does with models and runs that are not plain: on two ranks, all in one start of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from timm.optim import Lamb
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.state import whole_weights
from dlo_plugins.callbacks.compile import Compile
from dlo_plugins.strategies.fsdp import FSDPStrategy

WIDTH, STEPS, BATCH = 6, 4, 8


def data(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(5, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


class Batches:
    """A rank's batches, which a resumed run goes on with."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.next = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.next %= len(self.batches)
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def mine(rank: int, world: int, steps: int = STEPS) -> Batches:
    return Batches([tuple(t.chunk(world)[rank] for t in batch) for batch in data(steps)])


def trainer(world: int, strategy: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return Trainer(**(settings | options))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(LightningModule):
    """The common one; ``prepare`` changes the net, ``loss`` computes from it."""

    prepare: Callable[[Any], None] = staticmethod(lambda net: None)
    rate = 0.05

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = Net()
        self.prepare(self.net)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=self.rate, eps=1e-5, weight_decay=0.1)


def alone(module: Any, epochs: int = 1, parts: int = 1, clip: float | None = None) -> dict[str, Tensor]:
    """Returns the weights that one process in plain torch comes to."""
    optimizer = module.configure_optimizers()
    for x, y in data() * epochs:
        for number, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            module.part = number
            (module.loss((inputs, targets)) / parts).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def differ(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference between two models' weights; NaN if their names differ."""
    if found.keys() != expected.keys():
        return float("nan")
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


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


class Adversaries(LightningModule):
    """Two nets, each with an optimizer of its own, taking turns as a generator and a discriminator do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.maker, self.judge = Net(), Net()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.maker.parameters(), lr=0.05, eps=1e-5),
            torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.5),
        ]

    def fooled(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.judge(x + torch.nn.functional.pad(self.maker(x), (0, 1))), y)

    def told(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            made = x + torch.nn.functional.pad(self.maker(x), (0, 1))
        one, other = nn.functional.cross_entropy(self.judge(x), y), nn.functional.cross_entropy(self.judge(made), y)
        return one - 0.1 * other

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        self.manual_backward(self.fooled(*batch))
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        for _ in range(2):  # An accumulation by hand.
            self.manual_backward(self.told(*batch) / 2)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)


def adversaries_alone() -> dict[str, Tensor]:
    module = Adversaries()
    maker, judge = module.configure_optimizers()
    for batch in data():
        for optimizer, loss in ((maker, module.fooled), (judge, module.told)):
            loss(*batch).backward()
            optimizer.step()
            maker.zero_grad()
            judge.zero_grad()
    return module.state_dict()


# --- what runs on the ranks -------------------------------------------------------------------------------------


def _tied(rank: int, world: int, folder: Path) -> Any:
    run, module = trainer(world, FSDPStrategy()), TiedModule()
    run.fit(module, mine(rank, world))
    weights = whole_weights(run)
    units = run.strategy.sharding.units
    return differ(weights, alone(TiedModule())) if rank == 0 else 0.0, units, int(weights["net.calls"])


def _unused(rank: int, world: int, folder: Path) -> Any:
    run, module = trainer(world, FSDPStrategy(find_unused=True)), UnusedModule()
    module.part = rank
    run.fit(module, mine(rank, world))
    weights = whole_weights(run)
    return differ(weights, alone(UnusedModule(), parts=world)) if rank == 0 else 0.0


def _named(rank: int, world: int, folder: Path) -> Any:
    module = UnusedModule()
    module.part = rank
    with pytest.raises(DloError) as error:
        trainer(world, FSDPStrategy()).fit(module, mine(rank, world))
    return str(error.value)


def _manual(rank: int, world: int, folder: Path) -> Any:
    run, module = trainer(world, FSDPStrategy()), Adversaries()
    run.fit(module, mine(rank, world))
    weights = whole_weights(run)
    return differ(weights, adversaries_alone()) if rank == 0 else 0.0, len(run.strategy.sharding.roots)


def _evaluation(rank: int, world: int, folder: Path) -> Any:
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
    return {
        "evaluations": [float(loss) for loss in losses],
        "found": found,
        "predictions": float((predicted - of_reference).abs().max()),
        "second fit": differ(whole_weights(again), alone(twice)) if rank == 0 else whole_weights(again) and 0.0,
    }


def _other_options(rank: int, world: int, folder: Path) -> Any:
    module = Module()
    trainer(world, FSDPStrategy()).validate(module, mine(rank, world), verbose=False)
    with pytest.raises(DloError) as error:
        trainer(world, FSDPStrategy(offload=True)).fit(module, mine(rank, world))
    return str(error.value)


def _clipped_by_value(rank: int, world: int, folder: Path) -> Any:
    run, module = trainer(world, FSDPStrategy(), gradient_clip_val=0.01, gradient_clip_algorithm="value"), Module()
    run.fit(module, mine(rank, world))
    weights = whole_weights(run)
    return differ(weights, alone(Module(), clip=0.01)) if rank == 0 else 0.0


class Scaled(Module):
    """Its second rank alone overflows in the second step."""

    def loss(self, batch: Any) -> Tensor:
        overflow = dist.get_rank() == 1 and len(self.losses) == 1
        return super().loss(batch) * (float("inf") if overflow else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.get_scale()]
        self.seen = [
            *getattr(self, "seen", []),
            sum(float(t.double().sum()) for t in self.trainer.strategy.held_tensors()),
        ]


def _scaled(rank: int, world: int, folder: Path) -> Any:
    # The Trainer takes bf16 for fp16 on a CPU, but torch's autocast and loss scale do not need an accelerator.
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    run, module = trainer(world, FSDPStrategy(), plugins=[half]), Scaled()
    run.fit(module, mine(rank, world))
    finite = all(bool(torch.isfinite(t).all()) for t in run.strategy.held_tensors())
    return module.scales, module.seen, finite


class Meta(Module):
    """Built by ``configure_model``, after the strategy is there."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.losses = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Net()
            self.was_meta = self.net.head.weight.is_meta


def _meta(rank: int, world: int, folder: Path) -> Any:
    weights, found = [], []
    for number, options in enumerate(({}, {"units": []}, {"offload": True})):
        torch.manual_seed(11)
        run, module = trainer(world, FSDPStrategy(meta_init=True, **options)), Meta()
        if number:  # Something else has drawn random numbers.
            torch.rand(3)
        run.validate(module, mine(rank, world), verbose=False)
        found.append(module.was_meta)
        weights.append(whole_weights(run))
        if number == 0:
            run.fit(module, mine(rank, world))
            run.save_checkpoint(folder / "meta.ckpt")
            trained = whole_weights(run)
    torch.manual_seed(12)
    run, module = trainer(world, FSDPStrategy(meta_init=True)), Meta()
    run.validate(module, mine(rank, world), ckpt_path=folder / "meta.ckpt", verbose=False)
    loaded = whole_weights(run)
    return found, weights, (differ(loaded, trained) if rank == 0 else 0.0), {n: w.std() for n, w in weights[0].items()}


def _compiled(rank: int, world: int, folder: Path) -> Any:
    found = {}
    for name, options in (("plain", {}), ("recomputed", {"recompute": True})):
        compiling = Compile(scope="blocks", backend="aot_eager")
        run = trainer(world, FSDPStrategy(**options), callbacks=[compiling])
        run.fit(Module(), mine(rank, world))
        weights = whole_weights(run)
        found[name] = (differ(weights, alone(Module())) if rank == 0 else 0.0), compiling.tally.graphs
    return found


class Save(Callback):
    """Saves after a batch."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            trainer.save_checkpoint(self.path)


def _accumulated(rank: int, world: int, folder: Path) -> Any:
    found = {}
    for name, options in (("local", {}), ("reduced", {"sync_every_micro_batch": True})):
        path = folder / f"{name}.ckpt"
        weights = []
        for resume in (None, path):
            callbacks = [ExactResume(), *([Save(path, 4)] if resume is None else [])]
            run = trainer(world, FSDPStrategy(**options), accumulate_grad_batches=4, callbacks=callbacks)
            run.fit(Module(), mine(rank, world, 8), ckpt_path=resume)
            weights.append(whole_weights(run))
        found[name] = differ(*weights) if rank == 0 else 0.0, run.global_step
    return found


class Stumbles(Module):
    """Raises once in forward and once in backward, as a batch that does not fit memory does, and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.stumbled: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        where = {1: "forward", 2: "backward"}.get(batch_idx)
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


def _stumbles(rank: int, world: int, folder: Path) -> Any:
    run, module = trainer(world, FSDPStrategy()), Stumbles()
    run.fit(module, mine(rank, world))
    weights = whole_weights(run)
    return (differ(weights, alone(Module())) if rank == 0 else 0.0), module.stumbled


class Lambs(Module):
    """Steps whole tensors, by the norms of each and of all."""

    def configure_optimizers(self) -> Any:
        return Lamb(self.net.parameters(), lr=self.rate, max_grad_norm=0.5)


class Adafactors(Module):
    """Keeps a row and a column of a matrix for its state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.net.parameters(), lr=self.rate)


def _resumed(rank: int, world: int, folder: Path) -> Any:
    """Returns how far weights are from those of a run that was not stopped, whoever goes on."""
    found = {}
    for cls in (Module, Lambs, Adafactors):
        path = folder / f"{cls.__name__}.ckpt"
        run = trainer(world, FSDPStrategy(), callbacks=[Save(path, 3)])
        run.fit(cls(), mine(rank, world, 8))
        expected = whole_weights(run)
        back = folder / f"{cls.__name__}-ddp.ckpt"
        for name, make, source in (
            ("fsdp", FSDPStrategy, path),
            ("ddp", DataParallelStrategy, path),
            ("offloaded, in other units", lambda: FSDPStrategy(offload=True, units=["net.head"]), path),
            ("back from ddp", FSDPStrategy, back),
        ):
            other = trainer(world, make(), callbacks=[Save(back, 5)] if name == "ddp" else [])
            other.fit(cls(), mine(rank, world, 8), ckpt_path=source)
            weights = whole_weights(other)
            found[f"{cls.__name__}, {name}"] = differ(weights, expected) if rank == 0 else 0.0
    return found


class Normed(Module):
    """A batch norm in a block and one outside."""

    @staticmethod
    def prepare(net: Any) -> None:
        for block in net.blocks:
            block.two = nn.Sequential(nn.BatchNorm1d(9), block.two)
        net.stem = nn.Sequential(net.stem, nn.BatchNorm1d(WIDTH))


def _batch_norm(rank: int, world: int, folder: Path) -> Any:
    """Evaluates, and sets up a fit: torch's synchronised norms do not train on a CPU."""
    run = trainer(world, FSDPStrategy(), sync_batchnorm=True, limit_train_batches=0, limit_val_batches=1.0)
    module, norms = Normed(), []
    for step in (run.validate, run.fit):
        step(module, mine(rank, world))
        norms.append([id(part) for part in module.modules() if isinstance(part, nn.SyncBatchNorm)])
    found = float(run.validate(module, mine(rank, world), verbose=False)[0]["val"])
    reference = Normed().eval()
    losses = [reference.loss(batch).detach() for batch in data()]
    return norms, float(torch.stack(losses).mean()), found


class Even(Module):
    """Sizes that two ranks divide, and no parameter outside the units."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.stem, net.head = nn.Identity(), nn.Identity()
        net.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = self.trainer.strategy.state_bytes()


def _traffic(rank: int, world: int, folder: Path) -> Any:
    """Returns what passes in a step, and what a rank holds, both in units of psi."""
    found = {}
    for name, options, accumulate in (
        ("plain", {}, 1),
        ("kept", {"reshard_after_forward": False}, 1),
        ("accumulated", {}, 4),
        ("reduced", {"sync_every_micro_batch": True}, 4),
    ):
        run, module = trainer(world, FSDPStrategy(**options), accumulate_grad_batches=accumulate), Even()
        run.fit(module, mine(rank, world, 8))
        psi = sum(parameter.numel() for parameter in module.parameters())
        passed = {what: count / psi / run.global_step for what, count in run.strategy.sharding.sharers.elements.items()}
        found[name] = passed, {what: count / psi / 4 for what, count in module.held.items()}
    return found


CHECKS = {
    check.__name__: check
    for check in (
        _tied,
        _unused,
        _named,
        _manual,
        _evaluation,
        _other_options,
        _clipped_by_value,
        _scaled,
        _meta,
        _compiled,
        _accumulated,
        _stumbles,
        _traffic,
        _resumed,
        _batch_norm,
    )
}


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Returns what each check found, or its traceback: one that fails is not to hide the others."""
    found: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(rank, world, folder)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("fsdp"), timeout=280)


def of(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    """Returns each rank's findings of a check; a check that raised shows its traceback."""
    for rank in ranks:
        found = rank[name]
        assert not (isinstance(found, str) and "Traceback" in found), found
    return [rank[name] for rank in ranks]


def test_tied_frozen_and_whole_number_parameters(ranks: list[dict[str, Any]]) -> None:
    difference, units, calls = of(ranks, "_tied")[0]
    assert difference < 1e-6
    assert units == ["net.blocks.0"]  # The other one shares its weight with the head.
    assert calls == STEPS


def test_unused_parameters_stay_as_they_are_and_rank_dependent_ones_get_their_mean(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "_unused")[0] < 1e-6


def test_unused_parameters_are_named(ranks: list[dict[str, Any]]) -> None:
    first, second = of(ranks, "_named")
    assert "net.now_and_then" in first
    assert "net.now_and_never" in first
    for message in (first, second):
        assert "net.blocks.0.never.weight, net.blocks.0.never.bias got none" in message
        assert "find_unused: true" in message


def test_two_optimizers_by_hand(ranks: list[dict[str, Any]]) -> None:
    difference, roots = of(ranks, "_manual")[0]
    assert difference < 1e-6
    assert roots == 2


def test_evaluation_around_fits(ranks: list[dict[str, Any]]) -> None:
    for found in of(ranks, "_evaluation"):
        assert found["found"] == pytest.approx(found["evaluations"], rel=1e-5)
        assert found["predictions"] < 1e-5
        assert found["second fit"] < 1e-6


def test_a_module_that_is_sharded_keeps_its_options(ranks: list[dict[str, Any]]) -> None:
    assert all("sharded by an earlier run with other options" in message for message in of(ranks, "_other_options"))


def test_clipping_by_value(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "_clipped_by_value")[0] < 1e-6


def test_one_rank_that_overflows_makes_all_skip_the_step(ranks: list[dict[str, Any]]) -> None:
    (scales, seen, finite), other = of(ranks, "_scaled")
    assert scales == other[0]
    assert scales == [65536.0, 32768.0, 32768.0, 32768.0]
    for weights in (seen, other[1]):
        assert weights[1] == weights[0]
        assert weights[2] != weights[1]
    assert finite
    assert other[2]


def test_initialisation_without_memory(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    meta, weights, loaded, spread = of(ranks, "_meta")[0]
    assert meta == [True] * 3
    (one,) = run_distributed(_meta, 1, tmp_path)
    for found in [*weights, *one[1]]:
        assert all(torch.equal(found[name], value) for name, value in weights[0].items())
    assert loaded == 0
    assert all(value > 0.05 for value in spread.values())


def test_compiled_blocks(ranks: list[dict[str, Any]]) -> None:
    for difference, graphs in of(ranks, "_compiled")[0].values():
        assert difference < 1e-6
        assert graphs > 0


def test_an_accumulation_goes_on_after_a_resume(ranks: list[dict[str, Any]]) -> None:
    for difference, steps in of(ranks, "_accumulated")[0].values():
        assert difference < 1e-6
        assert steps == 2


def test_a_step_that_raised_leaves_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    difference, stumbled = of(ranks, "_stumbles")[0]
    assert difference < 1e-6
    assert stumbled == ["forward", "backward"]


def test_what_passes_and_what_a_rank_holds_is_what_the_paper_says(ranks: list[dict[str, Any]]) -> None:
    for found in of(ranks, "_traffic"):
        assert found["plain"][0] == {"all_gather": 2, "reduce_scatter": 1}
        assert found["kept"][0] == {"all_gather": 1, "reduce_scatter": 1}
        assert found["accumulated"][0] == {"all_gather": 8, "reduce_scatter": 1}
        assert found["reduced"][0] == {"all_gather": 8, "reduce_scatter": 4}
        for _, held in found.values():
            assert held["parameters"] == held["gradients"] == 0.5
        assert found["plain"][1]["optimizer"] == pytest.approx(1, abs=0.05)  # and a count of steps a parameter


def test_others_go_on_from_its_checkpoints_and_it_from_theirs(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "_resumed")[0]
    assert len(found) == 12
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}
    assert all(found[f"{cls}, fsdp"] == 0 for cls in ("Module", "Lambs", "Adafactors"))


def test_synchronised_batch_norms_come_before_the_first_sharding_and_stay(ranks: list[dict[str, Any]]) -> None:
    for (first, second), expected, found in of(ranks, "_batch_norm"):
        assert len(first) == 3
        assert second == first
        assert found == pytest.approx(expected, rel=1e-6)

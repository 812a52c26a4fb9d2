"""Compile of the loss and of the optimizer, and resumed runs: values of the uncompiled step, and of the whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CUDA_GRAPHS
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_curves import OneCycle
from support.compiled_calls import CALLS, fresh_compiler
from support.fsdp_nets import Batches, differ, trainer
from support.runs import fit_with_defaults
from support.trainers import quiet_trainer

clean = pytest.fixture(autouse=True)(fresh_compiler)

ROWS, STEPS = 4, 6


class Net(Task):
    scheduled = True
    make: Any = staticmethod(lambda parameters: torch.optim.AdamW(parameters, lr=0.05))

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def inputs(self, batch: Any) -> Any:
        return (batch[0],), {}

    def loss(self, outputs: Any, batch: Any) -> Any:
        return cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    """Notes the rates after each step, and whether they are numbers; its hooks count the steps."""

    def __init__(self) -> None:
        self.rates: list[Any] = []
        self.before = self.after = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def count(name: str) -> Any:
            return lambda *_: setattr(self, name, getattr(self, name) + 1)

        trainer.optimizers[0].register_step_pre_hook(count("before"))
        trainer.optimizers[0].register_step_post_hook(count("after"))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(module: LightningModule, *callbacks: Any, sizes: tuple[int, ...] = (ROWS,) * STEPS) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(5)
    rows = [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]
    data = DataLoader(TensorDataset(*map(torch.cat, zip(*rows, strict=True))), batch_size=ROWS)
    module.configure_model()
    quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=list(callbacks)).fit(module, data)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def net(make: Any = Net.make) -> Net:
    seed_everything(3, verbose=False)
    found = Net()
    found.make = make
    return found


MAKES: dict[str, Any] = {
    "adamw": Net.make,
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "adamw, fused"])
def test_weights_are_those_of_the_uncompiled_step_and_rates_are_no_new_code(name: str) -> None:
    expected = fit(net(MAKES[name]))
    watch, callback = Rates(), Compile(backend="aot_eager", optimizer=True, loss=True)
    module = net(MAKES[name])
    # RunMonitor counts the first batch's FLOPs, step and all, by a mode under which torch.compile compiles nothing.
    found = fit(module, RunMonitor(), watch, callback, sizes=(*(ROWS,) * STEPS, 2))
    assert watch.before == watch.after == STEPS + 1
    assert watch.rates == pytest.approx([0.05 * (1 - 0.1 * step) for step in range(1, STEPS + 2)])
    assert all(isinstance(rate, float) for rate in watch.rates)
    # The model, the loss and the step; a second graph of the step has the state that the first has made.
    assert callback.tally.graphs <= 4, callback.tally.text()
    assert not any("lr" in reason for reason in callback.tally.recompiles), callback.tally.text()
    assert "CompiledOptimizer" not in module.trainer.optimizers[0].step.__qualname__
    assert "loss" not in module.__dict__
    module = net(MAKES[name])
    found = fit(module, Compile(backend="aot_eager", optimizer=True, loss=True))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # As in `dlo`.
def test_inductor_compiles_both_on_a_cpu(tmp_path: Any) -> None:
    expected = fit(net())
    callback = Compile(optimizer=True, loss=True, cache_dir=str(tmp_path))
    found = fit(net(), callback)
    assert callback.tally.graphs >= 3
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


class Plain(LightningModule):
    def configure_model(self) -> None:
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(DloError, match=r"loss: true must have a Task.* got Plain"):
        fit(Plain(), Compile(backend="aot_eager", loss=True))
    with pytest.raises(DloError, match="must have an optimizer with a foreach implementation, got Muon"):
        fit(net(lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2])), Compile(optimizer=True))
    module = net()
    module.scheduled = False
    with pytest.raises(DloError, match=r"must have constant parameter groups but for lr, got betas .* cycle_momentum"):
        fit(module, OneCycle(max_lr=0.1), Compile(backend="aot_eager", optimizer=True))


def _compare(rank: int, world: int) -> float:
    weights = []
    for callbacks in ([], [Compile(backend="aot_eager", optimizer=True, loss=True)]):
        module, draw = net(), torch.Generator().manual_seed(rank)
        batches = [(torch.randn(ROWS, 6, generator=draw), torch.randint(3, (ROWS,), generator=draw)) for _ in "four"]
        run = trainer(world, ZeroStrategy(3), callbacks=callbacks)
        run.fit(module, Batches(batches))
        weights.append(gather_full_weights(run))
    return differ(*weights) if rank == 0 else 0.0


def test_ranks_have_the_weights_of_the_uncompiled_step() -> None:
    """The composition of callbacks and strategies has the other strategies."""
    assert 0 <= run_distributed(_compare, 2, timeout=200)[0] < 1e-5


class OnGraphs(Compile):
    """As on an accelerator, but for the graphs."""

    @property
    def _cuda_graphs(self) -> bool:
        return self.mode in CUDA_GRAPHS

    @_cuda_graphs.setter
    def _cuda_graphs(self, value: bool) -> None:
        pass


def test_a_step_of_cuda_graphs_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    with pytest.raises(DloError, match=r"batches must keep their shapes .* got DynamicBatchSize; set mode: default"):
        fit(net(), OnGraphs(mode="reduce-overhead", optimizer=True), DynamicBatchSize({0: ROWS}))
    callback = OnGraphs(mode="reduce-overhead", optimizer=True)
    callback.backend = "eager"
    fit(net(), callback, sizes=(ROWS, ROWS, 2))  # The last batch of an epoch runs uncompiled.
    callback._shapes = [(ROWS, 6), (ROWS,)]
    with pytest.raises(DloError, match=r"got \[\(3, 6\), \(3,\)\] after \[\(4, 6\), \(4,\)\]"):
        callback._check_shapes([torch.ones(3, 6), torch.ones(3)])


# Compile: a run that is stopped and resumed is the whole one, and checkpoints are those of a run without it


class Resumed(LightningModule):
    """Takes any number of rows of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        loss = cross_entropy(outputs.mean(1), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]).mean(1), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(count: int) -> TensorDataset:
    torch.manual_seed(5)
    return TensorDataset(torch.randn(count, 4, 6), torch.randint(3, (count,)))


class Rows(BatchTransform):
    """Cuts the samples of batches down to 3 rows, from the eighth batch on."""

    def transform(self, trainer, pl_module, batch):
        place = trainer.current_epoch * 6 + trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return [batch[0][:, :3] if place >= 7 else batch[0], batch[1]]


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=5, num_workers=0, seed=3)

    def train_dataloader(self):
        return self.train_loader(samples(32))

    def val_dataloader(self):
        return self.eval_loader(samples(7))


def run(folder, callbacks, *, resume=False, **options):
    """Returns the module of a run with dlo's defaults, resumed or not."""
    torch.manual_seed(0 if not resume else 9)
    module = Resumed()
    fit_with_defaults(folder, module, Data(), callbacks, resume=resume, **{"max_epochs": 3, **options})
    return module


@pytest.mark.parametrize("at", [1, *(pytest.param(at, marks=pytest.mark.slow) for at in (4, 6)), 8])
def test_stopped_and_resumed_gives_the_losses_of_the_whole_run(tmp_path, at):
    """Also after the first batch, which runs uncompiled in the whole run, and only there."""
    whole = run(tmp_path / "whole", [Compile(backend="traced")]).losses
    assert len(set(whole)) == 18
    torch.compiler.reset()
    before = run(tmp_path / "cut", [Compile(backend="traced")], max_steps=at).losses
    assert before == whole[:at]
    compiled = len(CALLS)
    callback = Compile(backend="traced")
    torch.compiler.reset()
    after = run(tmp_path / "cut", [callback], resume=True).losses
    assert callback.seconds > callback.tally.seconds > 0 or at == 1  # which compiled nothing before
    assert after == whole[at:]
    assert len(CALLS) - compiled == 18 - at


@pytest.mark.slow
@pytest.mark.parametrize("at", [6, 7, 8, 9])
def test_stopped_around_a_change_of_size_whose_first_batch_runs_uncompiled(tmp_path, at):
    """The first batch of each size is counted in the whole run; a resumed one counts what that had not yet."""
    whole = run(tmp_path / "whole", [Rows(), Compile(backend="traced")]).losses
    assert len(CALLS) == 18 - 2  # all but the two that are counted
    for resumed in (False, True):
        torch.compiler.reset()
        options = {"resume": True} if resumed else {"max_steps": at}
        losses = run(tmp_path / "cut", [Rows(), Compile(backend="traced")], **options).losses
        assert losses == (whole[at:] if resumed else whole[:at])


def test_checkpoints_are_the_same_with_and_without_it_and_the_weight_average(tmp_path):
    """Every way to go from one to the other: no key is missing, and none is left over."""
    ways = {"plain": [], "compiled": [Compile], "average": [WeightEMA], "both": [Compile, WeightEMA]}

    def callbacks(way):
        return [Compile(backend="aot_eager") if kind is Compile else kind(0.5) for kind in ways[way]]

    keys = {}
    for way in ways:
        run(tmp_path / way, callbacks(way), max_epochs=1)
        keys[way] = torch.load(tmp_path / way / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert len(set(map(tuple, keys.values()))) == 1
    for first, then in (("plain", "both"), ("both", "plain"), ("compiled", "average"), ("average", "compiled")):
        assert len(run(tmp_path / first, callbacks(then), resume=True, max_epochs=2).losses) == 6


# --- the real back end -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_trains_as_eager_resumes_bit_for_bit_and_fills_its_cache(tmp_path):
    def inductor():
        return Compile(cache_dir=str(tmp_path / "cache"))

    plain = run(tmp_path / "plain", []).losses
    whole = run(tmp_path / "whole", [inductor()]).losses
    assert any((tmp_path / "cache" / "fxgraph").iterdir())
    before = run(tmp_path / "cut", [inductor()], max_steps=4).losses
    torch.compiler.reset()  # As a new process, which has nothing but the cache.
    after = run(tmp_path / "cut", [inductor()], resume=True).losses
    assert before + after == whole
    assert whole[0] == plain[0]  # uncompiled, for the FLOPs; then dropout draws from a stream of inductor's
    assert sum(whole) == pytest.approx(sum(plain), rel=0.1)

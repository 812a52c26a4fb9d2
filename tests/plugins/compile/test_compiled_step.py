"""Compile of the loss and of the optimizer: values of the uncompiled step, one compilation for all learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

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
from support.compiled_calls import fresh_compiler
from support.fsdp_nets import Batches, differ, trainer
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

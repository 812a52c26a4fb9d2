"""Compile: what runs compiled, what is told and refused, what it leaves alone; loss, optimizer; resumed runs.

Most tests compile with torch's own front end and a back end of their own, which generates no code: it counts its calls
and scales what it computes, so that losses tell whether a batch ran compiled.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.costs import is_compiled
from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.testing.training import leave_group
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.compile import callback as compiling
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CUDA_GRAPHS, CompileBlocks
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_curves import OneCycle
from support.compiled_calls import CALLS, fresh_compiler
from support.fsdp_nets import Batches, differ, trainer
from support.runs import fit_with_defaults
from support.trainers import quiet_trainer

clean = pytest.fixture(autouse=True)(fresh_compiler)


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), scale

    def forward(self, x):
        return x + self.scale * torch.relu(self.linear(x))


class Net(nn.Module):
    """Takes any number of rows, and any number of columns of 6 (as an image of any size)."""

    def __init__(self, scales=(1.0, 1.0), breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(scale) for scale in scales])
        self.drop, self.head, self.breaks = nn.Dropout(0.2), nn.Linear(6, 3), breaks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(self.drop(x)).flatten(1, -2).mean(1) if x.ndim > 2 else self.head(self.drop(x))


class Plain(LightningModule):
    """A module as anyone writes it: it logs in its training step (Lightning issue #21836)."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Net()
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Own(Task):
    """The same as a Task."""

    def configure_model(self):
        if not self.has_model:
            self.model = Net()

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count: int, *size: int):
    torch.manual_seed(5)
    return TensorDataset(torch.randn(count, *size, 6), torch.randint(3, (count,)))


def loader(count: int = 20, batch: int = 5, *size: int) -> DataLoader:
    return DataLoader(samples(count, *size), batch_size=batch)


def fit(module, callbacks, data=None, **options):
    torch.manual_seed(1)
    trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 2, **options})
    trainer.fit(module, *(data or (loader(), loader())))
    return trainer


def seeded(make, *arguments):
    torch.manual_seed(0)
    return make(*arguments)


# --- what runs compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "make"), [("model", Plain), ("blocks", Own)])
def test_a_module_trains_as_without_it(scope, make):
    """torch.compile's front end and autograd's back end compute what eager does."""
    plain, compiled = seeded(make), seeded(make)
    if make is Own:
        plain.configure_model()
        compiled.configure_model()
        compiled.load_state_dict(plain.state_dict())
    fit(plain, [])
    callback = Compile(scope=scope, backend="aot_eager")
    fit(compiled, [callback])
    assert callback.tally.graphs == (1 if scope == "model" else 2)  # the first block's input needs no gradient
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_training_runs_compiled_and_evaluation_does_not():
    module = seeded(Plain)
    fit(module, [Compile(backend="traced")])
    assert len(CALLS) == 8
    CALLS.clear()
    module.losses.clear()
    fit(module, [Compile(backend="traced", evaluate="compiled")], max_epochs=1)
    assert len(CALLS) == 2 + 4 + 4  # the sanity check, training, validation


def test_a_partial_last_batch_runs_uncompiled():
    callback = Compile(backend="traced", evaluate="compiled")
    fit(seeded(Plain), [callback], (loader(18), loader(18)), num_sanity_val_steps=0)
    assert len(CALLS) == 2 * (3 + 3)
    assert callback.tally.graphs == 2  # one that trains, one that evaluates


def test_each_size_is_compiled_once_and_evaluation_between_them_starts_no_storm():
    """Six blocks of as many structures, three sizes: 18 graphs, where torch by itself stops at 8."""

    class Sizes(Plain):
        def train_dataloader(self):
            return loader(10, 5, self.trainer.current_epoch % 3 + 2)

        def val_dataloader(self):
            return [loader(7, 4, size) for size in (2, 5, 6, 7, 8, 9)]

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.net(batch[0])

    module = Sizes(Net(scales=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    callback = Compile(scope="blocks", backend="traced")
    torch.manual_seed(1)
    quiet_trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1, max_epochs=6).fit(module)
    assert callback.tally.given_up == {}
    # The first block's input needs no gradient: that it shares no code with the others is no size's doing.
    assert callback.tally.graphs == 18
    assert len(CALLS) == 6 * 2 * 6


@pytest.mark.slow
def test_sizes_past_the_limit_run_uncompiled_and_that_is_said(capsys):
    class Sizes(Plain):
        def train_dataloader(self):
            return loader(5, 5, self.trainer.current_epoch + 2)

    callback = Compile(backend="traced", max_sizes=8)
    options = {"max_epochs": 11, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=[callback], **options).fit(Sizes())
    assert callback.tally.graphs == 8
    assert len(CALLS) == 8
    assert "more than max_sizes=8 input sizes" in capsys.readouterr().out


# --- what it leaves alone ----------------------------------------------------------------------------------


def test_it_leaves_module_torch_and_environment_as_they_were(monkeypatch, tmp_path):
    """Also where a run fails, after which Lightning tears nothing down."""
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    seen = []

    class Fails(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append((os.environ.get(compiling.CACHE), torch._dynamo.config.recompile_limit, is_compiled(self)))
            raise KeyError("here")

    module = Fails()
    keys, cache = list(module.state_dict()), tmp_path / "home" / "dlo" / "inductor"
    monkeypatch.delenv(compiling.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(KeyError, match="here"):
        fit(module, [Compile(max_sizes=50)])
    assert compiling.CACHE not in os.environ
    monkeypatch.setenv(compiling.CACHE, str(tmp_path / "mine"))
    for folder in (None, str(tmp_path / "given")):
        with pytest.raises(KeyError, match="here"):
            fit(module, [Compile(max_sizes=50, cache_dir=folder)])
        assert os.environ[compiling.CACHE] == str(tmp_path / "mine")
    assert seen == [(str(folder), 50, True) for folder in (cache, tmp_path / "mine", tmp_path / "given")]
    assert all(folder.is_dir() for folder in (cache, tmp_path / "mine", tmp_path / "given"))
    assert limits == (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)
    assert not is_compiled(module)
    assert "_compiled_call_impl" not in module.net.__dict__
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize("monitor_first", [True, False])
def test_flops_of_another_size_are_counted_on_its_first_batch_which_runs_uncompiled(monitor_first):
    class Sizes(Plain):
        def train_dataloader(self):
            return loader(10, 5, (2, 4, 2)[self.trainer.current_epoch])

    monitor, module = RunMonitor(), Sizes(Net(scales=[0.1]))
    callbacks = [monitor, Compile(backend="traced")]
    torch.manual_seed(1)
    options = {"max_epochs": 3, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=callbacks if monitor_first else callbacks[::-1], **options).fit(module)
    two, four = monitor.flops.counts.values()
    assert four == 2 * two > 0
    assert len(CALLS) == 6 - 2
    assert monitor.flops.uncompile is None


# --- on an accelerator -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_on_an_accelerator_every_mode_trains_as_eager_does(mode, scope, tmp_path):
    def losses(callbacks):
        module = seeded(Plain)
        module.net.drop.p = 0.0
        torch.manual_seed(1)
        trainer = quiet_trainer(accelerator="gpu", devices=1, callbacks=callbacks, max_epochs=4)
        trainer.fit(module, loader(18), loader(18))
        return module.losses

    compiled = losses([Compile(scope=scope, mode=mode, cache_dir=str(tmp_path))])
    assert compiled == pytest.approx(losses([]), rel=1e-3)


# --- what is told ------------------------------------------------------------------------------------------


def test_graph_breaks_and_recompilations_are_told_once_with_their_reasons(tmp_path, capsys):
    class Grows(Plain):
        def train_dataloader(self):
            return loader(10, 5, max(2, self.trainer.current_epoch + 1))  # 2, 2, 3, 4

    fit(Plain(), [Compile(backend="eager")], [loader()])
    assert capsys.readouterr().out.count("compiled 1 graph in ") == 1  # nothing new at the end
    torch.compiler.reset()
    module = Grows(Net(scales=[0.1], breaks=True))
    callback = Compile(backend="eager")
    logger = CSVLogger(tmp_path)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=[callback], logger=logger, **options).fit(module)
    told = re.split("^compiled ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert len(told) == 2  # after the first epoch, and at the end
    assert told[0].startswith("2 graphs in ")
    assert "1 graph break, no recompilations" in told[0]
    assert "graph break 1x: test_compile.py:" in told[0]
    assert " in forward: Call to `torch._dynamo.graph_break()`" in told[0]
    assert told[1].startswith("6 graphs in ")
    assert "4 recompilations" in told[1]
    assert "size mismatch at index 1. expected 2, actual 3" in told[1]
    written = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert "compile/graph_breaks" in written.splitlines()[0]
    scalars = callback.tally.scalars()
    assert scalars["compile/recompiles"] == 4
    assert scalars["compile/seconds"] == callback.seconds > 0


def test_a_net_that_is_not_called_as_a_module_is_reported(capsys):
    class Aside(Plain):
        def training_step(self, batch, batch_idx):
            return self.net.forward(batch[0]).square().mean()

    fit(Aside(), [Compile(backend="eager")], [loader()], max_epochs=1)
    assert "no module ran compiled: call net as modules" in capsys.readouterr().out
    # The batch whose FLOPs are counted.
    fit(Plain(), [Compile(backend="eager"), RunMonitor()], [loader()], max_steps=1)
    assert "compiled" not in capsys.readouterr().out


# --- what is refused ---------------------------------------------------------------------------------------


def test_a_module_that_is_compiled_already_is_refused():
    module = Plain()
    module.net.head.compile(backend="eager")
    with pytest.raises(DloError, match=r"must not be compiled already, got torch\.compile in Plain"):
        fit(module, [Compile()])


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DloError, match="cannot make the cache folder"):
        fit(Plain(), [Compile(cache_dir=str(tmp_path / "file" / "cache"))])


def test_strategies_that_wrap_too_early_are_refused():
    class Early:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    with pytest.raises(DloError, match="Compile does not support FSDPStrategy: it joins parameters"):
        Compile().setup(Early(), Plain(), "fit")


class OnCuda:
    """What Compile asks a trainer on an accelerator."""

    strategy = SingleDeviceStrategy(device=torch.device("cuda", 0))
    accumulate_grad_batches = 2


@pytest.mark.parametrize(
    ("mode", "instead"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")]
)
def test_cuda_graphs_with_accumulated_gradients_are_refused(mode, instead):
    with pytest.raises(DloError, match=f"accumulate_grad_batches must be 1 .* got 2; set it to 1, or mode: {instead}$"):
        Compile(mode=mode).setup(OnCuda(), Plain(), "fit")


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_cuda_graphs_over_parameters_that_are_gathered_are_refused(scope):
    message = r"mode reduce-overhead, which replays a CUDA graph, got ZeroStrategy, which gathers net\..* mode: default"
    graphs = OnGraphs(scope=scope, mode="reduce-overhead")
    try:
        with pytest.raises(DloError, match=message):
            fit(Plain(), [graphs], [loader()], max_steps=1, strategy=ZeroStrategy(3))
    finally:
        leave_group()


@pytest.mark.parametrize("mode", sorted(CUDA_GRAPHS))
def test_the_applier_replays_no_cuda_graphs(mode):
    with pytest.raises(DloError, match=f"got {mode}: .* set mode: {CUDA_GRAPHS[mode]}$"):
        CompileBlocks(mode=mode)
    assert CompileBlocks(mode=CUDA_GRAPHS[mode]).mode == CUDA_GRAPHS[mode]


# --- the loss and the optimizer: values of the uncompiled step -------------------------------------------------------


ROWS, STEPS = 4, 6


class Stepped(Task):
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


def fit_stepped(
    module: LightningModule, *callbacks: Any, sizes: tuple[int, ...] = (ROWS,) * STEPS
) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(5)
    rows = [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]
    data = DataLoader(TensorDataset(*map(torch.cat, zip(*rows, strict=True))), batch_size=ROWS)
    module.configure_model()
    quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=list(callbacks)).fit(module, data)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def net(make: Any = Stepped.make) -> Stepped:
    seed_everything(3, verbose=False)
    found = Stepped()
    found.make = make
    return found


MAKES: dict[str, Any] = {
    "adamw": Stepped.make,
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "adamw, fused"])
def test_weights_are_those_of_the_uncompiled_step_and_rates_are_no_new_code(name: str) -> None:
    expected = fit_stepped(net(MAKES[name]))
    watch, callback = Rates(), Compile(backend="aot_eager", optimizer=True, loss=True)
    module = net(MAKES[name])
    # RunMonitor counts the first batch's FLOPs, step and all, by a mode under which torch.compile compiles nothing.
    found = fit_stepped(module, RunMonitor(), watch, callback, sizes=(*(ROWS,) * STEPS, 2))
    assert watch.before == watch.after == STEPS + 1
    assert watch.rates == pytest.approx([0.05 * (1 - 0.1 * step) for step in range(1, STEPS + 2)])
    assert all(isinstance(rate, float) for rate in watch.rates)
    # The model, the loss and the step; a second graph of the step has the state that the first has made.
    assert callback.tally.graphs <= 4, callback.tally.text()
    assert not any("lr" in reason for reason in callback.tally.recompiles), callback.tally.text()
    assert "CompiledOptimizer" not in module.trainer.optimizers[0].step.__qualname__
    assert "loss" not in module.__dict__
    module = net(MAKES[name])
    found = fit_stepped(module, Compile(backend="aot_eager", optimizer=True, loss=True))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # As in `dlo`.
def test_inductor_compiles_both_on_a_cpu(tmp_path: Any) -> None:
    expected = fit_stepped(net())
    callback = Compile(optimizer=True, loss=True, cache_dir=str(tmp_path))
    found = fit_stepped(net(), callback)
    assert callback.tally.graphs >= 3
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(DloError, match=r"loss: true must have a Task.* got Plain"):
        fit(Plain(), [Compile(backend="aot_eager", loss=True)])
    with pytest.raises(DloError, match="must have an optimizer with a foreach implementation, got Muon"):
        fit_stepped(
            net(lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2])), Compile(optimizer=True)
        )
    module = net()
    module.scheduled = False
    with pytest.raises(DloError, match=r"must have constant parameter groups but for lr, got betas .* cycle_momentum"):
        fit_stepped(module, OneCycle(max_lr=0.1), Compile(backend="aot_eager", optimizer=True))


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
        fit_stepped(net(), OnGraphs(mode="reduce-overhead", optimizer=True), DynamicBatchSize({0: ROWS}))
    callback = OnGraphs(mode="reduce-overhead", optimizer=True)
    callback.backend = "eager"
    fit_stepped(net(), callback, sizes=(ROWS, ROWS, 2))  # The last batch of an epoch runs uncompiled.
    callback._shapes = [(ROWS, 6), (ROWS,)]
    with pytest.raises(DloError, match=r"got \[\(3, 6\), \(3,\)\] after \[\(4, 6\), \(4,\)\]"):
        callback._check_shapes([torch.ones(3, 6), torch.ones(3)])


# Compile: a run that is stopped and resumed is the whole one, and checkpoints are those of a run without it


class Rows(BatchTransform):
    """Cuts the samples of batches down to 3 rows, from the eighth batch on."""

    def transform(self, trainer, pl_module, batch):
        place = trainer.current_epoch * 6 + trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return [batch[0][:, :3] if place >= 7 else batch[0], batch[1]]


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=5, num_workers=0, seed=3)

    def train_dataloader(self):
        return self.train_loader(samples(32, 4))

    def val_dataloader(self):
        return self.eval_loader(samples(7, 4))


def run(folder, callbacks, *, resume=False, **options):
    """Returns the module of a run with dlo's defaults, resumed or not."""
    torch.manual_seed(0 if not resume else 9)
    module = Plain()
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

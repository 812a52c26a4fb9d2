"""Compile: what it tells of a run, and what it refuses."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.errors import DloError
from dlo_framework.testing.training import leave_group
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CUDA_GRAPHS, CompileBlocks
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.compiled_calls import fresh_compiler
from support.trainers import quiet_trainer

clean = pytest.fixture(autouse=True)(fresh_compiler)


class Net(nn.Module):
    """Takes any number of columns of 6; breaks into two graphs if told to."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.breaks = nn.Linear(6, 6), nn.Linear(6, 3), breaks

    def forward(self, x):
        x = self.body(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x).mean(1)


class Plain(LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Net()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(count: int = 20, batch: int = 5, columns: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(count, columns, 6)), batch_size=batch)


def fit(module, callbacks, **options):
    quiet_trainer(callbacks=callbacks, **{"max_epochs": 2, **options}).fit(module, loader())


# --- what is told ------------------------------------------------------------------------------------------


def test_graph_breaks_and_recompilations_are_told_once_with_their_reasons(tmp_path, capsys):
    class Grows(Plain):
        def train_dataloader(self):
            return loader(10, 5, max(2, self.trainer.current_epoch + 1))  # 2, 2, 3, 4

    fit(Plain(), [Compile(backend="eager")])
    assert capsys.readouterr().out.count("compiled 1 graph in ") == 1  # nothing new at the end
    torch.compiler.reset()
    module = Grows(Net(breaks=True))
    callback = Compile(backend="eager")
    logger = CSVLogger(tmp_path)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=[callback], logger=logger, **options).fit(module)
    told = re.split("^compiled ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert len(told) == 2  # after the first epoch, and at the end
    assert told[0].startswith("2 graphs in ")
    assert "1 graph break, no recompilations" in told[0]
    assert "graph break 1x: test_compile_report.py:" in told[0]
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

    fit(Aside(), [Compile(backend="eager")], max_epochs=1)
    assert "no module ran compiled: call net as modules" in capsys.readouterr().out
    fit(Plain(), [Compile(backend="eager"), RunMonitor()], max_steps=1)  # the batch whose FLOPs are counted
    assert "compiled" not in capsys.readouterr().out


# --- what is refused ---------------------------------------------------------------------------------------


def test_a_module_that_is_compiled_already_is_refused():
    module = Plain()
    module.net.body.compile(backend="eager")
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


class OnGraphs(Compile):
    """As on an accelerator, but for the graphs."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self._cuda_graphs = self.mode in CUDA_GRAPHS


class Blocks(Plain):
    def __init__(self):
        super().__init__()
        self.net.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_cuda_graphs_over_parameters_that_are_gathered_are_refused(scope):
    message = r"mode reduce-overhead, which replays a CUDA graph, got ZeroStrategy, which gathers net\..* mode: default"
    try:
        with pytest.raises(DloError, match=message):
            fit(Blocks(), [OnGraphs(scope=scope, mode="reduce-overhead")], max_steps=1, strategy=ZeroStrategy(3))
    finally:
        leave_group()


@pytest.mark.parametrize("mode", sorted(CUDA_GRAPHS))
def test_the_applier_replays_no_cuda_graphs(mode):
    with pytest.raises(DloError, match=f"got {mode}: .* set mode: {CUDA_GRAPHS[mode]}$"):
        CompileBlocks(mode=mode)
    assert CompileBlocks(mode=CUDA_GRAPHS[mode]).mode == CUDA_GRAPHS[mode]

"""Compile: a run that is stopped and resumed is the whole one, and checkpoints are those of a run without it."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_plugins.compile.callback import Compile
from support.compiled_calls import CALLS, fresh_compiler
from support.runs import fit_with_defaults

clean = pytest.fixture(autouse=True)(fresh_compiler)


class Plain(LightningModule):
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

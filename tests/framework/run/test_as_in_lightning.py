"""Lightning's ways to use checkpoints work with dlo's too, or are refused with another way."""

import copy
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

import dlo_framework
from dlo_framework import DloError, Task
from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import (
    DataParallelStrategy,
    ShardedStrategy,
    SingleProcessStrategy,
    use_canonical_checkpoints,
)
from dlo_framework.run.resume import ExactResume
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.trainers import quiet_trainer


def loader():
    return DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), batch_size=2)


class Net(LightningModule):
    def __init__(self, width: int = 3, note: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Regression(Task):
    def __init__(self, width: int = 3, note: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if not self.has_model:
            self.model = torch.nn.Linear(4, self.hparams.width)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(folder, callbacks=(), form="canonical", **options):
    made = quiet_trainer(default_root_dir=folder, callbacks=list(callbacks), **{"max_epochs": 1} | options)
    use_canonical_checkpoints(made)
    made.strategy.checkpoint_format = form
    return made


def saved(folder, module, callbacks=(), form="canonical", **options):
    made = trainer(folder, callbacks, form, **options)
    made.fit(module, loader())
    made.save_checkpoint(folder / "end.ckpt")
    return folder / "end.ckpt"


# --- configure_optimizers ------------------------------------------------------------------------------------------


class NoOptimizer(Net):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize("form", ["canonical", "lightning"])
def test_a_run_without_an_optimizer_saves_and_goes_on(tmp_path, form):
    path = saved(tmp_path, NoOptimizer(), form=form)
    more = trainer(tmp_path, form=form, max_epochs=2)
    more.fit(NoOptimizer(), loader(), ckpt_path=path)
    assert more.global_step == 8
    with pytest.raises(DloError, match="must hold optimizer state, got one of a run without an optimizer"):
        trainer(tmp_path, form=form, max_epochs=3).fit(Net(), loader(), ckpt_path=path)


class Sharding(ShardedStrategy):
    def shard(self, trainer):
        pass


class Searching(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Another(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(2, 7))], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoOptimizer, "must return an optimizer under Sharding, got None"),
        (Searching, "that evaluates the model once a step under Sharding, got LBFGS"),
        (Another, r"SGD must step parameters of Another only, got a tensor of shape \[2, 7\]"),
    ],
)
def test_strategies_that_shard_refuse_optimizers_that_they_cannot_step(tmp_path, kind, message):
    strategy, module, made = Sharding(), kind(), trainer(tmp_path)
    strategy.connect(module)
    module.trainer = made
    with pytest.raises(DloError, match=message):
        strategy.setup_optimizers(made)
    if kind is Searching:
        made.fit(module, loader())


def test_a_trainer_is_copied(tmp_path):
    made = trainer(tmp_path, strategy=DataParallelStrategy(), devices=2)
    copied = copy.deepcopy(made)
    assert copied.strategy.launcher.num_processes == 2
    assert copied.strategy.launcher is not made.strategy.launcher


def test_other_numbers_of_optimizers_are_refused(tmp_path):
    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.net]

    path = saved(tmp_path, Net())
    with pytest.raises(DloError, match="must return 1 optimizers, as many as the checkpoint has, got 2"):
        trainer(tmp_path, max_epochs=2).fit(Two(), loader(), ckpt_path=path)


class NumpyRate(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=np.float64(0.125), momentum=np.float32(0.5))
        optimizer.param_groups[0]["often"] = (np.int64(3), [np.bool_(True)])
        return optimizer


@pytest.mark.parametrize("form", ["canonical", "lightning"])
def test_numbers_of_numpy_are_saved_as_numbers(tmp_path, form):
    path = saved(tmp_path, NumpyRate(), form=form)
    group = load(path)["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["often"]) == (0.125, 0.5, (3, [True]))
    assert {type(group["lr"]), type(group["momentum"])} == {float}
    trainer(tmp_path, form=form, max_epochs=2).fit(NumpyRate(), loader(), ckpt_path=path)


# --- loading -------------------------------------------------------------------------------------------------------


class Larger(Net):
    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.more = torch.nn.Linear(2, 2)
        self.more.requires_grad_(False)


def test_strict_loading_false_is_heeded(tmp_path):
    path = saved(tmp_path, Net())
    module = Larger()
    made = trainer(tmp_path)
    made.fit(module, loader(), ckpt_path=path)
    assert torch.equal(module.net[0].weight, load(path)["state_dict"]["net.0.weight"])
    module.strict_loading = True
    with pytest.raises(DloError, match=r"2 \(more.bias, more.weight\) missing"):
        trainer(tmp_path).fit(module, loader(), ckpt_path=path)


class CustomLoading(Net):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.called = (sorted(state_dict), strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def test_a_modules_own_way_of_loading_is_taken(tmp_path):
    path = saved(tmp_path, Net())
    module = CustomLoading()
    trainer(tmp_path).fit(module, loader(), ckpt_path=path)
    assert module.called == (sorted(module.state_dict()), True)
    hooked = Net()

    def rename(module, state_dict, prefix, *_):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "weight") * 2

    hooked.net[0].register_load_state_dict_pre_hook(rename)
    trainer(tmp_path).fit(hooked, loader(), ckpt_path=path)
    assert torch.equal(hooked.net[0].weight, load(path)["state_dict"]["net.0.weight"] * 2)


def test_a_checkpoints_mappings_are_copied_and_pickled(tmp_path):
    state = load(saved(tmp_path, Net()))["state_dict"]
    first = state["net.0.weight"]  # Its file is open now.
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert torch.equal(other["net.0.weight"], first)
        other["net.0.weight"] = torch.zeros(1)
        assert torch.equal(state["net.0.weight"], first)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


@pytest.mark.parametrize(("model", "strategy"), [(Net, "auto"), (Scheduled, "auto"), (Scheduled, "zero1")])
def test_stochastic_weight_averaging_goes_on(tmp_path, model, strategy):
    class Keep(StochasticWeightAveraging):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(tmp_path / "third.ckpt")

    def fit(module, path=None):
        chosen = ZeroStrategy(stage=1) if strategy == "zero1" else strategy
        averaging = Keep(swa_lrs=0.01, swa_epoch_start=1)
        trainer(tmp_path, [averaging, ExactResume()], max_epochs=5, strategy=chosen).fit(
            module, loader(), ckpt_path=path
        )

    whole, resumed = model(), model()
    fit(whole)
    fit(resumed, tmp_path / "third.ckpt")
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name


class Uploads(CSVLogger):
    """Logger with the attribute of WandbLogger, MLFlowLogger and LitLogger."""

    def __init__(self, folder):
        super().__init__(folder)
        self._log_model = "all"


@pytest.mark.parametrize("strategy", ["auto", "zero1"])
def test_a_logger_that_would_upload_nothing_is_refused(tmp_path, strategy):
    chosen = ZeroStrategy(stage=1) if strategy == "zero1" else strategy
    run = trainer(tmp_path, [], max_epochs=1, strategy=chosen, logger=Uploads(tmp_path))
    with pytest.raises(DloError, match="log_model of Uploads must be false with canonical checkpoints"):
        run.fit(Net(), loader())
    if strategy == "auto":
        run.strategy.checkpoint_format = "lightning"
        run.fit(Net(), loader())


# --- load_from_checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["canonical", "lightning"])
def test_a_task_comes_back_as_in_lightning(tmp_path, form):
    trained = Regression(width=5, note="first")
    path = saved(tmp_path, trained, form=form)
    module = Regression.load_from_checkpoint(path)
    assert (module.hparams.width, module.hparams.note) == (5, "first")
    assert torch.equal(module.model.weight, trained.model.weight)
    assert Regression.load_from_checkpoint(str(path), map_location="cpu", note="second").hparams.note == "second"
    places = []
    Regression.load_from_checkpoint(path, map_location=lambda storage, place: places.append(place) or storage)
    assert set(places) == {"cpu"}
    (tmp_path / "hparams.yaml").write_text("width: 5\nnote: third\n")
    assert Regression.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml").hparams.note == "third"
    with pytest.raises(RuntimeError, match="size mismatch"):
        Regression.load_from_checkpoint(path, width=4)


class Wider(Regression):
    def configure_model(self):
        super().configure_model()
        self.more = torch.nn.Linear(2, 2)


def test_strict_says_whether_the_names_must_be_the_same(tmp_path):
    path = saved(tmp_path, Regression())
    with pytest.raises(RuntimeError, match=r"Missing key.*more"):
        Wider.load_from_checkpoint(path)
    loaded = Wider.load_from_checkpoint(path, strict=False)
    assert torch.equal(loaded.model.weight, load(path)["state_dict"]["model.weight"])


@pytest.mark.parametrize("form", ["canonical", "lightning"])
def test_any_module_comes_back(tmp_path, form):
    trained = Net(width=5)
    path = saved(tmp_path, trained, form=form)
    module = dlo_framework.load_from_checkpoint(Net, path, note="second")
    assert (module.hparams.width, module.hparams.note) == (5, "second")
    assert torch.equal(module.net[1].running_mean, trained.net[1].running_mean)
    with pytest.raises(DloError, match=r"no checkpoint .*none\.ckpt; choose an existing path"):
        dlo_framework.load_from_checkpoint(Net, tmp_path / "none.ckpt")


# --- where and in which form checkpoints are written ---------------------------------------------------------------


def test_lightnings_format_is_a_file_that_lightning_goes_on_from(tmp_path):
    torch.manual_seed(1)
    path = saved(tmp_path, Net(), form="lightning")
    assert path.is_file()
    assert set(torch.load(path, weights_only=True)["optimizer_states"][0]["state"]) == {0, 1, 2, 3}
    ends = []
    for swap in (False, True):
        torch.manual_seed(2)
        module = Net.load_from_checkpoint(path)
        made = trainer(tmp_path, max_epochs=2) if swap else quiet_trainer(default_root_dir=tmp_path, max_epochs=2)
        assert swap or type(made.strategy) is SingleDeviceStrategy
        made.fit(module, loader(), ckpt_path=path)
        ends.append(module.net[0].weight)
    assert torch.equal(*ends)


@pytest.mark.parametrize(("first", "then"), [("canonical", "lightning"), ("lightning", "canonical")])
def test_one_format_takes_the_others_place(tmp_path, first, then):
    path = saved(tmp_path, Net(), form=first)
    again = trainer(tmp_path, form=then, max_epochs=2)
    again.fit(Net(), loader(), ckpt_path=path)
    again.save_checkpoint(path)
    assert path.is_file() == (then == "lightning")
    assert load(path)["global_step"] == 8
    assert [entry.name for entry in tmp_path.glob("end.ckpt*")] == ["end.ckpt"]


class Counting(TorchCheckpointIO):
    calls = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls += 1
        self.options = storage_options
        super().save_checkpoint(checkpoint, path)


def test_a_checkpoint_io_is_called_or_refused(tmp_path):
    with pytest.raises(DloError, match=r"must have no CheckpointIO with canonical checkpoints.*got Counting"):
        trainer(tmp_path, plugins=[Counting()]).fit(Net(), loader())
    io = Counting()
    made = trainer(tmp_path, plugins=[io], form="lightning")
    made.fit(Net(), loader())
    made.save_checkpoint(tmp_path / "end.ckpt", storage_options={"key": 1})
    assert (io.calls, io.options) == (1, {"key": 1})


@pytest.mark.parametrize("form", ["canonical", "lightning"])
def test_storage_that_is_no_file_system_is_refused(tmp_path, form, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trainer(tmp_path, form=form)
    made.fit(Net(), loader())
    with pytest.raises(DloError, match=r"storage_options must be None, got {'key': 1}"):
        made.save_checkpoint(tmp_path / "end.ckpt", storage_options={"key": 1})
    with pytest.raises(DloError, match=r"must be on a file system, or .*, got s3://bucket/end\.ckpt"):
        made.save_checkpoint("s3://bucket/end.ckpt")
    with pytest.raises(DloError, match=r"must be on a file system, or .*, got s3://bucket/end\.ckpt"):
        trainer(tmp_path, form=form).fit(Net(), loader(), ckpt_path="s3://bucket/end.ckpt")
    assert not (tmp_path / "s3:").exists()


def test_other_formats_are_refused(tmp_path):
    strategy = SingleProcessStrategy("cpu")
    strategy.checkpoint_format = "zip"
    with pytest.raises(DloError, match="must be one of canonical, lightning, got zip"):
        strategy.check_checkpoints()

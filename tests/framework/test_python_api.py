"""Training from Python gives what ``dlo fit`` gives: names, run folder, callbacks, resuming, checkpoints, lock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import dlo_framework as dlo
from dlo_framework.checkpoint import load
from dlo_framework.cli.main import main
from dlo_framework.lock import release_all, start_time, this_process
from dlo_framework.run import runs
from support.user_net import Net

CONFIG = """
plugins: [support.user_net]
model: {class_path: Net}
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def net(tmp_path, monkeypatch):
    """The class of a small module; the working directory has a config of it."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG)
    yield Net
    release_all()
    os.environ.pop(runs.ENVIRONMENT, None)
    os.environ.pop(runs.FOUND, None)


def fit(kind: type[LightningModule], epochs: int, ckpt_path: str | None = None, **options) -> dlo.Trainer:
    seed_everything(42, workers=True, verbose=False)
    trainer = dlo.Trainer(max_epochs=epochs, **{"run_name": "own", **QUIET, **options})
    trainer.fit(kind(), ckpt_path=ckpt_path)
    return trainer


def weights(run: str) -> dict[str, torch.Tensor]:
    return dict(load(Path(run) / "checkpoints/last.ckpt")["state_dict"])


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def summary(run: str) -> dict:
    return json.loads((Path(run) / "summary.json").read_text())


def files(run: str) -> set[str]:
    names = {path.name for path in Path(run).rglob("*") if not path.name.startswith("run.lock")}  # the command's own
    return {"events" if name.startswith("events") else name for name in names}


def test_every_plugin_has_its_name():
    from dlo_plugins.schedules.lr_curves import OneCycle

    assert dlo.OneCycle is OneCycle
    assert {"OneCycle", "ZeroStrategy", "ImageClassifier", "Trainer", "load_config"} <= set(dir(dlo))
    assert "zero2" not in dir(dlo)
    with pytest.raises(AttributeError, match=r"no attribute 'OneCylce'; did you mean 'OneCycle'\?"):
        dlo.OneCylce  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'one_cycle'"):
        dlo.one_cycle  # noqa: B018


def test_a_run_from_python_is_the_run_of_the_command(net):
    assert main(["fit", "--config", "x.yaml"]) == 0
    os.environ.pop(runs.ENVIRONMENT, None)
    release_all()
    loaded = dlo.load_config("x.yaml", options={"run.name": "loaded"})
    assert not Path("runs/loaded").exists(), "the run folder is made by a fit"
    loaded.fit()
    trainer = fit(net, 2)
    command, config, own = "runs/x/version_0", "runs/loaded/version_0", "runs/own/version_0"
    assert trainer.run_folder == Path(own).absolute()
    assert files(command) == files(config) == files(own)
    assert equal(weights(command), weights(config))
    assert equal(weights(command), weights(own))
    for key in ("metrics", "steps", "samples", "status", "strategy", "best_metric"):
        assert summary(command)[key] == summary(config)[key] == summary(own)[key], key
    saved = [yaml.safe_load((Path(run) / "config.yaml").read_text()) for run in (command, config, own)]
    assert saved[0] == {**saved[1], "run": saved[0]["run"]}, "the config of a loaded config is that of the command"
    assert saved[1]["run"]["name"] == "loaded"
    assert saved[2]["model"] == {"class_path": "support.user_net.Net", "init_args": Net().hparams}
    assert saved[2]["trainer"]["max_epochs"] == 2
    kinds = [[type(callback).__name__ for callback in each.callbacks] for each in (loaded.trainer, trainer)]
    assert kinds[0] == kinds[1]
    assert {"ExactResume", "GracefulStop", "RunRecord", "LastCheckpoint", "EndCheckpoint"} <= set(kinds[0])


def test_a_run_is_resumed_in_its_folder(net):
    whole = fit(net, 3, run_name="whole")
    fit(net, 1)
    resumed = fit(net, 3, "last")
    assert resumed.run_folder == Path("runs/own/version_0").absolute()
    assert summary("runs/own/version_0")["resumptions"] == 1
    assert equal(weights("runs/own/version_0"), weights("runs/whole/version_0"))
    assert whole.global_step == resumed.global_step
    (metrics,) = resumed.validate(ckpt_path="best", verbose=False)
    assert metrics["val"] == pytest.approx(summary("runs/own/version_0")["best_metric"]["val"])
    assert fit(net, 3, "auto").run_folder == Path("runs/own/version_1").absolute(), "the newest has finished"
    assert resumed.predict(net(), net().val_dataloader(), ckpt_path="last")[0].shape == (4, 1)


def test_a_trainer_is_one_run(net):
    trainer = fit(net, 1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net(), ckpt_path="last")
    assert [path.name for path in Path("runs/own").iterdir()] == ["version_0"]
    assert summary("runs/own/version_0")["steps"] == 8


def test_what_is_refused_leaves_nothing(net):
    for options, message in (
        ({"max_epoch": 3}, "unknown argument 'max_epoch' of Trainer; did you mean 'max_epochs'?"),
        ({"gpus": 1}, "unknown argument 'gpus' of Trainer; did you mean 'devices'?"),
        ({"precision": "fp16"}, "got 'fp16'; did you mean '16-mixed'?"),
        (
            {"callbacks": [dlo.OneCycle]},
            "must be Callback objects, got the class OneCycle; write OneCycle(...)",
        ),
        ({"callbacks": "OneCycle"}, "Callback objects, got the text 'OneCycle'; write dlo_framework.OneCycle(...)"),
        ({"strategy": "zer2"}, "unknown strategy 'zer2'; did you mean 'zero2'?"),
        ({"run_dir": "s3://bucket"}, "run_dir must be on a file system, got s3:/bucket"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be at least 1, got 0"),
    ):
        with pytest.raises(dlo.DloError) as raised:
            dlo.Trainer(**options)
        assert message in str(raised.value)
    with pytest.raises(dlo.DloError, match=r"no config 'quikstart'.*did you mean 'quickstart'"):
        dlo.load_config("quikstart")
    with pytest.raises(dlo.DloError, match=r"no checkpoint none\.ckpt; choose an existing path"):
        dlo.load_from_checkpoint(net, "none.ckpt")
    with pytest.raises(dlo.DloError, match=r"model must be a LightningModule, got the class .*; write .*\(\.\.\.\)"):
        dlo.Trainer(**QUIET).fit(net)
    with pytest.raises(dlo.DloError, match=r"unknown option '--trainer\.max_epoch'; did you mean"):
        dlo.load_config("x.yaml", options={"trainer.max_epoch": 1})

    class Refusing(net):
        refuses = True

        def check(self, datamodule):
            if self.refuses:
                raise dlo.DloError("width must be odd, got 4; use 5")

    trainer = dlo.Trainer(run_name="own", max_epochs=1, **QUIET)
    model = Refusing()
    with pytest.raises(dlo.DloError, match="width must be odd"):
        trainer.fit(model)
    with pytest.raises(dlo.DloError, match="no run in runs/own has a last checkpoint"):
        trainer.fit(model, ckpt_path="last")
    assert not Path("runs").exists()
    model.refuses = False
    trainer.fit(model)
    assert summary("runs/own/version_0")["status"] == "finished"


def test_a_folder_is_removed_if_the_run_is_refused_after_it_was_made(net):
    from lightning.pytorch import Callback

    class Refusing(Callback):
        refuses = True

        def check_run(self, trainer, module, datamodule):
            if self.refuses:
                raise dlo.DloError("no")

    callback = Refusing()
    trainer = dlo.Trainer(run_name="own", max_epochs=1, callbacks=[callback], **QUIET)
    count = len(trainer.callbacks)
    with pytest.raises(dlo.DloError, match="no"):
        trainer.fit(net())
    assert list(Path("runs/own").iterdir()) == []
    assert (len(trainer.callbacks), trainer.loggers, trainer.run_folder) == (count, [], None)
    callback.refuses = False
    trainer.fit(net())
    assert summary("runs/own/version_0")["steps"] == 4


def test_another_job_in_the_folder_is_refused(net, monkeypatch):
    fit(net, 1)
    run = Path("runs/own/version_0")
    assert not list(run.glob("run.lock.*")), "the lock is released when the fit ends"
    parent = os.getppid()
    holder = {**this_process(), "pid": parent, "start": start_time(parent)}
    (run / "run.lock.0").write_text(json.dumps(holder))
    with pytest.raises(dlo.DloError, match="a run must be trained by one job at a time"):
        fit(net, 2, "last")


IMAGES = {"model": "vit_tiny_patch16_224", "model_args": {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}}
NOTEBOOK = """
import dlo_framework as dlo
from dlo_framework.distributed import gradient_check, launcher
from lightning.pytorch import seed_everything

launcher._IS_INTERACTIVE = gradient_check._IS_INTERACTIVE = True
data = dlo.DigitsData(image_size=16, batch_size=64)
for name, strategy in {"zero": "zero2", "mesh": dlo.MeshStrategy(tp=2)}.items():
    seed_everything(42, workers=True, verbose=False)
    model = dlo.ImageClassifier(**IMAGES, schedule="constant")
    options = {"limit_train_batches": 2, "limit_val_batches": 1, "enable_progress_bar": False}
    trainer = dlo.Trainer(run_name=name, max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, **options)
    trainer.fit(model, data)
    print(name, float(trainer.callback_metrics["val_loss"]))
model.unused = __import__("torch").nn.Linear(2, 2)
try:
    dlo.Trainer(run_name="x", accelerator="cpu", devices=2, strategy="zero2", max_epochs=1).fit(model, data)
except dlo.DloError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_notebook_checks_a_shipped_task_and_then_forks_its_ranks(tmp_path):
    """A process of its own: a backward on fake tensors in the notebook's process would keep ranks from theirs."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("IMAGES", repr(IMAGES)))
    command = [sys.executable, "notebook.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    losses = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(("zero ", "mesh "))}
    assert losses["mesh"] == pytest.approx(losses["zero"], rel=1e-4)
    assert any("unused.weight" in line and "find_unused: true" in line for line in lines)


README = (Path(__file__).parents[2] / "README.md").read_text()
#: The README's script, after which each rank validates the last checkpoint and leaves a file.
SCRIPT = f"""
{README.partition("```python")[2].partition("```")[0]}
    Net.validation_step = lambda self, *batch: self.log("val", self.training_step(*batch), sync_dist=True)
    data = DataLoader(TensorDataset(torch.rand(64, 2, generator=torch.Generator().manual_seed(1))), 64)
    (metrics,) = trainer.validate(Net(), data, ckpt_path="last", verbose=False)
    with open(f"rank-{{trainer.global_rank}}", "w") as file:
        file.write(f"{{trainer.run_folder}} {{metrics['val']}}")
"""


#: The README's module as a notebook trains it.
CELLS = f"""
{README.partition("```python")[2].partition("if __name__")[0]}
import os
from dlo_framework.distributed import launcher

launcher._IS_INTERACTIVE = True
Net.validation_step = lambda self, *batch: self.log("val", self.training_step(*batch), sync_dist=True)
data = DataLoader(TensorDataset(torch.rand(64, 2)), 32)
trainer = dlo.Trainer(run_name="own", max_epochs=1, accelerator="cpu", devices=2, strategy="zero3")
model = Net()
before = model.layers[0].weight.detach().clone()
trainer.fit(model, data, data)
assert not torch.equal(model.layers[0].weight, before)
assert "LOCAL_RANK" not in os.environ
torch.save([model.state_dict(), float(trainer.callback_metrics["val"])], "own.pt")
"""


def test_a_notebook_starts_ranks_and_gets_their_weights(net, dlo):
    """Ranks are forked where Python is interactive, from a new Python: a fork of one with torchao is refused."""
    Path("notebook.py").write_text(CELLS)
    subprocess.run([sys.executable, "notebook.py"], env=dlo.environment(), timeout=250, check=True)
    found, val = torch.load("own.pt")
    assert equal(found, weights("runs/own/version_0"))
    assert summary("runs/own/version_0")["world_size"] == 2
    assert val == pytest.approx(summary("runs/own/version_0")["metrics"]["val"])


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [None, *(pytest.param(words, marks=pytest.mark.slow) for words in ([], TORCHRUN))])
def test_a_script_starts_ranks(net, dlo, launcher):
    Path("train.py").write_text(SCRIPT)
    if launcher is None:
        dlo("train.py")
    else:
        start = [sys.executable, *launcher, "train.py"]
        done = subprocess.run(start, capture_output=True, text=True, env=dlo.environment(), timeout=250)
        assert done.returncode == 0, done.stderr
    first, second = (Path(f"rank-{rank}").read_text() for rank in range(2))
    assert first == second
    folder, loss = first.split()
    assert folder.endswith("/runs/train/version_0")
    assert float(loss) < 0.2
    assert {summary(folder)[key] for key in ("steps", "world_size")} == {20, 2}
    assert [path.name for path in Path("runs/train").iterdir()] == ["version_0"]


def test_options_of_lightnings_trainer_keep_their_meaning(net):
    loaders = {"train_dataloaders": net().train_dataloader(), "val_dataloaders": net().val_dataloader()}
    for options in ({"fast_dev_run": True}, {"barebones": True, "max_epochs": 1, "accelerator": "cpu"}):
        given = {**QUIET, **options} if "barebones" not in options else options
        trainer = dlo.Trainer(run_name="own", **given)
        trainer.fit(net(), **loaders)
        assert trainer.run_folder is None
    assert not Path("runs").exists()
    own = ModelCheckpoint(monitor="val", every_n_train_steps=2)
    trainer = dlo.Trainer(max_steps=3, run_dir="elsewhere", run_name="own", callbacks=own, logger=False, **QUIET)
    trainer.fit(net(), **loaders)
    assert Path(own.dirpath) == Path("elsewhere/own/version_0/checkpoints").resolve()
    assert sum(isinstance(callback, ModelCheckpoint) for callback in trainer.callbacks) == 2, "that, and the last"
    assert not list(Path("elsewhere/own/version_0").glob("events*"))
    assert summary("elsewhere/own/version_0")["steps"] == 3
    trainer = dlo.Trainer(max_steps=1, run_name="none", enable_checkpointing=False, **QUIET)
    trainer.fit(net())
    assert not Path("runs/none/version_0/checkpoints").exists()
    with pytest.raises(dlo.DloError, match="data must be set for fit, got none: BoringData has no train_dataloader"):
        dlo.Trainer(max_steps=1, **QUIET).fit(BoringData())


class BoringData(LightningModule):
    """Module without loaders."""

    def training_step(self, batch, batch_idx):
        return None

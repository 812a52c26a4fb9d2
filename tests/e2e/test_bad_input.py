"""Bad input ends with exit code 2 and one message that holds the rule, what was given and the fix; no traceback.

Most of these call the command's entry point in this process, for each new one costs seconds of imports.
"""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest
import torch

from dlo_framework.cli.config_scan import read_config
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from support.digits_config import digits_config

SIZES = "patch_size: 4, embed_dim: 48, depth: 2, num_heads: 2"
CONFIG = digits_config("max_epochs: 1, accelerator: cpu, limit_train_batches: 2, limit_val_batches: 1", SIZES)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Returns a function that runs ``dlo``, checks that it refuses, and returns its message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(CONFIG)

    def run(*words: str) -> str:
        code = main(list(words))
        os.environ.pop(runs.ENVIRONMENT, None)
        err = capfd.readouterr().err
        assert code == 2, err
        assert "Traceback" not in err
        return err.strip().splitlines()[-1]

    return run


def folder_options(root: Path) -> list[str]:
    return [
        "fit", "--config", "train.yaml", "--data", "ImageFolderData", "--data.root", str(root),
        "--data.image_size", "32", "--data.batch_size", "4",
    ]  # fmt: skip


def edit(old: str, new: str) -> str:
    assert old in CONFIG
    Path("edited.yaml").write_text(CONFIG.replace(old, new))
    return "edited.yaml"


CYCLE = "{class_path: OneCycle, init_args: {max_lr: big}}"
TWO_CALLBACKS = "{callbacks: [{class_path: LRFinder}, {class_path: OneCycle}], max_epochs: 1,"


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        (("max_epochs", "max_epoch"), "", "edited.yaml: unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?"),
        (("\nmodel:", "\nmodle:"), "", "unknown key 'modle'; did you mean 'model'?"),
        (("image_size", "image_sise"), "", "of DigitsData; did you mean 'image_size'? it takes: image_size,"),
        (("224", "224\n    lr: fast"), "", "must be float, got 'fast'"),
        (None, "--trainer.callbacks+ OneCylce", "unknown callback 'OneCylce'; did you mean 'OneCycle'?"),
        (None, "--trainer.callbacks OneCycle --trainer.callbacks.pct_start 2.0", "OneCycle: pct_start must be above 0"),
        (None, "--trainer.devices 0,1", "with `CPUAccelerator` should be an int > 0"),
        (None, "--model.init_args.lrr 1", "unknown key 'model.lrr' of ImageClassifier; did you mean 'lr'?"),
        (None, f"--trainer.callbacks+ '{CYCLE}'", "trainer.callbacks.max_lr must be float or list, got 'big'"),
        (None, "--trainer.strategy mesh --trainer.strategy.tp 2", "got the alias 'mesh', which takes no options; name"),
        (("{max_epochs: 1,", TWO_CALLBACKS), "--trainer.callbacks.Cycle.max_lr 1", "must name a callback of the run"),
    ],
)
def test_what_a_run_refuses(refused, changed, words, message):
    config = edit(*changed) if changed else "train.yaml"
    assert message in refused("fit", "--config", config, *shlex.split(words))
    assert not list(Path().rglob("version_*")), "what is refused leaves nothing behind"


def test_devices_that_cannot_be(refused):
    Path("mine.py").write_text(
        "from lightning.pytorch.strategies import SingleDeviceStrategy\n"
        "class Mine(SingleDeviceStrategy):\n"
        '    def __init__(self, device: str = "cpu"):\n'
        "        super().__init__(device)\n"
    )
    words = ["fit", "--config", "train.yaml", "--plugins", "./mine.py", "--trainer.strategy.class_path", "mine.Mine"]
    message = refused(*words, "--trainer.devices", "2")
    assert "trainer.devices x trainer.num_nodes must be 1 under Mine, got 2 x 1; set both to 1" in message
    words = ["fit", "--config", "train.yaml", "--trainer.strategy", "ddp", "--data.init_args.batch_size"]
    message = refused(*words, "32", "--trainer.devices", "3")
    assert "batch_size, the global batch, must be divisible by the 3 data-parallel ranks, got 32; set" in message
    message = refused(*words, "30", "--trainer.devices", "3", "--data.init_args.eval_batch_size", "32")
    assert "eval_batch_size, the global batch, must be divisible by the 3 data-parallel ranks, got 32" in message
    assert list(Path("runs/train").iterdir()) == []


def test_a_checkpoint_of_another_model(refused):
    assert main(["fit", "--config", "train.yaml"]) == 0
    os.environ.pop(runs.ENVIRONMENT, None)
    other = edit("embed_dim: 48, depth: 2", "embed_dim: 24, depth: 1")
    message = refused("fit", "--config", other, "--ckpt_path", "runs/train/version_0/checkpoints/last.ckpt")
    assert "the checkpoint's weights must be those of the config's model, got 0 missing, 12 (model." in message
    assert re.search(r"\.\.\.\) unexpected, \d+ \(model\.blocks\.0\..*, \.\.\.\) of another shape", message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "mine:Net",
            "model must be a class by its name or path, such as my_pkg.mod.Class, got mine:Net; write mine.Net",
        ),
        ("./mine.py", "got ./mine.py; write --plugins ./mine.py --model CLASS"),
        ("{class_path: Net", "model must be valid YAML, got {class_path: Net; check its brackets and quotes"),
    ],
)
def test_values_that_cannot_be_a_class(refused, given, message):
    assert refused("fit", "--model", given).endswith(message)


def test_weights_that_cannot_be_downloaded(refused, monkeypatch):
    def unreachable(*args, **options):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("timm.models._builder.load_pretrained", unreachable)
    message = refused("fit", "--config", "train.yaml", "--model.pretrained", "true")
    assert "pretrained weights of vit_tiny_patch16_224 must be in the cache or downloadable, got OSError" in message


def test_a_class_that_a_config_may_not_name(refused):
    message = refused("fit", "--config", edit("class_path: DigitsData", "class_path: subprocess.Popen"))
    assert "subprocess.Popen" in message
    assert "plugins" in message, "the fix: list the module under plugins:"


def test_configs_that_cannot_be_read(refused):
    assert "no config 'trian.yaml'" in refused("fit", "--config", "trian.yaml")
    assert "did you mean 'train.yaml'?" in refused("fit", "--config", "trian.yaml")
    assert "did you mean 'quickstart'?" in refused("fit", "--config", "quikstart")
    Path("odd.yaml").write_text("trainer: 5")
    assert "trainer must be a mapping, such as max_epochs: 3, got 5" in refused("fit", "--config", "odd.yaml")
    Path("noise.yaml").write_bytes(bytes(range(256)))
    assert "noise.yaml: a config must be a text file" in refused("fit", "--config", "noise.yaml")
    Path("broken.yaml").write_text("trainer: {max_epochs: 1")
    assert "broken.yaml" in refused("fit", "--config", "broken.yaml")


def test_corrupt_images_that_are_skipped_are_counted(refused, photos, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", photos, copy], check=True)
    for path in (copy / "train" / "china").iterdir():
        path.write_bytes(path.read_bytes()[:300])
    options = ["--data.on_corrupt", "skip", "--data.num_workers", "2", "--trainer.limit_train_batches", "1.0"]
    assert main([*folder_options(copy), *options]) == 0
    os.environ.pop(runs.ENVIRONMENT, None)
    summary = json.loads(Path("runs/train/version_0/summary.json").read_text())
    assert summary["corrupt_samples"] >= 12, "each of the 12, and those that stood in for one and were corrupt too"


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (["--trainer.default_root_dir", "mine"], "mine/train"),
        (["--run.dir", "other", "--trainer.default_root_dir", "mine"], "other/train"),
    ],
)
def test_runs_are_looked_for_where_they_are_kept(refused, given, folder):
    assert f"no run in {folder} has" in refused("validate", "--config", "train.yaml", "--ckpt_path", "last", *given)


def test_what_cannot_be_read_is_named(refused, monkeypatch):
    Path("folder.yaml").mkdir()
    with pytest.raises(DloError, match=r"cannot read the config folder\.yaml: Is a directory"):
        read_config("folder.yaml")

    def locked(path):
        raise PermissionError(13, "Permission denied", f"{path}/state.pt")

    monkeypatch.setattr("dlo_framework.run_setup.check", locked)
    message = refused("validate", "--config", "train.yaml", "--ckpt_path", "last.ckpt")
    assert message.endswith("cannot read the checkpoint last.ckpt/state.pt: Permission denied")


def test_a_run_does_not_go_on_from_weights_alone(refused):
    torch.save({"state_dict": {}, "global_step": 3, "epoch": 0}, "weights.ckpt")
    message = refused("fit", "--config", "train.yaml", "--ckpt_path", "weights.ckpt")
    assert "got weights.ckpt with weights only" in message


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (["--run.dir", "s3://bucket/runs"], "run.dir"),
        (["--trainer.default_root_dir", "s3://bucket/runs"], "trainer.default_root_dir"),
        (
            ["--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {dirpath: 'memory://bucket/best'}}]"],
            "dirpath of ModelCheckpoint",
        ),
    ],
)
def test_a_folder_with_a_scheme_is_refused_and_leaves_nothing(refused, tmp_path, given, option):
    message = refused("fit", "--config", "train.yaml", *given)
    assert f"{option} must be on a file system, got " in message
    assert [path.name for path in tmp_path.iterdir()] == ["train.yaml"]


def test_the_command_itself_exits_with_2(dlo):
    (dlo.folder / "train.yaml").write_text(CONFIG.replace("max_epochs", "max_epoch"))
    done = dlo("fit", "--config", "train.yaml", code=2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith("unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?")
    assert "Traceback" not in done.stderr


def test_a_crash_below_python_says_which_line_led_to_it(dlo) -> None:
    (dlo.folder / "crashing.py").write_text("import ctypes\n\nctypes.string_at(0)\n")
    (dlo.folder / "train.yaml").write_text(f"plugins: [crashing.py]\n{CONFIG}")
    done = dlo("fit", "--config", "train.yaml", code=-signal.SIGSEGV)
    assert "Segmentation fault" in done.stderr
    assert 'crashing.py", line 3' in done.stderr

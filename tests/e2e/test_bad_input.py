"""Bad input ends with exit code 2 and one message that holds the rule, what was given and the fix; no traceback.

Most of these call the command's entry point in this process, for each new one costs seconds of imports.
"""

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest
import torch

from dlo_framework.cli.config_scan import read_config
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_tasks.language.records import read_records
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
    Path("edited.yaml").write_text(CONFIG.replace(old, new), errors="surrogateescape")
    return "edited.yaml"


DATA = "data: {class_path: DigitsData, init_args: {image_size: 16}}\n"
GPT2 = "{model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 64, vocab_size: 300}"
LANGUAGE = f"model: {{class_path: CausalLM, init_args: {{config: {GPT2}}}}}\n"
TEXT = f"{LANGUAGE}data: {{class_path: TextData, init_args: {{seq_len: 32}}}}\n"
TEXT_LORA = TEXT.replace("{config", "{lora: {rnk: 4}, config")
RNK = "of Lora; did you mean 'rank'? it takes: rank, "
CYCLE = "{class_path: OneCycle, init_args: {max_lr: big}}"
TWO_CALLBACKS = "{callbacks: [{class_path: LRFinder}, {class_path: OneCycle}], max_epochs: 1,"
REMOTE_BEST = "[{class_path: ModelCheckpoint, init_args: {dirpath: 'memory://bucket/best'}}]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trainer.callbacks+ OneCylce", "unknown callback 'OneCylce'; did you mean 'OneCycle'?"),
        ("--model.init_args.lrr 1", "unknown key 'model.lrr' of ImageClassifier; did you mean 'lr'?"),
        (f"--trainer.callbacks+ '{CYCLE}'", "trainer.callbacks.max_lr must be float or list, got 'big'"),
        ("--trainer.strategy mesh --trainer.strategy.tp 2", "got the alias 'mesh', which takes no options; name"),
        ("--trainer.callbacks OneCycle --model.schedule cosine", "OneCycle sets the learning rate, got"),
        # Values that cannot be a class.
        ("--model mine:Net", "by its name or path, such as my_pkg.mod.Class, got mine:Net; write mine.Net"),
        ("--model ./mine.py", "got ./mine.py; write --plugins ./mine.py --model CLASS"),
        ("--model '{class_path: Net'", "model must be valid YAML, got {class_path: Net; check its brackets and quotes"),
        # Options by other names and values.
        ("--lr 1e-3", "unknown option '--lr'; did you mean --model.lr?"),
        ("--nothing_like_it 3", "unknown option '--nothing_like_it'"),
        ("--epochs 3", "unknown option '--epochs'; did you mean --trainer.max_epochs?"),
        ("--trainer.epochs 3", "did you mean --trainer.max_epochs?"),
        ("--resume run", "did you mean --ckpt_path last?"),
        ("--trainer.precision fp16", "got 'fp16'; did you mean '16-mixed'?"),
        ("--trainer.devices 0", "trainer.devices must be at least 1, or auto, got 0; set 1 or auto"),
        ("--trainer.accelerator cpuu", "got cpuu; did you mean 'cpu'?"),
        ("train.yaml", "an option must begin with --, got 'train.yaml'; write --config train.yaml"),
        ("more", "an option must begin with --, got 'more'"),
        # Folders.
        ("--run.dir s3://bucket/runs", "run.dir must be on a file system, got "),
        ("--trainer.default_root_dir s3://bucket/runs", "trainer.default_root_dir must be on a file system, got "),
        (f'--trainer.callbacks "{REMOTE_BEST}"', "dirpath of ModelCheckpoint must be on a file system, got "),
        ("--ckpt_path last --trainer.default_root_dir mine", "no run in mine/train has"),
        ("--ckpt_path last --run.dir other --trainer.default_root_dir mine", "no run in other/train has"),
        # Configs that cannot be read.
        ("--config trian.yaml", "no config 'trian.yaml'"),
        ("--config trian.yaml", "did you mean 'train.yaml'?"),
        ("--config quikstart", "did you mean 'quickstart'?"),
    ],
)
def test_what_a_run_refuses(refused, words, message):
    assert message in refused("fit", "--config", "train.yaml", *shlex.split(words))
    assert {path.name for path in Path().iterdir()} <= {"train.yaml", "runs"}
    assert not list(Path().rglob("version_*")), "what is refused leaves nothing behind"


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("max_epochs", "max_epoch", "", "edited.yaml: unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?"),
        ("max_epochs: 1", "gpus: 1", "", "edited.yaml: unknown key 'trainer.gpus'; did you mean 'trainer.devices'?"),
        ("\nmodel:", "\nmodle:", "", "unknown key 'modle'; did you mean 'model'?"),
        ("image_size", "image_sise", "", "of DigitsData; did you mean 'image_size'? it takes: image_size,"),
        ("{max_epochs: 1,", TWO_CALLBACKS, "--trainer.callbacks.Cycle.max_lr 1", "must name a callback of the run"),
        ("class_path: DigitsData", "class_path: subprocess.Popen", "", "'subprocess.Popen' is refused: "),
        ("class_path: DigitsData", "class_path: subprocess.Popen", "", "plugins: ["),
        (CONFIG, "trainer: 5", "", "trainer must be a mapping, such as max_epochs: 3, got 5"),
        (CONFIG, "\udcff", "", "edited.yaml: a config must be a text file"),
        (CONFIG, "trainer: {max_epochs: 1", "", "edited.yaml"),
        (DATA, "", "", "data must be set for fit, got none: ImageClassifier has no train_dataloader of its own; add"),
        (CONFIG, LANGUAGE, "", "data must be set for fit, got none: CausalLM has no train_dataloader"),
        (CONFIG, TEXT, "--model.init_args.lora.rnk 4", f"unknown key 'model.lora.rnk' {RNK}"),
        (CONFIG, TEXT_LORA, "", f"edited.yaml: unknown key 'model.init_args.lora.rnk' {RNK}"),
    ],
)
def test_what_is_wrong_in_a_config(refused, old, new, words, message):
    assert message in refused("fit", "--config", edit(old, new), *shlex.split(words))
    assert not list(Path().rglob("version_*"))


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


def test_weights_that_cannot_be_downloaded(refused, monkeypatch):
    def unreachable(*args, **options):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("timm.models._builder.load_pretrained", unreachable)
    message = refused("fit", "--config", "train.yaml", "--model.pretrained", "true")
    assert "pretrained weights of vit_tiny_patch16_224 must be in the cache or downloadable, got OSError" in message


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


# --- what a new user types on the first day -----------------------------------------------------------------


@pytest.fixture
def unfit(refused):
    """Returns a function that runs ``dlo fit`` with a config, checks that it refuses, and returns its message."""
    return lambda *words, config="train.yaml": refused("fit", "--config", config, *words)


def test_a_callback_without_what_it_requires(unfit):
    message = unfit("--trainer.callbacks+", "EarlyStopping")
    assert "monitor of EarlyStopping under trainer.callbacks must be set, got none; set init_args: {monitor:" in message
    assert "or add --trainer.callbacks.monitor VALUE after the class" in message
    words = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val_loss"]
    assert main(["fit", "--config", "train.yaml", *words]) == 0, "the fix works"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_whose_package_is_missing(unfit):
    message = unfit("--trainer.logger", "WandbLogger")
    assert message.endswith(
        "WandbLogger needs the package wandb>=0.12.10, which is not installed; pip install 'wandb>=0.12.10'"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(("word", "meant"), [("train", "fit"), ("evaluate", "validate"), ("ft", "fit")])
def test_a_command_by_another_tools_name(word, meant, capfd):
    assert main([word, "--config", "quickstart"]) == 2
    assert f"unknown command '{word}'; did you mean '{meant}'? available: fit, " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"question": "a", "answer": "b"}, "set data.init_args.columns to {prompt: question, completion: answer}"),
        ({"instruction": "a", "input": "", "output": "b"}, "to {prompt: instruction, completion: output}"),
        ({"instruction": "a", "input": "c", "output": "b"}, "and join 'input' to the prompt, which is left out"),
        ({"content": "a"}, "set data.init_args.columns to {text: content}"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "columns to {messages: conversations}"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "> chats.jsonl` makes it of yours"),
    ],
)
def test_columns_of_common_data_sets(tmp_path, record, fix):
    with pytest.raises(DloError) as raised:
        read(tmp_path, "x.jsonl", json.dumps(record))
    assert fix in str(raised.value)


def test_a_misspelt_metric_is_found_before_the_first_step(unfit):
    message = unfit("--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {monitor: val_los}}]")
    assert "monitor of ModelCheckpoint must be a logged metric, got 'val_los'; did you mean 'val_loss'?" in message
    assert "validation logs: val_acc1, val_acc5, val_loss" in message
    (summary,) = Path("runs/train").glob("version_*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 0


def test_a_metric_that_nobody_logs(unfit):
    words = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val_kappa"]
    with pytest.warns(UserWarning, match="EarlyStopping is 'val_kappa', which validation does not log; it logs val_a"):
        message = unfit(*words)
    assert "monitor of EarlyStopping must be a logged metric, got 'val_kappa'; logged: val_acc1, " in message


def test_an_accelerator_that_the_machine_lacks(unfit, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: False)
    monkeypatch.setattr("lightning.pytorch.accelerators.MPSAccelerator.is_available", lambda: False)
    fix = "set cpu, or install a torch that sees the device (`dlo doctor`)"
    for given in ("gpu", "cuda"):
        rule = f"trainer.accelerator must be one that this machine has (auto, cpu), got {given}"
        assert unfit("--trainer.accelerator", given).endswith(f"{rule}; {fix}")


def test_a_folder_of_images_without_train(unfit):
    images = ["--data", "ImageFolderData", "--data.image_size", "32", "--data.batch_size", "4", "--data.root"]
    Path("pictures/train/one").mkdir(parents=True)
    Path("pictures/val/one").mkdir(parents=True)
    Path("flat/one").mkdir(parents=True)
    Path("outer").mkdir()
    assert unfit(*images, "flat").endswith("got flat without train/; " + MOVE)
    assert unfit(*images, "pictures/train").endswith("without train/; set data.init_args.root to pictures")
    Path("pictures").rename("outer/pictures")
    assert unfit(*images, "outer").endswith("got outer without train/; set data.init_args.root to outer/pictures")


MOVE = "its folders one look like classes: move them to flat/train, and a part of each one's images to flat/val/<class>"


def test_a_config_is_printed_without_defaults(unfit, capfd):
    for flag in ("--print_config=skip_default", "--print_config"):
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", "train.yaml", flag])
        assert not ended.value.code
        out = capfd.readouterr().out
        assert "class_path: dlo_tasks.imagenet.classifier.ImageClassifier" in out
        assert ("num_sanity_val_steps" in out) == (flag == "--print_config")


def test_a_model_that_is_neither_a_folder_nor_on_a_hub_that_answers(unfit, monkeypatch):
    def unreachable(*args, **options):
        raise OSError(-2, "Name or service not known")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    Path("my-modle").mkdir()
    text = TEXT.replace(f"config: {GPT2}", "model: my-model")
    Path("named.yaml").write_text(text)
    message = unfit(config="named.yaml")
    assert "model must be a folder, or a model of the Hugging Face hub, got my-model: no such folder in " in message
    assert "cannot be reached (Name or service not known); did you mean 'my-modle'?" in message


def read(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    list(read_records([folder / name]))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_where_lines_are_wanted(tmp_path, indent):
    text = json.dumps([{"text": "a"}, {"text": "b"}], indent=indent)
    with pytest.raises(DloError) as raised:
        read(tmp_path, "texts.json", text)
    path = tmp_path / "texts.json"
    assert f"{path} must have one JSON object on each line, got one JSON value over the file" in str(raised.value)
    assert f"`jq -c '.[]' {path} > {path}l`" in str(raised.value)

"""Messages for what a new user types on the first day: one line, with the key or command that is meant."""

import importlib.util
import json
import os
import socket
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_tasks.language.records import read_records
from support.digits_config import digits_config

DATA = "data: {class_path: DigitsData, init_args: {image_size: 16}}\n"
CONFIG = digits_config("max_epochs: 1, accelerator: cpu, limit_train_batches: 2, limit_val_batches: 1")
GPT2 = "{model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 64, vocab_size: 300}"
LANGUAGE = f"model: {{class_path: CausalLM, init_args: {{config: {GPT2}}}}}\n"


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Returns a function that runs ``dlo fit``, checks that it refuses, and returns its message."""
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(CONFIG)
    Path("text.yaml").write_text(f"{LANGUAGE}data: {{class_path: TextData, init_args: {{seq_len: 32}}}}\n")

    def run(*words: str, config: str = "train.yaml") -> str:
        code = main(["fit", "--config", config, *words])
        os.environ.pop(runs.ENVIRONMENT, None)
        err = capfd.readouterr().err
        assert code == 2, err
        assert "Traceback" not in err
        return err.strip().splitlines()[-1]

    return run


def test_a_callback_without_what_it_requires(refused):
    message = refused("--trainer.callbacks+", "EarlyStopping")
    assert "monitor of EarlyStopping under trainer.callbacks must be set, got none; set init_args: {monitor:" in message
    assert "or add --trainer.callbacks.monitor VALUE after the class" in message
    words = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val_loss"]
    assert main(["fit", "--config", "train.yaml", *words]) == 0, "the fix works"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_whose_package_is_missing(refused):
    message = refused("--trainer.logger", "WandbLogger")
    assert message.endswith(
        "WandbLogger needs the package wandb>=0.12.10, which is not installed; pip install 'wandb>=0.12.10'"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 1e-3", "unknown option '--lr'; did you mean --model.lr?"),
        ("--nothing_like_it 3", "unknown option '--nothing_like_it'"),
        ("--epochs 3", "unknown option '--epochs'; did you mean --trainer.max_epochs?"),
        ("--trainer.epochs 3", "did you mean --trainer.max_epochs?"),
        ("--resume run", "did you mean --ckpt_path last?"),
        ("--trainer.precision fp16", "got 'fp16'; did you mean '16-mixed'?"),
        ("--trainer.devices 0", "trainer.devices must be at least 1, or auto, got 0; set 1 or auto"),
        ("--trainer.accelerator cpuu", "got cpuu; did you mean 'cpu'?"),
    ],
)
def test_options_by_other_names_and_values(refused, words, message):
    assert refused(*words.split()).endswith(message)


def test_a_config_without_its_option(refused, capfd):
    message = refused("train.yaml")
    assert message.endswith("an option must begin with --, got 'train.yaml'; write --config train.yaml")
    assert refused("more").endswith("an option must begin with --, got 'more'")
    Path("gpus.yaml").write_text(CONFIG.replace("max_epochs: 1", "gpus: 1"))
    message = refused(config="gpus.yaml")
    assert message.endswith("gpus.yaml: unknown key 'trainer.gpus'; did you mean 'trainer.devices'?")


@pytest.mark.parametrize(("word", "meant"), [("train", "fit"), ("evaluate", "validate"), ("ft", "fit")])
def test_a_command_by_another_tools_name(word, meant, capfd):
    assert main([word, "--config", "quickstart"]) == 2
    assert f"unknown command '{word}'; did you mean '{meant}'? available: fit, " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"question": "a", "answer": "b"}, "set data.init_args.columns to {prompt: question, completion: answer}"),
        ({"instruction": "a", "input": "", "output": "b"}, "to {prompt: instruction, completion: output}"),
        (
            {"instruction": "a", "input": "c", "output": "b"},
            "and join 'input' to the prompt, which is left out otherwise",
        ),
        ({"content": "a"}, "set data.init_args.columns to {text: content}"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "columns to {messages: conversations}"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "> chats.jsonl` makes it of yours"),
    ],
)
def test_columns_of_common_data_sets(tmp_path, record, fix):
    with pytest.raises(DloError) as raised:
        read(tmp_path, "x.jsonl", json.dumps(record))
    assert fix in str(raised.value)


def test_a_field_of_an_options_own_class(refused):
    fault = "of Lora; did you mean 'rank'? it takes: rank, "
    assert f"unknown key 'model.lora.rnk' {fault}" in refused("--model.init_args.lora.rnk", "4", config="text.yaml")
    model = LANGUAGE.replace("init_args: {", "init_args: {lora: {rnk: 4}, ")
    Path("lora.yaml").write_text(f"{model}data: {{class_path: TextData, init_args: {{seq_len: 32}}}}\n")
    assert f"lora.yaml: unknown key 'model.init_args.lora.rnk' {fault}" in refused(config="lora.yaml")


def test_a_misspelt_metric_is_found_before_the_first_step(refused):
    message = refused("--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {monitor: val_los}}]")
    assert "monitor of ModelCheckpoint must be a logged metric, got 'val_los'; did you mean 'val_loss'?" in message
    assert "validation logs: val_acc1, val_acc5, val_loss" in message
    (summary,) = Path("runs/train").glob("version_*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 0


def test_a_metric_that_nobody_logs(refused):
    words = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val_kappa"]
    with pytest.warns(UserWarning, match="EarlyStopping is 'val_kappa', which validation does not log; it logs val_a"):
        message = refused(*words)
    assert "monitor of EarlyStopping must be a logged metric, got 'val_kappa'; logged: val_acc1, " in message


def test_an_accelerator_that_the_machine_lacks(refused, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: False)
    monkeypatch.setattr("lightning.pytorch.accelerators.MPSAccelerator.is_available", lambda: False)
    fix = "set cpu, or install a torch that sees the device (`dlo doctor`)"
    for given in ("gpu", "cuda"):
        rule = f"trainer.accelerator must be one that this machine has (auto, cpu), got {given}"
        assert refused("--trainer.accelerator", given).endswith(f"{rule}; {fix}")


def test_a_folder_of_images_without_train(refused):
    images = ["--data", "ImageFolderData", "--data.image_size", "32", "--data.batch_size", "4", "--data.root"]
    Path("pictures/train/one").mkdir(parents=True)
    Path("pictures/val/one").mkdir(parents=True)
    Path("flat/one").mkdir(parents=True)
    Path("outer").mkdir()
    assert refused(*images, "flat").endswith("got flat without train/; " + MOVE)
    assert refused(*images, "pictures/train").endswith("without train/; set data.init_args.root to pictures")
    Path("pictures").rename("outer/pictures")
    assert refused(*images, "outer").endswith("got outer without train/; set data.init_args.root to outer/pictures")


MOVE = "its folders one look like classes: move them to flat/train, and a part of each one's images to flat/val/<class>"


def test_a_config_without_data(refused):
    Path("none.yaml").write_text(CONFIG.removesuffix(DATA))
    message = refused(config="none.yaml")
    assert "data must be set for fit, got none: ImageClassifier has no train_dataloader of its own; add" in message
    Path("none.yaml").write_text(LANGUAGE)
    assert "data must be set for fit, got none: CausalLM has no train_dataloader" in refused(config="none.yaml")


def test_a_config_is_printed_without_defaults(refused, capfd):
    for flag in ("--print_config=skip_default", "--print_config"):
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", "train.yaml", flag])
        assert not ended.value.code
        out = capfd.readouterr().out
        assert "class_path: dlo_tasks.imagenet.classifier.ImageClassifier" in out
        assert ("num_sanity_val_steps" in out) == (flag == "--print_config")


def test_a_model_that_is_neither_a_folder_nor_on_a_hub_that_answers(refused, monkeypatch):
    def unreachable(*args, **options):
        raise OSError(-2, "Name or service not known")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    Path("my-modle").mkdir()
    text = Path("text.yaml").read_text().replace(f"config: {GPT2}", "model: my-model")
    Path("named.yaml").write_text(text)
    message = refused(config="named.yaml")
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


def test_a_scheduler_beside_a_callback_that_sets_the_learning_rate(refused):
    message = refused("--trainer.callbacks", "OneCycle", "--model.schedule", "cosine")
    assert "OneCycle: ImageClassifier must configure no scheduler, as OneCycle sets the learning rate, got" in message
    assert message.rstrip().endswith("set model.init_args.schedule: constant")
    assert not list(Path("runs").rglob("version_*")), "refused before the run has a folder"

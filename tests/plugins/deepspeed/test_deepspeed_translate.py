"""A config is printed as the JSON of its run, and a JSON as a config, by `dlo deepspeed-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.main import main, remove_local_rank
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import merge_options
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.deepspeed.trainer_settings import (
    fill_from_trainer,
    get_open_settings,
    infer_ranks,
    read_settings,
)
from dlo_plugins.deepspeed.translation import make_nearest_config, task_options, to_config
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.deepspeed_configs import CONFIGS, RANKS


def there_and_back(config):
    """Returns a configuration as its run completes it, directly, and from the YAML that it becomes."""
    resolved = merge_options({}, config)
    trainer = yaml.safe_load(yaml.safe_dump(to_config(resolved, RANKS)))
    strategy = trainer.pop("strategy")
    assert strategy["class_path"] == "DeepSpeedBridge"
    again = DeepSpeedBridge(**strategy["init_args"])
    facts = read_settings(trainer, RANKS)
    return fill_from_trainer(resolved, facts), fill_from_trainer(again.asked, facts)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_json_as_yaml_is_the_same_json(name):
    direct, back = there_and_back(CONFIGS[name])
    assert back == direct


def test_ranks_and_accumulation_follow_from_the_batch_sizes():
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert to_config(merge_options({}, config))["devices"] == 8
    del config["gradient_accumulation_steps"]
    assert to_config(merge_options({}, config), ranks=4)["accumulate_grad_batches"] == 4
    assert infer_ranks(config) is None


# --- as options of a task ----------------------------------------------------------------------------------


def test_a_tasks_options_are_timms_optimizer_and_the_tasks_schedule():
    def options_of(**sections):
        return task_options(merge_options({"stage": 0}, sections))[0]

    assert options_of() == {}
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
    assert options_of(optimizer=sgd) == {"optimizer": "sgd", "lr": 0.1, "optimizer_args": {"momentum": 0.9}}
    lion = {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}}
    cosine = {"total_num_steps": 100, "warmup_num_steps": 10, "cos_min_ratio": 0.1}
    found = options_of(optimizer=lion, scheduler={"type": "WarmupCosineLR", "params": cosine})
    assert found.pop("min_lr") == pytest.approx(1e-5)
    optimizer = {"optimizer": "lion", "lr": 1e-4, "weight_decay": 0.0, "optimizer_args": {"betas": [0.9, 0.99]}}
    assert found == optimizer | {"schedule": "cosine", "warmup_steps": 10}


def test_a_tasks_options_fit_the_tasks():
    """Breaks when the tasks or timm rename an option that is suggested."""
    import inspect

    from timm.optim import list_optimizers

    from dlo_tasks.imagenet.classifier import ImageClassifier
    from dlo_tasks.language.language_model import LanguageModel

    for config in CONFIGS.values():
        found, _ = task_options(merge_options({}, config))
        for task in (LanguageModel, ImageClassifier):
            assert found.keys() <= set(inspect.signature(task.__init__).parameters)
        assert found.get("optimizer", "adamw") in list_optimizers()


# --- another strategy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "section"),
    [
        (ZeroStrategy(stage=1, bucket_mb=4), {"stage": 1, "reduce_bucket_size": 2**20}),
        (ZeroStrategy(stage=3, offload="both"), {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
        (FSDPStrategy(), {"stage": 3}),
        (FSDPStrategy(offload=True), {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    ],
)
def test_zero_and_fsdp_have_a_stage(strategy, section):
    strategy._num_nodes = 1
    strategy.parallel_devices = [0, 1]
    want = {key: {"device": value} if value == "cpu" else value for key, value in section.items()}
    assert make_nearest_config(strategy) == {"zero_optimization": want}


def test_what_deepspeeds_json_has_nothing_like_is_refused():
    strategy = MeshStrategy(tp=2)
    strategy.parallel_devices = [0, 1, 2, 3]
    with pytest.raises(DloError, match="tp must be 1"):
        make_nearest_config(strategy)


# --- what a Trainer leaves open ----------------------------------------------------------------------------


def test_a_json_fills_what_the_trainer_leaves_open():
    asked = merge_options({}, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    open_trainer = {"precision": None, "accumulate_grad_batches": 1, "gradient_clip_val": None, "devices": 2}
    assert get_open_settings(asked, open_trainer) == {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.5,
    }
    same = open_trainer | {"precision": "bf16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
    assert get_open_settings(asked, same) == {}
    assert get_open_settings(merge_options({}), open_trainer) == {}
    with pytest.raises(DloError, match=r"gradient_clip_val 1\.0, got 0\.5"):
        get_open_settings(asked, open_trainer | {"gradient_clip_val": 1.0})


def test_the_data_are_asked_too_where_the_ranks_are_known():
    from dlo_framework.data import ResumableDataModule

    asked = merge_options({}, {"train_micro_batch_size_per_gpu": 8})
    data = ResumableDataModule(batch_size=8)
    with pytest.raises(DloError, match=r"set --data\.batch_size 16"):
        get_open_settings(asked, {"devices": 2, "accumulate_grad_batches": 1}, data)
    assert get_open_settings(asked, {"devices": "auto", "accumulate_grad_batches": 1}, data) == {}
    assert get_open_settings(asked, {"devices": 1, "accumulate_grad_batches": 1}, data) == {}


# --- ``dlo deepspeed-config``, and the words of DeepSpeed's launcher and of its scripts ------------------------------


TASK = ("deepspeed-config", "--config", "quickstart", "--ranks", "2", "--trainer.accelerator", "cpu")


@pytest.fixture
def ds_json(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    content = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 1000,
    }
    path.write_text(json.dumps(content))
    return path


def with_json(path: Path) -> list[str]:
    return ["--deepspeed_config", str(path), "--data.init_args.batch_size", "32"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_a_json_is_printed_as_a_config(capsys: pytest.CaptureFixture[str], ds_json: Path) -> None:
    trainer = yaml.safe_load(printed(capsys, "deepspeed-config", str(ds_json)))["trainer"]
    assert trainer == {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "strategy": {
            "class_path": "DeepSpeedBridge",
            "init_args": {
                "stage": 3,
                "offload_optimizer": "cpu",
                "config": {"train_micro_batch_size_per_gpu": 16, "steps_per_print": 1000},
            },
        },
    }
    text = printed(capsys, "deepspeed-config", str(ds_json), "--ranks", "4")
    assert "data.init_args.batch_size: 64" in text
    assert yaml.safe_load(text)["trainer"]["devices"] == 4


def test_a_config_is_printed_as_the_json_of_its_run(capsys: pytest.CaptureFixture[str], ds_json: Path) -> None:
    complete = json.loads(printed(capsys, *TASK, *with_json(ds_json)))
    assert complete == json.loads(ds_json.read_text()) | {"train_batch_size": 64}


def test_another_strategy_has_the_nearest_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deepspeed-config", "--config", "digits/zero", "--trainer.gradient_clip_val", "1.0"]
    found = json.loads(printed(capsys, *words))
    assert found["zero_optimization"] == {"stage": 3}
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (64, 32)
    assert found["gradient_clipping"] == 1.0


def test_batch_sizes_that_nobody_says_are_left_open(capsys: pytest.CaptureFixture[str], ds_json: Path) -> None:
    """Those of a datamodule that is not dlo's; of a run too, its JSON's are taken for the log alone."""
    words = [*TASK, "--data.class_path", "lightning.pytorch.demos.boring_classes.BoringDataModule"]
    words += ["--model.init_args.num_classes", "2"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == ("auto", "auto")
    assert found["gradient_accumulation_steps"] == 1
    assert 'batch sizes are "auto", which `dlo fit` fills in' in err
    assert main([*words, "--deepspeed_config", str(ds_json)]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["train_batch_size"], err) == (64, "")


def test_a_contradiction_is_refused_as_in_a_run(capsys: pytest.CaptureFixture[str], ds_json: Path) -> None:
    for command in ("deepspeed-config", "fit"):
        ranks = ["--ranks", "2"] if command == "deepspeed-config" else ["--trainer.devices", "2"]
        words = [command, "--config", "quickstart", "--trainer.accelerator", "cpu", *ranks, *with_json(ds_json)]
        message = refused(capsys, *words, "--trainer.gradient_clip_val", "0.7")
        assert f"{ds_json}: gradient_clipping must equal trainer.gradient_clip_val 0.7, got 0.5" in message


def test_what_is_given_decides_the_direction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "must be a config" in refused(capsys, "deepspeed-config")
    assert "got a.json b.json" in refused(capsys, "deepspeed-config", "a.json", "b.json")
    assert "--ranks must be at least 1" in refused(capsys, "deepspeed-config", "a.json", "--ranks", "0")
    assert "the file does not exist" in refused(capsys, "deepspeed-config", str(tmp_path / "a.json"))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    message = refused(capsys, "deepspeed-config", "--config", str(tmp_path / "ds.json"))
    assert f"to print its config, run `dlo deepspeed-config {tmp_path / 'ds.json'}`" in message
    broken = tmp_path / "broken.json"
    broken.write_text('{"zero_optimization": {"stge": 2}}')
    assert "did you mean 'stage'?" in refused(capsys, "deepspeed-config", str(broken))


# --- words of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [["--local-rank=1"], ["--local_rank", "1"], ["--local_rank=1", "--deepspeed"]])
def test_a_launchers_word_is_taken_away(word: list[str]) -> None:
    words = remove_local_rank([*word, "fit", "--run.name", "x"], {"LOCAL_RANK": "1"})
    assert scan(words).argv == ["fit", "--run.name", "x"]


def test_deepspeeds_switch_may_come_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deepspeed-config", "a.json", "--ranks", "0"]
    assert "--ranks must be at least 1" in refused(capsys, "--deepspeed", *words)
    assert "unknown command '--deepsped'" in refused(capsys, "--deepsped", *words)


def test_deepspeeds_words_for_scripts_name_the_strategy_and_its_json() -> None:
    for words in (["--deepspeed_config", "ds.json"], ["--deepspeed_config=ds.json"]):
        assert scan(["fit", "--deepspeed", *words]).argv == [
            *("fit", "--trainer.strategy.class_path", "DeepSpeedBridge"),
            *("--trainer.strategy.init_args.config", "ds.json"),
        ]


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--local_rank=1", "fit"], {}, "must come from a launcher that sets LOCAL_RANK"),
        (["--local_rank=1", "fit"], {"LOCAL_RANK": "0"}, "--local_rank must equal LOCAL_RANK 0, got 1"),
        (["fit", "--deepspeed_config"], {}, "must be a DeepSpeed JSON"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(DloError, match=message):
        scan(remove_local_rank(words, environment))

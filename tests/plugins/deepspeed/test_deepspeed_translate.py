"""Configs as the JSON of `dlo deepspeed-config`, JSONs as configs, and configs of Accelerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.main import main, remove_local_rank
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.accelerate_command import to_yaml, translate
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
    return [f"--deepspeed_config={path}", "--data.init_args.batch_size", "32"]


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


# --- configs of Accelerate become configs that `dlo fit` takes; what dlo does not have is refused by name -----------


LOCAL = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "mixed_precision": "no"}
FSDP = {
    **LOCAL,
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    },
}
DEEPSPEED = {
    **LOCAL,
    "distributed_type": "DEEPSPEED",
    "use_cpu": True,
    "deepspeed_config": {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero_stage": 3,
    },
}


def fsdp(**options):
    prefixed = {f"fsdp_{key}": value for key, value in options.items()}
    return {**FSDP, "fsdp_config": prefixed, "use_cpu": True, "num_machines": 1, "num_processes": 2}


def trainer(content):
    return translate(content)[0]


def test_devices_precision_and_fsdp():
    found, notes = translate(FSDP)
    assert found == {
        "accelerator": "gpu",
        "devices": 8,
        "num_nodes": 2,
        "precision": "bf16-mixed",
        "strategy": {"class_path": "FSDPStrategy", "init_args": {"recompute": True}},
    }
    assert [note.partition(" ")[0] for note in notes] == [
        "fsdp_auto_wrap_policy",
        "fsdp_state_dict_type",
        "fsdp_version",
    ]


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, "fsdp"),
        ({"sharding_strategy": 2}, {"reshard_after_forward": False}),
        ({"sharding_strategy": "NO_SHARD"}, "ddp"),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"replicate": -1, "shard": "node"}),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"offload_params": True, "forward_prefetch": True}, {"offload": True, "forward_prefetch": 1}),
    ],
)
def test_kinds_of_sharding(options, strategy):
    expected = strategy if isinstance(strategy, str) else {"class_path": "FSDPStrategy", "init_args": strategy}
    assert trainer(fsdp(**options))["strategy"] == expected


def test_deepspeed_its_file_and_plain_ranks():
    found = trainer(DEEPSPEED)
    assert found["strategy"]["init_args"] == {"stage": 3, "offload_optimizer": "cpu"}
    assert (found["accumulate_grad_batches"], found["gradient_clip_val"], found["accelerator"]) == (4, 1.0, "cpu")
    file = {**LOCAL, "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    assert trainer(file)["strategy"] == {"class_path": "DeepSpeedBridge", "init_args": {"config": "ds.json"}}
    assert trainer({**LOCAL, "distributed_type": "MULTI_CPU"})["strategy"] == "ddp"
    one = trainer({"distributed_type": "NO", "mixed_precision": False})
    assert one == {"accelerator": "auto", "devices": 1, "precision": "32-true", "strategy": "auto"}
    assert trainer({**LOCAL, "distributed_type": "MULTI_GPU", "gpu_ids": "0,2"})["devices"] == [0, 2]


def test_parallelism_fp8_and_compilation():
    sizes = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 4, "parallelism_config_cp_size": 1}
    found, notes = translate(
        {
            **fsdp(activation_checkpointing=True),
            "parallelism_config": sizes,
            "mixed_precision": "fp8",
            "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        }
    )
    assert found["strategy"] == {
        "class_path": "MeshStrategy",
        "init_args": {
            "dp_shard": 4,
            "tp": 2,
            "appliers": [{"class_path": "FullyShard", "init_args": {"recompute": True}}],
        },
    }
    assert [each["class_path"] for each in found["callbacks"]] == ["LowPrecision", "Compile"]
    assert any(note.startswith("dynamo_config") for note in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type must be NO, MULTI_CPU, .* got MEGATRON_LM"),
        ({"mixed_precission": "bf16"}, "mixed_precission must be a key .*; did you mean 'mixed_precision'"),
        ({"mixed_precision": "int8"}, "mixed_precision must be one of no, fp16, bf16, fp8, got int8"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes must be a multiple of num_machines, got 3 and 2"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment must be LOCAL_MACHINE"),
        ({"parallelism_config": {"parallelism_config_sp_size": 2}}, "got sp_size 2; did you mean"),
        ({"fsdp_config": {"fsdp_offload_param": True}, "distributed_type": "FSDP"}, "got fsdp_offload_param"),
    ],
)
def test_what_dlo_does_not_have_is_refused(change, message):
    with pytest.raises(DloError, match=message):
        translate({**LOCAL, "distributed_type": "MULTI_GPU", **change})


def test_what_the_command_prints_is_a_config_that_fit_takes(tmp_path, monkeypatch, capsys):
    """Written by Accelerate's own class, so that a key that it adds or renames is seen here."""
    monkeypatch.chdir(tmp_path)
    ClusterConfig(**{**DEEPSPEED, "debug": False}).to_yaml_file("theirs.yaml")
    assert main(["config", "from-accelerate", "theirs.yaml"]) == 0
    Path("machine.yaml").write_text(capsys.readouterr().out)
    expected = yaml.safe_load(Path("machine.yaml").read_text())["trainer"]
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "quickstart", "--config", "machine.yaml", "--print_config"])
    assert not end.value.code
    parsed = yaml.safe_load(capsys.readouterr().out)["trainer"]
    for key in ("accelerator", "devices", "precision"):
        assert parsed[key] == expected[key]
    assert expected["strategy"]["class_path"] in str(parsed["strategy"])
    with pytest.raises(DloError, match="must be a config that `accelerate config` wrote, got one without"):
        to_yaml(Path("machine.yaml"))

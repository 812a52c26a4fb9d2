import pytest
import yaml

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import merge_options
from dlo_plugins.deepspeed.json_file import get
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.deepspeed.trainer_settings import (
    fill_from_trainer,
    get_open_settings,
    infer_ranks,
    read_settings,
)
from dlo_plugins.deepspeed.translation import make_nearest_config, task_options, to_config, to_options
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


def test_typed_options_are_taken_out_of_the_json():
    options, rest = to_options(merge_options({}, CONFIGS["an NVMe disk"]))
    assert options == {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "nvme",
        "nvme_path": "/local_nvme",
    }
    assert "device" not in rest["zero_optimization"]["offload_param"]
    different = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "nvme", "nvme_path": "/b"},
        }
    }
    options, rest = to_options(merge_options({}, different))
    assert "nvme_path" not in options
    assert get(rest, "zero_optimization.offload_param.nvme_path") == "/b"


def test_the_trainers_part_stands_under_the_trainers_names():
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    }
    trainer = to_config(merge_options({}, config))
    strategy = trainer.pop("strategy")
    assert trainer == {
        "devices": 8,
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
    }
    assert strategy["init_args"] == {"config": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}}
    del config["gradient_accumulation_steps"]
    assert to_config(merge_options({}, config), ranks=4)["accumulate_grad_batches"] == 4
    assert infer_ranks(config) is None


# --- as options of a task ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "options"),
    [
        ({}, {}),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
            {"optimizer": "sgd", "lr": 0.1, "optimizer_args": {"momentum": 0.9}},
        ),
        (
            {
                "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 100, "warmup_num_steps": 10, "cos_min_ratio": 0.1},
                },
            },
            {
                "optimizer": "lion",
                "lr": 1e-4,
                "weight_decay": 0.0,
                "optimizer_args": {"betas": [0.9, 0.99]},
                "schedule": "cosine",
                "warmup_steps": 10,
                "min_lr": 1e-5,
            },
        ),
    ],
)
def test_a_tasks_options_are_timms_optimizer_and_the_tasks_schedule(sections, options):
    found, _ = task_options(merge_options({"stage": 0}, sections))
    assert found.keys() == options.keys()
    for key, value in options.items():
        assert found[key] == (pytest.approx(value) if isinstance(value, float) else value)


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


@pytest.mark.parametrize(
    ("given_trainer", "message"),
    [
        ({"precision": "16-mixed"}, "trainer.precision 16-mixed, got"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches 2, got"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val 1.0, got"),
        ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm must be norm"),
    ],
)
def test_what_the_trainer_says_otherwise_is_a_contradiction_before_it_is_built(given_trainer, message):
    asked = merge_options({}, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    with pytest.raises(DloError) as caught:
        get_open_settings(asked, {"accumulate_grad_batches": 1, "devices": 2} | given_trainer)
    assert message in str(caught.value)


def test_the_data_are_asked_too_where_the_ranks_are_known():
    from dlo_framework.data import ResumableDataModule

    asked = merge_options({}, {"train_micro_batch_size_per_gpu": 8})
    data = ResumableDataModule(batch_size=8)
    with pytest.raises(DloError, match=r"set --data\.batch_size 16"):
        get_open_settings(asked, {"devices": 2, "accumulate_grad_batches": 1}, data)
    assert get_open_settings(asked, {"devices": "auto", "accumulate_grad_batches": 1}, data) == {}
    assert get_open_settings(asked, {"devices": 1, "accumulate_grad_batches": 1}, data) == {}

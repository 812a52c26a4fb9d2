"""A DeepSpeed configuration from options and a JSON: files, keys, old spellings, and what is refused of them."""

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import merge_options
from dlo_plugins.deepspeed.json_file import get
from support.deepspeed_configs import CONFIGS


def refused(*arguments, **options):
    with pytest.raises(DloError) as caught:
        merge_options(*arguments, **options)
    return str(caught.value)


# --- options and a JSON into one ---------------------------------------------------------------------------


def test_without_a_json_the_stage_is_two():
    assert merge_options({}) == {"zero_optimization": {"stage": 2}}


def test_with_a_json_the_stage_is_the_jsons_even_where_it_says_none():
    assert merge_options({}, {"gradient_clipping": 1.0}) == {"gradient_clipping": 1.0}
    assert get(merge_options({"stage": 1}, {"gradient_clipping": 1.0}), "zero_optimization.stage") == 1


def test_each_typed_option_stands_where_deepspeed_reads_it():
    options = {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "cpu",
        "nvme_path": "/disk",
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 2000,
        "communication_dtype": "bfloat16",
        "hpz": 2,
        "partition_activations": True,
        "flops_profiler": 7,
        "comms_logger": True,
        "timeout_minutes": 3.0,
    }
    assert merge_options(options) == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            "offload_param": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": False,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 2000,
            "zero_hpz_partition_size": 2,
        },
        "communication_data_type": "bf16",
        "activation_checkpointing": {"partition_activations": True},
        "flops_profiler": {"enabled": True, "profile_step": 7},
        "comms_logger": {"enabled": True},
    }


def test_equal_values_in_both_places_pass_and_other_ones_name_both():
    json_config = {"zero_optimization": {"stage": 3}}
    assert merge_options({"stage": 3}, json_config) == json_config
    message = refused({"stage": 2}, json_config)
    assert "zero_optimization.stage must equal the strategy's option stage 2, got 3" in message
    assert merge_options({"stage": 2}, {"zero_optimization": {"stage": "auto"}})["zero_optimization"]["stage"] == 2


def test_an_nvme_path_that_nothing_uses_is_refused():
    assert "must be unset without offload to NVMe" in refused({"stage": 3, "nvme_path": "/disk"})
    assert "must be a folder" in refused({"stage": 3, "offload_parameters": "nvme"})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"communication_dtype": "fp8"}, "fp32, fp16 or bf16, got fp8"),
        ({"flops_profiler": 0}, "at least 1, got 0"),
        ({"stage": 4}, "zero_optimization.stage: Input should be 0, 1, 2 or 3, got 4"),
        (
            {"stage": 3, "offload_optimizer": "disk"},
            "offload_optimizer.device: Input should be 'none', 'cpu' or 'nvme', got 'disk'",
        ),
        ({"stage": 2, "reduce_bucket_size": 0}, "reduce_bucket_size: Input should be greater than 0, got 0"),
    ],
)
def test_a_value_that_does_not_fit_names_its_rule(options, rule):
    assert rule in refused(options)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"communication_data_type": "int8"}, "Invalid communication_data_type"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "not supported with ZeRO stage 3"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
        ),
    ],
)
def test_what_deepspeed_itself_refuses_is_refused_before_it_starts(config, rule):
    message = refused({}, config)
    assert message.startswith("strategy.config: DeepSpeed refuses the config")
    assert rule in message


# --- files -------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_deepspeed_reads_it(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  # a comment of Hjson\n  "zero_optimization": {"stage": 3},\n  "gradient_clipping": 1.0,\n}\n')
    assert merge_options({}, path) == {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}
    assert merge_options({}, path).source == str(path)


def test_a_file_that_does_not_parse_names_line_and_column(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  "zero_optimization": {"stage": 3},\n  "gradient_clipping" 1.0\n}\n')
    message = refused({}, str(path))
    assert message.startswith(f"{path}: line 3, column 23: Expecting ':' delimiter")
    path.write_text("[1, 2]")
    assert "got a list" in refused({}, path)
    path.write_text('{"gradient_clipping": 1.0, "gradient_clipping": 2.0}')
    assert "'gradient_clipping' must be unique, got 1.0 and 2.0" in refused({}, path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "must be a text file" in refused({}, path)
    path.write_text("")
    assert "the file is empty" in refused({}, path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("${zero_stage},", "'${zero_stage},', a placeholder"),
        ('"<stage>"', "'<stage>', a placeholder"),
        ("STAGE,", "'STAGE,', a text without quotes, and its comma"),
    ],
)
def test_a_template_that_is_not_filled_in_is_refused_with_its_key(tmp_path, value, shown):
    path = tmp_path / "ds_TEMPLATE.json"
    path.write_text('{\n  "zero_optimization": {\n    "stage": ' + value + '\n  },\n  "gradient_clipping": 1.0\n}\n')
    assert f"{path}: zero_optimization.stage must be a value, got {shown}; write the value" in refused({}, path)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", ["fill_me_in", 0])
def test_a_batch_size_that_is_no_number_of_samples_is_refused_before_a_trainer_is_known(key, value):
    message = f'{key} must be an integer of at least 1 or "auto", got {value!r}'
    assert message in refused({}, {key: value, "zero_optimization": {"stage": 2}})


def test_a_file_that_is_missing_names_its_neighbour(tmp_path):
    (tmp_path / "ds_config.json").write_text("{}")
    assert "did you mean 'ds_config.json'?" in refused({}, tmp_path / "ds_confg.json")
    assert "neither is its folder" in refused({}, tmp_path / "nowhere" / "ds.json")


# --- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_cliping": 1.0}, "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'?"),
        ({"flops_profiler": {"profile_steps": 3}}, "'flops_profiler.profile_steps'; did you mean 'profile_step'?"),
        ({"zero_stage": 2}, "unknown key 'zero_stage'; did you mean 'zero_optimization.stage'?"),
        ({"stage": 3}, "unknown key 'stage'; it belongs at 'zero_optimization.stage'"),
        (
            {"optimizer": {"type": "AdamW", "lr": 1e-3}},
            "'optimizer.lr'; it belongs at 'optimizer.params.lr'",
        ),
        ({"fp16": True}, "fp16 must be a section"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(config, message):
    assert message in refused({}, config)


@pytest.mark.parametrize(
    "config",
    [
        {"flash_attention": {"enabled": True}},
        {"optimizer": {"type": "AdamW", "adam_w_mode": True}},
    ],
)
def test_keys_that_deepspeed_ignores_are_warned_of(config):
    key = "optimizer.adam_w_mode" if "optimizer" in config else next(iter(config))
    with pytest.warns(UserWarning, match=f"unknown key '{key}' does nothing: DeepSpeed ignores it; remove it"):
        assert merge_options({"stage": 1}, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "callback GradientCompression"),
        ({"elasticity": {"enabled": True}}, "resumed on any number of ranks"),
        ({"progressive_layer_drop": {"enabled": True}}, "DeepSpeed has removed 'progressive_layer_drop'"),
        ({"curriculum_learning": {"enabled": True}}, "data_efficiency.data_sampling.curriculum_learning"),
    ],
)
def test_what_is_gone_from_deepspeed_names_what_to_take(config, message):
    assert message in refused({}, config)


# --- old spellings -----------------------------------------------------------------------------------------


def test_old_spellings_mean_what_deepspeed_takes_them_for():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    given_section = CONFIGS["old spellings"]["zero_optimization"]
    resolved = merge_options({}, CONFIGS["old spellings"])
    ours, theirs = (DeepSpeedZeroConfig(**section) for section in (resolved["zero_optimization"], given_section))
    assert (ours.stage, ours.offload_optimizer.device) == (theirs.stage, theirs.offload_optimizer.device) == (3, "cpu")
    assert ours.gather_16bit_weights_on_model_save is theirs.gather_16bit_weights_on_model_save is True
    assert resolved["bf16"] == {"enabled": True}
    assert "bfloat16" not in resolved
    assert merge_options({}, {"zero_optimization": True}) == {"zero_optimization": {"stage": 1}}
    assert merge_options({}, {"zero_optimization": {"stage": 2, "cpu_offload": False}}) == {
        "zero_optimization": {"stage": 2}
    }


def test_an_old_spelling_and_an_option_can_contradict_each_other():
    config = {"zero_optimization": {"stage": 3, "cpu_offload": True}}
    assert merge_options({"offload_optimizer": "cpu"}, config)
    assert "option offload_optimizer nvme, got cpu" in refused({"offload_optimizer": "nvme", "nvme_path": "/d"}, config)
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    assert "leave out cpu_offload" in refused({}, config)

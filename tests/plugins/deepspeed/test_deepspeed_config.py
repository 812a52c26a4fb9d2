"""DeepSpeed's configuration from options, a JSON and the Trainer's settings, and what is refused of them."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import (
    ASYNC_IO,
    PIN_MEMORY,
    QUANTIZER,
    check_available,
    merge_options,
)
from dlo_plugins.deepspeed.json_file import get
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.deepspeed.trainer_settings import MICRO, STEPS, TRAIN, TrainerSettings, fill_from_trainer
from support.deepspeed_configs import CONFIGS, RANKS


def refused(*arguments, **options):
    with pytest.raises(DloError) as caught:
        merge_options(*arguments, **options)
    return str(caught.value)


# --- options and a JSON into one ---------------------------------------------------------------------------


def test_without_a_json_the_stage_is_two_and_with_one_it_is_the_jsons_even_where_it_says_none():
    assert merge_options({}) == {"zero_optimization": {"stage": 2}}
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


STAGE_3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("options", "config", "parts"),
    [
        # Values.
        ({"communication_dtype": "fp8"}, None, ["fp32, fp16 or bf16, got fp8"]),
        ({"flops_profiler": 0}, None, ["at least 1, got 0"]),
        ({"stage": 4}, None, ["zero_optimization.stage: Input should be 0, 1, 2 or 3, got 4"]),
        ({"stage": 3, "nvme_path": "/disk"}, None, ["must be unset without offload to NVMe"]),
        ({"stage": 3, "offload_parameters": "nvme"}, None, ["must be a folder"]),
        (
            {},
            STAGE_3 | {TRAIN: "fill_me_in"},
            [f"{TRAIN} must be an integer of at least 1 or \"auto\", got 'fill_me_in'"],
        ),
        ({}, {MICRO: 0}, [f'{MICRO} must be an integer of at least 1 or "auto", got 0']),
        ({}, {STEPS: 0}, [f'{STEPS} must be an integer of at least 1 or "auto", got 0']),
        # What DeepSpeed itself refuses, before it starts.
        ({}, {"communication_data_type": "int8"}, ["DeepSpeed refuses the config", "Invalid communication_data_type"]),
        ({}, STAGE_3 | {"gradient_allreduce_op": "sum"}, ["not supported with ZeRO stage 3"]),
        # Keys.
        ({}, {"gradient_cliping": 1.0}, ["unknown key 'gradient_cliping'; did you mean 'gradient_clipping'?"]),
        (
            {},
            {"flops_profiler": {"profile_steps": 3}},
            ["'flops_profiler.profile_steps'; did you mean 'profile_step'?"],
        ),
        ({}, {"zero_stage": 2}, ["unknown key 'zero_stage'; did you mean 'zero_optimization.stage'?"]),
        ({}, {"stage": 3}, ["unknown key 'stage'; it belongs at 'zero_optimization.stage'"]),
        ({}, {"optimizer": {"type": "AdamW", "lr": 1e-3}}, ["'optimizer.lr'; it belongs at 'optimizer.params.lr'"]),
        ({}, {"fp16": True}, ["fp16 must be a section"]),
        # What is gone from DeepSpeed, or that dlo has in another place.
        ({}, {"optimizer": {"type": "OneBitAdam"}}, ["callback GradientCompression"]),
        ({}, {"elasticity": {"enabled": True}}, ["resumed on any number of ranks"]),
        ({}, {"progressive_layer_drop": {"enabled": True}}, ["DeepSpeed has removed 'progressive_layer_drop'"]),
        ({}, {"curriculum_learning": {"enabled": True}}, ["data_efficiency.data_sampling.curriculum_learning"]),
        ({}, {"tensor_parallel": {"autotp_size": 4}}, ["tensor parallelism", "init_args.tp 4"]),
        ({}, {"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        ({}, {"autotuning": {"enabled": True}}, ["autotuning", '"enabled": false', "MicroBatchFinder"]),
        ({}, {"data_efficiency": {"data_sampling": {"enabled": True}}}, ["must be off", "DynamicBatchSize"]),
        # What contradicts itself.
        ({"stage": 2, "offload_parameters": "cpu"}, None, ["stage must be 3", "got 2", "set stage: 3"]),
        ({"stage": 0, "offload_optimizer": "cpu"}, None, ["stage must be 1, 2 or 3", "set stage: 2"]),
        (
            {"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/d"},
            None,
            ["stage must be 3 to offload the optimizer to NVMe", "offload_optimizer: cpu"],
        ),
        ({"stage": 2, "hpz": 2}, None, ["stage must be 3 for zero_optimization.zero_hpz_partition_size"]),
        ({}, STAGE_3 | {"pipeline": {"stages": 2}}, ["pipeline needs stage 0 or 1, got 3", "MeshStrategy", "pp 2"]),
        (
            {"stage": 3},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            ["super_offload", "CPU Adam"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_as_the_strategy_is_built(options, config, parts):
    message = refused(options, config)
    assert all(part in message for part in parts), message


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


def test_a_file_that_is_missing_names_its_neighbour(tmp_path):
    (tmp_path / "ds_config.json").write_text("{}")
    assert "did you mean 'ds_config.json'?" in refused({}, tmp_path / "ds_confg.json")
    assert "neither is its folder" in refused({}, tmp_path / "nowhere" / "ds.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"flash_attention": {"enabled": True}}, "unknown key 'flash_attention' does nothing: DeepSpeed ignores it; "),
        ({"optimizer": {"type": "AdamW", "adam_w_mode": True}}, "unknown key 'optimizer.adam_w_mode' does nothing: "),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer does nothing: .* torch's optimizer"),
    ],
)
def test_keys_that_do_nothing_are_warned_of(config, message):
    with pytest.warns(UserWarning, match=message):
        merge_options({"stage": 2, "offload_optimizer": "cpu"}, config)


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


# --- A DeepSpeed configuration completed by the Trainer's settings: what they add and what they contradict -----------


PLAIN = TrainerSettings("32-true", 1, None, None, None, 2)


def contradiction(config, **facts):
    values = {"precision": "32-true", "accumulation": 1, "clip_val": None, "clip_algorithm": None}
    values |= {"micro_batch_size": None, "world_size": 2} | facts
    with pytest.raises(DloError) as caught:
        fill_from_trainer(merge_options({}, config), TrainerSettings(**values))
    return str(caught.value)


# --- the Trainer -------------------------------------------------------------------------------------------


def test_what_is_absent_or_auto_comes_from_the_trainer():
    facts = TrainerSettings("bf16-mixed", 4, 0.5, "norm", 8, 2)
    want = {
        TRAIN: 64,
        MICRO: 8,
        STEPS: 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }
    assert fill_from_trainer(merge_options({}, {}), facts) == want
    auto: dict[str, object] = dict.fromkeys(want, "auto") | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    auto["zero_optimization"] = {"stage": "auto"}
    assert fill_from_trainer(merge_options({}, auto), facts) == want
    off = fill_from_trainer(merge_options({}, {"fp16": {"enabled": "auto", "loss_scale": 0}}), facts)
    assert off["fp16"] == {"enabled": False, "loss_scale": 0}


def test_what_only_the_json_sets_is_taken():
    # DeepSpeed 0.19 clips to a norm of 1 where its configuration says nothing.
    assert fill_from_trainer(merge_options({}), PLAIN)["gradient_clipping"] == 0.0
    config = {"gradient_clipping": 1.0, TRAIN: 16, STEPS: 1}
    found = fill_from_trainer(merge_options({}, config), PLAIN)
    assert (found["gradient_clipping"], found[MICRO]) == (1.0, 8)


@pytest.mark.parametrize(
    ("config", "facts", "parts"),
    [
        (
            {"gradient_clipping": 1.0},
            {"clip_val": 0.5},
            ["gradient_clipping must equal trainer.gradient_clip_val 0.5, got 1.0"],
        ),
        ({"gradient_clipping": -1.0}, {}, ["must be a norm"]),
        ({}, {"clip_val": 0.5, "clip_algorithm": "value"}, ["gradient_clip_algorithm must be norm"]),
        (
            {STEPS: 4},
            {},
            ["must equal trainer.accumulate_grad_batches 1, got 4", "--trainer.accumulate_grad_batches 4"],
        ),
        (
            {TRAIN: 64, MICRO: 8},
            {},
            ["train_batch_size 64 / (train_micro_batch_size_per_gpu 8 x 2 ranks)", "accumulate_grad_batches 4"],
        ),
        (
            {TRAIN: 65, MICRO: 8},
            {},
            ["per_gpu 8 x gradient_accumulation_steps 1 x 2 ranks = 16, got 65; set train_batch_size 16"],
        ),
        (
            {MICRO: 16},
            {"micro_batch_size": 8},
            [
                "per_gpu 16 of",
                "16 samples per rank",
                "got 16 (the global batch: 8 per rank)",
                "set --data.batch_size 32",
            ],
        ),
        ({"fp16": {"enabled": True}}, {}, ["agree with trainer.precision 32-true, got true", "16-mixed"]),
        ({"bf16": {"enabled": True}}, {"precision": "16-mixed"}, ["bf16.enabled must agree", "bf16-mixed"]),
        ({}, {"precision": "64-true"}, ["trainer.precision must be one of", "got 64-true"]),
    ],
)
def test_a_contradiction_names_both_and_the_fix(config, facts, parts):
    message = contradiction(config, **facts)
    assert all(part in message for part in parts), message


# --- against DeepSpeed itself ------------------------------------------------------------------------------


def facts_for(config):
    """Returns what a Trainer would say that agrees with a configuration."""
    resolved = merge_options({}, config)
    precision = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    chosen = next((precision[key] for key in precision if get(resolved, f"{key}.enabled") is True), "32-true")
    train, micro, steps = (resolved.get(key) for key in (TRAIN, MICRO, STEPS))
    if not isinstance(steps, int):
        steps = train // (micro * RANKS) if isinstance(train, int) and isinstance(micro, int) else 1
    return TrainerSettings(chosen, steps, None, None, None, RANKS)


@pytest.mark.parametrize("name", CONFIGS)
def test_deepspeed_itself_takes_every_sample_completed(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    completed = fill_from_trainer(merge_options({}, CONFIGS[name]), facts_for(CONFIGS[name]))
    json.dumps(completed)
    theirs = DeepSpeedConfig(dict(completed) | {"train_batch_size": completed["train_batch_size"] // RANKS})
    assert theirs.zero_optimization_stage == (get(completed, "zero_optimization.stage") or 0)
    assert theirs.gradient_clipping == completed["gradient_clipping"]


@settings(max_examples=40)
@given(
    micro=st.integers(1, 8),
    steps=st.integers(1, 8),
    ranks=st.integers(1, 8),
    said=st.sets(st.sampled_from([TRAIN, MICRO, STEPS])),
)
def test_any_part_of_the_batch_sizes_gives_the_others_as_deepspeed_derives_them(micro, steps, ranks, said):
    whole = {TRAIN: micro * steps * ranks, MICRO: micro, STEPS: steps}
    config = merge_options({}, {key: whole[key] for key in said})
    for known in (micro, None) if {TRAIN, MICRO} & said else (micro,):
        found = fill_from_trainer(config, TrainerSettings("32-true", steps, None, None, known, ranks))
        assert {key: found[key] for key in whole} == whole


def available(options, config=None, device="cpu", ranks=4):
    facts = TrainerSettings("32-true", 1, None, None, 2, ranks)
    return check_available(fill_from_trainer(merge_options(options, config), facts), device)


def refusal(*arguments, **options):
    with pytest.raises(DloError) as caught:
        available(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """No operator is built, and builds go into a folder of the test's."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


# --- what the device has not --------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "config"), [("16-true", None), ("16-mixed", {"fp16": {"enabled": True}})])
def test_half_precision_on_a_cpu_that_has_none_is_refused_with_the_trainer(monkeypatch, precision, config):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    with pytest.raises(DloError, match=r"got fp16 .*set --trainer\.precision bf16-mixed or 32-true"):
        Trainer(strategy=DeepSpeedBridge(config=config), precision=precision, **options)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    Trainer(strategy=DeepSpeedBridge(config=config), precision=precision, **options)


# --- the machine -------------------------------------------------------------------------------------------


def test_hpz_divides_the_ranks():
    message = refusal({"stage": 3, "hpz": 3}, ranks=4)
    assert "must divide the 4 ranks, got 3; set 1 or 2 or 4" in message
    available({"stage": 3, "hpz": 2}, ranks=4)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantised_communication_is_cudas(key, nothing_built, monkeypatch):
    config = {"zero_optimization": {"stage": 3, key: True}}
    assert f"{key} (ZeRO++) must be off on CPUs" in refusal({}, config)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "and nvcc, not found" in refusal({}, config, device="cuda")


@pytest.mark.parametrize("config", [{"aio": {"use_gds": True}}, {"compile": {"deepcompile": True}}])
def test_what_only_cuda_has_is_refused_on_a_cpu(config):
    assert "must be off on CPUs" in refusal({"stage": 3}, config)


def test_an_nvme_path_must_be_a_folder_that_takes_files(tmp_path):
    options = {"stage": 3, "offload_optimizer": "nvme"}
    assert "which does not exist" in refusal({**options, "nvme_path": str(tmp_path / "none")})
    (tmp_path / "file").write_text("")
    assert "which is a file" in refusal({**options, "nvme_path": str(tmp_path / "file")})
    assert "must be writable" in refusal({**options, "nvme_path": "/proc"})


def test_offload_to_nvme_without_libaio_says_what_to_install(tmp_path, nothing_built, monkeypatch):
    """DeepSpeed looks for libaio by linking with it; with LDFLAGS that break every link it is found nowhere."""
    monkeypatch.setenv("LDFLAGS", "-L/nowhere -lno_such_library")
    message = refusal({"stage": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path)})
    assert "needs libaio" in message
    assert "apt install libaio-dev" in message
    assert "offload_optimizer: cpu" in message


def test_without_a_compiler_that_is_what_is_missing(tmp_path, nothing_built, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = refusal({"stage": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path)})
    assert "compiles async_io on first use, which needs no-such-compiler" in message
    assert "DS_BUILD_AIO=1 pip install" in message


def test_operators_are_named_as_deepspeed_names_them():
    """Breaks when DeepSpeed renames a builder, or the variable that prebuilds it."""
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
    from deepspeed.ops.op_builder.quantizer import QuantizerBuilder

    for op, builder in ((ASYNC_IO, AsyncIOBuilder), (PIN_MEMORY, PinMemoryBuilder), (QUANTIZER, QuantizerBuilder)):
        assert (op.name, op.builder, op.variable) == (builder.NAME, builder.__name__, builder.BUILD_VAR)

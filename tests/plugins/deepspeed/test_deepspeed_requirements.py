import pytest
import torch
from lightning.pytorch import Trainer

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import (
    ASYNC_IO,
    PIN_MEMORY,
    QUANTIZER,
    check_available,
    merge_options,
)
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.deepspeed.trainer_settings import TrainerSettings, fill_from_trainer


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


# --- what contradicts itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "config", "parts"),
    [
        ({"stage": 2, "offload_parameters": "cpu"}, None, ["stage must be 3", "got 2", "set stage: 3"]),
        ({"stage": 0, "offload_optimizer": "cpu"}, None, ["stage must be 1, 2 or 3", "set stage: 2"]),
        (
            {"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/d"},
            None,
            ["stage must be 3 to offload the optimizer to NVMe", "offload_optimizer: cpu"],
        ),
        ({"stage": 2, "hpz": 2}, None, ["stage must be 3 for zero_optimization.zero_hpz_partition_size"]),
        (
            {"stage": 3},
            {"pipeline": {"stages": 2}},
            ["pipeline needs stage 0 or 1, got 3", "MeshStrategy", "pp 2"],
        ),
        ({}, {"tensor_parallel": {"autotp_size": 4}}, ["tensor parallelism", "init_args.tp 4"]),
        ({}, {"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        ({}, {"autotuning": {"enabled": True}}, ["autotuning", '"enabled": false', "MicroBatchFinder"]),
        (
            {},
            {"data_efficiency": {"data_sampling": {"enabled": True}}},
            ["must be off", "DynamicBatchSize"],
        ),
        (
            {"stage": 3},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            ["super_offload", "CPU Adam"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused_as_the_strategy_is_built(options, config, parts):
    with pytest.raises(DloError) as caught:
        merge_options(options, config)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_deepspeeds_cpu_optimizer_is_torchs():
    with pytest.warns(UserWarning, match="zero_force_ds_cpu_optimizer does nothing: .* torch's optimizer"):
        merge_options({"stage": 2, "offload_optimizer": "cpu"}, {"zero_force_ds_cpu_optimizer": True})


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

"""Configs of Accelerate become configs that `dlo fit` takes; what dlo does not have is refused by name."""

from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.accelerate_command import to_yaml, translate

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


def test_weights_go_to_accelerate_and_come_from_it(tmp_path, monkeypatch):
    from accelerate import Accelerator, load_checkpoint_in_model

    from dlo_framework.checkpoint import load
    from dlo_tasks.imagenet.classifier import ImageClassifier

    def build() -> ImageClassifier:
        task = ImageClassifier(
            model="vit_tiny_patch16_224",
            num_classes=10,
            model_args={"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 2},
        )
        task.configure_model()
        return task

    monkeypatch.chdir(tmp_path)
    task = build()
    Accelerator(cpu=True).save_model(task, "theirs")
    assert main(["checkpoint", "convert", "theirs/model.safetensors", "ours.ckpt"]) == 0
    ours = load("ours.ckpt")["state_dict"]
    for name, parameter in task.named_parameters():
        assert torch.equal(ours[name], parameter), name
    assert main(["checkpoint", "export", "ours.ckpt", "exported.safetensors"]) == 0
    other = build()
    assert not torch.equal(other.model.head.weight, task.model.head.weight)
    load_checkpoint_in_model(other.model, "exported.safetensors")
    for mine, theirs in zip(task.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)

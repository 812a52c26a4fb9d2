"""``dlo config from-accelerate``: translates a config of Hugging Face Accelerate (1.15) to a `trainer` section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.errors import DloError, check_choice, did_you_mean
from dlo_framework.yaml_text import read_yaml

_HELP = """Print the file that `accelerate config` wrote as the trainer section of a config.

  dlo config from-accelerate default_config.yaml > machine.yaml
  dlo fit --config my.yaml --config machine.yaml

Devices, machines, precision, FSDP, DeepSpeed, parallelism and compilation are translated. Comments name what has no
place there. Neither Accelerate nor torch is imported.

exit codes: 0, or 2 for a file or a value that dlo does not have"""


def main(argv: list[str]) -> int:
    """Print a config of Hugging Face Accelerate as the trainer section of a config.

    Example:
        dlo config from-accelerate default_config.yaml
    """
    parser = CommandParser("dlo config from-accelerate", description=_HELP)
    parser.add_argument("file", metavar="FILE", help="YAML or JSON file that `accelerate config` wrote")
    options = parser.parse_args(argv or ["--help"])
    print(to_yaml(Path(options.file)), end="")
    return 0


#: Keys of Accelerate's ``ClusterConfig`` that have no effect on a run of dlo, each with the reason; None needs none.
_WITHOUT_EFFECT: dict[str, str | None] = {
    "compute_environment": None,
    "debug": "dlo checks that ranks agree in every run",
    "downcast_bf16": "it is for TPUs",
    "enable_cpu_affinity": "bind ranks to cores by the launcher",
    "machine_rank": "the launcher sets it: torchrun --node-rank, SLURM",
    "main_process_ip": "the launcher sets it: torchrun --master-addr, SLURM",
    "main_process_port": "the launcher sets it: torchrun --master-port",
    "main_training_function": None,
    "mpirun_config": "start ranks by torchrun or SLURM",
    "rdzv_backend": "the launcher sets it: torchrun --rdzv-backend",
    "same_network": None,
}
_DEFAULT_RENDEZVOUS = ("rdzv_backend", "static")
_TPU = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env")
_READ = (
    *("deepspeed_config", "distributed_type", "dynamo_config", "fp8_config", "fsdp_config", "gpu_ids"),
    *("megatron_lm_config", "mixed_precision", "num_machines", "num_processes", "parallelism_config", "use_cpu"),
)
_PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "bf16-mixed"}
#: FSDP 1's strategies by their number in Accelerate.
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_FSDP_WITHOUT_EFFECT = {
    "version": "dlo has FSDP 2 alone",
    "auto_wrap_policy": "units are the blocks of the model's plan; FSDPStrategy's `units` names others",
    "transformer_layer_cls_to_wrap": "units are the blocks of the model's plan; FSDPStrategy's `units` names others",
    "min_num_params": "units are the blocks of the model's plan; FSDPStrategy's `units` names others",
    "backward_prefetch": "FSDP 2 gathers one unit ahead; `backward_prefetch` sets another number",
    "state_dict_type": "checkpoints are canonical: any strategy reads them",
    "use_orig_params": "FSDP 2 always keeps the parameters",
    "sync_module_states": "all ranks build the same model",
    "cpu_ram_efficient_loading": "for large models set FSDPStrategy's `meta_init: true`",
}
_DEEPSPEED_WITHOUT_EFFECT = {
    "zero3_init_flag": "`configure_model` builds the model in parts",
    "zero3_save_16bit_model": "`dlo checkpoint export` writes weights in any dtype",
    "deepspeed_multinode_launcher": "start ranks by torchrun or SLURM",
    "deepspeed_hostfile": "start ranks by torchrun or SLURM",
    "deepspeed_exclusion_filter": "start ranks by torchrun or SLURM",
    "deepspeed_inclusion_filter": "start ranks by torchrun or SLURM",
    "deepspeed_moe_layer_cls_names": "mixtures of experts are found by their form",
}
_PARALLEL = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp", "cp_size": "cp"}


def to_yaml(path: Path) -> str:
    """Returns an Accelerate config as a `trainer` section, with comments for what has no place there.

    Args:
        path: YAML or JSON file that `accelerate config` wrote.

    Raises:
        DloError: The file is not such a config, or sets what dlo does not have.
    """
    content = _read(path)
    trainer, notes = translate(content)
    text = yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None, width=100)
    head = f"# {path}, for dlo fit: pass it after your task's config: --config task.yaml --config this.yaml."
    return "\n".join([head, text.rstrip("\n"), *(f"# {note}" for note in notes)]) + "\n"


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, "config of Accelerate")  # JSON is YAML too.
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise DloError(
            f"from-accelerate: {path} must be a config that `accelerate config` wrote, got one without"
            " distributed_type; its default place is ~/.cache/huggingface/accelerate/default_config.yaml"
        )
    return content


def translate(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys of the `trainer` section, and notes on what has no place there.

    Args:
        content: Content of the Accelerate config.

    Raises:
        DloError: A key or value is unknown, or dlo does not have what it sets.
    """
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise DloError(
            f"compute_environment must be LOCAL_MACHINE, got {content['compute_environment']}; SageMaker starts jobs of"
            " its own: run `dlo fit` as the job's command"
        )
    known = (*_READ, *_WITHOUT_EFFECT, *_TPU)
    for key in content:
        if key not in known:
            raise DloError(f"{key} must be a key of Accelerate's config{did_you_mean(key, known) or '; remove it'}")
    notes = [
        f"{key} has no effect here: {_WITHOUT_EFFECT[key]}."
        for key, value in content.items()
        if value not in (None, False, {}, "no", 0) and _WITHOUT_EFFECT.get(key) and (key, value) != _DEFAULT_RENDEZVOUS
    ]
    strategy, extra = _strategy(content, notes)
    trainer = {**_devices(content), **_precision(content, notes), "strategy": strategy, **extra}
    callbacks = _callbacks(content, notes)
    return {**trainer, **({"callbacks": callbacks} if callbacks else {})}, notes


def _devices(content: Mapping[str, Any]) -> dict[str, Any]:
    kind = content["distributed_type"]
    machines, processes = content.get("num_machines", 1), content.get("num_processes", 1 if kind == "NO" else -1)
    if machines < 1 or (processes > 0 and processes % machines):
        raise DloError(f"num_processes must be a multiple of num_machines, got {processes} and {machines}")
    on_cpu = content.get("use_cpu") or kind == "MULTI_CPU"
    devices: Any = processes // machines if processes > 0 else "auto"
    ids = str(content.get("gpu_ids") or "all")
    if ids != "all" and not on_cpu:
        devices = [int(number) for number in ids.split(",") if number.strip()]
    accelerator = "cpu" if on_cpu else "auto" if kind == "NO" else "gpu"
    return {"accelerator": accelerator, "devices": devices, **({"num_nodes": machines} if machines > 1 else {})}


def _precision(content: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    given = content.get("mixed_precision")
    name = "no" if given in (None, False) else str(given)  # YAML reads `no` as false.
    check_choice("mixed_precision", name, _PRECISIONS, "choose one of them")
    if name == "fp8" and content.get("fp8_config"):
        notes.append("fp8_config has no effect here: options of the callback LowPrecision replace it.")
    return {"precision": _PRECISIONS[name]}


def _callbacks(content: Mapping[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    callbacks: list[dict[str, Any]] = []
    if content.get("mixed_precision") == "fp8":
        callbacks.append({"class_path": "LowPrecision", "init_args": {"scheme": "fp8"}})
    dynamo = _without_prefix(content.get("dynamo_config"), "dynamo_")
    if str(dynamo.get("backend", "no")).lower() not in ("no", "false"):
        callbacks.append({"class_path": "Compile"})
        notes.append(f"dynamo_config is Compile's own choice here: it was {dynamo}; see `dlo plugins show Compile`.")
    return callbacks


def _strategy(content: Mapping[str, Any], notes: list[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the strategy, and further keys of the `trainer` section."""
    kind = content["distributed_type"]
    mesh = {key: size for key, size in _mesh(content).items() if size != 1}
    fsdp = _fsdp(content, notes) if kind == "FSDP" else {}
    if mesh and kind != "DEEPSPEED":
        options: dict[str, Any] = {"dp_shard": 1, **mesh}
        sharding = {key: value for key, value in fsdp.items() if key not in ("replicate", "shard", "copies")}
        if sharding:
            options["appliers"] = [{"class_path": "FullyShard", "init_args": sharding}]
        return {"class_path": "MeshStrategy", "init_args": options}, {}
    if kind == "NO":
        return "auto", {}
    if kind in ("MULTI_CPU", "MULTI_GPU") or fsdp.pop("copies", False):
        return "ddp", {}
    if kind == "FSDP":
        return ({"class_path": "FSDPStrategy", "init_args": fsdp} if fsdp else "fsdp"), {}
    if kind == "DEEPSPEED":
        return _deepspeed(content, notes)
    known = "NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
    raise DloError(f"distributed_type must be {known}, got {kind}; dlo has no strategy for it")


def _mesh(content: Mapping[str, Any]) -> dict[str, int]:
    options = _without_prefix(content.get("parallelism_config"), "parallelism_config_")
    options.pop("cp_comm_strategy", None)  # How ring attention sends keys and values; dlo's ring overlaps them.
    sizes = {}
    for key, value in options.items():
        if key not in _PARALLEL and value != 1:
            raise DloError(
                f"parallelism_config must have sizes of {', '.join(_PARALLEL)}, got {key} {value}"
                f"{did_you_mean(key, _PARALLEL) or '; use an axis of MeshStrategy'}"
            )
        if key in _PARALLEL:
            sizes[_PARALLEL[key]] = int(value)
    return sizes


def _fsdp(content: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns FSDPStrategy's options; `copies` if nothing is sharded."""
    options = _without_prefix(content.get("fsdp_config"), "fsdp_")
    init_args: dict[str, Any] = {}
    sharding = options.pop("sharding_strategy", "FULL_SHARD")
    name = _SHARDING[int(sharding) - 1] if str(sharding).isdigit() else str(sharding)
    if name not in _SHARDING:
        raise DloError(f"fsdp_sharding_strategy must be one of {', '.join(_SHARDING)}, got {sharding}; choose one")
    if name == "NO_SHARD":
        init_args["copies"] = True
    if name.startswith("HYBRID"):
        init_args |= {"replicate": -1, "shard": "node"}
    reshard = options.pop("reshard_after_forward", None)
    if str(reshard).upper() in _SHARDING:  # FSDP 1 has its strategy under this key too.
        reshard = str(reshard).upper() in ("FULL_SHARD", "HYBRID_SHARD")
    if reshard is False or name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        init_args["reshard_after_forward"] = False
    for key, ours in (("offload_params", "offload"), ("activation_checkpointing", "recompute")):
        if options.pop(key, False):
            init_args[ours] = True
    if options.pop("forward_prefetch", False):
        init_args["forward_prefetch"] = 1
    _note_options(options, _FSDP_WITHOUT_EFFECT, "fsdp_config", "fsdp_", notes)
    return init_args


def _deepspeed(content: Mapping[str, Any], notes: list[str]) -> tuple[Any, dict[str, Any]]:
    options = dict(content.get("deepspeed_config") or {})
    file = options.pop("deepspeed_config_file", None)
    if file not in (None, "none"):
        _note_options(options, _DEEPSPEED_WITHOUT_EFFECT, "deepspeed_config", "", notes)
        return {"class_path": "DeepSpeedBridge", "init_args": {"config": str(file)}}, {}
    init_args: dict[str, Any] = {"stage": int(options.pop("zero_stage", 2))}
    for part, ours in (("optimizer", "offload_optimizer"), ("param", "offload_parameters")):
        device = options.pop(f"offload_{part}_device", None)
        if device not in (None, "none", False):
            init_args[ours] = device
        path = options.pop(f"offload_{part}_nvme_path", None)
        if path not in (None, "none") and device == "nvme":
            init_args["nvme_path"] = path
    extra = {}
    for key, ours in (
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        ("gradient_clipping", "gradient_clip_val"),
    ):
        value = options.pop(key, None)
        if value not in (None, "auto", "none"):
            extra[ours] = value
    _note_options(options, _DEEPSPEED_WITHOUT_EFFECT, "deepspeed_config", "", notes)
    return {"class_path": "DeepSpeedBridge", "init_args": init_args}, extra


def _note_options(
    options: Mapping[str, Any], reasons: Mapping[str, str], section: str, prefix: str, notes: list[str]
) -> None:
    for key, value in options.items():
        if key not in reasons:
            near = did_you_mean(key, reasons) or "; remove it, or set its equivalent by hand"
            raise DloError(f"{section} must have keys of Accelerate's that dlo knows, got {prefix}{key}{near}")
        if value not in (None, False, "", "none"):
            notes.append(f"{prefix}{key} has no effect here: {reasons[key]}.")


def _without_prefix(options: Any, prefix: str) -> dict[str, Any]:
    return {str(key).removeprefix(prefix): value for key, value in (options or {}).items()}

"""DeepSpeed's configuration, merged from the bridge's typed options and a user's JSON, and its contradictions.

A value that two of them set must be equal; a value that one sets is used. :func:`merge_options` runs when the
strategy is built, before a process starts; ``trainer_settings.fill_from_trainer`` once the Trainer is known;
``machine_requirements.check_available`` on the machine of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.json_file import DeepSpeedJson, get, get_stage, number, put, read_json
from dlo_plugins.deepspeed.optimizer_and_schedule import check_optimizer, check_scheduler
from dlo_plugins.deepspeed.schema import check_keys, check_removed, check_whole, sections
from dlo_plugins.deepspeed.trainer_settings import check_batch_sizes

#: ZeRO stage if neither an option nor a JSON sets one; the stage that most DeepSpeed runs use.
DEFAULT_STAGE = 2

#: Sections that offload, by the bridge's option.
OFFLOADED = {
    "offload_optimizer": "zero_optimization.offload_optimizer",
    "offload_parameters": "zero_optimization.offload_param",
}

#: Boolean keys of ZeRO++ that quantize.
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def merge_options(options: Mapping[str, Any], config: str | Path | Mapping[str, Any] | None = None) -> DeepSpeedJson:
    """Returns one DeepSpeed configuration from the bridge's typed options and a JSON.

    Old spellings that DeepSpeed still accepts become the new ones. Values of ``"auto"`` stay, for
    ``fill_from_trainer``. If neither the options nor a JSON set a stage, it is 2.

    Args:
        options: Arguments of DeepSpeedBridge by name; those that are None are not set.
        config: Path of a JSON file, or its content.

    Raises:
        DloError: If a file does not parse, a key is unknown or removed, a value is invalid, options and JSON differ, or
            DeepSpeed cannot combine two settings.
    """
    content, source = read_json(config)
    check_removed(content, source)
    check_keys(content, source)
    content = replace_old_keys(content, source)
    result = DeepSpeedJson(content, source)
    for path, (option, value) in to_values(options, content).items():
        given = get(content, path, "auto")
        if given not in ("auto", value):
            raise DloError(
                f"{source}: {path} must equal the strategy's option {option} {_shown(value)}, got {_shown(given)}; set"
                f" it in one place: leave out {option} or the key"
            )
        put(result, path, value)
    if config is None and get(result, "zero_optimization.stage") is None:
        put(result, "zero_optimization.stage", DEFAULT_STAGE)
    check_whole(result, source)
    check_batch_sizes(result, source)
    check_consistent(result, source)
    check_optimizer(result, source)
    check_scheduler(result, source)
    return result


def replace_old_keys(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns a configuration with DeepSpeed's old spellings replaced by the new ones, as its model of ZeRO does.

    Raises:
        DloError: If both spellings are set to different values.
    """
    result: dict[str, Any] = copy.deepcopy(dict(config))
    zero = result.get("zero_optimization")
    if isinstance(zero, bool):
        result["zero_optimization"] = zero = {"stage": int(zero)}
        if "allgather_size" in result:
            zero["allgather_bucket_size"] = result.pop("allgather_size")
    if "bfloat16" in result:
        _rename(result, "bfloat16", "bf16", result["bfloat16"], source)
    if not isinstance(zero, dict):
        return result
    fields = sections()["zero_optimization"].model_fields
    for old in [key for key in zero if key in fields]:
        extra = fields[old].json_schema_extra or {}
        if extra.get("deprecated") and extra.get("set_new_param", True):
            new = extra["new_param"]
            if not isinstance(zero[old], bool | None):
                raise DloError(f"{source}: zero_optimization.{old} must be true or false, got {_shown(zero[old])}")
            value = extra.get("new_param_fn", lambda value: value)(zero[old])
            value = value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else value
            _rename(zero, old, fields[new].alias or new, value, f"{source}: zero_optimization")
    return result


def _rename(section: dict[str, Any], old: str, new: str, value: Any, where: str) -> None:
    given = section.get(new, value)
    if value is not None and given != value:
        raise DloError(
            f"{where}: {new} must equal {_shown(value)}, which its old spelling {old} means, got {_shown(given)}; leave"
            f" out {old}"
        )
    del section[old]
    if given is not None:
        section[new] = given


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- typed options -----------------------------------------------------------------------------------------

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _profiler(value: bool | int) -> dict[str, Any]:
    """Returns the section of the FLOPs profiler: on, off, or on at a step."""
    if isinstance(value, bool):
        return {"enabled": value}
    if value < 1:
        raise DloError(f"flops_profiler must be true, false or the step to profile, at least 1, got {value}")
    return {"enabled": True, "profile_step": value}


def _dtype(value: str) -> str:
    short = _DTYPES.get(value, value)
    if short not in _DTYPES.values():
        raise DloError(f"communication_dtype must be fp32, fp16 or bf16, got {value}")
    return short


#: Place in the JSON of each of DeepSpeedBridge's arguments. An argument of None keeps the JSON's value or DeepSpeed's
#: default; a mapping is merged into the section.
OPTIONS: dict[str, str] = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_parameters": "zero_optimization.offload_param.device",
    "overlap_comm": "zero_optimization.overlap_comm",
    "contiguous_gradients": "zero_optimization.contiguous_gradients",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "round_robin_gradients": "zero_optimization.round_robin_gradients",
    "hpz": "zero_optimization.zero_hpz_partition_size",
    "communication_dtype": "communication_data_type",
    "partition_activations": "activation_checkpointing.partition_activations",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing": "activation_checkpointing",
    "flops_profiler": "flops_profiler",
    "comms_logger": "comms_logger",
}

#: Functions that convert a value for the JSON.
_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "communication_dtype": _dtype,
    "flops_profiler": _profiler,
    "comms_logger": lambda value: {"enabled": value},
}

#: Options of the bridge that are dlo's own, and the path that sections with NVMe offload share.
_NOT_IN_JSON = ("timeout_minutes", "config", "nvme_path")


def to_values(options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns the JSON values that typed options set, as (option, value) by path.

    Args:
        options: Options by name; those that are None are left out.
        config: JSON beside them; `nvme_path` is set in each section that offloads to NVMe.

    Raises:
        DloError: If a value is invalid, two options contradict each other, or nothing uses an NVMe path.
    """
    values: dict[str, tuple[str, Any]] = {}
    for name, value in options.items():
        if value is None or name in _NOT_IN_JSON:
            continue
        place, converted = OPTIONS[name], _CONVERTED.get(name, lambda value: value)(value)
        inside = converted.items() if isinstance(converted, Mapping) else ()
        for path, inner in [(f"{place}.{key}", inner) for key, inner in inside] or [(place, converted)]:
            other, known = values.get(path, (name, inner))
            if known != inner:
                raise DloError(
                    f"{path} must have one value, got {known} from {other} and {inner} from {name}; leave out one"
                )
            values[path] = (name, inner)
    folder = options.get("nvme_path")
    if folder is not None:
        found = {}
        for section in OFFLOADED.values():
            if values.get(f"{section}.device", ("", get(config, f"{section}.device")))[1] == "nvme":
                found[f"{section}.nvme_path"] = ("nvme_path", str(folder))
        if not found:
            raise DloError(
                f"nvme_path must be unset without offload to NVMe, got {folder}; leave it out, or set"
                " offload_optimizer: nvme or offload_parameters: nvme"
            )
        values |= found
    return values


# --- combinations ------------------------------------------------------------------------------------------


def check_consistent(config: Mapping[str, Any], source: str) -> None:
    """Checks a configuration for contradictions, and for features of other launchers or strategies.

    Raises:
        DloError: For the first one, with the fix.
    """
    stage = get_stage(config)
    _check_offload(config, stage, source)
    _check_pipeline(config, stage, source)
    _check_left_to_others(config, source)
    _check_own_optimizer(config, source)


def offload_device(config: Mapping[str, Any], section: str) -> str | None:
    """Returns the target that a section offloads to, ``cpu`` or ``nvme``; None if it does not offload."""
    device = get(config, f"{section}.device")
    return device if device in ("cpu", "nvme") else None


def _check_offload(config: Mapping[str, Any], stage: int, source: str) -> None:
    optimizer, parameters = (offload_device(config, section) for section in OFFLOADED.values())
    if parameters is not None and stage < 3:
        raise DloError(
            f"{source}: stage must be 3 to offload parameters to {parameters}, got {stage}, in which each rank computes"
            " with full parameters; set stage: 3, or offload only the optimizer (offload_optimizer: cpu)"
        )
    if optimizer is not None and stage < 1:
        raise DloError(
            f"{source}: stage must be 1, 2 or 3 to offload the optimizer to {optimizer}, got 0; set stage: 2"
        )
    if optimizer == "nvme" and stage < 3:
        raise DloError(
            f"{source}: stage must be 3 to offload the optimizer to NVMe, got {stage}; set stage: 3, or"
            " offload_optimizer: cpu"
        )
    for option, section in OFFLOADED.items():
        if offload_device(config, section) == "nvme" and not get(config, f"{section}.nvme_path"):
            raise DloError(
                f"{source}: nvme_path must be a folder on a local NVMe disk for {option}: nvme, got none; set"
                f" nvme_path: /local_nvme, or {section}.nvme_path in the JSON"
            )
    on = [key for key in QUANTIZED if get(config, f"zero_optimization.{key}") is True]
    if number(config, "zero_optimization.zero_hpz_partition_size", 1) > 1:
        on.insert(0, "zero_hpz_partition_size")
    if on and stage < 3:
        raise DloError(f"{source}: stage must be 3 for zero_optimization.{on[0]}, got {stage}; set stage: 3")


def _check_pipeline(config: Mapping[str, Any], stage: int, source: str) -> None:
    mesh = "--trainer.strategy.class_path MeshStrategy --trainer.strategy.init_args."
    if "pipeline" in config:
        conflict = f" (and pipeline needs stage 0 or 1, got {stage})" if stage > 1 else ""
        raise DloError(
            f"{source}: pipeline must be unset{conflict}: DeepSpeed's pipeline engine takes a model cut by"
            f" deepspeed.pipe, and a task is not; leave it out, and use {mesh}pp 2"
        )
    for path, axis, what in (
        ("tensor_parallel.autotp_size", "tp", "tensor parallelism"),
        ("sequence_parallel_size", "cp", "sequence parallelism"),
    ):
        size = number(config, path, 1)
        if size > 1:
            raise DloError(
                f"{source}: {path} must be 1, got {size}: the bridge leaves {what} to MeshStrategy; leave out the key,"
                f" and set {mesh}{axis} {size}"
            )
    if "expert_parallel" in config or get(config, "hybrid_engine.enabled") is True:
        key = "expert_parallel" if "expert_parallel" in config else "hybrid_engine"
        raise DloError(f"{source}: {key} must be unset: it needs DeepSpeed's own model classes; leave it out")


def _check_left_to_others(config: Mapping[str, Any], source: str) -> None:
    if get(config, "autotuning.enabled") is True:
        raise DloError(
            f"{source}: autotuning.enabled must be false, got true: DeepSpeed's launcher tunes by restarting a script"
            ' with other micro-batches in its JSON, and dlo reads them from the data; set "autotuning": {"enabled":'
            " false}, and use the callback MicroBatchFinder"
        )
    if get(config, "data_efficiency.data_sampling.enabled") is True:
        raise DloError(
            f"{source}: data_efficiency.data_sampling must be off, got on: it works in DeepSpeed's own loader, and"
            " dlo's data come from the Trainer's; leave it out, and use dlo's curricula (the callbacks"
            " ProgressiveResizing and DynamicBatchSize)"
        )
    if get(config, "data_efficiency.data_routing.random_ltd.enabled") is True:
        raise DloError(
            f"{source}: data_efficiency.data_routing.random_ltd must be off, got on: it drops tokens in layers that"
            " deepspeed's convert_to_random_ltd has wrapped, and a task has none; leave it out"
        )


def _check_own_optimizer(config: Mapping[str, Any], source: str) -> None:
    """Checks that no option needs the state of DeepSpeed's CPUAdam; warns where it is asked for by name."""
    section = OFFLOADED["offload_optimizer"]
    if get(config, "zero_force_ds_cpu_optimizer") is True and offload_device(config, section):
        rank_zero_warn(
            f"{source}: zero_force_ds_cpu_optimizer does nothing: dlo steps offloaded state by torch's fused kernel,"
            " whose step is the same, with the state of torch's optimizer; remove it"
        )
    for path in (f"{section}.super_offload", "zero_optimization.zenflow"):
        if get(config, path) not in (None, False):
            raise DloError(
                f"{source}: {path} must be unset: it needs DeepSpeed's own CPU Adam, whose state other strategies"
                " cannot read; leave it out, and keep offload_optimizer: cpu"
            )

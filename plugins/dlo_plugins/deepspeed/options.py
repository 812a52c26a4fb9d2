"""Typed options of the bridge, and the place of each in DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.nested_paths import get

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _unchanged(value: Any) -> Any:
    return value


def _switch(value: bool) -> dict[str, Any]:
    return {"enabled": value}


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


@dataclass(frozen=True)
class Option:
    """One typed option of the bridge.

    Attributes:
        path: Place of the option in the JSON.
        to_json: Function that converts a value for the JSON; a mapping is merged into the section at `path`.
    """

    path: str
    to_json: Callable[[Any], Any] = _unchanged


#: Options by the name of DeepSpeedBridge's argument. An argument of None keeps the JSON's value or DeepSpeed's default.
OPTIONS: dict[str, Option] = {
    "stage": Option("zero_optimization.stage"),
    "offload_optimizer": Option("zero_optimization.offload_optimizer.device"),
    "offload_parameters": Option("zero_optimization.offload_param.device"),
    "overlap_comm": Option("zero_optimization.overlap_comm"),
    "contiguous_gradients": Option("zero_optimization.contiguous_gradients"),
    "reduce_bucket_size": Option("zero_optimization.reduce_bucket_size"),
    "allgather_bucket_size": Option("zero_optimization.allgather_bucket_size"),
    "round_robin_gradients": Option("zero_optimization.round_robin_gradients"),
    "hpz": Option("zero_optimization.zero_hpz_partition_size"),
    "communication_dtype": Option("communication_data_type", _dtype),
    "partition_activations": Option("activation_checkpointing.partition_activations"),
    "cpu_checkpointing": Option("activation_checkpointing.cpu_checkpointing"),
    "activation_checkpointing": Option("activation_checkpointing"),
    "flops_profiler": Option("flops_profiler", _profiler),
    "comms_logger": Option("comms_logger", _switch),
}

#: Sections that `nvme_path` is set in, if they offload to NVMe.
_OFFLOADED = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")

#: Options of the bridge that are dlo's own and have no place in the JSON.
NOT_IN_JSON = frozenset({"timeout_minutes", "config"})


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
        if value is None or name in NOT_IN_JSON or name == "nvme_path":
            continue
        option = OPTIONS[name]
        converted = option.to_json(value)
        found = {f"{option.path}.{key}": inner for key, inner in converted.items()} if _is_section(converted) else {}
        for path, inner in (found or {option.path: converted}).items():
            other, known = values.get(path, (name, inner))
            if known != inner:
                raise DloError(
                    f"{path} must have one value, got {known} from {other} and {inner} from {name}; leave out one"
                )
            values[path] = (name, inner)
    if options.get("nvme_path") is not None:
        values |= _nvme_paths(str(options["nvme_path"]), values, config)
    return values


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _nvme_paths(
    path: str, values: Mapping[str, tuple[str, Any]], config: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    found = {}
    for section in _OFFLOADED:
        device = values.get(f"{section}.device", ("", get(config, f"{section}.device")))[1]
        if device == "nvme":
            found[f"{section}.nvme_path"] = ("nvme_path", path)
    if not found:
        raise DloError(
            f"nvme_path must be unset without offload to NVMe, got {path}; leave it out, or set offload_optimizer: nvme"
            " or offload_parameters: nvme"
        )
    return found

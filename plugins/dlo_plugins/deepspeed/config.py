"""DeepSpeed's configuration, merged from the bridge's typed options and a user's JSON, and its contradictions.

A value that two of them set must be equal; a value that one sets is used. :func:`merge_options` runs when the
strategy is built, before a process starts; ``trainer_settings.fill_from_trainer`` once the Trainer is known;
``machine_requirements.check_available`` on the machine of the run.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.json_file import (
    DeepSpeedJson,
    check_keys,
    check_removed,
    check_whole,
    get,
    get_source,
    get_stage,
    number,
    put,
    read_json,
    sections,
)
from dlo_plugins.deepspeed.optimizer_and_schedule import check_optimizer, check_scheduler
from dlo_plugins.deepspeed.trainer_settings import check_batch_sizes, get_precision_section, infer_ranks

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
        nvme_values = {}
        for section in OFFLOADED.values():
            if values.get(f"{section}.device", ("", get(config, f"{section}.device")))[1] == "nvme":
                nvme_values[f"{section}.nvme_path"] = ("nvme_path", str(folder))
        if not nvme_values:
            raise DloError(
                f"nvme_path must be unset without offload to NVMe, got {folder}; leave it out, or set"
                " offload_optimizer: nvme or offload_parameters: nvme"
            )
        values |= nvme_values
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


# --- the machine ------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """Operator of DeepSpeed that is compiled on first use.

    Attributes:
        name: DeepSpeed's name of the operator.
        builder: Name of the class that builds it.
        variable: Environment variable that makes ``pip install`` build the operator if it is 1.
    """

    name: str
    builder: str
    variable: str


PIN_MEMORY = Op("pin_memory", "PinMemoryBuilder", "DS_BUILD_PIN_MEMORY")
ASYNC_IO = Op("async_io", "AsyncIOBuilder", "DS_BUILD_AIO")
QUANTIZER = Op("quantizer", "QuantizerBuilder", "DS_BUILD_QUANTIZER")  # Needs CUDA's compiler too.


def check_available(config: Mapping[str, Any], device_type: str, world_size: int | None = None) -> None:
    """Checks that this machine has what a configuration needs, and announces what will be compiled.

    Args:
        config: Configuration that ``fill_from_trainer`` returned.
        device_type: Type of device, ``cpu`` or ``cuda``.
        world_size: Number of ranks; None derives it from the configuration's batch sizes.

    Raises:
        DloError: For the first missing requirement, with the fix.
    """
    source = get_source(config)
    check_device(config, device_type, get_precision_section(config))
    _check_hpz(config, world_size or infer_ranks(config), source)
    for section in OFFLOADED.values():
        if offload_device(config, section) == "nvme":
            check_nvme_path(get(config, f"{section}.nvme_path"), source)
    needed = list_ops(config)
    missing = [op for op in needed if not is_built(op)]
    if ASYNC_IO in missing:  # An operator that is built needs the library alone, which it links.
        check_libaio(source)
    if missing:
        check_compiler(missing, source)
        rank_zero_info(
            f"DeepSpeed now compiles {' and '.join(op.name for op in missing)}, which takes minutes, once per machine;"
            f" to build beforehand: {_install(missing)}"
        )


def list_ops(config: Mapping[str, Any]) -> list[Op]:
    """Returns the operators that DeepSpeed compiles for a configuration, in the order of their builds."""
    ops = []
    if any(offload_device(config, section) == "nvme" for section in OFFLOADED.values()):
        ops += [PIN_MEMORY, ASYNC_IO]
    if any(get(config, f"zero_optimization.{key}") is True for key in QUANTIZED):
        ops += [QUANTIZER]
    return ops


def check_device(config: Mapping[str, Any], device_type: str, precision: str | None) -> None:
    """Checks that a type of device supports a configuration, without importing DeepSpeed.

    Args:
        config: Configuration that ``merge_options`` or ``fill_from_trainer`` returned.
        device_type: Type of device, ``cpu`` or ``cuda``.
        precision: Enabled section, `fp16` or `bf16`; None for neither.

    Raises:
        DloError: For the first unsupported setting.
    """
    if device_type != "cpu":
        return
    source = get_source(config)
    if precision == "fp16" and not _cpu_has_fp16():
        raise DloError(
            f"{source}: precision must be bf16-mixed or 32-true on a CPU without fp16 instructions, got fp16"
            " (trainer.precision 16-mixed or 16-true); set --trainer.precision bf16-mixed or 32-true, and"
            ' "fp16": {"enabled": "auto"} in the JSON'
        )
    for key, what in (
        *((f"zero_optimization.{key}", " (ZeRO++)") for key in QUANTIZED),
        ("aio.use_gds", " (GPUDirect Storage)"),
        ("compile.deepcompile", ""),
    ):
        if get(config, key) is True:
            raise DloError(f"{source}: {key}{what} must be off on CPUs, got true: it needs CUDA; leave it out")


def _cpu_has_fp16() -> bool:
    """Returns whether this CPU computes in fp16, by the same call as DeepSpeed 0.19.

    Reads a private function of torch 2.11 to 2.15, which has no public one, and none in builds without oneDNN.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is not None and bool(supported())


def _check_hpz(config: Mapping[str, Any], world_size: int | None, source: str) -> None:
    size = number(config, "zero_optimization.zero_hpz_partition_size", 1)
    if size > 1 and world_size is not None and world_size % size:
        fitting = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
        raise DloError(
            f"{source}: hpz (zero_optimization.zero_hpz_partition_size) must divide the {world_size} ranks, got {size};"
            f" set {' or '.join(map(str, fitting))}, best the number of ranks per node"
        )


def check_nvme_path(path: Any, source: str) -> None:
    """Checks that a folder exists and is writable.

    Raises:
        DloError: If it is not.
    """
    folder = Path(str(path))
    if not folder.is_dir():
        state = "which is a file" if folder.exists() else "which does not exist"
        raise DloError(
            f"{source}: nvme_path must be a folder, got {folder}, {state}; create it on a local NVMe disk: mkdir -p"
            f" {folder}"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DloError(
            f"{source}: nvme_path must be writable, got {folder}: {error.strerror}; choose another folder"
        ) from error


def check_libaio(source: str) -> None:
    """Checks that libaio, which offload to NVMe reads and writes with, is installed with its headers.

    Raises:
        DloError: If it is not installed.
    """
    if _builder(ASYNC_IO).is_compatible(verbose=False):
        return
    check_compiler([ASYNC_IO], source)  # DeepSpeed tests for the library by compiling a program.
    raise DloError(
        f"{source}: offload to NVMe needs libaio with its headers, which are not found; run apt install libaio-dev (dnf"
        " install libaio-devel), or, if they are elsewhere, set CFLAGS=-I... and LDFLAGS=-L..., or use"
        " offload_optimizer: cpu"
    )


def check_compiler(ops: list[Op], source: str) -> None:
    """Checks that operators can be compiled on this machine.

    Raises:
        DloError: If a compiler or header is missing.
    """
    compiler = os.environ.get("CXX") or "c++"
    missing = {} if shutil.which(compiler.split()[0]) else {compiler: "apt install g++"}
    if not shutil.which("ninja") and not (Path(sys.executable).parent / "ninja").exists():
        missing["ninja"] = "pip install ninja"
    toolkit = f"{os.environ.get('CUDA_HOME', '')}/bin"
    if QUANTIZER in ops and not (shutil.which("nvcc") or shutil.which("nvcc", path=toolkit)):
        missing["nvcc"] = "install the CUDA toolkit of torch's version, and set CUDA_HOME"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing["Python.h"] = "apt install python3-dev"
    if missing:
        names = ", ".join(op.name for op in ops)
        raise DloError(
            f"{source}: DeepSpeed compiles {names} on first use, which needs {' and '.join(missing)}, not found here:"
            f" {'; '.join(missing.values())}; or install DeepSpeed with it built: {_install(ops)}"
        )


def is_built(op: Op) -> bool:
    """Returns whether an operator is built: with DeepSpeed, or by an earlier run on this machine.

    Calls ``torch.utils.cpp_extension._get_build_directory``, private in torch 2.11 to 2.15.
    """
    from deepspeed.git_version_info import installed_ops
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(op.name, verbose=False))
    return installed_ops.get(op.name, False) or (folder / f"{op.name}.so").exists()


def _install(ops: list[Op]) -> str:
    """Returns the command that installs DeepSpeed with operators built."""
    variables = " ".join(f"{op.variable}=1" for op in ops)
    return f"{variables} pip install --force-reinstall --no-build-isolation deepspeed"


def _builder(op: Op) -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(op.builder)


def unused_checkpointing(config: Mapping[str, Any]) -> list[str]:
    """Returns the options of `activation_checkpointing` that are on and have no effect on a task."""
    names = ("partition_activations", "contiguous_memory_optimization")
    return [name for name in names if get(config, f"activation_checkpointing.{name}") is True]


def warn_unused_checkpointing(config: Mapping[str, Any]) -> None:
    """Warns about options of `activation_checkpointing` that have no effect on a task."""
    asked = unused_checkpointing(config)
    if asked:
        rank_zero_warn(
            f"activation_checkpointing: {' and '.join(asked)} must be off, got true, without effect: DeepSpeed divides"
            " activations among model-parallel ranks, and DeepSpeedBridge has one; leave it out, or set"
            " cpu_checkpointing, which keeps only the blocks' inputs, on the CPU; MeshStrategy divides activations by"
            " tp with sequence_parallel"
        )

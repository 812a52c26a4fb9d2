"""Checks of a configuration for settings that DeepSpeed cannot combine, or that the bridge does not support.

:func:`check_consistent` runs when the strategy is built, before processes start. ``machine_requirements.py`` has the
checks that depend on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.nested_paths import get, get_stage, number

_OPTIMIZER, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_consistent(config: Mapping[str, Any], source: str) -> None:
    """Checks a configuration for contradictions, and for features of other launchers or strategies.

    Raises:
        DloError: For the first one, with the fix.
    """
    stage = get_stage(config)
    _check_offload(config, stage, source)
    _check_needs_stage_3(config, stage, source)
    _check_pipeline(config, stage, source)
    _check_left_to_others(config, source)
    _check_own_optimizer(config, source)


def offload_device(config: Mapping[str, Any], section: str) -> str | None:
    """Returns the target that a section offloads to, ``cpu`` or ``nvme``; None if it does not offload."""
    device = get(config, f"{section}.device")
    return device if device in ("cpu", "nvme") else None


def _check_offload(config: Mapping[str, Any], stage: int, source: str) -> None:
    parameters, optimizer = offload_device(config, _PARAMETERS), offload_device(config, _OPTIMIZER)
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
    for section, option in ((_OPTIMIZER, "offload_optimizer"), (_PARAMETERS, "offload_parameters")):
        if offload_device(config, section) == "nvme" and not get(config, f"{section}.nvme_path"):
            raise DloError(
                f"{source}: nvme_path must be a folder on a local NVMe disk for {option}: nvme, got none; set"
                f" nvme_path: /local_nvme, or {section}.nvme_path in the JSON"
            )


def _check_needs_stage_3(config: Mapping[str, Any], stage: int, source: str) -> None:
    if stage == 3:
        return
    on = [key for key in _QUANTIZED if get(config, f"zero_optimization.{key}") is True]
    if number(config, "zero_optimization.zero_hpz_partition_size", 1) > 1:
        on.insert(0, "zero_hpz_partition_size")
    if on:
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
    """Checks that no option needs DeepSpeed's CPUAdam, which is compiled on first use: about 100 seconds."""
    if get(config, "zero_force_ds_cpu_optimizer") is True and offload_device(config, _OPTIMIZER):
        raise DloError(
            f"{source}: zero_force_ds_cpu_optimizer must be false, got true: DeepSpeed's CPU optimizer is compiled on"
            " first use; leave it out: dlo steps offloaded state with torch's optimizer, and saves its state by name"
        )
    own = (
        (f"{_OPTIMIZER}.super_offload", get(config, f"{_OPTIMIZER}.super_offload") is True),
        ("zero_optimization.zenflow", get(config, "zero_optimization.zenflow") is not None),
    )
    for path, on in own:
        if on:
            raise DloError(
                f"{source}: {path} must be unset: it needs DeepSpeed's own CPU Adam, whose state other strategies"
                " cannot read; leave it out, and keep offload_optimizer: cpu"
            )

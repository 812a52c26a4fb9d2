"""What DeepSpeed cannot combine, and what its bridge leaves to others: seen from the configuration alone.

:func:`check_consistent` runs when the strategy is built, so before processes start. What depends on the machine is in
``requirements.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.paths import get, number, stage_of

_OPTIMIZER, _PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_consistent(config: Mapping[str, Any], source: str) -> None:
    """Checks a configuration for what contradicts itself, and for what only other launchers or strategies do.

    Raises:
        DloError: for the first such thing, with the fix.
    """
    stage = stage_of(config)
    _check_offload(config, stage, source)
    _check_needs_stage_3(config, stage, source)
    _check_pipeline(config, stage, source)
    _check_left_to_others(config, source)
    _check_own_optimizer(config, source)


def offload_device(config: Mapping[str, Any], section: str) -> str | None:
    """Returns where a section offloads to, ``cpu`` or ``nvme``; None where it does not."""
    device = get(config, f"{section}.device")
    return device if device in ("cpu", "nvme") else None


def _check_offload(config: Mapping[str, Any], stage: int, source: str) -> None:
    parameters, optimizer = offload_device(config, _PARAMETERS), offload_device(config, _OPTIMIZER)
    if parameters is not None and stage < 3:
        raise DloError(
            f"{source}: offload of parameters to {parameters} needs stage 3; in stage {stage} every rank computes with"
            " whole parameters; set stage: 3, or offload the optimizer alone (offload_optimizer: cpu)"
        )
    if optimizer is not None and stage < 1:
        raise DloError(
            f"{source}: offload of the optimizer to {optimizer} needs stage 1, 2 or 3, but the stage is 0; set stage: 2"
        )
    if optimizer == "nvme" and stage < 3:
        raise DloError(
            f"{source}: offload of the optimizer to NVMe needs stage 3, but the stage is {stage}; set stage: 3, or"
            " offload_optimizer: cpu"
        )
    for section, option in ((_OPTIMIZER, "offload_optimizer"), (_PARAMETERS, "offload_parameters")):
        if offload_device(config, section) == "nvme" and not get(config, f"{section}.nvme_path"):
            raise DloError(
                f"{source}: {option}: nvme needs a folder of a local NVMe disk; set nvme_path: /local_nvme, or"
                f" {section}.nvme_path in the JSON"
            )


def _check_needs_stage_3(config: Mapping[str, Any], stage: int, source: str) -> None:
    if stage == 3:
        return
    on = [key for key in _QUANTIZED if get(config, f"zero_optimization.{key}") is True]
    if number(config, "zero_optimization.zero_hpz_partition_size", 1) > 1:
        on.insert(0, "zero_hpz_partition_size")
    if on:
        raise DloError(f"{source}: zero_optimization.{on[0]} needs stage 3, but the stage is {stage}; set stage: 3")


def _check_pipeline(config: Mapping[str, Any], stage: int, source: str) -> None:
    mesh = "--trainer.strategy.class_path MeshStrategy --trainer.strategy.init_args."
    if "pipeline" in config:
        conflict = f"pipeline goes with stages 0 and 1, but the stage is {stage}, and " if stage > 1 else "pipeline: "
        raise DloError(
            f"{source}: {conflict}DeepSpeed's pipeline engine takes a model cut by deepspeed.pipe, not a task; leave"
            f" the section out, and cut the task with {mesh}pp 2"
        )
    for path, axis, what in (
        ("tensor_parallel.autotp_size", "tp", "tensor parallelism"),
        ("sequence_parallel_size", "cp", "sequence parallelism"),
    ):
        size = number(config, path, 1)
        if size > 1:
            raise DloError(
                f"{source}: {path} {size}: the bridge leaves {what} to MeshStrategy; leave the key out, and set"
                f" {mesh}{axis} {size}"
            )
    if "expert_parallel" in config or get(config, "hybrid_engine.enabled") is True:
        key = "expert_parallel" if "expert_parallel" in config else "hybrid_engine"
        raise DloError(f"{source}: {key} needs DeepSpeed's own model classes, not a task; leave it out")


def _check_left_to_others(config: Mapping[str, Any], source: str) -> None:
    if get(config, "autotuning.enabled") is True:
        raise DloError(
            f"{source}: autotuning is done by DeepSpeed's launcher, which starts a script again and again with another"
            ' micro-batch in its JSON, and dlo\'s comes from the data; set "autotuning": {"enabled": false}: the'
            " callback MicroBatchFinder finds the largest that fits"
        )
    if get(config, "data_efficiency.data_sampling.enabled") is True:
        raise DloError(
            f"{source}: data_efficiency.data_sampling works in DeepSpeed's own loader, and dlo's data come from the"
            " Trainer's: it would do nothing; leave it out (the callbacks ProgressiveResizing and DynamicBatchSize"
            " are dlo's own curricula)"
        )
    if get(config, "data_efficiency.data_routing.random_ltd.enabled") is True:
        raise DloError(
            f"{source}: data_efficiency.data_routing.random_ltd drops tokens in layers that a script has wrapped by"
            " deepspeed's convert_to_random_ltd, and a task has none: it would do nothing; leave it out"
        )


def _check_own_optimizer(config: Mapping[str, Any], source: str) -> None:
    """Checks that nothing asks for DeepSpeed's CPUAdam, which is compiled on first use: about 100 seconds."""
    if get(config, "zero_force_ds_cpu_optimizer") is True and offload_device(config, _OPTIMIZER):
        raise DloError(
            f"{source}: zero_force_ds_cpu_optimizer asks for DeepSpeed's CPU optimizer, which is compiled on first use;"
            " dlo steps offloaded state with torch's, whose state its checkpoints hold by name; leave the key out"
        )
    own = (
        (f"{_OPTIMIZER}.super_offload", get(config, f"{_OPTIMIZER}.super_offload") is True),
        ("zero_optimization.zenflow", get(config, "zero_optimization.zenflow") is not None),
    )
    for path, on in own:
        if on:
            raise DloError(
                f"{source}: {path} needs DeepSpeed's own CPU Adam, whose state no other strategy reads; leave it out,"
                " and keep offload_optimizer: cpu"
            )

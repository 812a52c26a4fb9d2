"""Checks of the machine for what a configuration needs: disks, libraries, compilers, and compiled operators."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import OFFLOADED, QUANTIZED, offload_device
from dlo_plugins.deepspeed.json_file import get, get_source, number
from dlo_plugins.deepspeed.trainer_settings import get_precision_section, infer_ranks


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

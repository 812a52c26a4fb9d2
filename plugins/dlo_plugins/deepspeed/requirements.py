"""What a configuration needs of the machine: disks, libraries, compilers, and operators that DeepSpeed compiles."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.batch import MICRO, STEPS, TRAIN
from dlo_plugins.deepspeed.config import source_of
from dlo_plugins.deepspeed.consistency import offload_device
from dlo_plugins.deepspeed.paths import get, number
from dlo_plugins.deepspeed.precision import precision_of

_OFFLOADED = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")

#: A lock that no process has open and that is older than this, in seconds, is a killed build's.
_STALE_AFTER = 60.0


@dataclasses.dataclass(frozen=True)
class Op:
    """An operator of DeepSpeed that is compiled on first use.

    Attributes:
        name: DeepSpeed's.
        builder: the class that builds it.
        variable: of the environment; set to 1, it has ``pip install`` build the operator.
        minutes: how long a build takes, about.
        cuda: whether it needs CUDA's compiler too.
    """

    name: str
    builder: str
    variable: str
    minutes: float
    cuda: bool = False


PIN_MEMORY = Op("pin_memory", "PinMemoryBuilder", "DS_BUILD_PIN_MEMORY", 0.5)
ASYNC_IO = Op("async_io", "AsyncIOBuilder", "DS_BUILD_AIO", 1.0)
QUANTIZER = Op("quantizer", "QuantizerBuilder", "DS_BUILD_QUANTIZER", 2.0, cuda=True)


def check_available(config: Mapping[str, Any], device_type: str, world_size: int | None = None) -> None:
    """Checks that this machine has what a configuration needs, and says what will be compiled.

    Args:
        config: what ``with_trainer`` returned.
        device_type: ``cpu`` or ``cuda``.
        world_size: ranks; by default what the configuration's batch sizes say.

    Raises:
        DloError: for the first thing that is missing, with the fix.
    """
    source = source_of(config)
    check_device(config, device_type, precision_of(config))
    _check_hpz(config, world_size or ranks_of(config), source)
    for section in _OFFLOADED:
        if offload_device(config, section) == "nvme":
            check_nvme_path(get(config, f"{section}.nvme_path"), source)
    needed = ops_of(config)
    missing = [op for op in needed if not is_built(op)]
    if any(op is ASYNC_IO for op in needed):
        check_libaio(source, built=ASYNC_IO not in missing)
    if missing:
        check_compiler(missing, source)
        check_locks(missing)
        rank_zero_info(_notice(missing))


def ranks_of(config: Mapping[str, Any]) -> int | None:
    """Returns how many ranks a configuration's batch sizes are for; None where they do not say."""
    values = [config.get(key) for key in (TRAIN, MICRO, STEPS)]
    train, micro, steps = (value if isinstance(value, int) and value > 0 else 0 for value in values)
    return train // (micro * steps) if train and micro and steps else None


def ops_of(config: Mapping[str, Any]) -> list[Op]:
    """Returns the operators that a configuration has DeepSpeed compile, in the order in which they are built."""
    ops = []
    if any(offload_device(config, section) == "nvme" for section in _OFFLOADED):
        ops += [PIN_MEMORY, ASYNC_IO]
    if any(get(config, f"zero_optimization.{key}") is True for key in _QUANTIZED):
        ops += [QUANTIZER]
    return ops


def check_device(config: Mapping[str, Any], device_type: str, precision: str | None) -> None:
    """Checks that a kind of device has what is asked of it; DeepSpeed is not imported for that.

    Args:
        config: what ``resolve`` or ``with_trainer`` returned.
        device_type: ``cpu`` or ``cuda``.
        precision: the section that is enabled, `fp16` or `bf16`; None for neither.

    Raises:
        DloError: for the first thing that it has not.
    """
    if device_type != "cpu":
        return
    source = source_of(config)
    if precision == "fp16" and not _cpu_has_fp16():
        raise DloError(
            f"{source}: DeepSpeed has fp16 (trainer.precision 16-mixed or 16-true) on accelerators, and on CPUs with"
            " instructions for it, which this one has not; set --trainer.precision bf16-mixed or 32-true here, and"
            ' "fp16": {"enabled": "auto"} where a JSON says it'
        )
    for key in _QUANTIZED:
        if get(config, f"zero_optimization.{key}") is True:
            raise DloError(
                f"{source}: zero_optimization.{key} (ZeRO++) has kernels for CUDA alone, and this run is on CPUs; leave"
                " it out here"
            )
    if get(config, "aio.use_gds") is True:
        raise DloError(f"{source}: aio.use_gds (GPUDirect Storage) needs CUDA, and this run is on CPUs; leave it out")
    if get(config, "compile.deepcompile") is True:
        raise DloError(f"{source}: compile.deepcompile needs CUDA, and this run is on CPUs; leave it out here")


def _cpu_has_fp16() -> bool:
    """Returns whether this CPU computes in fp16, as DeepSpeed 0.19 asks itself.

    A reach into torch 2.11 to 2.15, which has no public question for it, and none at all in builds without oneDNN.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is not None and bool(supported())


def _check_hpz(config: Mapping[str, Any], world_size: int | None, source: str) -> None:
    size = number(config, "zero_optimization.zero_hpz_partition_size", 1)
    if size > 1 and world_size is not None and world_size % size:
        fitting = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
        raise DloError(
            f"{source}: hpz (zero_optimization.zero_hpz_partition_size) {size} does not divide {world_size} ranks; set"
            f" {' or '.join(map(str, fitting))}, best the ranks of a node"
        )


def check_nvme_path(path: Any, source: str) -> None:
    """Checks that a folder is there and takes a file.

    Raises:
        DloError: otherwise.
    """
    folder = Path(str(path))
    if not folder.is_dir():
        is_what = "is no folder" if folder.exists() else "does not exist"
        raise DloError(f"{source}: nvme_path {folder} {is_what}; make it on a local NVMe disk: mkdir -p {folder}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DloError(
            f"{source}: nvme_path {folder} takes no files: {error.strerror}; give a folder that this user may write to"
        ) from error


def check_libaio(source: str, built: bool) -> None:
    """Checks that libaio is there, which offload to NVMe reads and writes with.

    Args:
        source: what the message calls the configuration.
        built: whether the operator that links it is built: then the library is enough, without its headers.

    Raises:
        DloError: if it is not.
    """
    if built or _builder(ASYNC_IO).is_compatible(verbose=False):
        return
    check_compiler([ASYNC_IO], source)  # DeepSpeed looks for the library by compiling a program.
    raise DloError(
        f"{source}: offload to NVMe needs libaio with its headers, which are not found; apt install libaio-dev (dnf"
        " install libaio-devel), or, if they are elsewhere, set CFLAGS=-I... and LDFLAGS=-L...; offload_optimizer: cpu"
        " needs neither"
    )


def check_compiler(ops: list[Op], source: str) -> None:
    """Checks that operators can be compiled here.

    Raises:
        DloError: naming the compilers that are missing.
    """
    compiler = os.environ.get("CXX") or "c++"
    missing = {} if shutil.which(compiler.split()[0]) else {compiler: "apt install g++"}
    if not shutil.which("ninja") and not (Path(sys.executable).parent / "ninja").exists():
        missing["ninja"] = "pip install ninja"
    if any(op.cuda for op in ops) and not _nvcc():
        missing["nvcc"] = "install the CUDA toolkit of torch's version, and set CUDA_HOME"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing["Python.h"] = "apt install python3-dev"
    if missing:
        names = ", ".join(op.name for op in ops)
        raise DloError(
            f"{source}: DeepSpeed compiles {names} on first use, but this machine has no {' and no '.join(missing)}:"
            f" {'; '.join(missing.values())}; or install a DeepSpeed that has it built:"
            f" {' '.join(f'{op.variable}=1' for op in ops)} pip install --no-build-isolation deepspeed"
        )


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None)


def check_locks(ops: list[Op]) -> None:
    """Checks that no killed build has left a lock that would have this one wait for ever.

    torch up to 2.13 or so waits for the file to go; later ones lock it through the operating system, which frees it.

    Raises:
        DloError: naming the file.
    """
    if not waits_for_lock_files():
        return
    for op in ops:
        lock = build_folder(op.name) / "lock"
        if is_stale(lock):
            raise DloError(
                f"{lock} was left by a build of {op.name} that was killed, and DeepSpeed would wait for it for ever;"
                f" remove it: rm {lock}"
            )


def waits_for_lock_files() -> bool:
    """Returns whether torch's builds wait for a lock file to vanish: where it has ``FileBaton`` in use (torch 2.11)."""
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def is_stale(lock: Path, now: float | None = None) -> bool:
    """Returns whether a lock file is there, has been for a while, and no process has it open.

    Args:
        lock: the file.
        now: seconds since the epoch; the present by default.
    """
    try:
        age = (time.time() if now is None else now) - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    return age > _STALE_AFTER and not any(os.path.samefile(lock, path) for path in _open_files(lock.name))


def _open_files(name: str) -> Iterator[str]:
    """Yields the files of a name that this user's processes have open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue  # The process has ended, or is another user's: who cannot hold a lock in this user's folder.
        if target.endswith(f"/{name}") and os.path.exists(target):
            yield target


def build_folder(name: str) -> Path:
    """Returns the folder that torch builds an extension in; it is not made.

    A reach into torch 2.11 to 2.15, ``torch.utils.cpp_extension._get_build_directory``, which makes it.
    """
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        version = torch.version.cuda or torch.version.hip
        device = f"cu{version.replace('.', '')}" if torch.version.cuda and version else "cpu"
        python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        root = os.path.join(cpp_extension.get_default_build_root(), f"{python}_{device}")
    return Path(root) / name


def is_built(op: Op) -> bool:
    """Returns whether an operator is built: with DeepSpeed, or by an earlier run on this machine."""
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(op.name, False):
        return True
    folder = build_folder(op.name)
    building = waits_for_lock_files() and (folder / "lock").exists()
    return (folder / f"{op.name}.so").exists() and not building


def _builder(op: Op) -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(op.builder)


def _notice(ops: list[Op]) -> str:
    minutes = sum(op.minutes for op in ops)
    names = " and ".join(op.name for op in ops)
    variables = " ".join(f"{op.variable}=1" for op in ops)
    return (
        f"DeepSpeed now compiles {names}, which takes about {minutes:g} minutes, once on this machine; to do it"
        f" beforehand: {variables} pip install --force-reinstall --no-build-isolation deepspeed"
    )


def warn_of_checkpointing(config: Mapping[str, Any]) -> None:
    """Says what of `activation_checkpointing` has no effect on a task."""
    names = ("partition_activations", "contiguous_memory_optimization")
    asked = [name for name in names if get(config, f"activation_checkpointing.{name}") is True]
    if asked:
        rank_zero_warn(
            f"activation_checkpointing: no task uses {' and '.join(asked)}: DeepSpeed divides activations among"
            " model-parallel ranks, and DeepSpeedBridge has one; leave it out, or set cpu_checkpointing, which keeps"
            " the inputs of the blocks alone, on the CPU; MeshStrategy divides activations by tp with sequence_parallel"
        )

"""``dlo fit | validate | test | predict``: Lightning's own command line, with dlo's plug-ins, run folder and errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlo_framework import runs
from dlo_framework.cli.scan import Scan, scan
from dlo_framework.errors import DloError, OrderlyEnd, is_agreed

if TYPE_CHECKING:
    from dlo_framework.registry import Registry

LR_FIND = "lr-find"
_DRIVER = Path("/proc/driver/nvidia/version")


def run(argv: list[str]) -> int:
    """Runs one command.

    Args:
        argv: the words after ``dlo``; the first is the command. ``lr-find`` takes those of ``fit``.

    Returns:
        The exit code.

    Raises:
        DloError: on bad input, before processes start or data loads.
    """
    sweep = argv[0] == LR_FIND
    # Before the imports below: a missing file is told at once, not after five seconds.
    found = scan(["fit", *argv[1:]] if sweep else argv)
    registry = prepare(found)
    try:
        return _run(found, registry, sweep)
    except BaseException as error:
        _leave_together(error)
        raise


def _run(found: Scan, registry: Registry, sweep: bool) -> int:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.cli.lightning_cli import DloCLI, ParseError
    from dlo_framework.cli.lr_find import FINDER, LRFindCLI, SweepDone
    from dlo_framework.cli.messages import explain
    from dlo_framework.stop import RunStopped

    try:
        if sweep:
            LRFindCLI(found, registry.load(FINDER, "callback"))
        else:
            DloCLI(found)
    except SweepDone:
        return 0
    except ParseError as error:
        raise explain(error, found, registry) from None
    except MisconfigurationException as error:
        raise DloError(str(error)) from error
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise DloError(other_model(str(error))) from error
    except ValueError as error:
        if isinstance(error, DloError) or "`val_check_interval`" not in str(error):
            raise
        # Lightning knows it only when the loaders are there.
        raise DloError(f"trainer: {str(error).strip()}") from error
    except RunStopped as stopped:
        if runs.is_first_process():
            print(stopped, file=sys.stderr)
        return stopped.exit_code
    return 0


def _leave_together(error: BaseException) -> None:
    """Ends the process if a run of several ranks has failed: one of them says why, the others a line or nothing."""
    from dlo_framework.distributed.failure import Failure, how_it_ended, leave, tell

    if is_agreed(error) and not isinstance(error, OrderlyEnd) and not runs.is_first_process():
        leave(2 if isinstance(error, DloError) else 1)
    ended = how_it_ended()
    if ended is None:
        return
    failure = ended.failure
    if ended.own and isinstance(error, DloError):
        failure = Failure.of(error, ended.rank, failure.world_size)
    tell(replace(ended, failure=failure))
    leave(failure.exit_code)


def prepare(found: Scan) -> Registry:
    """Gets this process ready for a command of Lightning's: silences what is no news, and imports the plug-ins."""
    _quiet()
    set_allocator()
    import lightning  # noqa: F401  It sets PYTORCH_NVML_BASED_CUDA_CHECK, which the next line mends.

    _mend_environment()
    return _load_plugins(found)


def other_model(message: str) -> str:
    """Returns torch's wall of keys as one sentence: how many are missing, unexpected, or of another size."""
    lists = [re.search(rf"{kind} key\(s\) in state_dict: (.*)", message) for kind in ("Missing", "Unexpected")]
    counts = [found.group(1).count('"') // 2 if found else 0 for found in lists]
    sizes = message.count("size mismatch for")
    return (
        "the checkpoint is of another model than the config's:"
        f" {counts[0]} weights missing in it, {counts[1]} unexpected, {sizes} of another size"
    )


def _load_plugins(found: Scan) -> Registry:
    """Imports the plug-ins that the command names, and sets what else a class path may name."""
    import jsonargparse

    from dlo_framework.cli.short_names import prefer_plugins
    from dlo_framework.registry import Registry

    registry = Registry()
    registry.discover()
    for spec in found.plugins:
        registry.load_user_module(spec)
    named = registry.find_named(found.strings)
    for plugin in named:
        registry.load(plugin.name, plugin.kind)
    prefer_plugins(named)
    jsonargparse.set_parsing_settings(
        import_path_denylist=registry.denied_import_paths(),
        import_path_allowlist=registry.allowed_import_paths(),
        instantiate_subclass_spec_in_any=False,
    )
    return registry


def _mend_environment() -> None:
    """Undoes, where there is no NVIDIA driver, a setting of Lightning's that costs a library lookup a step.

    ``import lightning`` sets ``PYTORCH_NVML_BASED_CUDA_CHECK=1`` so that ``torch.cuda.is_available()`` does not
    start CUDA before a fork. Optimizers ask that question at each step, and without a driver each answer is a
    failed ``dlopen`` of NVML: a third of a small model's step. Without a driver there is no CUDA to start.
    """
    if sys.platform == "linux" and not _DRIVER.exists():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


#: Variables by which a user sets up torch's allocator; any of them leaves it alone.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocator(driver: Path = _DRIVER) -> None:
    """Has torch's allocator grow its segments on NVIDIA's GPUs, so that free memory is not left in small pieces.

    It comes before torch is imported. A value of the user's stays: `PYTORCH_ALLOC_CONF=expandable_segments:False`
    switches it off.
    """
    if driver.exists() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


#: Warnings of other libraries that no user of dlo can act on.
_NO_NEWS = (
    ".*pkg_resources is deprecated.*",
    ".*does not have many workers.*",
    ".*LeafSpec.* is deprecated.*",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from .*",
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint.*",
)


def _quiet() -> None:
    """Silences what is no news, so that what is stands out."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for message in _NO_NEWS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for Lightning's lines that are no news: its tips, and accelerators that nobody asked for."""
    text = record.getMessage()
    return not (text.startswith("💡 Tip") or text.startswith(("TPU available: False", "HPU available: False")))

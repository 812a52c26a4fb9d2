"""``dlo fit | validate | test | predict``, and what commands with the same options share: process, plug-ins, errors.

`load_config` returns trainer, model and data of a config as objects, for scripts and notebooks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.command_table import HELP_ALL
from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.errors import DloError, OrderlyEnd, is_agreed
from dlo_framework.run import runs
from dlo_framework.run.process import (
    DRIVER,
    disable_nvml_check,
    exits_on_interrupt,
    import_without_collection,
    shorten_warnings,
    silence_warnings,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from dlo_framework.registry import Registry
    from dlo_framework.trainer import Trainer


#: Option that describes a run in place of it.
DRY_RUN = "--dry-run"


def run(argv: list[str]) -> int:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``, the first of the arguments; returns the exit code.

    Raises:
        DloError: If the input is invalid, before processes start or data loads.
    """
    # Before the imports, which take five seconds: a missing file is reported at once.
    config_scan = scan(["--help" if word == HELP_ALL else word for word in argv if word != DRY_RUN])

    def build() -> None:
        if DRY_RUN in argv:
            from dlo_framework.cli.dry_run import describe_run

            describe_run(config_scan)
            return
        from dlo_framework.cli.lightning_cli import run_command

        run_command(config_scan)

    return train(config_scan, build)


def train(found: ConfigScan, build: Callable[[], None]) -> int:
    """Runs a command that trains or evaluates.

    Args:
        found: Scanned command line.
        build: Function that runs it, called in :func:`prepared_process`.

    Returns:
        Exit code; 0 also after an :class:`~dlo_framework.errors.OrderlyEnd` of a trainer.

    Raises:
        DloError: If the input is invalid.
    """
    try:
        with prepared_process(found):
            return _train(build)
    except BaseException as error:
        _exit_with_ranks(error)
        raise


def _train(build: Callable[[], None]) -> int:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.stop import RunStopped
    from dlo_framework.watch.monitor import explain_missing_metric

    try:
        build()
    except MisconfigurationException as error:
        raise DloError(str(error)) from error
    except RuntimeError as error:
        missing = explain_missing_metric(str(error))
        if missing:
            raise DloError(missing) from error
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise DloError(summarize_mismatch(str(error))) from error
    except ValueError as error:
        if isinstance(error, DloError) or "`val_check_interval`" not in str(error):
            raise
        # Lightning checks it only once the loaders exist.
        raise DloError(f"trainer: {str(error).strip()}") from error
    except SystemExit as end:
        if isinstance(end.__cause__, RunStopped):  # The trainer has said so.
            return end.__cause__.exit_code
        raise
    return 0


def _exit_with_ranks(error: BaseException) -> None:
    """Ends the process if a run of several ranks has failed: one rank prints the cause, the others at most a line."""
    if "dlo_framework.distributed.failure" not in sys.modules:
        return  # No run has begun. An import of torch that was interrupted cannot be repeated.
    from dlo_framework.distributed.failure import Failure, RunEnd, exit_process, print_run_end

    agreed = is_agreed(error) or (error.__cause__ is not None and is_agreed(error.__cause__))
    if agreed and not isinstance(error, OrderlyEnd) and not runs.is_first_process():
        exit_process(2 if isinstance(error, DloError) else 1)
    ended = RunEnd.last
    if ended is None:
        return
    failure = ended.failure
    if ended.own and isinstance(error, DloError):
        failure = Failure.from_error(error, ended.rank, failure.world_size)
    print_run_end(replace(ended, failure=failure))
    exit_process(failure.exit_code)


@contextlib.contextmanager
def prepared_process(found: ConfigScan) -> Iterator[None]:
    """Sets warnings, allocator and environment, imports the plug-ins of a command line, and explains parse errors.

    Modules that import torch or Lightning must be imported inside.

    Raises:
        DloError: If a plug-in cannot be imported, or the command line's parser refuses it.
    """
    silence_warnings()
    set_allocator()
    with exits_on_interrupt(), import_without_collection():
        import lightning  # noqa: F401  It sets PYTORCH_NVML_BASED_CUDA_CHECK, which the next line may reset.

        disable_nvml_check()
        shorten_warnings()
        registry = _load_plugins(found)
        from dlo_framework.cli.lightning_cli import ParseError
        from dlo_framework.cli.parse_errors import explain_parse_error

    try:
        yield
    except ParseError as error:
        raise explain_parse_error(error, found, registry) from None


def summarize_mismatch(message: str) -> str:
    """Returns torch's list of keys as one sentence: how many are missing, unexpected, or of another size."""
    lists = [re.search(rf"{kind} key\(s\) in state_dict: (.*)", message) for kind in ("Missing", "Unexpected")]
    counts = [match.group(1).count('"') // 2 if match else 0 for match in lists]
    sizes = message.count("size mismatch for")
    return (
        "the checkpoint must be of the config's model, got another:"
        f" {counts[0]} weights missing in it, {counts[1]} unexpected, {sizes} of another size; use that model's config"
    )


def _load_plugins(config_scan: ConfigScan) -> Registry:
    """Imports the plug-ins that the command names, and sets which other classes a config may name."""
    import jsonargparse

    from dlo_framework.cli.plugin_arguments import (
        expand_arguments,
        get_class_paths,
        place_callback_options,
        prefer_plugins,
    )
    from dlo_framework.registry import Registry

    registry = Registry()
    registry.discover()
    for spec in config_scan.plugins:
        registry.load_user_module(spec)
    named = registry.find_named(config_scan.strings)
    for plugin in named:
        registry.load(plugin.name, plugin.kind)
    prefer_plugins(named)
    config_scan.argv[:] = place_callback_options(config_scan.argv, config_scan.configs, registry)
    config_scan.argv[:] = expand_arguments(config_scan.argv, get_class_paths(named))
    jsonargparse.set_parsing_settings(
        import_path_denylist=registry.denied_import_paths(),
        import_path_allowlist=registry.allowed_import_paths(),
        instantiate_subclass_spec_in_any=False,
    )
    return registry


#: Variables that configure torch's allocator; dlo sets nothing if a user sets any of them.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocator(driver: Path = DRIVER) -> None:
    """Sets expandable segments for torch's allocator on NVIDIA GPUs, which reduces fragmentation.

    It must run before torch is imported. A user's value stays: `PYTORCH_ALLOC_CONF=expandable_segments:False`
    switches it off.
    """
    if driver.exists() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


@dataclass
class LoadedConfig:
    """Objects of a config, ready to fit.

    Attributes:
        trainer: Trainer, whose first fit creates the run folder.
        model: Module.
        data: Datamodule; None if the config has none.
    """

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule | None

    def fit(self, ckpt_path: str | Path | None = None) -> None:
        """Trains, as ``dlo fit --ckpt_path`` does."""
        self.trainer.fit(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def validate(self, ckpt_path: str | Path | None = None) -> Any:
        """Evaluates on the validation data; returns the metrics."""
        return self.trainer.validate(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def test(self, ckpt_path: str | Path | None = None) -> Any:
        """Evaluates on the test data; returns the metrics."""
        return self.trainer.test(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def predict(self, ckpt_path: str | Path | None = None) -> Any:
        """Returns predictions."""
        return self.trainer.predict(self.model, datamodule=self.data, ckpt_path=ckpt_path)


def load_config(*configs: str | Path, options: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Builds the trainer, model and data of a config, as ``dlo fit --config`` does before it trains.

    Args:
        configs: Paths, or names of shipped configs, such as `quickstart`; later ones override earlier ones.
        options: Values by dotted key, such as `{"trainer.max_epochs": 3}`; they override the configs.

    Raises:
        DloError: If a config cannot be read, or a key or value is invalid.
    """
    if not configs:
        raise DloError("load_config must get a config, got none; pass a path or a name, such as 'quickstart'")
    words = [word for config in configs for word in ("--config", str(config))]
    words += [f"--{key}={_to_text(value)}" for key, value in (options or {}).items()]
    config_scan = scan(["fit", *words])
    with prepared_process(config_scan):
        return _build(config_scan)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value)


def _build(config_scan: ConfigScan) -> LoadedConfig:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.cli.lightning_cli import DloCLI
    from dlo_framework.trainer import Trainer

    cli = DloCLI(config_scan, "load_config")
    if cli.options.ckpt_path:
        raise DloError("load_config: ckpt_path must be unset; pass it to fit, validate, test or predict")
    try:
        cli.build()
        return LoadedConfig(cli.make_trainer(Trainer), cli.model, cli.datamodule)
    except MisconfigurationException as error:
        raise DloError(str(error)) from error

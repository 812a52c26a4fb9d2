"""LightningCLI with dlo's defaults: model and data by class path, one run folder, checks before a run starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework import run_lock, runs
from dlo_framework.checkpoint import SafeCheckpointIO, check, recover
from dlo_framework.checkpoint.history import read_entry
from dlo_framework.checkpoint.store import LOCAL, store_of
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.defaults import add_default_callbacks, check_checkpoint_folders, check_on_file_system
from dlo_framework.distributed.checkpointing import CanonicalStrategy
from dlo_framework.distributed.grace import GRACE
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError, did_you_mean, dlo_error_in
from dlo_framework.frozen_model import find_frozen_models
from dlo_framework.registry import Registry
from dlo_framework.run_checker import RunChecker
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.clock import StepClock
from dlo_framework.watch.predictions import SavePredictions

#: Seed of a run whose config sets none.
DEFAULT_SEED = 42


class ParseError(Exception):
    """Error for a command line or config that the parser refuses; :mod:`dlo_framework.cli.parse_errors` explains it.

    It does not derive from ValueError, which jsonargparse reads as "this type does not fit, try the next".
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.known_keys: list[str] = []


class DloParser(LightningArgumentParser):
    """LightningArgumentParser that raises a :class:`ParseError` instead of printing its usage and exiting.

    LightningCLI (2.6.6) calls methods that jsonargparse 5 removes; this class defines them by their successors (4.53).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._builders: list[tuple[Callable[..., Any], Any, bool]] = []

    def add_instantiator(
        self, instantiator: Callable[..., Any], class_type: Any, subclasses: bool = True, prepend: bool = False
    ) -> None:
        """Registers a function that instantiates a class; the first one that fits is called."""
        self._builders.insert(0 if prepend else len(self._builders), (instantiator, class_type, subclasses))

    def instantiate_classes(self, cfg: Namespace, **kwargs: Any) -> Namespace:
        """Instantiates the classes that a config names."""
        return self.instantiate(cfg, instantiators=self._builders, **kwargs)

    def dump(self, cfg: Namespace, **kwargs: Any) -> str:
        """Returns a config as text."""
        if "skip_none" in kwargs:
            kwargs["skip_unset"] = kwargs.pop("skip_none")
        return super().dump(cfg, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises a :class:`ParseError`."""
        raise ParseError(message) from ex


class DloCLI(LightningCLI):
    """LightningCLI with dlo's defaults. Only the differences are documented here.

    Args:
        found: Scanned command line; its plug-ins have been imported.
    """

    #: Text of ``--help`` for the command; None keeps Lightning's text on the trainer's method.
    description: str | None = None
    #: Words that call the command, for usage lines; None for ``dlo`` and the trainer's method.
    prog: str | None = None

    def __init__(self, found: ConfigScan) -> None:
        self.command = found.argv[0]
        self.config_paths = list(found.configs)
        self.run_folder: Path | None = None
        self._refused: DloError | None = None
        self._found_auto = False
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=DloParser,
            parser_kwargs={
                "prog": "dlo",
                "allow_abbrev": False,
                "description": "Train with plug-ins that the config names.",
                self.command: {"description": self.description} if self.description else {},
            },
            seed_everything_default=DEFAULT_SEED,
            save_config_callback=None,  # defaults.RunRecord does it, into the run folder.
            args=found.argv,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Returns only the command that was given, because building the parsers of the others takes seconds."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds Lightning's arguments, with data optional: a LightningModule may bring its own loaders."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds dlo's own keys."""
        parser.add_argument(
            "--plugins",
            type=list[str] | str | None,
            default=None,
            help="modules and files of your own to import: [my_pkg.mod, ./file.py]",
        )
        parser.add_argument(
            "--run.dir",
            type=str | None,
            default=None,
            help="folder that holds all runs (default: trainer.default_root_dir, else runs)",
        )
        parser.add_argument(
            "--run.name",
            type=str | None,
            default=None,
            help="name of the run (default: the config's file name)",
        )
        parser.add_argument(
            "--run.async_checkpoints",
            type=bool,
            default=False,
            help="write checkpoints in the background; costs memory for a copy of this rank's shard",
        )
        parser.add_argument(
            "--run.checkpoint_format",
            type=Literal["canonical", "lightning"],
            default="canonical",
            help="lightning: one file in Lightning's own format, under auto and ddp only",
        )
        parser.add_argument(
            "--run.stop_grace",
            type=float,
            default=GRACE,
            help="seconds without a batch or a save after which a run that was asked to stop is killed",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the arguments, without Lightning's warning about arguments that do not come from ``sys.argv``.

        Raises:
            ParseError: If the parser refuses the arguments; holds the known keys.
        """
        own = self._subcommand_parsers[self.command]
        own.prog = self.prog or own.prog
        try:
            self.config = parser.parse_args(args)
        except ParseError as error:
            error.known_keys = [action.dest for action in own._actions]
            raise

    def _parse_ckpt_path(self) -> None:
        """Finds the checkpoint that ``--ckpt_path`` names and refuses an unsafe one, before the run starts.

        Lightning's method lets hyperparameters of the checkpoint override the config; here the config wins.
        """
        config = self.config[self.command]
        if config.ckpt_path == "auto" and self.command == "fit":
            for newest in runs.versions(self._runs())[:1] if runs.is_first_process() else []:
                run_lock.check_free(newest)  # Another job may train in it before its first checkpoint.
            self._found_auto = True
            found = runs.unfinished(self._runs())
            config.ckpt_path = None if found is None else str(found)
        if not config.ckpt_path:
            if self.command != "fit" and runs.is_first_process():
                print("no --ckpt_path (a path, last or best): the weights are untrained", file=sys.stderr)
            return
        if config.ckpt_path in ("last", "best"):
            config.ckpt_path = str(runs.find_checkpoint(self._runs(), config.ckpt_path))
        try:
            check(config.ckpt_path)
        except OSError as error:
            raise DloError(
                f"cannot read the checkpoint {error.filename or config.ckpt_path}: {error.strerror}"
            ) from error
        entry = read_entry(Path(config.ckpt_path)) if self.command == "fit" else None
        if entry is not None and entry.weights_only:
            raise DloError(
                f"ckpt_path must have optimizer state and counters, got {config.ckpt_path} with weights only;"
                " take the run's last checkpoint"
            )

    def _runs(self) -> Path:
        """Returns the folder of this config's runs: ``runs/quickstart``.

        Raises:
            DloError: If the folder begins with a scheme, such as ``s3:``.
        """
        config = self.config[self.command]
        name = config.run.name or (Path(self.config_paths[-1]).stem if self.config_paths else "default")
        folder = Path(config.run.dir or config.trainer.default_root_dir or "runs") / name
        rooted = config.trainer.default_root_dir and not config.run.dir
        check_on_file_system("trainer.default_root_dir" if rooted else "run.dir", folder)
        return folder

    def before_instantiate_classes(self) -> None:
        """Registers :meth:`_build_strategy` as the builder of strategies."""
        self.parser.add_instantiator(self._build_strategy, Strategy)

    def instantiate_classes(self) -> None:
        """Instantiates model, data and trainer.

        Raises:
            DloError: If a constructor or a check refuses its arguments; jsonargparse wraps the error in one of its own.
        """
        try:
            super().instantiate_classes()
        except Exception as error:
            cause = dlo_error_in(error) or self._refused
            if cause is None:
                raise
            raise cause from error

    def _build_strategy(self, cls: type[Strategy], *args: Any, **kwargs: Any) -> Strategy:
        """Instantiates a strategy and keeps its error: for a union type jsonargparse raises the first type's error."""
        try:
            return cls(*args, **kwargs)
        except DloError as error:
            self._refused = error
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer with the run folder, logger, checkpoint and monitoring callbacks."""
        self.config[self.command].run.name = self._runs().name  # So that the saved config has the name too.
        config = self._get(self.config_init, "trainer")
        callbacks = config.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        self._check_parts(config)  # Before the run folder is made, so that a refused config leaves none behind.
        kwargs["plugins"] = _with_checkpoint_io(config.get("plugins"))
        if self.command != "fit" or config.get("fast_dev_run"):
            if config.get("logger") in (None, True):
                kwargs["logger"] = False
            if self.command != "fit" and not any(isinstance(callback, Checkpoint) for callback in callbacks):
                kwargs["enable_checkpointing"] = False
            if self.command == "predict":
                kwargs["callbacks"] = [*callbacks, SavePredictions(self._predictions())]
            return self._build_trainer(kwargs)
        check_checkpoint_folders(callbacks)
        self.run_folder = self._resumed_run() or self._new_run()
        if runs.is_first_process():
            self._lock_run(self.run_folder)
            recover(self.run_folder / runs.CHECKPOINTS)
        if config.get("logger") in (None, True):
            kwargs["logger"] = TensorBoardLogger(self.run_folder, name="", version="", default_hp_metric=False)
        kwargs["callbacks"] = add_default_callbacks(
            callbacks,
            run_folder=self.run_folder,
            model=self.model,
            config=self._config_to_keep(),
            progress_bar=config.get("enable_progress_bar") is not False,
            checkpoints=config.get("enable_checkpointing") is not False,
            stop_grace=self.config[self.command].run.stop_grace,
            cudnn_benchmark=config.get("benchmark") is not False,
        )
        kwargs["default_root_dir"] = str(self.run_folder)
        if config.get("profiler") is None:
            kwargs["profiler"] = StepClock()
        return self._build_trainer(kwargs)

    def _lock_run(self, run: Path) -> None:
        """Acquires the lock of the run folder.

        Raises:
            DloError: If another job trains in the folder, or started the same run at the same time.
        """
        run_lock.lock_run(run)
        if self._found_auto and self._resumed_run() is None:
            try:
                run_lock.check_only_starter(run, runs.versions(self._runs()))
            except DloError:
                run_lock.release_all()
                run.rmdir()
                raise

    def _config_to_keep(self) -> str:
        """Returns the config as YAML to run again, without the checkpoint that this run resumed from."""
        config = self.config[self.command].clone()
        config.pop("ckpt_path", None)
        # A null is kept where the default is another value: it is a setting too.
        return self._parser(self.command).dump(config, skip_unset=False)

    def _check_parts(self, config: Any) -> None:
        """Checks the model, the data and the trainer's options.

        Raises:
            DloError: If an option would fail later.
        """
        for part, arguments in ((self.datamodule, ()), (self.model, (self.datamodule,))):
            check = getattr(part, "check", None)
            if callable(check):
                check(*arguments)
        check_predict = getattr(self.datamodule, "check_predict", None)
        if self.command == "predict" and callable(check_predict):
            check_predict()
        check_strategy(config.get("strategy"))
        if config.get("accumulate_grad_batches", 1) < 1:
            raise DloError(
                f"accumulate_grad_batches must be at least 1, got {config['accumulate_grad_batches']};"
                " 1 switches it off"
            )

    def _predictions(self) -> Path:
        """Returns the path for predictions: in the checkpoint's run folder, unless the config names another."""
        config = self.config[self.command]
        path = Path(config.ckpt_path) if config.ckpt_path else None
        is_in_run = path is not None and path.parent.name == runs.CHECKPOINTS and store_of(path) is LOCAL
        run = path.parent.parent if path is not None and is_in_run else None
        if run is None or (config.run.dir and not self._is_own(run)):
            run = self._runs()
        return run / f"predictions-{path.stem if path is not None else 'untrained'}.pt"

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Builds the trainer, and raises its configuration errors as :class:`DloError`."""
        try:
            register_data_parallel()
            trainer = super().instantiate_trainer(**self._with_strategys_arguments(kwargs))
            use_canonical_checkpoints(trainer)
            check_ranks(trainer.strategy, {**self._get(self.config_init, "trainer"), **kwargs})
            self._set_checkpoints(trainer)
            strategy, callbacks = contract_of(trainer.strategy), trainer.callbacks  # type: ignore[attr-defined]
            strategy.checkpoint_to_load = self.config[self.command].ckpt_path
            strategy.check_model(self.model, self.datamodule, trains=self.command == "fit", callbacks=callbacks)
            if self.command == "fit":
                self._check_run(trainer)
            self._check_shares(trainer)
            if self.command == "predict":
                strategy.check_predict(self.model)
            return trainer
        except (MisconfigurationException, ValueError, TypeError) as error:
            if runs.is_first_process():
                run_lock.release_all()
            if self.run_folder is not None and self.run_folder.is_dir() and not any(self.run_folder.iterdir()):
                self.run_folder.rmdir()
            if isinstance(error, DloError) or (isinstance(error, TypeError) and "`devices`" not in str(error)):
                raise
            raise DloError(f"trainer: {error}") from error

    def _check_run(self, trainer: Trainer) -> None:
        """Lets module and callbacks check a fit, and checks the second models that they have not."""
        owners = [self.model, *trainer.callbacks]  # type: ignore[attr-defined]
        for owner in owners:
            if isinstance(owner, RunChecker):
                owner.check_run(trainer, self.model, self.datamodule)
        for frozen in find_frozen_models(owners):
            if not frozen.checked:  # by its owner's check_run
                frozen.check(self.model, self.datamodule, contract_of(trainer.strategy))

    def _check_shares(self, trainer: Trainer) -> None:
        """Checks that a batch can be divided among the ranks."""
        check_shares = getattr(self.datamodule, "check_shares", None)
        if check_shares is not None and self.command == "fit":
            check_shares(trainer)

    def _with_strategys_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the trainer's arguments, with values from its strategy where the config leaves the defaults.

        A strategy with a config file of its own, such as DeepSpeed's, may define them there.
        """
        config = self._get(self.config_init, "trainer")
        ask = getattr(config.get("strategy"), "trainer_arguments", None)
        found = ask(dict(config), self.datamodule) if callable(ask) else {}
        return {**kwargs, **{key: found[key] for key in found if kwargs.get(key, config[key]) == config[key]}}

    def _set_checkpoints(self, trainer: Trainer) -> None:
        """Sets how the strategy writes checkpoints: in the background, or in Lightning's format."""
        run = self.config[self.command].run
        if isinstance(trainer.strategy, CanonicalStrategy):
            trainer.strategy.async_checkpoints = run.async_checkpoints
            trainer.strategy.checkpoint_format = run.checkpoint_format
            trainer.strategy.check_checkpoints()
            trainer.strategy.check_loggers(trainer.loggers)
        elif run.async_checkpoints:
            raise DloError(
                f"run.async_checkpoints must be false under {type(trainer.strategy).__name__}, which writes its own"
                " checkpoints, got true; set it to false, or use auto, ddp, zero1 to zero3 or fsdp"
            )

    def _new_run(self) -> Path:
        """Creates the folder of a new run."""
        return runs.new_run(self._runs())

    def _resumed_run(self) -> Path | None:
        """Returns the run folder of ``--ckpt_path`` if it is one of this config's runs, else None."""
        path = self.config[self.command].ckpt_path
        if not path or Path(path).parent.name != runs.CHECKPOINTS:
            return None
        run = Path(path).parent.parent
        return run if self._is_own(run) else None

    def _is_own(self, run: Path) -> bool:
        """Whether a run's folder is one of this config's runs."""
        return run.parent.resolve() == self._runs().resolve()


def check_ranks(strategy: Strategy, options: Any) -> None:
    """Raises a DloError for several ranks under a single-device strategy, which Lightning (2.6) accepts silently."""
    devices = options.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    number = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
    nodes = int(options.get("num_nodes") or 1)
    if isinstance(strategy, SingleDeviceStrategy) and number * nodes > 1:
        raise DloError(
            f"trainer.devices x trainer.num_nodes must be 1 under {type(strategy).__name__}, got"
            f" {options.get('devices')} x {nodes}; set both to 1, or use a strategy of several ranks, such as ddp"
        )


def check_strategy(strategy: Any) -> None:
    """Raises a DloError, with the nearest match, for a strategy name that is not registered."""
    if not isinstance(strategy, str):
        return
    known = ["auto", *StrategyRegistry.available_strategies()]
    if strategy not in known:
        registered = Registry().names("strategy")
        if strategy in registered:
            raise DloError(
                f"strategy must be a class_path or a registered name, got the class name '{strategy}'; write strategy:"
                f" {{class_path: {strategy}}}, or on the command line --trainer.strategy.class_path {strategy}"
            )
        known = list(dict.fromkeys([*known, *registered]))
        shown = [name for name in known if "spawn" not in name and "fork" not in name and "find_unused" not in name]
        raise DloError(
            f"unknown strategy '{strategy}'{did_you_mean(strategy, known) or ';'} available: {', '.join(shown)}"
        )


def _with_checkpoint_io(plugins: Any) -> list[Any]:
    """Returns Lightning's ``plugins`` with dlo's checkpoint reader and writer, unless the user sets one."""
    given = plugins if isinstance(plugins, list) else [plugins] if plugins is not None else []
    if any(isinstance(plugin, CheckpointIO) for plugin in given):
        return given
    return [*given, SafeCheckpointIO()]

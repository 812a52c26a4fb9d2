"""LightningCLI with dlo's defaults: model and data by class path, one run folder, checks before a run starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework import run_lock, runs
from dlo_framework.checkpoint.store import LOCAL, store_of
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.run_help import CKPT_PATH
from dlo_framework.defaults import add_default_callbacks, check_checkpoint_folders, check_on_file_system
from dlo_framework.distributed.grace import GRACE
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError, dlo_error_in
from dlo_framework.run_setup import (
    check_accumulation,
    check_data,
    check_parts,
    check_ranks,
    check_run,
    check_strategy,
    explain_trainer_error,
    find_start_checkpoint,
    lock_run_folder,
    resumed_run,
    set_checkpoints,
    strategy_arguments,
    with_checkpoint_io,
)
from dlo_framework.stop import SAVE_MINUTES
from dlo_framework.watch.clock import StepClock
from dlo_framework.watch.predictions import SavePredictions, check_table

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
    #: Whether no rank starts, so that batch sizes need not be those of the run.
    simulates_ranks = False

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

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Builds the parser of a command; Lightning's (2.6.6), whose text on ``--ckpt_path`` is not dlo's."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH[subcommand]
        return parser

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
            help="name of the run (default: the first config's file name)",
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
            "--run.predictions",
            type=Literal["pt", "csv", "jsonl", "parquet"],
            default="pt",
            help="form of dlo predict's file: tensors, or a table of the images' classes or the prompts' completions",
        )
        parser.add_argument(
            "--run.stop_grace",
            type=float,
            default=GRACE,
            help="seconds without a batch or a save after which a run that was asked to stop is killed",
        )
        parser.add_argument(
            "--run.save_minutes",
            type=float,
            default=SAVE_MINUTES,
            help="minutes after the last checkpoint when last.ckpt is saved in the background; 0: never",
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
        run = next((folder for path in self.config_paths if self._is_own(folder := Path(path).parent)), None)
        if run is not None and config.ckpt_path in ("last", "best"):  # The config is that which the run has kept.
            config.ckpt_path = str(runs.find_checkpoint(run.parent, config.ckpt_path, only=run))
        path, self._found_auto = find_start_checkpoint(config.ckpt_path, self._runs, trains=self.command == "fit")
        config.ckpt_path = path
        if path is None and self.command != "fit" and runs.is_first_process():
            print("no --ckpt_path (a path, last or best): the weights are untrained", file=sys.stderr)

    def _runs(self) -> Path:
        """Returns the folder of this config's runs: ``runs/quickstart``; sets the run's name where the config does not.

        Raises:
            DloError: If the name leaves its folder, or the folder begins with a scheme, such as ``s3:``.
        """
        config = self.config[self.command]
        config.run.name = config.run.name or (Path(self.config_paths[0]).stem if self.config_paths else "default")
        name = Path(config.run.name)
        if name.is_absolute() or ".." in name.parts:
            raise DloError(f"run.name must be a name below run.dir, got {name}; set run.dir to its folder")
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
            cause = dlo_error_in(error) or self._refused or _missing_package(error)
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
        self._runs()  # So that the saved config has the name too.
        config = self._get(self.config_init, "trainer")
        callbacks = config.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        self._check_parts(config)  # Before the run folder is made, so that a refused config leaves none behind.
        kwargs["plugins"] = with_checkpoint_io(config.get("plugins"))
        if self.command != "fit" or config.get("fast_dev_run"):
            if config.get("logger") in (None, True):
                kwargs["logger"] = False
            if self.command != "fit" and not any(isinstance(callback, Checkpoint) for callback in callbacks):
                kwargs["enable_checkpointing"] = False
            if self.command == "predict":
                form = self.config[self.command].run.predictions
                if form != "pt":
                    check_table(form, self.datamodule)
                kwargs["callbacks"] = [*callbacks, SavePredictions(self._predictions(), form)]
            return self._build_trainer(kwargs)
        check_checkpoint_folders(callbacks)
        self.run_folder = self._resumed_run() or self._new_run()
        lock_run_folder(self.run_folder, self._runs(), starts=self._found_auto and self._resumed_run() is None)
        if config.get("logger") in (None, True):
            folder = self.run_folder.absolute()
            kwargs["logger"] = TensorBoardLogger(folder, name="", version="", default_hp_metric=False)
        kwargs["callbacks"] = add_default_callbacks(
            callbacks,
            run_folder=self.run_folder,
            model=self.model,
            config=self._config_to_keep(),
            progress_bar=config.get("enable_progress_bar") is not False,
            checkpoints=config.get("enable_checkpointing") is not False,
            stop_grace=self.config[self.command].run.stop_grace,
            save_minutes=self.config[self.command].run.save_minutes,
            cudnn_benchmark=config.get("benchmark") is not False,
        )
        kwargs["default_root_dir"] = str(self.run_folder)
        if config.get("profiler") is None:
            kwargs["profiler"] = StepClock()
        return self._build_trainer(kwargs)

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
        check_data(self.model, self.datamodule, self.command)
        check_parts(self.model, self.datamodule, predicts=self.command == "predict")
        check_strategy(config.get("strategy"))
        check_accumulation(config.get("accumulate_grad_batches", 1))

    def _predictions(self) -> Path:
        """Returns the path for predictions: in the checkpoint's run folder, unless the config names another."""
        config = self.config[self.command]
        path = Path(config.ckpt_path) if config.ckpt_path else None
        is_in_run = path is not None and path.parent.name == runs.CHECKPOINTS and store_of(path) is LOCAL
        run = path.parent.parent if path is not None and is_in_run else None
        if run is None or (config.run.dir and not self._is_own(run)):
            run = self._runs()
        form = getattr(config.run, "predictions", "pt")
        return run / f"predictions-{path.stem if path is not None else 'untrained'}.{form}"

    def _build_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """Builds the trainer, and raises its configuration errors as :class:`DloError`."""
        try:
            register_data_parallel()
            trainer = super().instantiate_trainer(**self._with_strategys_arguments(kwargs))
            use_canonical_checkpoints(trainer)
            check_ranks(trainer.strategy, {**self._get(self.config_init, "trainer"), **kwargs})
            run = self.config[self.command].run
            set_checkpoints(trainer, background=run.async_checkpoints, form=run.checkpoint_format)
            path = self.config[self.command].ckpt_path
            parts = trainer, self.model, self.datamodule
            check_run(*parts, command=self.command, ckpt_path=path, has_batch_size=not self.simulates_ranks)
            return trainer
        except (MisconfigurationException, ValueError, TypeError) as error:
            if runs.is_first_process():
                run_lock.release_all()
            if self.run_folder is not None and self.run_folder.is_dir() and not any(self.run_folder.iterdir()):
                self.run_folder.rmdir()
            if isinstance(error, DloError) or (isinstance(error, TypeError) and "`devices`" not in str(error)):
                raise
            raise explain_trainer_error(error, self._get(self.config_init, "trainer")) from error

    def _with_strategys_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the trainer's arguments, with values from its strategy where the config leaves the defaults.

        A strategy with a config file of its own, such as DeepSpeed's, may define them there.
        """
        config = self._get(self.config_init, "trainer")
        found = strategy_arguments(config, self.datamodule)
        return {**kwargs, **{key: found[key] for key in found if kwargs.get(key, config[key]) == config[key]}}

    def _new_run(self) -> Path:
        """Creates the folder of a new run."""
        return runs.new_run(self._runs())

    def _resumed_run(self) -> Path | None:
        """Returns the run folder of ``--ckpt_path`` if it is one of this config's runs, else None."""
        return resumed_run(self.config[self.command].ckpt_path, self._runs())

    def _is_own(self, run: Path) -> bool:
        """Whether a run's folder is one of this config's runs."""
        return run.parent.resolve() == self._runs().resolve()


def _missing_package(error: Exception) -> DloError | None:
    """Returns the error for a class whose package is not installed, such as a logger's; None for another error.

    For a union type jsonargparse's (4.53) error is a page of all its types. Lightning names the requirement.
    """
    problem = re.search(r"Problem with given class_path '([^']+)':\s+(.+)", str(error))
    needed = re.search(r"Requirement '([^']+)' not met|No module named '([^']+)'", str(error))
    if needed is None:
        return None
    name = problem.group(1).rpartition(".")[2] if problem else "a class of the config"
    package = needed.group(1) or needed.group(2)
    return DloError(f"{name} needs the package {package}, which is not installed; pip install '{package}'")

"""LightningCLI with dlo's defaults: model and data by class path, and the commands that train or evaluate.

And short runs of commands such as ``dlo profile``: some steps of a config, in a folder of their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from dlo_framework.checkpoint.store import LOCAL, store_of
from dlo_framework.cli.command_table import CKPT_PATH
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.defaults import EndCheckpoint, check_on_file_system
from dlo_framework.distributed.signals import GRACE
from dlo_framework.errors import DloError, dlo_error_in
from dlo_framework.run import runs
from dlo_framework.run_setup import check_data, check_strategy, fill_ranks, strategy_arguments
from dlo_framework.stop import SAVE_MINUTES, GracefulStop
from dlo_framework.trainer import Trainer
from dlo_framework.watch.predictions import SavePredictions, check_table

T = TypeVar("T", bound=Trainer)

#: Seed of a run whose config sets none.
DEFAULT_SEED = 42


@dataclass(frozen=True)
class RunOptions:
    """Options of a config under ``run``.

    Args:
        dir: Folder that holds all runs; by default `trainer.default_root_dir`, else `runs`.
        name: Name of the run; by default the first config's file name.
        async_checkpoints: Whether to write checkpoints in the background; costs memory for a copy of this rank's shard.
        checkpoint_format: Format of checkpoints; `lightning` is one file in Lightning's own, under auto and ddp only.
        predictions: Form of `dlo predict`'s file: tensors, or a table of the images' classes or the prompts'
            completions.
        stop_grace: Seconds without a batch or a save after which a run that was asked to stop is killed.
        save_minutes: Minutes after the last checkpoint when `last.ckpt` is saved in the background; 0 for never.
    """

    dir: str | None = None
    name: str | None = None
    async_checkpoints: bool = False
    checkpoint_format: Literal["canonical", "lightning"] = "canonical"
    predictions: Literal["pt", "csv", "jsonl", "parquet"] = "pt"
    stop_grace: float = GRACE
    save_minutes: float = SAVE_MINUTES


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
    """LightningCLI with dlo's defaults, which parses when it is made; a command then calls what it needs of the rest.

    ``dlo fit`` and its kin are :func:`run_command`. Other commands build model and data by :meth:`build` and a trainer
    by :meth:`make_trainer`, with their changes as arguments. Only the differences from Lightning are documented here.

    Args:
        found: Scanned command line; its plug-ins have been imported.
        prog: Words that call the command, for usage lines; None for ``dlo`` and the trainer's method.
        description: Text of ``--help`` for the command; None for Lightning's text on the trainer's method.

    Attributes:
        trainer_options: Arguments of the trainer, instantiated, as the config has them; set by :meth:`build`.
    """

    trainer_options: dict[str, Any]

    def __init__(self, found: ConfigScan, prog: str | None = None, description: str | None = None) -> None:
        self.command, self.prog = found.argv[0], prog
        self.config_paths = list(found.configs)
        self._refused: DloError | None = None
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
                self.command: {"description": description} if description else {},
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
        parser.add_class_arguments(RunOptions, "run")

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
        """Does nothing: in Lightning's, hyperparameters of the checkpoint override the config, which wins here."""

    def instantiate_classes(self) -> None:
        """Does nothing, as the constructor calls it; :meth:`build` instantiates."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing, as the constructor calls it; :func:`run_command` runs."""

    # --- the config ------------------------------------------------------------------------------------------

    @property
    def options(self) -> Namespace:
        """Parsed options of the command."""
        options: Namespace = self.config[self.command]
        return options

    def user_config(self) -> dict[str, Any]:
        """Returns the config as the user means it: all files and overrides, without Lightning's defaults."""
        config: dict[str, Any] = yaml.safe_load(self._parser(self.command).dump(self.options, skip_default=True))
        return config

    def runs(self) -> Path:
        """Returns the folder of this config's runs: ``runs/quickstart``; sets the run's name where the config does not.

        Raises:
            DloError: If the name leaves its folder, or the folder begins with a scheme, such as ``s3:``.
        """
        run, root = self.options.run, self.options.trainer.default_root_dir
        run.name = run.name or (Path(self.config_paths[0]).stem if self.config_paths else "default")
        name = Path(run.name)
        if name.is_absolute() or ".." in name.parts:
            raise DloError(f"run.name must be a name below run.dir, got {name}; set run.dir to its folder")
        folder = Path(run.dir or root or "runs") / name
        check_on_file_system("trainer.default_root_dir" if root and not run.dir else "run.dir", folder)
        return folder

    def find_checkpoint(self) -> None:
        """Replaces the words `last` and `best` of ``--ckpt_path`` by a path; the trainer checks and loads it."""
        options = self.options
        if options.ckpt_path in ("last", "best"):
            # The config may be that which a run has kept.
            run = next((folder for path in self.config_paths if self._is_own(folder := Path(path).parent)), None)
            folder = run.parent if run is not None else self.runs()
            options.ckpt_path = str(runs.find_checkpoint(folder, options.ckpt_path, only=run))
        if not options.ckpt_path and self.command != "fit" and runs.is_first_process():
            print("no --ckpt_path (a path, last or best): the weights are untrained", file=sys.stderr)

    def predictions_path(self) -> Path:
        """Returns the path for predictions: in the checkpoint's run folder, unless the config names another."""
        path = Path(self.options.ckpt_path) if self.options.ckpt_path else None
        is_in_run = path is not None and path.parent.name == runs.CHECKPOINTS and store_of(path) is LOCAL
        run = path.parent.parent if path is not None and is_in_run else None
        if run is None or (self.options.run.dir and not self._is_own(run)):
            run = self.runs()
        return run / f"predictions-{path.stem if path is not None else 'untrained'}.{self.options.run.predictions}"

    def _is_own(self, run: Path) -> bool:
        """Whether a run's folder is one of this config's runs."""
        return run.parent.resolve() == self.runs().resolve()

    # --- its objects -----------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Registers :meth:`_build_strategy` as the builder of strategies."""
        self.parser.add_instantiator(self._build_strategy, Strategy)

    def _build_strategy(self, cls: type[Strategy], *args: Any, **kwargs: Any) -> Strategy:
        """Instantiates a strategy and keeps its error: for a union type jsonargparse raises the first type's error."""
        try:
            return cls(*args, **kwargs)
        except DloError as error:
            self._refused = error
            raise

    def build(self) -> None:
        """Instantiates the model, the data and the trainer's arguments; each call makes new ones.

        Raises:
            DloError: If a constructor or a check refuses its arguments; jsonargparse wraps the error in one of its own.
        """
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
        except Exception as error:
            cause = dlo_error_in(error) or self._refused or _missing_package(error)
            if cause is None:
                raise
            raise cause from error
        self.model, self.datamodule = self._get(self.config_init, "model"), self._get(self.config_init, "data")
        self.trainer_options = dict(self._get(self.config_init, "trainer"))
        self._add_configure_optimizers_method_to_model(self.command)
        check_strategy(self.trainer_options["strategy"])

    def callbacks(self) -> list[Callback]:
        """Returns the config's callbacks."""
        callbacks = self.trainer_options["callbacks"] or []
        return list(callbacks) if isinstance(callbacks, list) else [callbacks]

    def make_trainer(self, cls: type[T], **changes: Any) -> T:
        """Returns a trainer for the config.

        A strategy with a config file of its own, such as DeepSpeed's, sets arguments that the config leaves at their
        defaults.

        Args:
            cls: Class of the trainer.
            changes: Arguments in place of the config's.

        Raises:
            DloError: If the trainer or its strategy refuses the options.
        """
        self.runs()  # Sets the name.
        options, run = self.trainer_options, self.options.run
        fill_ranks(options)
        asked = strategy_arguments(options, self.datamodule)
        opened = {key: asked[key] for key in asked if changes.get(key, options[key]) == options[key]}
        about = {"run_name": run.name, "run_dir": run.dir, "config": self._config_to_keep()}
        names = ("async_checkpoints", "checkpoint_format", "stop_grace", "save_minutes")
        return cls(**{**about, **{name: run[name] for name in names}, **options, **changes, **opened})

    def _config_to_keep(self) -> str:
        """Returns the config as YAML to run again, without the checkpoint that this run resumed from."""
        config = self.options.clone()
        config.pop("ckpt_path", None)
        # A null is kept where the default is another value: it is a setting too.
        return self._parser(self.command).dump(config, skip_unset=False)


def run_command(config_scan: ConfigScan) -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``, the first of a command line's words.

    Raises:
        DloError: If a part or a check refuses the run.
    """
    cli = DloCLI(config_scan)
    cli.find_checkpoint()
    cli.build()
    check_data(cli.model, cli.datamodule, cli.command)
    changes: dict[str, Any] = {}
    if cli.command == "predict":
        form = cli.options.run.predictions
        if form != "pt":
            check_table(form, cli.datamodule)
        changes["callbacks"] = [*cli.callbacks(), SavePredictions(cli.predictions_path(), form)]
    trainer = cli.make_trainer(Trainer, **changes)
    arguments = {name: cli.options[name] for name in cli._subcommand_method_arguments[cli.command]}
    getattr(trainer, cli.command)(cli.model, datamodule=cli.datamodule, **arguments)


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


class ShortTrainer(Trainer):
    """Trainer without validation and checkpoints; GracefulStop stays, which saves nothing before the first step."""

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        every = super()._run_callbacks(users, run_folder, model, config)
        stop = [each for each in every if isinstance(each, GracefulStop)]
        return [*(each for each in every if not isinstance(each, Checkpoint | EndCheckpoint)), *stop]


def open_run(found: ConfigScan, name: str, reasons: dict[str, str]) -> DloCLI:
    """Builds the parts of a short run.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        name: Name of the command.
        reasons: Why ``fast_dev_run`` and ``ckpt_path`` must be unset.

    Raises:
        DloError: An option rules the run out.
    """
    cli = DloCLI(found, f"dlo {name}", f"The options of `dlo {name}` are those of `dlo fit`.")
    fast, path = cli.options.trainer.fast_dev_run, cli.options.ckpt_path
    for option, value in (("trainer.fast_dev_run", fast), ("--ckpt_path", path)):
        if value:
            reason = reasons[option.rpartition(".")[2].removeprefix("--")]
            raise DloError(f"{name}: {option} must be unset; remove it: {reason}")
    cli.build()
    return cli


def train_briefly(
    cli: DloCLI, name: str, callbacks: list[Callback], cls: type[ShortTrainer] = ShortTrainer, **options: Any
) -> Path:
    """Trains in a folder under the command's name, so that the config's first run is still ``version_0``.

    Args:
        cli: Command line that :func:`open_run` returned.
        name: Name of the command.
        callbacks: Callbacks in place of the config's.
        cls: Class of the trainer.
        options: Arguments of the trainer in place of the config's.

    Returns:
        The run's folder.
    """
    callbacks = [each for each in callbacks if not isinstance(each, Checkpoint)]
    cli.runs()  # Sets the name.
    options |= {"run_name": f"{cli.options.run.name}/{name}", "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = cli.make_trainer(cls, callbacks=callbacks, **options)
    trainer.fit(cli.model, datamodule=cli.datamodule)
    assert trainer.run_folder is not None
    return trainer.run_folder

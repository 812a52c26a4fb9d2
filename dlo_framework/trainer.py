"""`Trainer`: Lightning's Trainer with the run folder, callbacks, checks and checkpoints of ``dlo fit``."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework import run_setup
from dlo_framework.data.description import run_datamodule
from dlo_framework.defaults import add_default_callbacks, check_checkpoint_folders, check_on_file_system
from dlo_framework.distributed.signals import GRACE
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError, OrderlyEnd, check_number, did_you_mean
from dlo_framework.lock import RunLock
from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import module_file
from dlo_framework.run import runs
from dlo_framework.run.process import disable_nvml_check, silence_warnings
from dlo_framework.stop import SAVE_MINUTES, RunStopped
from dlo_framework.watch.bar import RunBar
from dlo_framework.watch.monitor import StepClock
from dlo_framework.watch.summary import ModelTable, RunRecord

#: Lightning's arguments with their defaults.
_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(LightningTrainer.__init__).parameters.items()
}


class Trainer(LightningTrainer):
    """Lightning's Trainer that runs what ``dlo fit`` runs, for scripts and notebooks.

    A fit has a run folder, dlo's default callbacks, TensorBoard, canonical checkpoints, and the checks before ranks
    start. A Trainer is one run: a second ``fit`` continues in its folder. ``validate``, ``test`` and ``predict`` write
    nothing.

    Args:
        run_name: Name of the run; by default the script's file name, or `notebook`.
        run_dir: Folder that holds all runs; by default `default_root_dir`, else `runs`.
        async_checkpoints: Whether checkpoints are written in the background; costs memory for a copy of this rank's
            shard.
        checkpoint_format: Format of checkpoints; `lightning` is one file, under auto and ddp only.
        stop_grace: Seconds without a batch or a save after which a run that was asked to stop is killed.
        save_minutes: Minutes after the last checkpoint when `last.ckpt` is saved in the background; 0 for never.
        config: Config of the run as YAML, to be saved with it; by default a record of the objects' options.
        options: Arguments of Lightning's Trainer. `strategy` also takes the names of plug-ins, such as `zero2`.

    Attributes:
        run_folder: Folder of the run; None before the first fit.

    Raises:
        DloError: If an argument is unknown, or the strategy refuses the options.
    """

    callbacks: list[Callback]

    def __init__(
        self,
        *,
        run_name: str | None = None,
        run_dir: str | Path | None = None,
        async_checkpoints: bool = False,
        checkpoint_format: Literal["canonical", "lightning"] = "canonical",
        stop_grace: float = GRACE,
        save_minutes: float = SAVE_MINUTES,
        config: str | None = None,
        **options: Any,
    ) -> None:
        silence_warnings()
        disable_nvml_check()
        register_data_parallel()
        for name in options:
            if name not in _DEFAULTS or name == "self":
                known = [*_DEFAULTS, *list(inspect.signature(Trainer).parameters)[:-1]]  # Without `options`.
                meant = run_setup.OTHER_NAMES.get(name, "").removeprefix("trainer.")
                hint = f"; did you mean '{meant}'?" if meant in known else did_you_mean(name, known)
                raise DloError(f"unknown argument '{name}' of Trainer{hint}")
        self.run_folder: Path | None = None
        self._lock: RunLock | None = None
        self._run_options: dict[str, Any] = {
            "name": run_name or script_name(),
            "dir": str(run_dir) if run_dir is not None else None,
            "async_checkpoints": async_checkpoints,
            "checkpoint_format": checkpoint_format,
        }
        self._config, self._stop_grace, self._save_minutes = config, stop_grace, save_minutes
        self._options = {**_DEFAULTS, **options}
        self._options["strategy"] = _find_strategy(self._options["strategy"])
        run_setup.fill_ranks(self._options)
        self._options |= self._open_options()
        check_number("accumulate_grad_batches", self._options["accumulate_grad_batches"], "at least 1", "1 is off")
        self._runs()
        given = self._options["callbacks"] or []
        self._given = list(given) if isinstance(given, list) else [given]
        for callback in self._given:
            _check_object(callback, "callbacks", Callback)
        check_checkpoint_folders(self._given)
        try:
            super().__init__(**self._lightning_options())
            use_canonical_checkpoints(self)
            run_setup.check_ranks(self.strategy, self._options)
            run_setup.set_checkpoints(self, background=async_checkpoints, form=checkpoint_format)
        except (MisconfigurationException, ValueError, TypeError) as error:
            if isinstance(error, DloError) or (isinstance(error, TypeError) and "`devices`" not in str(error)):
                raise
            raise run_setup.explain_trainer_error(error, self._options) from error
        own = [callback for callback in self.callbacks if callback not in self._given]
        tables: dict[Callback, Callback] = {
            callback: ModelTable() for callback in own if isinstance(callback, ModelSummary)
        }
        self.callbacks = [tables.get(callback, callback) for callback in self.callbacks]
        self._lightnings = [*tables.values(), *(callback for callback in own if isinstance(callback, Timer))]

    # --- Lightning's methods -------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains, as ``dlo fit`` does.

        Args:
            model: Module to train.
            train_dataloaders: Loaders, or a datamodule.
            val_dataloaders: Loaders for validation.
            datamodule: Datamodule.
            ckpt_path: Checkpoint to resume from: a path, `last` or `best` of this Trainer's run or of the newest run
                of its name, or `auto`, which starts a run if none is unfinished.
            weights_only: Setting of Lightning for checkpoints that torch reads.

        Raises:
            DloError: If a check refuses the run.
        """
        _check_object(model, "model", LightningModule)
        data = datamodule if datamodule is not None else _as_datamodule(train_dataloaders)
        if train_dataloaders is None:
            run_setup.check_data(model, data, "fit")
        path = self._prepare("fit", model, data, ckpt_path)
        with self._ending():
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluates on the validation data; arguments as in Lightning, and ``ckpt_path`` as in :meth:`fit`."""
        options = {"verbose": verbose, "weights_only": weights_only}
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, **options) or []

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluates on the test data; arguments as in Lightning, and ``ckpt_path`` as in :meth:`fit`."""
        options = {"verbose": verbose, "weights_only": weights_only}
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, **options) or []

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | list[list[Any]] | None:
        """Returns predictions; arguments as in Lightning, and ``ckpt_path`` as in :meth:`fit`."""
        options = {"return_predictions": return_predictions, "weights_only": weights_only}
        return self._evaluate("predict", model, dataloaders, datamodule, ckpt_path, **options)

    # --- preparing -----------------------------------------------------------------------------------------

    def _open_options(self) -> dict[str, Any]:
        """Returns the arguments that the strategy sets where they have their defaults."""
        arguments = run_setup.strategy_arguments(self._options)
        return {key: value for key, value in arguments.items() if self._options[key] == _DEFAULTS[key]}

    def _lightning_options(self) -> dict[str, Any]:
        """Returns the arguments of Lightning's Trainer, before a run: without loggers and checkpoints of its own."""
        options = {key: value for key, value in self._options.items() if key != "self"}
        if options["barebones"]:
            return options
        bar = options["enable_progress_bar"] is not False
        own = [RunBar()] if bar and not any(isinstance(each, ProgressBar) for each in self._given) else []
        options |= {"callbacks": [*self._given, *own], "plugins": run_setup.with_checkpoint_io(options["plugins"])}
        if options["logger"] in (None, True):
            options["logger"] = False
        saves = any(isinstance(callback, Checkpoint) for callback in self._given)
        options["enable_checkpointing"] = saves and options["enable_checkpointing"] is not False
        if options["profiler"] is None:
            options["profiler"] = StepClock()
        return options

    def _runs(self) -> Path:
        """Returns the folder of this Trainer's runs: ``runs/train`` for ``train.py``."""
        root = self._run_options["dir"] or self._options["default_root_dir"] or "runs"
        folder = Path(str(root)) / str(self._run_options["name"])
        check_on_file_system("run_dir" if self._run_options["dir"] else "default_root_dir", folder)
        return folder

    def _prepare(self, command: str, model: LightningModule, data: Any, ckpt_path: str | Path | None) -> str | None:
        """Checks a run before ranks start, and gives a training its folder; returns its checkpoint."""
        trains = command == "fit"
        path, is_auto = run_setup.find_start_checkpoint(ckpt_path, self._runs, trains=trains, run=self.run_folder)
        run_setup.check_parts(model, data, predicts=command == "predict")
        before = (self.run_folder, self.callbacks, self.loggers)
        try:
            if trains and not (self._options["fast_dev_run"] or self._options["barebones"]):
                if self.run_folder is None:
                    self._start_run(model, data, path, is_auto)
                else:
                    self._lock = run_setup.lock_run_folder(self.run_folder, self._runs(), starts=False)
            run_setup.check_run(self, model, data, command=command, ckpt_path=path)
        except (MisconfigurationException, ValueError, TypeError):
            made, (self.run_folder, callbacks, self.loggers) = self.run_folder, before
            self.callbacks = callbacks
            if made is not None and before[0] is None:
                self._release()
                if made.is_dir() and not any(made.iterdir()):
                    made.rmdir()
            raise
        return path

    def _evaluate(
        self, command: str, model: LightningModule | None, dataloaders: Any, datamodule: Any, ckpt_path: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Checks an evaluation, of the module of the last fit if none is given, and runs it by Lightning's method."""
        model = model if model is not None else self.lightning_module
        if model is None:
            raise DloError(f"model must be set for {command}, got none; pass the module, or fit it first")
        data = datamodule if datamodule is not None else _as_datamodule(dataloaders)
        if data is None and dataloaders is None:  # As Lightning does after a fit.
            data = run_datamodule(self)
        path = self._prepare(command, model, data, ckpt_path)
        run = getattr(super(), command)
        with self._ending():
            return run(model, dataloaders, datamodule=datamodule, ckpt_path=path, **options)
        return None

    def _start_run(self, model: LightningModule, data: Any, path: str | None, is_auto: bool) -> None:
        """Gives the run its folder, its lock, its logger and dlo's callbacks."""
        resumed = run_setup.resumed_run(path, self._runs())
        self.run_folder = resumed or runs.new_run(self._runs())
        self._lock = run_setup.lock_run_folder(self.run_folder, self._runs(), starts=is_auto and resumed is None)
        if self._options["logger"] in (None, True):
            self.loggers = [TensorBoardLogger(self.run_folder.absolute(), name="", version="", default_hp_metric=False)]
        lightnings = [callback for callback in self.callbacks if callback in self._lightnings]
        users = [callback for callback in self.callbacks if callback not in lightnings]
        config = self._config if self._config is not None else self._record(model, data)
        callbacks = self._run_callbacks(users, self.run_folder, model, config)
        # Lightning's (2.6.6) constructor orders them; a list that is set later stays in its order.
        self.callbacks = _CallbackConnector._reorder_callbacks([*callbacks, *lightnings])
        self._default_root_dir = str(self.run_folder)

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        """Returns the callbacks of a training: the user's and dlo's."""
        return add_default_callbacks(
            users,
            run_folder=run_folder,
            model=model,
            config=config,
            progress_bar=self._options["enable_progress_bar"] is not False,
            checkpoints=self._options["enable_checkpointing"] is not False,
            stop_grace=self._stop_grace,
            save_minutes=self._save_minutes,
            cudnn_benchmark=self._options["benchmark"] is not False,
        )

    def _record(self, model: LightningModule, data: Any) -> str:
        """Returns the options of a run from Python as YAML."""
        changed = {key: value for key, value in self._options.items() if key != "self" and value != _DEFAULTS[key]}
        trainer = {key: value for key, value in changed.items() if is_plain(value)}
        if "strategy" in changed.keys() - trainer.keys():
            trainer["strategy"] = describe_object(changed["strategy"])
        trainer["callbacks"] = [describe_object(callback) for callback in self._given]
        record: dict[str, Any] = {"trainer": trainer, "model": describe_object(model), "run": self._run_options}
        if data is not None:
            record["data"] = describe_object(data)
        if "PL_GLOBAL_SEED" in os.environ:
            record["seed_everything"] = int(os.environ["PL_GLOBAL_SEED"])
        head = f"# Record of a run from Python; {Path(sys.argv[0]).name or 'the program'} repeats it.\n"
        return head + yaml.safe_dump(record, sort_keys=False)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends the process with the exit code of ``dlo fit`` after a signal; a notebook goes on."""
        try:
            yield
        except RunStopped as stopped:
            if runs.is_first_process():
                print(stopped, file=sys.stderr)
            if not _IS_INTERACTIVE:
                raise SystemExit(stopped.exit_code) from stopped
        except OrderlyEnd:
            pass
        finally:
            record = next((each for each in self.callbacks if isinstance(each, RunRecord)), None)
            if record is not None:
                self.run_folder = record.folder  # Rank 0 has told the ranks that others have started.
            self._release()

    def _release(self) -> None:
        """Releases the run's folder: a notebook lives on after a run."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None


class CheckedTrainer(Trainer):
    """Trainer without a run folder, callbacks and loggers of dlo's, for commands that inspect a run or compare runs."""

    def _open_options(self) -> dict[str, Any]:
        """Returns nothing: the command line has asked the strategy about the config, and then changed it."""
        return {}

    def _lightning_options(self) -> dict[str, Any]:
        options = {key: value for key, value in self._options.items() if key != "self"}
        return options | {"plugins": run_setup.with_checkpoint_io(options["plugins"])}

    def _start_run(self, model: LightningModule, data: Any, path: str | None, is_auto: bool) -> None:
        """Does nothing."""


def script_name() -> str:
    """Returns the name of runs of this program: its file's without suffix, or ``notebook``."""
    file = module_file("__main__")
    if file is None or _IS_INTERACTIVE:
        return "notebook"
    path = Path(file)
    return path.parent.name if path.stem == "__main__" else path.stem


def _find_strategy(strategy: Any) -> Any:
    """Imports the plug-in that a strategy's name means; returns what Lightning takes for it."""
    if not isinstance(strategy, str):
        return strategy
    registry = Registry()
    if strategy in registry.names("strategy"):
        cls = registry.load(strategy, "strategy")  # It registers its aliases, of which Lightning has some too.
        return cls() if strategy == registry.get(strategy).name else strategy
    run_setup.check_strategy(strategy)
    return strategy


def _as_datamodule(loaders: Any) -> LightningDataModule | None:
    return loaders if isinstance(loaders, LightningDataModule) else None


def _check_object(given: Any, name: str, base: type) -> None:
    """Checks that an argument is an object, and not its class or its name, which Lightning (2.6) fails on later.

    Raises:
        DloError: If it is one of them.
    """
    rule = f"{name} must be {base.__name__} objects" if name == "callbacks" else f"{name} must be a {base.__name__}"
    if isinstance(given, type):
        raise DloError(f"{rule}, got the class {given.__name__}; write {given.__name__}(...)")
    if isinstance(given, str):
        raise DloError(f"{rule}, got the text '{given}'; write dlo_framework.{given}(...)")


def describe_object(built: Any) -> dict[str, Any]:
    """Returns an object's class, and the arguments of its constructor that it keeps as plain data.

    They are read from Lightning's ``hparams``, or from attributes of the same names; others are left out.
    """
    cls = type(built)
    known = {**vars(built), **dict(getattr(built, "hparams", {}))}
    names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    arguments = {name: _plain(known[name]) for name in names if name in known and is_plain(known[name])}
    described: dict[str, Any] = {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
    return described | ({"init_args": arguments} if arguments else {})


def is_plain(value: Any) -> bool:
    """Returns whether a value is made of texts, numbers, None, lists and mappings."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return type(value) in (str, int, float, bool, type(None)) or isinstance(value, Path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value

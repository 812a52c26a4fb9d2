"""Steps before a run starts, which ``dlo fit`` and ``dlo_framework.Trainer`` share: checks, checkpoint, run folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.checkpoint import SafeCheckpointIO, check, recover
from dlo_framework.checkpoint.history import read_entry
from dlo_framework.data.description import DataDescription, ModuleDescription
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.frozen_model import find_frozen_models
from dlo_framework.lock import RunLock, check_free, check_only_starter, lock_run, release_all
from dlo_framework.registry import Registry
from dlo_framework.run import runs
from dlo_framework.strategy_abilities import ArrangesRanks, CanonicalCheckpoints
from dlo_framework.strategy_contract import contract_of, has_one_process


@runtime_checkable
class RunChecker(Protocol):
    """Callback or module that checks a fit before processes start.

    The command line and :class:`dlo_framework.trainer.Trainer` call :meth:`check_run`. Lightning's own Trainer does
    not: check in `setup` too.
    """

    def check_run(self, trainer: Any, module: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Checks the run.

        Args:
            trainer: Trainer of the run; its strategy knows the ranks, and has started none.
            module: Module of the run, whose model may not be built.
            datamodule: Datamodule of the run, which has read no data; None without one.

        Raises:
            DloError: The run cannot work as configured; the message has the fix.
        """


# --- the checkpoint and the folder ---------------------------------------------------------------------------


def find_start_checkpoint(
    ckpt_path: str | Path | None, folder: Callable[[], Path], *, trains: bool, run: Path | None = None
) -> tuple[str | None, bool]:
    """Finds the checkpoint that a run starts from, and refuses an unsafe one.

    Args:
        ckpt_path: Path, `last`, `best`, or, for training, `auto`; None for none.
        folder: Function that returns the folder of the runs.
        trains: Whether the run trains.
        run: Run in which to look for `last` and `best`; None for the newest that has one.

    Returns:
        The path, or None; and whether `auto` was asked for.

    Raises:
        DloError: If the checkpoint does not exist, is unsafe or damaged, or training needs more than it holds.
    """
    is_auto = ckpt_path == "auto" and trains
    if is_auto:
        newest = next(iter(runs.versions(folder())), None) if runs.is_first_process() else None
        if newest is not None:
            check_free(newest)  # Another job may train in it before its first checkpoint.
        ckpt_path = runs.unfinished(folder())
        if newest is not None and ckpt_path is None:
            _report_finished(newest)
    if not ckpt_path:
        return None, is_auto
    if ckpt_path in ("last", "best"):
        which = str(ckpt_path)
        ckpt_path = (run and runs.checkpoint_of(run, which)) or runs.find_checkpoint(folder(), which)
    path = str(ckpt_path)
    try:
        check(path)
    except OSError as error:
        raise DloError(f"cannot read the checkpoint {error.filename or path}: {error.strerror}") from error
    entry = read_entry(Path(path)) if trains else None
    if entry is not None and entry.weights_only:
        raise DloError(
            f"ckpt_path must have optimizer state and counters, got {path} with weights only;"
            " take the run's last checkpoint"
        )
    return path, is_auto


def _report_finished(run: Path) -> None:
    """Logs that `auto` starts a new run because the newest has finished."""
    summary = runs.current_summary(run)
    last = run / runs.CHECKPOINTS / runs.LAST  # The word `last` would be the new run's, once that has saved.
    if summary is not None and summary["status"] == "finished" and last.exists():
        rank_zero_info(
            f"ckpt_path auto: {run} has finished after {summary['steps']} steps, so a new run starts; to train that one"
            f" longer, set ckpt_path to {last}, and trainer.max_epochs or trainer.max_steps to a larger number"
        )


def resumed_run(ckpt_path: str | None, folder: Path) -> Path | None:
    """Returns the run folder of a checkpoint if it is one of the runs in ``folder``, else None."""
    if not ckpt_path or Path(ckpt_path).parent.name != runs.CHECKPOINTS:
        return None
    run = Path(ckpt_path).parent.parent
    return run if run.parent.resolve() == folder.resolve() else None


def lock_run_folder(run: Path, folder: Path, *, starts: bool) -> RunLock | None:
    """Acquires the lock of a run folder, and completes what a killed save has left; on rank 0.

    Args:
        run: Folder of the run.
        folder: Folder of all runs of that name.
        starts: Whether ``auto`` has started a new run, which only one job may do at a time.

    Returns:
        The lock, which is released when the process ends; None on other ranks.

    Raises:
        DloError: If another job trains in the folder, or started the same run at the same time.
    """
    if not runs.is_first_process():
        return None
    lock = lock_run(run)
    if starts:
        try:
            check_only_starter(run, runs.versions(folder))
        except DloError:
            release_all()
            run.rmdir()
            raise
    recover(run / runs.CHECKPOINTS)
    return lock


# --- checks --------------------------------------------------------------------------------------------------


def check_data(model: Any, datamodule: Any, command: str) -> None:
    """Checks that a run has data: a datamodule, or a loader of the module's own.

    Raises:
        DloError: If it has none.
    """
    loader = {"fit": "train", "validate": "val"}.get(command, command) + "_dataloader"
    if datamodule is None and not is_overridden(loader, model, LightningModule):
        raise DloError(
            f"data must be set for {command}, got none: {type(model).__name__} has no {loader} of its own; add"
            " data: {class_path: ...} to the config, or --data ClassName (`dlo plugins` lists them); from Python, pass"
            " a datamodule or loaders"
        )


def check_parts(model: Any, datamodule: Any, *, predicts: bool = False) -> None:
    """Lets the data and the model check their options.

    Raises:
        DloError: If an option would fail later.
    """
    data, check_model = DataDescription(datamodule), ModuleDescription(model).check
    if callable(data.check):
        data.check()
    if callable(check_model):
        check_model(datamodule)
    if predicts and callable(data.check_predict):
        data.check_predict()


def check_run(
    trainer: Trainer,
    model: Any,
    datamodule: Any,
    *,
    command: str,
    ckpt_path: str | None,
    has_batch_size: bool = True,
) -> None:
    """Lets strategy, module, callbacks and data check a run whose trainer is built, before ranks start.

    Args:
        trainer: Trainer of the run.
        model: LightningModule of the run.
        datamodule: LightningDataModule of the run; None without one.
        command: Method of the trainer: `fit`, `validate`, `test` or `predict`.
        ckpt_path: Checkpoint that the run starts from.
        has_batch_size: Whether the batch size is that of the run; that of simulated ranks has not been chosen yet.

    Raises:
        DloError: If one of them refuses the run.
    """
    strategy, callbacks = contract_of(trainer.strategy), trainer.callbacks  # type: ignore[attr-defined]
    trains = command == "fit"
    strategy.checkpoint_to_load = ckpt_path
    strategy.check_model(model, datamodule, trains=trains, callbacks=callbacks)
    if trains:
        _warn_without_steps(trainer)
        owners = [model, *callbacks]
        for owner in owners:
            if isinstance(owner, RunChecker):
                owner.check_run(trainer, model, datamodule)
        for frozen in find_frozen_models(owners):
            if not frozen.checked:  # by its owner's check_run
                frozen.check(model, datamodule, strategy)
        check_shares = DataDescription(datamodule).check_shares
        if check_shares is not None and has_batch_size:
            check_shares(trainer)
    if command == "predict":
        mesh = strategy.find_ability(ArrangesRanks)
        if mesh is not None:
            mesh.check_predict(model)


def _warn_without_steps(trainer: Any) -> None:
    """Warns that a run trains no step, which Lightning (2.6) ends without a word."""
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            rank_zero_warn(
                f"the run trains no step, because trainer.{name} is 0; set it to 1 or more, or use `dlo validate`"
            )


@dataclass(frozen=True)
class LaunchedRanks:
    """Processes that another program has started, each a rank of one run.

    Attributes:
        launcher: Name of the program, for messages.
        per_node: Number of processes on this node.
        nodes: Number of nodes.
    """

    launcher: str
    per_node: int
    nodes: int

    @classmethod
    def find(cls) -> LaunchedRanks | None:
        """Returns the processes of torchrun, Ray Train or SLURM; None where this process starts its own ranks.

        Raises:
            DloError: Nodes have different numbers of processes, SLURM's tasks are not given per node, or torchrun's
                nodes come and go while ranks meet in its store.
        """
        environment = os.environ
        if TorchElasticEnvironment.detect():
            _check_store_of_nodes()
            name, ranks, per_node = "torchrun", int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
        elif SLURMEnvironment.detect() and "SLURM_STEP_ID" in environment:  # A task of srun, not the job's script.
            name, ranks = "SLURM", int(environment["SLURM_NTASKS"])
            per_node = int(environment.get("SLURM_NTASKS_PER_NODE", "0"))
            if ranks > 1 and not per_node:
                raise DloError(
                    f"SLURM's tasks must be given per node, got --ntasks {ranks}; use --nodes and --ntasks-per-node"
                )
        else:
            return None
        if ranks > 1 and ranks % per_node:
            raise DloError(
                f"all nodes must have as many processes, got {ranks} in all and {per_node} on this node; start the same"
                " number on each"
            )
        return cls(name, per_node, ranks // per_node) if ranks > 1 else None


def _check_store_of_nodes() -> None:
    """Refuses torchrun's shared store where nodes come and go.

    Its agents (torch 2.15) keep the address of the first store when rank 0 moves to another node, and a node that joins
    counts restarts from 0, so that ranks would wait for each other until their time limit. The range of nodes is in the
    agent's command line or environment alone.
    """
    command, process = "", os.getppid()
    with contextlib.suppress(OSError):  # Only Linux has the files.
        while process > 1:  # A user's script may have been started between the agent and this process.
            command += Path(f"/proc/{process}/cmdline").read_text(errors="replace")
            process = int(re.findall(r"PPid:\s*(\d+)", Path(f"/proc/{process}/status").read_text())[0])
    given = re.search(r"--nnodes[=\0]([\d:]+)", f"{command}\0--nnodes={os.environ.get('PET_NNODES', '')}")
    fewest, _, most = given[1].partition(":") if given is not None else ("", "", "")
    if most not in ("", fewest) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise DloError(
            f"torchrun's nodes must be a fixed number while it shares its store with the ranks, got --nnodes"
            f" {fewest}:{most}; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment"
        )


def fill_ranks(options: dict[str, Any]) -> None:
    """Sets `devices` and `num_nodes` to the processes that a launcher has started, where `devices` is auto.

    Args:
        options: Arguments of Lightning's Trainer.

    Raises:
        DloError: See :meth:`LaunchedRanks.find`.
    """
    launched = LaunchedRanks.find() if options["devices"] in ("auto", -1, "-1") else None
    if launched is not None:
        options |= {"devices": launched.per_node, "num_nodes": launched.nodes}


def check_ranks(strategy: Strategy, options: Any) -> None:
    """Raises a DloError for several ranks under a single-device strategy, which Lightning (2.6) accepts silently.

    Each process of torchrun or SLURM would be a run of its own, in the same folder.
    """
    devices = options.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    number = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
    nodes = int(options.get("num_nodes") or 1)
    launched = LaunchedRanks.find() if has_one_process(strategy) else None
    if launched is not None:
        raise DloError(
            f"trainer.devices x trainer.num_nodes must be the {launched.per_node * launched.nodes} processes that"
            f" {launched.launcher} has started, got {number} x {nodes}; set --trainer.devices auto"
        )
    if has_one_process(strategy) and number * nodes > 1:
        raise DloError(
            f"trainer.devices x trainer.num_nodes must be 1 under {type(strategy).__name__}, got"
            f" {options.get('devices')} x {nodes}; set both to 1, or use a strategy of several ranks, such as ddp"
        )


#: Options by the names that other tools, and older versions of Lightning, have for them.
OTHER_NAMES = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "num_train_epochs", "train_epochs"), "trainer.max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_train_steps", "train_steps"), "trainer.max_steps"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "ngpus", "gpu", "world_size"), "trainer.devices"),
    **dict.fromkeys(("nproc", "nproc_per_node", "num_processes", "tpu_cores", "num_devices"), "trainer.devices"),
    **dict.fromkeys(("nodes", "nnodes", "num_machines"), "trainer.num_nodes"),
    **dict.fromkeys(("mixed_precision", "fp16", "bf16", "amp"), "trainer.precision"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "trainer.accumulate_grad_batches"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad_norm", "clip_grad"), "trainer.gradient_clip_val"),
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint"), "ckpt_path last"),
    **dict.fromkeys(("ckpt", "checkpoint", "checkpoint_path", "weights"), "ckpt_path"),
    **dict.fromkeys(("seed", "random_seed"), "seed_everything"),
    **dict.fromkeys(("output_dir", "out_dir", "output", "default_root_dir", "log_dir"), "run.dir"),
    **dict.fromkeys(("learning_rate", "lr"), "model.lr"),
}

#: Lightning's names of precisions that other tools call otherwise.
_PRECISIONS = {
    **dict.fromkeys(("fp16", "float16", "half", "amp"), "16-mixed"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float"), "32-true"),
    **dict.fromkeys(("fp64", "float64", "double"), "64-true"),
}


def explain_precision(given: str) -> str:
    """Returns the message for a precision that Lightning does not have."""
    names = ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true", "transformer-engine"]
    known = _PRECISIONS.get(given.lower())
    hint = f"; did you mean '{known}'?" if known else did_you_mean(given, names)
    return f"trainer.precision must be one of {', '.join(names)}, got '{given}'{hint}"


def explain_trainer_error(error: Exception, options: Any) -> DloError:
    """Returns the message for arguments that Lightning's Trainer (2.6) refuses.

    Args:
        error: Lightning's error.
        options: Arguments of the Trainer.
    """
    text = " ".join(str(error).split())
    if re.search(r"No supported gpu|invalid accelerator name|can not run on your system", text):
        names = [name for name in AcceleratorRegistry.available_accelerators() if name != "auto"]
        present = ["auto", *(name for name in names if AcceleratorRegistry[name]["accelerator"].is_available())]
        given = str(options.get("accelerator"))
        fix = f"set {present[-1]}, or install a torch that sees the device (`dlo doctor`)"
        hint = did_you_mean(given, present) if given not in (*names, "gpu") else ""
        rule = f"trainer.accelerator must be one that this machine has ({', '.join(present)})"
        return DloError(f"{rule}, got {given}{hint or f'; {fix}'}")
    if re.search(r"devices='?-?\d*'?\)` value is not a valid input", text):
        return DloError(f"trainer.devices must be at least 1, or auto, got {options.get('devices')}; set 1 or auto")
    if re.match(r"Precision '[^']*' is invalid", text):
        return DloError(explain_precision(str(options.get("precision"))))
    return DloError(f"trainer: {text}")


def check_strategy(strategy: Any) -> None:
    """Raises a DloError, with the nearest match, for a strategy name that is not registered."""
    if not isinstance(strategy, str):
        return
    known = ["auto", *StrategyRegistry.available_strategies()]
    if strategy.startswith("{"):  # The parser takes a mapping that no strategy accepts for a name.
        raise DloError(
            f"trainer.strategy must have options that its class takes, got {strategy}; write"
            " --trainer.strategy.class_path NAME --trainer.strategy.init_args.KEY VALUE, whose error has the key"
        )
    if strategy not in known:
        registered = Registry().names("strategy")
        if strategy in registered:
            raise DloError(
                f"strategy must be a class_path or a registered name, got the class name '{strategy}'; write strategy:"
                f" {{class_path: {strategy}}}, or on the command line --trainer.strategy.class_path {strategy}"
            )
        names = ["auto", "ddp", *(name for plugin in Registry().plugins("strategy") for name in plugin.short_names)]
        hint = did_you_mean(strategy, dict.fromkeys([*known, *registered])) or ";"
        raise DloError(
            f"unknown strategy '{strategy}'{hint} use one of {', '.join(names)};"
            " `dlo plugins` lists their variants and options"
        )


# --- the trainer's parts -------------------------------------------------------------------------------------


def strategy_arguments(given: Mapping[str, Any], datamodule: Any = None) -> dict[str, Any]:
    """Returns the trainer's arguments that its strategy sets.

    A strategy with a config file of its own, such as DeepSpeed's, may define them there.

    Args:
        given: Arguments of the trainer by name.
        datamodule: Datamodule of the run, if it is known.
    """
    ask = getattr(given.get("strategy"), "trainer_arguments", None)
    return ask(dict(given), datamodule) if callable(ask) else {}


def with_checkpoint_io(plugins: Any) -> list[Any]:
    """Returns Lightning's ``plugins`` with dlo's checkpoint reader and writer, unless the user sets one."""
    given = plugins if isinstance(plugins, list) else [plugins] if plugins is not None else []
    if any(isinstance(plugin, CheckpointIO) for plugin in given):
        return given
    return [*given, SafeCheckpointIO()]


def set_checkpoints(trainer: Trainer, *, background: bool, form: str) -> None:
    """Sets how the strategy writes checkpoints.

    Args:
        trainer: Trainer of the run.
        background: Whether to write them in the background.
        form: Format: `canonical` or `lightning`.

    Raises:
        DloError: If the strategy or a logger cannot do that.
    """
    contract = contract_of(trainer.strategy)
    if background or contract.find_ability(CanonicalCheckpoints) is not None:
        writer = contract.ability(CanonicalCheckpoints, "run.async_checkpoints")
        writer.async_checkpoints, writer.checkpoint_format = background, form
        writer.check_checkpoints(trainer.loggers)

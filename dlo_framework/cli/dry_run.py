"""``dlo fit --dry-run``: all checks of a run, and what it would do, without ranks, a run folder or a step.

The memory of a rank with its activations is predicted by an installed package, whose function is the entry point in the
group ``dlo_framework.memory``: ``predict(config, model, datamodule, ranks, device)`` returns bytes by part, or raises a
:class:`DloError` for a run that it does not predict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sized
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, DistributedSampler

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.data.description import DataDescription
from dlo_framework.data.module import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.extensions import installed_points, load_function
from dlo_framework.run import runs
from dlo_framework.run_setup import check_data, check_parts, check_run, find_start_checkpoint, resumed_run
from dlo_framework.strategy_abilities import ArrangesRanks
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task import Task
from dlo_framework.trainer import Trainer
from dlo_framework.units import format_bytes, format_duration
from dlo_framework.watch.state_bytes import paper_bytes

MEMORY_GROUP = "dlo_framework.memory"


def describe_run(config_scan: ConfigScan) -> None:
    """Prints the description of a run.

    Args:
        config_scan: Scanned command line of the run.

    Raises:
        DloError: If a check refuses the run.
    """
    cli = DloCLI(config_scan, "dlo fit --dry-run")
    cli.find_checkpoint()
    path, _ = find_start_checkpoint(cli.options.ckpt_path, cli.runs, trains=cli.command == "fit")
    cli.build()
    check_data(cli.model, cli.datamodule, cli.command)
    check_parts(cli.model, cli.datamodule, predicts=cli.command == "predict")
    trainer = cli.make_trainer(Trainer)
    check_run(trainer, cli.model, cli.datamodule, command=cli.command, ckpt_path=path)
    rows = dict(_describe(cli, trainer, path))
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows.items()))


def _describe(cli: DloCLI, trainer: Trainer, path: str | None) -> Iterator[tuple[str, str]]:
    ranks, fits = trainer.num_devices * trainer.num_nodes, cli.command == "fit"
    device = trainer.strategy.root_device.type
    yield "strategy", f"{type(trainer.strategy).__name__} on {ranks} rank(s) of {device}, {trainer.precision}"
    mesh = contract_of(trainer.strategy).find_ability(ArrangesRanks)
    sizes = {name: size for name, size in vars(mesh.mesh_spec()).items() if isinstance(size, int)} if mesh else {}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    if axes:
        yield "mesh", ", ".join(f"{name} {size}" for name, size in axes.items())
    model = cli.model.on_meta() if isinstance(cli.model, Task) else cli.model
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, frozen = (sum(size for size, trains in parameters if trains is kind) for kind in (True, False))
    yield "model", f"{type(cli.model).__name__}, {trained:,} trained parameters, {frozen:,} frozen"
    yield from _describe_memory(cli, trainer, trained, frozen, ranks, axes)
    trainer.strategy.connect(cli.model)  # Data may read the tokenizer or the sizes of `trainer.lightning_module`.
    # Ranks of a mesh that split the model have the same samples.
    shares = ranks // math.prod(axes.get(axis, 1) for axis in ("pp", "tp", "cp"))
    yield "data", describe_data(cli.datamodule, shares)
    steps = None
    if fits:
        divides = cli.options.trainer.use_distributed_sampler
        batches = count_batches(trainer, cli.datamodule, shares if divides else 1)
        steps, text = count_steps(trainer, batches)
        if steps is not None and not cli.model.automatic_optimization:
            steps, text = None, f"those of {type(cli.model).__name__}'s own, in {steps:,} batches: it optimizes by hand"
        yield "steps", text
    seconds = last_step_seconds(cli.runs())
    if steps is not None and seconds is not None:
        time = format_duration(steps * seconds)
        yield "time", f"{time}, at the {seconds:.3g} s a step of the last run of this name"
    yield "start", path or "the model's own weights"
    if fits and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        newest = runs.versions(cli.runs())[:1]
        number = int(newest[0].name.removeprefix("version_")) + 1 if newest else 0
        yield "run folder", str(resumed_run(path, cli.runs()) or cli.runs() / f"version_{number}")


def _describe_memory(
    cli: DloCLI, trainer: Trainer, trained: int, frozen: int, ranks: int, axes: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Yields the bytes of a rank by kind: of a mesh that splits the model all predicted, else by the ZeRO paper."""
    strategy, reason = contract_of(trainer.strategy), "only for fit"
    predicted: dict[str, float] = {}
    if cli.command == "fit":
        reason = "no installed package predicts memory"
        for point in installed_points().select(group=MEMORY_GROUP):
            arguments = cli.user_config(), cli.model, cli.datamodule, ranks, trainer.strategy.root_device.type
            try:
                predicted = load_function(point, "memory prediction")(*arguments)
                break
            except DloError as error:
                reason = str(error)
    if strategy.zero_stage is None or any(axes.get(axis, 1) > 1 for axis in ("pp", "tp", "cp", "ep")):
        total = f"{format_bytes(sum(predicted.values()))} on the rank that needs most, predicted"
        yield "memory", total if predicted else f"not predicted: {reason}"
        for part, size in predicted.items():
            yield f"  {part.replace('_', ' ')}", format_bytes(size)
        return
    shards, masters = axes.get("dp_shard", ranks), strategy.has_master_weights
    state_bytes = paper_bytes(trained, shards, strategy.zero_stage, frozen=frozen, masters=masters)
    yield "  parameters", f"{format_bytes(state_bytes.parameters)} a rank"
    yield "  gradients", f"{format_bytes(state_bytes.gradients)} a rank"
    yield "  optimizer", f"{format_bytes(state_bytes.optimizer)} a rank, with Adam's two states"
    working = format_bytes(sum(predicted.get(part, 0.0) for part in ("activations", "working", "loss")))
    yield "  activations", f"{working} a rank, predicted" if predicted else f"not predicted: {reason}"


def describe_data(datamodule: LightningDataModule | None, shares: int) -> str:
    """Returns the data's class and batch: the global one, or for plain loaders, which Lightning divides, a rank's."""
    if datamodule is None:
        return "loaders of the module"
    name, batch = type(datamodule).__name__, DataDescription(datamodule).batch_size
    if not batch:
        return name
    if isinstance(datamodule, ResumableDataModule):
        return f"{name}, {batch} samples a batch over all ranks"
    each = f", a rank: {batch * shares:,} over all {shares}" if shares > 1 and isinstance(batch, int) else ""
    return f"{name}, {batch} samples a batch{each}"


def count_batches(trainer: Any, datamodule: LightningDataModule | None, shares: int) -> int | None:
    """Returns a rank's number of training batches of an epoch, for which data are prepared as in a run.

    Args:
        trainer: Trainer of the run.
        datamodule: Data of the run.
        shares: Number of ranks that have different samples, among which Lightning divides a plain loader's.

    Returns:
        The number, or None if it is unknown.
    """
    if datamodule is None or (trainer.max_steps > 0 and trainer.max_epochs is None):
        return None
    datamodule.trainer = trainer
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    if not isinstance(loader, Sized):
        return None
    total, limit = len(loader), trainer.limit_train_batches
    if shares > 1 and isinstance(loader, DataLoader) and not isinstance(loader.sampler, DistributedSampler):
        samples = -(-len(loader.sampler) // shares)  # type: ignore[arg-type]  # As long on each rank.
        batch = loader.batch_size or 1
        total = samples // batch if loader.drop_last else -(-samples // batch)
    return min(total, limit) if isinstance(limit, int) else int(total * limit)


def count_steps(trainer: Any, batches: int | None) -> tuple[int | None, str]:
    """Returns the number of optimizer steps, None if unknown; and a text on it, or on why it is unknown."""
    timed = any(isinstance(one, Timer) for one in trainer.callbacks)
    epochs = trainer.max_epochs
    if epochs is None and trainer.max_steps <= 0 and not timed:
        epochs = 1000  # Lightning's, if nothing limits a run.
    ends = [trainer.max_steps] if trainer.max_steps > 0 else []
    if batches is not None and epochs is not None and epochs > 0:
        ends.append(epochs * -(-batches // trainer.accumulate_grad_batches))
    if not ends:
        known = batches is not None
        return None, "without a limit" if known else "unknown, as the data's length is; set trainer.max_steps"
    assumed = trainer.max_steps <= 0 and trainer.max_epochs is None
    more = ": without max_epochs or max_steps Lightning trains 1,000 epochs" if assumed else ""
    return min(ends), f"{min(ends):,}{more}"


def last_step_seconds(folder: Any) -> float | None:
    """Returns the seconds of a step of the newest finished run in a folder; None without one."""
    for run in runs.versions(folder):
        try:
            seconds = json.loads((run / runs.SUMMARY).read_text()).get("step_seconds")
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if seconds:
            return float(seconds)
    return None

"""Short training for a comparison: the user's trainer without the callbacks that watch, save or end a run.

Each rank draws its own random numbers, so that dropout, random augmentation and mixing alone make a run on several
ranks differ from that of one process. They are made equal, or switched off, with a note.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.batches import batch_size, map_rows, rebuild
from dlo_framework.callback import traits_of
from dlo_framework.data import hash64
from dlo_framework.data.module import ResumableDataModule
from dlo_framework.distributed.precision import with_sharded_clipping
from dlo_framework.distributed.step_primitives import loss_scaler
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.random_streams import preserved_random_state, seed_all
from dlo_framework.run.resume import ReplayedLoader
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing.compare import RTOL, default_rtol
from dlo_framework.testing.record import Record, Recorder

#: Options of the trainer that replace the user's. So a schedule over the full run runs over these steps. For a callback
#: with the trait ``needs_max_epochs``, which counts in fractions of the run's epochs, the user's epochs stay.
_FIXED: dict[str, Any] = {
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "num_nodes": 1,
    # Validation comes once, after the last step: see Recorder.
    "check_val_every_n_epoch": None,
    "val_check_interval": 10**9,
    "num_sanity_val_steps": 0,
    "logger": False,
    "profiler": None,
    "fast_dev_run": False,
    "barebones": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Setting:
    """Setting of one run of a comparison.

    Attributes:
        steps: Number of optimizer steps.
        seed: Seed of the weights, and of the order and the items of data that is not dlo's.
        ranks: Number of ranks on which the strategy runs; None for the one process that it is compared with.
        shares: Number of data-parallel ranks whose batches make up one batch of this process; 1 on ranks.
        control: Number of a control, which changes rounding only; 0 for none. Control 1 reverses the order of the
            samples in each batch; others shuffle it, and change the weights by a unit in the last place, and in half
            precision the gradients by half a unit.
        double: Whether to train in double precision.
    """

    steps: int
    seed: int
    ranks: int | None = None
    shares: int = 1
    control: int = 0
    double: bool = False


class Permuted(BatchTransform):
    """Changes the order of the samples in each training batch, after all other transforms.

    Args:
        number: Number of the control: 1 for the reverse order, others for a random one.
    """

    order = 1_000_000

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self._random = random.Random(number)

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with its samples in another order."""
        order = list(range(batch_size(batch)))
        order.reverse()
        if self.number > 1:
            self._random.shuffle(order)
        return permute(batch, order)


def permute(batch: Any, order: Sequence[int]) -> Any:
    """Returns a batch with its samples in another order, in every tensor and list whose length is theirs."""

    def reorder(rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows[torch.tensor(order, device=rows.device)]
        return rebuild(rows, [rows[number] for number in order])

    return map_rows(reorder, batch, len(order))


class InDouble(TorchFunctionMode):
    """Replaces float32 by float64 where code asks for float32 by name, as many norms do.

    Under ``64-true`` models have double parameters and inputs, but many compute norms, softmax and losses in float32
    nevertheless; that rounding would hide the differences that a comparison in double precision must show.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a torch function with float64 in place of float32."""
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is not Tensor.view:  # It would reinterpret the bytes.
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def record_training(
    model: LightningModule,
    data: LightningDataModule | Any,
    options: dict[str, Any],
    setting: Setting,
    strategy: Any = "auto",
    make_trainer: Callable[[dict[str, Any]], Trainer] = lambda options: Trainer(**options),
) -> Record:
    """Trains a model and returns the record of the run.

    Args:
        model: New model, built with the setting's seed.
        data: Datamodule, loader or nested structure of loaders; None where the model has its own.
        options: Options of the trainer; those for watching and saving are replaced.
        setting: Setting of the run.
        strategy: Strategy of the ranks; the one process has Lightning's own for a single device.
        make_trainer: Function that makes a trainer from its options.
    """
    notes: list[str] = ["device: float32 products in full precision, not TF32"] if _without_tf32() else []
    callbacks = _as_list(options.get("callbacks"))
    reasons = [traits_of(callback).left_out_of_parity for callback in callbacks]
    kept = [callback for callback, reason in zip(callbacks, reasons, strict=True) if reason is None]
    notes += [
        f"{type(callback).__name__}: left out; {reason}"
        for callback, reason in zip(callbacks, reasons, strict=True)
        if reason
    ]
    notes += call_for_parity([model, data, *kept], setting.shares)
    overfit = bool(options.get("overfit_batches"))
    shares = setting.shares if setting.ranks is None else None
    preparing: dict[str, Any] = {"seed": setting.seed, "shares": shares, "shuffle": not overfit, "notes": notes}
    if isinstance(data, LightningDataModule) or data is None:
        prepare_data(model if data is None else data, **preparing)
        feed: dict[str, Any] = {"datamodule": data}
    else:
        feed = {"train_dataloaders": prepare_loaders(data, **preparing)}
    spacing = default_rtol(options.get("precision"))
    recorder = Recorder(setting.control if setting.control > 1 else 0, spacing / 2 if spacing > RTOL else 0.0)
    mode = InDouble() if setting.double else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="dlo-parity-") as folder, mode:
        every: list[Callback] = [recorder, *kept, *([Permuted(setting.control)] if setting.control else [])]
        overruled = trainer_options(options, setting, strategy)
        in_need = [type(callback).__name__ for callback in kept if traits_of(callback).needs_max_epochs]
        if in_need:
            epochs = overruled["max_epochs"] = options.get("max_epochs")
            notes += [f"{' and '.join(in_need)}: a percentage is of the run's {epochs} epochs, not of these steps"]
        trainer = make_trainer(overruled | {"callbacks": every, "default_root_dir": folder})
        contract_of(trainer.strategy).several_buckets = True  # A fault between buckets shows in a small model too.
        use_canonical_checkpoints(trainer)  # So that the one process returns its optimizer state by parameter.
        _clip_precisely(trainer)
        trainer.fit(model, **feed)
    recorder.record.notes = notes + recorder.record.notes
    return recorder.record


def _clip_precisely(trainer: Trainer) -> None:
    """Makes a run whose ranks have full gradients clip by their precise norm, as those that shard gradients do.

    torch's norm of a large CPU tensor is off by up to 1e-4 in single precision, by which clipped gradients would
    differ: see :func:`~dlo_framework.norms.total_norm`.
    """
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    whole = contract_of(strategy).zero_stage == 0 and loss_scaler(plugin) is None
    if whole and type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        strategy.precision_plugin = with_sharded_clipping(plugin, contract_of(strategy).gradient_norm)


def trainer_options(options: dict[str, Any], setting: Setting, strategy: Any) -> dict[str, Any]:
    """Returns the options of a trainer for a recorded run, made from the user's."""
    plugins = [plugin for plugin in _as_list(options.get("plugins")) if not isinstance(plugin, CheckpointIO)]
    changed = _FIXED | {"max_steps": setting.steps, "strategy": strategy, "plugins": plugins}
    changed["devices"] = setting.ranks or 1
    if setting.ranks is None:
        changed["plugins"] = [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)]
        changed["sync_batchnorm"] = False
    if setting.double:
        changed["precision"] = "64-true"
    return {**options, **changed}


def _without_tf32() -> bool:
    """Switches TF32 off in this process, and returns whether CUDA is available.

    By default torch lets cuDNN's convolutions round their inputs to TF32's eleven bits.
    """
    if not torch.cuda.is_available():
        return False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return True


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def silence_lightning() -> None:
    """Silences Lightning's messages about devices and speed, which are of no use in a comparison."""
    import warnings

    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")


def leave_group() -> None:
    """Destroys the process group that a strategy has made, so that the next run in this process has none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- the data ------------------------------------------------------------------------------------------------


class SeededDataset(Dataset):
    """Map-style dataset whose items draw random numbers seeded by their index, the same on any rank."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with preserved_random_state():  # Loading in the main process must not change the model's.
            seed_all(int(hash64(np.array([int(index)]), self.seed)[0]) >> 1)
            return self.dataset[index]


class GlobalBatches(BatchSampler):
    """Batch sampler that concatenates the batches of several ranks under Lightning's ``DistributedSampler``.

    Lightning (2.6) distributes the training data of a plain ``DataLoader`` over ranks by that sampler: shuffled, even
    if the loader does not shuffle, and seeded by ``seed_everything``.
    """

    def __init__(self, dataset: Any, batch_size: int, shares: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self.samplers: list[DistributedSampler] = [
            DistributedSampler(dataset, num_replicas=shares, rank=rank, shuffle=shuffle, seed=seed)
            for rank in range(shares)
        ]
        self.batch_size, self.drop_last = batch_size, drop_last

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of all ranks' samplers."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        ranks = [BatchSampler(sampler, self.batch_size, self.drop_last) for sampler in self.samplers]
        for batches in zip(*ranks, strict=True):
            yield [index for batch in batches for index in batch]

    def __len__(self) -> int:
        return len(BatchSampler(self.samplers[0], self.batch_size, self.drop_last))


def prepare_loaders(loaders: Any, *, seed: int, shares: int | None, shuffle: bool, notes: list[str]) -> Any:
    """Returns training loaders whose batches are the same for one process and several ranks.

    A plain ``DataLoader`` over a map-style dataset gets seeded items; for the one process it also gets the concatenated
    batches of all ranks. Other loaders are returned unchanged: dlo's own loaders are equal already, and others are not
    known.

    Args:
        loaders: Result of ``train_dataloader``: a loader, or a nested structure of loaders.
        seed: Seed of the items and of the order.
        shares: Number of data-parallel ranks whose batches make up one batch of the one process; None on a rank.
        shuffle: Whether Lightning's sampler shuffles on ranks; it does not with ``overfit_batches``.
        notes: List to which notes on the changes are added.
    """

    def prepare(loader: DataLoader) -> DataLoader:
        sampler, dataset = loader.sampler, loader.dataset
        is_plain = type(loader) in (DataLoader, ReplayedLoader) and loader.batch_size is not None
        if not is_plain or isinstance(dataset, IterableDataset) or isinstance(sampler, DistributedSampler):
            notes.append(
                f"data: {type(loader).__name__} over {type(dataset).__name__} is used unchanged; its random choices"
                " are not made equal"
            )
            return loader
        notes.append(f"data: each sample of {type(dataset).__name__} draws random numbers seeded by its index")
        seeded = SeededDataset(dataset, seed)
        options: dict[str, Any] = {"batch_size": loader.batch_size, "sampler": sampler, "drop_last": loader.drop_last}
        if shares is not None:
            assert loader.batch_size is not None
            batches = GlobalBatches(seeded, loader.batch_size, shares, loader.drop_last, shuffle, seed)
            options = {"batch_sampler": batches}
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"):
            options[name] = getattr(loader, name)
        return DataLoader(seeded, persistent_workers=loader.persistent_workers, **options)

    if isinstance(loaders, CombinedLoader):
        loaders.flattened = [prepare(item) if isinstance(item, DataLoader) else item for item in loaders.flattened]
        return loaders
    return apply_to_collection(loaders, DataLoader, prepare)


def prepare_data(owner: Any, **options: Any) -> None:
    """Replaces an object's loaders for training and validation by prepared ones; see :func:`prepare_loaders`.

    Args:
        owner: Datamodule, or module with loaders of its own; this object is changed in place.
        **options: Arguments of :func:`prepare_loaders`.
    """
    if isinstance(owner, ResumableDataModule):
        options["notes"].append(
            f"data: {type(owner).__name__} draws each sample's random numbers from seed, epoch and index: equal"
        )
        return
    owner.train_dataloader = _prepared(owner.train_dataloader, options)
    owner.val_dataloader = _prepared(owner.val_dataloader, options | {"shares": None})


def _prepared(hook: Callable[[], Any], options: dict[str, Any]) -> Callable[[], Any]:
    @functools.wraps(hook)
    def dataloader() -> Any:
        return prepare_loaders(hook(), **options)

    # Lightning (2.6) treats a hook as missing if its code is the base class's, wrapped or not.
    return dataloader


# --- callbacks and others of the run ---------------------------------------------------------------------------


def call_for_parity(parts: list[Any], shares: int) -> list[str]:
    """Calls the method ``for_parity(shares)`` of each object that has one; returns notes on the changes.

    The method makes a callback, datamodule or module do the same in one process, whose batches are the concatenated
    batches of the ranks, as on the ranks. It returns a line about the changes, or None.

    Args:
        parts: Model, data and callbacks of the run.
        shares: Number of data-parallel ranks whose batches make up one batch of this process; 1 on a rank.
    """
    lines = []
    for part in parts:
        method = getattr(part, "for_parity", None)
        line = method(shares) if callable(method) else None
        if line:
            lines.append(f"{type(part).__name__}: {line}")
    return lines

"""Training steps that are undone, run by the run's own hooks, strategy and optimizer.

The learning-rate finder and the batch-size finder share this: real batches through the real hooks, the real optimizer
under the real strategy and precision, and afterwards the exact state of a run that never did it.

A checkpoint is not enough for that: it lacks the random state, the logged metrics and the state that modules and
callbacks keep in plain attributes. A :class:`Snapshot` has them, and is restored in place, so that wrapped modules
(DDP), optimizers, compiled code and CUDA graphs keep their tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from dlo_framework.callback import PluginCallback
from dlo_framework.data import ResumableBatchSampler, ResumableLoader
from dlo_framework.ema import WeightAverage
from dlo_framework.errors import DloError
from dlo_framework.local_memory import local_tensor
from dlo_framework.random_streams import random_state, restore_random_state
from dlo_framework.stop import GracefulStop
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.monitor import batch_loss
from dlo_framework.watch.summary import RunRecord


class Rehearsal:
    """Runs training steps on the side; :func:`trial_steps` makes one and undoes all that it did.

    Attributes:
        undo: Function that restores the state before the rehearsal, for another one; does nothing without a snapshot.
    """

    def __init__(self, trainer: Trainer, undo: Callable[[], object] = lambda: None) -> None:
        self.trainer, self.undo = trainer, undo
        self._batches: Iterator[Any] = self.batches()

    def batches(self) -> Iterator[Any]:
        """Yields this rank's training batches, on the CPU, and restarts at the end of an epoch.

        It uses its own iterators: the trainer's are not advanced. A ``DataLoader`` is copied for it, so that one with
        persistent workers keeps them.

        Raises:
            DloError: if a loader cannot be iterated a second time.
        """
        trained: Any = self.trainer.fit_loop._combined_loader
        loaders = [_iterate_again(loader) for loader in training_loaders(self.trainer)]
        source = CombinedLoader(trained.iterables, trained._mode)
        source.flattened, source.limits = loaders, trained.limits
        limit = self.trainer.num_training_batches
        try:
            while True:
                epoch = iter(source)
                number = 0
                while number < limit:
                    try:
                        batch, _, _ = next(epoch)
                    except StopIteration:
                        break
                    number += 1
                    yield batch
                if not number:
                    raise DloError(
                        "the training loader must yield a batch, got none; check the data and limit_train_batches"
                    )
        finally:
            source.reset()  # Ends the workers of the copies.

    def next_batch(self) -> Any:
        """Returns the next batch of :meth:`batches`."""
        return next(self._batches)

    def close(self) -> None:
        """Closes the loaders' iterators."""
        self._batches.close()  # type: ignore[attr-defined]

    def stop_if_asked(self) -> None:
        """Ends the run if Ctrl-C or SIGTERM has requested it; all ranks must call it equally often.

        Raises:
            RunStopped: if so, which undoes the rehearsal, as any error does.
        """
        options: Any = self.trainer
        for callback in options.callbacks:
            if isinstance(callback, GracefulStop):
                callback.stop_aside()

    def optimizer_step(self) -> torch.Tensor:
        """Trains for one optimizer step, on the batches of an epoch's first window.

        Returns:
            The mean of their losses on this rank, a scalar on the device; NaN if ``training_step`` returned none.

        Raises:
            RunStopped: if the run was asked to stop.
        """
        self.stop_if_asked()
        losses = []
        for number in itertools.count():
            loss = batch_loss(self.trainer, self.train_on(self.to_device(self.next_batch(), number), number))
            if loss is not None:
                losses.append(loss)
            if not self.trainer.fit_loop._should_accumulate():
                break
        if not losses:
            return torch.tensor(torch.nan, device=self.trainer.strategy.root_device)
        return torch.stack(losses).mean()

    def to_device(self, batch: Any, number: int) -> Any:
        """Returns a batch on the device, after all hooks that the epoch's batch ``number`` would pass through."""
        trainer, module = self.trainer, self.trainer.lightning_module
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = number
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def train_on(self, batch: Any, number: int) -> Any:
        """Trains on one micro-batch, as if it were the epoch's batch ``number``, which determines the optimizer step.

        This is the part of ``_TrainingEpochLoop.advance`` (Lightning 2.6) between the hooks of the batch's start and
        end, which callbacks count as progress: schedules, logs, checkpoints.

        Returns:
            The batch's outputs in the form that Lightning passes to hooks.
        """
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.current.ready, loop.batch_progress.is_last_batch = number + 1, False
        connector: Any = trainer._logger_connector
        connector.on_batch_start(batch)
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        return loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)

    def step_optimizer(self, number: int) -> None:
        """Steps the optimizer with the current gradients, as if after the epoch's batch ``number``.

        It includes all parts of a step: unscaling, hooks, clipping. It is ``_AutomaticOptimization`` (Lightning 2.6)
        with a closure that computes nothing.
        """
        loop = self.trainer.fit_loop.epoch_loop
        loop.batch_progress.current.ready = number + 1
        loss = torch.zeros((), device=self.trainer.strategy.root_device)
        loop.automatic_optimization._optimizer_step(number, lambda: loss)


def check_rehearsable(who: str, module: LightningModule) -> None:
    """Refuses modules that step their optimizers themselves, or fetch their batches.

    Args:
        who: Name of the callback, for the message.
        module: Module whose ``training_step`` is checked.

    Raises:
        DloError: for such a module.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise DloError(f"{who}: {name}.automatic_optimization must be True, got False; remove {who}")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise DloError(f"{who}: {name}.training_step must take batch, got dataloader_iter; change it, or remove {who}")


@contextlib.contextmanager
def trial_steps(trainer: Trainer, *, own_batches: bool = True, on_device: bool = False) -> Iterator[Rehearsal]:
    """Lets a callback train on the side, from ``on_train_epoch_start`` on, and undoes it, however it ends.

    Nothing is logged, callbacks keep it out of what they measure (``PluginCallback.aside``), and afterwards the run is
    in the same state as before; see :class:`Snapshot`. Under DDP on more than two ranks, gradients may then differ in
    their last bits from those of a run without it: DDP reorders its buckets after its first step.

    Args:
        trainer: Trainer of the run.
        own_batches: Whether it takes batches of its own from the loaders, whose positions are then restored.
        on_device: Whether the copies of tensors stay on their devices, instead of the CPU.
    """
    options: Any = trainer
    with contextlib.ExitStack() as stack:
        for callback in options.callbacks:
            if isinstance(callback, PluginCallback):
                stack.enter_context(callback.aside())
        snapshot = Snapshot(trainer, with_loaders=own_batches, on_device=on_device)
        stack.callback(snapshot.restore)
        stack.callback(setattr, trainer, "loggers", trainer.loggers)
        options.loggers = [DummyLogger() for _ in trainer.loggers]
        rehearsal = Rehearsal(trainer, snapshot.restore)
        stack.callback(rehearsal.close)
        yield rehearsal


class BeforeTraining(PluginCallback, ABC):
    """Callback that trains on the side once, before the first batch of a run that is not resumed.

    It does so in ``on_train_epoch_start``: by then ``on_train_start`` has been called everywhere, in the module too.
    And it moves before all other callbacks, so that none has begun the epoch.
    """

    left_out_of_parity = "it acts before training"
    #: Order among several such callbacks.
    turn = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the module; moves to its position among the callbacks."""
        if stage == "fit":
            check_rehearsable(type(self).__name__, pl_module)
            options: Any = trainer
            options.callbacks = sorted(options.callbacks, key=_turn)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calls :meth:`before_training`, once."""
        options: Any = trainer
        begun = trainer.global_step > 0 or trainer.current_epoch > 0 or options.ckpt_path is not None
        if not begun and not options.fast_dev_run:
            self.before_training(trainer, pl_module)

    @abstractmethod
    def before_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does the callback's work."""


def _turn(callback: Callback) -> float:
    return callback.turn if isinstance(callback, BeforeTraining) else float("inf")


def run_folder(trainer: Trainer) -> Path:
    """Returns the folder of a run's files, the same on every rank; all ranks must call it."""
    options: Any = trainer
    for callback in options.callbacks:
        if isinstance(callback, RunRecord):
            return callback.folder
    return Path(options.log_dir or options.default_root_dir)


def _iterate_again(loader: Any) -> Any:
    """Returns an iterable of a loader's batches that does not advance the existing iterator."""
    if isinstance(loader, DataLoader):
        second = copy.copy(loader)
        second._iterator = None  # A DataLoader keeps persistent workers in it (torch 2.11).
        return second
    if isinstance(loader, Iterator) and not hasattr(loader, "load_state_dict"):
        raise DloError(
            f"the training loader must be iterable more than once, to try out its batches before training, got a"
            f" {type(loader).__name__}; return an object whose __iter__ restarts, such as a DataLoader"
        )
    return loader


# --- state that is restored ----------------------------------------------------------------------------------


Undo = Callable[[], object]

#: Classes whose attributes are part of the state. Dataclasses are too; of any other object, the reference alone.
_OBJECTS = (
    nn.Module,  # torchmetrics among them, and Lightning's collection of logged metrics
    Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    Callback,
    WeightAverage,
    Precision,
    DataLoader,
    Sampler,
    ResumableLoader,
    ResumableBatchSampler,
    _Loop,
    _LoggerConnector,
)

#: Attributes of loaders and samplers that hold the data themselves.
_DATA = ("dataset", "data_source")

_CONSTANT = (int, float, complex, str, bytes, bool, type(None))


class Snapshot:
    """State of a run at one moment, from ``on_train_start`` on.

    It holds parameters, buffers and gradients, train or eval mode, ``requires_grad``, the states of optimizers,
    schedulers and the precision plugin's scaler, Lightning's counters and logged metrics, the loaders' positions, the
    random state of this process, and each callback's ``state_dict``. It also holds plain data, containers, tensors,
    arrays and generators in the attributes of modules, callbacks and all the above. Tensors are copied to the CPU by
    default, so that it takes no memory of the accelerator.

    It does not hold the state behind attributes of other classes, such as datasets, nor files. An iterator over a
    training loader that was begun before is not restored; train on the side with
    :meth:`~dlo_framework.rehearsal.Rehearsal.batches`, which begins one of its own.

    Args:
        trainer: Trainer of the run.
        with_loaders: Whether to copy the state of the loaders too; without, they may be read ahead meanwhile.
        on_device: Whether tensors are copied on their devices, which is faster, instead of to the CPU.
    """

    def __init__(self, trainer: Trainer, *, with_loaders: bool = True, on_device: bool = False) -> None:
        contract_of(trainer.strategy).finish_step()
        self._trainer, self._on_device = trainer, on_device
        #: Copied objects by id: each is copied once, and kept alive while its id is used.
        self._kept: dict[int, Any] = {}
        self._undo: list[Undo] = []
        self._flags = {name: getattr(trainer, name) for name in ("should_stop", "accumulate_grad_batches")}
        self._callbacks = [
            (callback, copy.deepcopy(state))
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if (state := callback.state_dict())
        ]
        loaders = training_loaders(trainer)
        if not with_loaders:
            self._kept |= {id(loader): loader for loader in loaders}
            loaders = []
        self._loaders = [
            (number, loader, copy.deepcopy(loader.state_dict()))
            for number, loader in enumerate(loaders)
            if isinstance(loader, _Stateful) and not isinstance(loader, DataLoader | ResumableLoader)
        ]
        self._keep(_roots(trainer, loaders))
        self._random = random_state()

    def _keep(self, items: Iterable[Any]) -> None:
        """Copies the items and everything reachable from them."""
        waiting = list(items)
        while waiting:
            item = waiting.pop()
            if isinstance(item, _CONSTANT) or id(item) in self._kept:
                continue
            self._kept[id(item)] = item
            undo, inside = _copied(item, self._on_device)
            if undo is not None:
                self._undo.append(undo)
            waiting.extend(inside)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything; it may be called again."""
        # First: a callback's state may hold objects that attributes do not reach, and a clock in it has advanced, which
        # the attributes then correct.
        for callback, state in self._callbacks:
            callback.load_state_dict(copy.deepcopy(state))
        for number, loader, state in self._loaders:
            loader.load_state_dict(copy.deepcopy(state))
            _restart_iterator(self._trainer, number, loader)
        for name, value in self._flags.items():
            setattr(self._trainer, name, value)
        contract_of(self._trainer.strategy).finish_step()
        for undo in self._undo:
            undo()
        contract_of(self._trainer.strategy).refresh()
        restore_random_state(self._random)


def training_loaders(trainer: Trainer) -> list[Any]:
    """Returns the training loaders; Lightning (2.6) exposes them as the nested structure that the user returned."""
    loader = trainer.fit_loop._combined_loader
    return list(loader.flattened) if loader is not None else []


def _roots(trainer: Trainer, loaders: list[Any]) -> list[Any]:
    """Returns the roots of the state; ``_logger_connector`` (Lightning 2.6) holds the logged metrics."""
    options: Any = trainer
    return [
        trainer.lightning_module,
        *trainer.optimizers,
        *(config.scheduler for config in trainer.lr_scheduler_configs),
        trainer.precision_plugin,
        trainer.fit_loop,
        options._logger_connector,
        *options.callbacks,
        *loaders,
        *_separate_shards(trainer),
    ]


def _separate_shards(trainer: Trainer) -> list[torch.Tensor]:
    """Returns the shards of a strategy whose optimizers step copies of them, as ZeRO 3 does when it offloads.

    With other strategies the optimizers step the same memory that the module has.
    """
    module = trainer.lightning_module
    own = [*module.parameters(), *module.buffers()]
    own += [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    memory = {local_tensor(tensor).untyped_storage().data_ptr() for tensor in own}
    held = map(local_tensor, contract_of(trainer.strategy).local_tensors())
    return [tensor for tensor in held if tensor.untyped_storage().data_ptr() not in memory]


def _restart_iterator(trainer: Trainer, number: int, loader: Any) -> None:
    """Restarts a loader's iteration at the position in its state.

    Lightning (2.6) made the iterator when it set the loader up and keeps it in ``CombinedLoader._iterator``.
    """
    combined: Any = trainer.fit_loop._combined_loader
    if combined._iterator is not None:
        combined._iterator.iterators[number] = iter(loader)


def _copied(item: Any, on_device: bool) -> tuple[Undo | None, Iterable[Any]]:
    """Returns a function that restores an object's present state, and the objects in it, to be copied too."""
    if isinstance(item, torch.Tensor):
        return _tensor(item, on_device)
    if isinstance(item, dict):
        inside = [*item.values(), vars(item)] if hasattr(item, "__dict__") else item.values()
        return _mapping(item), inside
    if isinstance(item, list | deque | set):
        return _collection(item), list(item)
    if isinstance(item, tuple):
        return None, item
    if isinstance(item, np.ndarray):
        return _array(item), ()
    generator = _generator(item)
    if generator is not None:
        return generator, ()
    if isinstance(item, _OBJECTS) or (dataclasses.is_dataclass(item) and not isinstance(item, type)):
        attributes = getattr(item, "__dict__", {})
        followed = [value for name, value in attributes.items() if name not in _DATA]
        return _mapping(attributes), followed
    return None, ()


def _tensor(tensor: torch.Tensor, on_device: bool) -> tuple[Undo | None, Iterable[Any]]:
    expanded = tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    freed = tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    if tensor.is_meta or tensor.is_inference() or expanded or freed:
        # None of these can be written to, so none has changed. (Freed: a parameter whose strategy holds shards of it,
        # which the optimizer has.)
        return None, ()
    leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if leaf else None
    with torch.no_grad():
        local = local_tensor(tensor)
        saved = local.clone() if on_device else local.to("cpu", copy=True)

    def undo() -> None:
        if leaf and not tensor.is_leaf:
            tensor.detach_()
        local_tensor(tensor).copy_(saved)
        if leaf:
            tensor.grad = gradient
            tensor.requires_grad_(requires_grad)

    return undo, () if gradient is None else (gradient,)


def _mapping(mapping: dict[Any, Any]) -> Undo:
    saved = list(mapping.items())

    def undo() -> None:
        # By identity: comparing tensors, which are the keys of an optimizer's state, compares their elements.
        same_keys = len(mapping) == len(saved) and all(a is b for a, (b, _) in zip(mapping, saved, strict=True))
        if not same_keys:
            mapping.clear()  # The order is part of the state: that of a module's parameters.
        for key, value in saved:
            if not same_keys or mapping[key] is not value:
                mapping[key] = value

    return undo


def _collection(collection: Any) -> Undo:
    saved = list(collection)

    def undo() -> None:
        collection.clear()
        (collection.update if isinstance(collection, set) else collection.extend)(saved)

    return undo


def _array(array: np.ndarray) -> Undo | None:
    saved = array.copy()
    return (lambda: np.copyto(array, saved)) if array.flags.writeable else None


#: Random generators with the names of the methods that return and set their state.
_GENERATORS = (
    (torch.Generator, "get_state", "set_state"),
    (random.Random, "getstate", "setstate"),
    (np.random.RandomState, "get_state", "set_state"),
)


def _generator(item: Any) -> Undo | None:
    """Returns a function that restores a random generator; None for anything else."""
    for kind, get, put in _GENERATORS:
        if isinstance(item, kind):
            state = getattr(item, get)()
            return lambda: getattr(item, put)(state)
    if isinstance(item, np.random.Generator):
        bits = copy.deepcopy(item.bit_generator.state)
        return lambda: setattr(item.bit_generator, "state", bits)
    return None

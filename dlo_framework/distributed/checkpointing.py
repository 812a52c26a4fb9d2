"""Canonical checkpoints of a strategy: `CanonicalStrategy` saves and loads model and optimizer state by name.

Model tensors are saved under their names. Optimizer state is saved by parameter name and key (``blocks.0.weight`` /
``exp_avg``), so that it means the same whatever tensors a strategy's optimizer steps, and in whatever order.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.agreement import run_on_all_ranks
from dlo_framework.checkpoint import AsyncSaver, SafeCheckpointIO, load, remove, save
from dlo_framework.checkpoint.formats.lightning_file import as_lightning
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.checkpoint.state_tree import module_versions, refuse_unreadable
from dlo_framework.checkpoint.store import checkpoint_path
from dlo_framework.distributed.groups import gloo_group
from dlo_framework.distributed.optimizer_steps import (
    add_step_hooks,
    disable_fused_unscale,
    own_implementation,
    prefer_fused,
)
from dlo_framework.distributed.precision import keep_dtypes
from dlo_framework.errors import DloError, check_choice
from dlo_framework.optimizers import stepped_tensors
from dlo_framework.random_streams import (
    TorchState,
    get_torch_state,
    random_state,
    reseed,
    restore_random_state,
    seed_torch,
    set_torch_state,
)
from dlo_framework.run.resume import as_replayed, give_generator
from dlo_framework.shards import FlatShard, Shard, SlicedShard
from dlo_framework.strategy_abilities import CanonicalCheckpoints
from dlo_framework.strategy_contract import StrategyContract, data_share, plain_name

#: Formats in which checkpoints are written.
FORMATS = ("canonical", "lightning")
#: Attribute of a module that holds its :class:`ShardOwner`.
OWNER = "_dlo_owner"
#: Key of the stream after a run.
_AFTER = 2**32
#: Suffix of the names under which torch saves a module's ``get_extra_state``.
EXTRA_STATE = "_extra_state"


class ShardOwner:
    """Record on a module of the strategy that has sharded its parameters; copies of the module do not have it."""

    def __init__(self, strategy: CanonicalStrategy, world_size: int, undo: Callable[[], None] | None) -> None:
        self.strategy, self.name = weakref.ref(strategy), type(strategy).__name__
        self.world_size, self.undo = world_size, undo

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leaves a copy of the module without an owner."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves a pickled module without an owner."""
        return (type(None), ())


#: Number of buckets of a small model's gradients, where several are asked for.
BUCKETS = 4


class CanonicalStrategy(Strategy, StrategyContract, CanonicalCheckpoints):
    """Lightning strategy that writes and reads canonical checkpoints.

    The defaults suit strategies whose optimizers step the module's own parameters, plain or DTensor. A strategy whose
    optimizers step other tensors overrides :meth:`optimizer_tensors`, :meth:`as_shard` and :meth:`empty_shard`.
    """

    #: Whether every rank holds the full state of module and optimizers, in the module's own tensors.
    holds_full_state = False
    _saver: AsyncSaver | None = None
    _initial_random: dict[str, Any] | None = None
    _step_seed: int | None = None
    _has_loaded_state = False
    _owned: weakref.ref[nn.Module] | None = None

    def connect(self, model: LightningModule) -> None:
        """Connects a module; one that another strategy's run has sharded gets its full parameters back first.

        So does the module that this strategy has sharded, if it is another: the engine is of one module.

        Raises:
            DloError: if the full parameters cannot be restored.
        """
        owner: ShardOwner | None = model.__dict__.get(OWNER)
        if owner is not None and owner.strategy() is not self:
            self._restore_full_parameters(owner, model)
            del model.__dict__[OWNER]
        earlier = self._owned() if self._owned is not None else None
        own = earlier.__dict__.get(OWNER) if earlier is not None and earlier is not model else None
        if own is not None and own.strategy() is self and own.undo is not None:
            own.undo()
            del earlier.__dict__[OWNER]
            self.forget_module()
            self._reset_optimizers_and_schedulers()
        super().connect(model)

    def own(self, module: nn.Module, world_size: int, undo: Callable[[], None] | None) -> None:
        """Notes on a module that this strategy has sharded its parameters.

        Args:
            module: Module of the run.
            world_size: Number of ranks that the parameters are divided among; 1 where each rank has full parameters.
            undo: Function that makes the parameters full tensors again, called on all ranks; None where there is none.
        """
        module.__dict__[OWNER] = ShardOwner(self, world_size, undo)
        self._owned = weakref.ref(module)

    def setup(self, trainer: Trainer) -> None:
        """Prepares the module on its device; some of its buffers keep their dtypes."""
        module = self.lightning_module
        assert module is not None
        self.check_loggers(trainer.loggers)
        with keep_dtypes(module):
            super().setup(trainer)
        self._begin_training_streams()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Sets the device and dtype in which Lightning builds the model: CPU memory, from which it is moved.

        So initial weights have the CPU's random numbers under every strategy, on every device. Lightning's own context
        draws them on the training device, which holds no model that is cut.
        """
        with super().tensor_init_context(empty_init), torch.device("cpu"):
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Returns a loader that can go on in mid-epoch; one of a fit's validations draws nothing of training's."""
        loader = super().process_dataloader(dataloader)
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is not None and trainer.training:
            return as_replayed(loader)
        if trainer is not None and trainer.state.fn == "fit":
            give_generator(loader)
        return loader

    def _restore_full_parameters(self, owner: ShardOwner, model: LightningModule) -> None:
        """Restores the full parameters of a module that another strategy has sharded.

        Args:
            owner: Record of that strategy.
            model: Sharded module.

        Raises:
            DloError: if the sharding cannot be undone, or is over another number of ranks than this strategy has.
        """
        ranks = getattr(self, "world_size", 1)
        if owner.undo is None or owner.world_size not in (1, ranks):
            raise DloError(
                f"{type(model).__name__} must have full parameters for {type(self).__name__} on {ranks} ranks, got"
                f" parameters that {owner.name} has divided among {owner.world_size}; load the module from a"
                " checkpoint of that run (dlo_framework.load_from_checkpoint)"
            )
        owner.undo()
        earlier = owner.strategy()
        if earlier is not None:
            earlier.forget_module()

    def forget_module(self) -> None:
        """Drops references to the module's parameters; called when another strategy has taken the module over."""

    # --- the strategy's tensors ----------------------------------------------------------------------------

    def empty_shard(self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an empty shard on this rank for a state tensor to be loaded.

        Args:
            name: Name of the parameter.
            tensor: Tensor that the optimizer steps for the parameter.
            shape: Shape of the full state tensor in the checkpoint.
            dtype: Dtype of the state tensor in the checkpoint.
        """
        if shape == tensor.shape:  # With its strides too: fused optimizers on CUDA require the parameter's.
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    zero_stage = 0

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers, and adds torch's step hooks to wrappers that skip the base constructor.

        torch's AdamW, Adam and SGD use their fused step on CUDA, unless the user has chosen an implementation.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            add_step_hooks(optimizer)
            disable_fused_unscale(optimizer)
            self._prefer_fused_step(optimizer)

    def _prefer_fused_step(self, optimizer: Optimizer) -> None:
        """Switches an optimizer to its fused step, unless the user has chosen an implementation."""
        prefer_fused(optimizer, self.lightning_module)

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores the gradients of an unfinished accumulation."""
        assert self.lightning_module is not None
        gradients = as_lazy_state_dict(saved)
        for name, parameter in self.lightning_module.named_parameters():
            if plain_name(name) in gradients:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                gradients.read_into(plain_name(name), parameter.grad)

    # --- saving --------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's tensors and shards of the module's state, by the module's own names."""
        assert self.lightning_module is not None
        return {plain_name(name): value for name, value in self.lightning_module.state_dict().items()}

    def state_names(self) -> set[str]:
        """Returns the names of the module's full state, that of other ranks included."""
        assert self.lightning_module is not None
        return {plain_name(name) for name in self.lightning_module.state_dict()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state by parameter name: ``{"state": {name: {key: value}}, "param_groups": [...]}``.

        The state comes from the optimizer's own ``state_dict``, where a wrapper (Lookahead) exports it too. The
        parameter groups name all their parameters, those without a shard on this rank included. State under keys that
        are not parameters is in ``beside``, the names of the optimizer's classes are in ``kinds``.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        packed, numbers = _packed(optimizer), _numbers(optimizer)
        if "param_groups" not in packed:  # Lightning's, where `configure_optimizers` returns None.
            return packed
        state = {
            name: {
                key: self.as_shard(name, tensor, value) if isinstance(value, Tensor) else value
                for key, value in packed["state"][numbers[id(tensor)]].items()
            }
            for name, tensor in self.optimizer_tensors(optimizer).items()
            if numbers[id(tensor)] in packed["state"]
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in packed["param_groups"]]
        for group, names in zip(groups, self.group_names(optimizer), strict=True):
            group["params"] = names
        beside = {key: value for key, value in packed["state"].items() if not isinstance(key, int)}
        saved = {"state": state, "param_groups": groups, "kinds": _kinds(optimizer)}
        return saved | ({"beside": beside} if beside else {})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a canonical checkpoint; called on all ranks.

        With :attr:`async_checkpoints` the state is copied now and written in the background; an error is then raised
        by the next save, or at the run's end.

        Raises:
            DloError: on all ranks, if any rank cannot write its shards; an older checkpoint at the path is kept. On a
                path or options of other storage than file systems.
        """
        path = self.broadcast(str(filepath))
        if self.checkpoint_format == "lightning":
            run_on_all_ranks(self.planning_group(), lambda: self._save_single_file(checkpoint, path, storage_options))
        elif self.async_checkpoints:
            if self._saver is None:
                self._saver = AsyncSaver(self.planning_group())
            self._saver.save(checkpoint, checkpoint_path(path, storage_options), about=self.about())
        else:
            if self._saver is not None:
                self._saver.wait()
            save(checkpoint, checkpoint_path(path, storage_options), group=self.planning_group(), about=self.about())

    def _save_single_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Writes the full state from rank 0 as a single file, as Lightning's own strategies do."""
        if self.is_global_zero:
            content = as_lightning(checkpoint)
            refuse_unreadable(content)
            writer = self.checkpoint_io if self._has_own_io() else SafeCheckpointIO()
            writer.save_checkpoint(content, path, storage_options=storage_options)

    @contextlib.contextmanager
    def saving_in_background(self) -> Iterator[None]:
        """Writes the block's checkpoints in the background, unless they are single files."""
        before, self.async_checkpoints = self.async_checkpoints, self.checkpoint_format == "canonical"
        try:
            yield
        finally:
            self.async_checkpoints = before

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._saver is not None and self._saver.is_busy

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint; with background saves, only once the saves after it are on disk."""
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.remove(filepath)
        else:
            remove(filepath)

    def finish_checkpoints(self) -> None:
        """Waits until checkpoints saved in the background are on disk.

        Raises:
            DloError: if a checkpoint could not be written.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def teardown(self) -> None:
        """Ends the run once its checkpoints are on disk."""
        self.finish_checkpoints()
        super().teardown()
        self._end_training_streams()

    # --- random numbers ------------------------------------------------------------------------------------

    def _begin_training_streams(self) -> None:
        """Gives each data share random numbers of its own, once weights and optimizers exist."""
        self._initial_random, self._step_seed = random_state(), None
        share, shares = data_share(self)
        if shares > 1:
            self._step_seed = torch.initial_seed()
            reseed(share)

    def _end_training_streams(self) -> None:
        """Leaves the script random numbers that depend on the run's initialisation only, the same on all ranks."""
        state, self._initial_random = self._initial_random, None
        if state is not None:
            restore_random_state(state)
            reseed(_AFTER)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer; what it and ``on_before_optimizer_step`` draw is the same on all ranks, as weights are.

        Args:
            optimizer: Optimizer of the run.
            closure: Function of forward and backward, which draws the rank's own random numbers.
            *args: Further arguments of Lightning's method.
            **kwargs: Further arguments of Lightning's method.

        Raises:
            DloError: The optimizer reads state that the checkpoint's, from which the run goes on, did not keep.
        """
        seed, module, device, own = self._step_seed, self.lightning_module, self.root_device, list[TorchState]()

        def close() -> Any:
            if seed is None or module is None:
                return closure()
            if own:
                set_torch_state(own.pop(), device)
            result = closure()
            own.append(get_torch_state(device))
            seed_torch(seed + module.trainer.global_step, device)
            return result

        try:
            return super().optimizer_step(optimizer, close, *args, **kwargs)
        except KeyError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not self._has_loaded_state or not isinstance(frame.f_locals.get("self"), Optimizer):
                raise
            held = sorted({key for state in optimizer.state.values() for key in state})
            raise _other_optimizer(optimizer, f"{error} in its state, got {', '.join(held)}") from error
        finally:
            if own:
                set_torch_state(own.pop(), device)

    def about(self) -> dict[str, Any]:
        """Returns the manifest's entries about the run, beside step and epoch."""
        return {"strategy": type(self).__name__, "world_size": self._world()}

    def planning_group(self) -> dist.ProcessGroup | None:
        """Returns the gloo group over which ranks plan a save; None in a single process."""
        return gloo_group(self)

    def _world(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    # --- loading -------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a canonical checkpoint, whose tensors are read lazily, or a Lightning file."""
        self.finish_checkpoints()
        path = self.broadcast(str(checkpoint_path))
        if self.checkpoint_format == "lightning" and self._has_own_io():
            return self.checkpoint_io.load_checkpoint(path)
        return load(path, group=self.planning_group())

    def setup_environment(self) -> None:
        """Checks the Trainer's checkpoint plug-ins, then starts the run."""
        self.check_checkpoints()
        super().setup_environment()

    def check_loggers(self, loggers: Iterable[Logger]) -> None:
        """Checks that no logger is to upload checkpoints, which Lightning's loggers do with single files only.

        Raises:
            DloError: on a logger with `log_model`.
        """
        for logger in loggers:
            # Lightning's names (2.6); Neptune's logger has the second. Not by `getattr`: its DummyLogger has any name.
            own = vars(logger)
            chosen = own.get("_log_model") or own.get("_log_model_checkpoints")
            if chosen and self.checkpoint_format == "canonical":
                raise DloError(
                    f"log_model of {type(logger).__name__} must be false with canonical checkpoints, which are folders"
                    f" while it uploads files, got {chosen}; set it to false and upload the run's folder, or set"
                    " run.checkpoint_format to lightning (strategy auto or ddp)"
                )

    def check_checkpoints(self, loggers: Iterable[Logger] = ()) -> None:
        """Checks that this strategy can write checkpoints of the chosen format.

        Raises:
            DloError: on a CheckpointIO that would not be called; on a single file of state that is sharded; on a logger
                that would upload a folder.
        """
        name = type(self).__name__
        check_choice("run.checkpoint_format", self.checkpoint_format, FORMATS)
        if self.checkpoint_format == "lightning" and not self.holds_full_state:
            raise DloError(
                f"run.checkpoint_format must be canonical under {name}, which shards the state, got lightning;"
                " use strategy auto or ddp, or run `dlo checkpoint convert LAST.ckpt FILE.ckpt` afterwards"
            )
        if self.checkpoint_format == "lightning" and self.async_checkpoints:
            raise DloError(
                "run.async_checkpoints must be false with run.checkpoint_format lightning, got true; remove one of them"
            )
        if self.checkpoint_format == "canonical" and self._has_own_io():
            raise DloError(
                f"trainer.plugins must have no CheckpointIO with canonical checkpoints, which {name} writes itself, got"
                f" {type(self.checkpoint_io).__name__}; remove it, or set run.checkpoint_format to lightning"
            )
        self.check_loggers(loggers)

    def _has_own_io(self) -> bool:
        """Whether the user has configured a CheckpointIO."""
        return type(self.checkpoint_io) not in (TorchCheckpointIO, SafeCheckpointIO)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's tensors and shards of the module's state."""
        if self.holds_full_state and isinstance(self.precision_plugin, DoublePrecision):
            # Lightning (2.6) loads before its setup converts the module: single precision would round the weights.
            assert self.lightning_module is not None
            with keep_dtypes(self.lightning_module):
                self.precision_plugin.convert_module(self.lightning_module)
        module = self.lightning_module
        assert module is not None
        if self.holds_full_state and _loads_by_itself(module):
            names, content = {plain_name(name): name for name in module.state_dict()}, checkpoint["state_dict"]
            state = OrderedDict((names.get(name, name), content[name]) for name in content)
            state._metadata = module_versions(content)  # type: ignore[attr-defined]
            module.load_state_dict(state, strict=strict)
            return
        saved, held = as_lazy_state_dict(checkpoint["state_dict"]), self.lightning_module_state_dict()
        extra = {
            name: part
            for prefix, part in module.named_modules()
            if type(part).set_extra_state is not nn.Module.set_extra_state
            and (name := plain_name(f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE)) in saved
        }
        held = {name: value for name, value in held.items() if name not in extra}
        own = self.state_names()
        missing, unexpected = own - saved.keys(), saved.keys() - own
        resized = {
            name
            for name in held.keys() & saved.keys()
            if isinstance(held[name], Shard) and held[name].shape != saved.shape(name)
        }
        if (strict and (missing or unexpected)) or resized:
            raise DloError(
                "the checkpoint's weights must be those of the config's model, got"
                f" {_listed(missing)} missing, {_listed(unexpected)} unexpected, {_listed(resized)} of another shape;"
                " load a checkpoint of this model, or change the config to the checkpoint's"
            )
        with torch.no_grad():
            for name in held.keys() & saved.keys():
                if isinstance(held[name], Shard):
                    saved.read_into(name, held[name])
        for name, part in extra.items():
            part.set_extra_state(_own(saved[name]))
        self.refresh()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' state and the hyperparameters of their parameter groups."""
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise DloError(
                f"configure_optimizers must return {len(states)} optimizers, as many as the checkpoint has, got"
                f" {len(self.optimizers)}; start from the checkpoint's weights alone (`dlo checkpoint export`)"
            )
        for optimizer, saved in zip(self.optimizers, states, strict=False):
            if not optimizer.param_groups:
                optimizer.load_state_dict(dict(saved))
            elif "param_groups" not in saved:
                raise DloError(
                    "the checkpoint must hold optimizer state, got one of a run without an optimizer; start from its"
                    " weights alone (`dlo checkpoint export`)"
                )
            else:
                self._load_optimizer(optimizer, saved)
                self._has_loaded_state = True

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        names = self.group_names(optimizer)
        saved = _by_name(saved, names)
        sources = {name: group for group in saved["param_groups"] for name in group["params"]}
        numbers = _numbers(optimizer)
        loaded: dict[Any, Any] = {
            numbers[id(tensor)]: self._read_state(name, tensor, saved["state"][name])
            for name, tensor in self.optimizer_tensors(optimizer).items()
            if name in saved["state"]
        }
        _check_groups(optimizer, saved["param_groups"], names)
        groups = []
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            source = next((sources[name] for name in group_names if name in sources), None)
            if source is None:
                raise _other_model(f"the run's parameter groups, got none for {_listed(set(group_names))}")
            settings = {key: value for key, value in source.items() if key != "params"} | own_implementation(group)
            groups.append({**settings, "params": [numbers[id(parameter)] for parameter in group["params"]]})
        needed = set(optimizer.defaults)  # torch's loading adds one, which groups need not have.
        optimizer.load_state_dict({"state": loaded | dict(saved.get("beside", {})), "param_groups": groups})
        lacking = {key for group in optimizer.param_groups for key in needed - group.keys()}
        if lacking:
            raise _other_optimizer(optimizer, f"{', '.join(sorted(lacking))} in its parameter groups, got none")
        kinds, own = saved.get("kinds") or _kinds(optimizer), _kinds(optimizer)
        if own[0] not in kinds and kinds[0] not in own and _algorithm(own[0]) != _algorithm(kinds[0]):
            raise _other_optimizer(optimizer, f"the settings and state of {kinds[0]}")

    def _read_state(self, name: str, tensor: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Reads one parameter's optimizer state on this rank."""
        saved, state = as_lazy_state_dict(saved), {}
        for key in saved:
            if not saved.is_tensor(key):
                state[key] = saved[key]
                continue
            shard = self.empty_shard(name, tensor, saved.shape(key), saved.dtype(key))
            saved.read_into(key, shard)
            state[key] = _data_of(shard)
        return state


def _loads_by_itself(module: nn.Module) -> bool:
    """Returns whether a module overrides loading, by its ``load_state_dict`` or by hooks of its submodules."""
    own = "load_state_dict" in vars(module) or type(module).load_state_dict is not nn.Module.load_state_dict
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return own or any(getattr(part, name, None) for part in module.modules() for name in hooks)


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    """Returns each stepped tensor's number in the optimizer's ``state_dict``, by the tensor's id."""
    return {id(tensor): number for number, tensor in enumerate(stepped_tensors(optimizer))}


def _kinds(optimizer: Optimizer) -> list[str]:
    """Returns the names of an optimizer's class and of those that it derives from, up to torch's.

    A ``ZeroRedundancyOptimizer`` has the state of the optimizer inside it.
    """
    return [kind.__name__ for kind in type(_inner(optimizer)).__mro__ if kind not in (Optimizer, object)]


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer inside one that shards its state, such as torch's ZeroRedundancyOptimizer; or itself."""
    return optimizer.optim if hasattr(optimizer, "consolidate_state_dict") else optimizer


def _algorithm(kind: str) -> str:
    """Returns the name of a class without words for its implementation; a decoupled decay of Adam's is a setting."""
    return re.sub("fused|paged|cpu|[48]bit|fp8", "", kind.lower()).replace("adamw", "adam")


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's ``state_dict``; of an optimizer that shards its state, this rank's shard.

    torch's ZeroRedundancyOptimizer refuses ``state_dict`` until one rank has gathered all state.
    """
    numbers, inner = _numbers(optimizer), _inner(optimizer)
    if inner is optimizer:
        return optimizer.state_dict()
    state = {numbers[id(tensor)]: values for tensor, values in inner.state.items()}
    return {"state": state, "param_groups": [dict(group) for group in optimizer.param_groups]}


def _own(value: Any) -> Any:
    """Returns a checkpoint's value as plain dicts and lists, with tensors cloned."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _own(value[key]) for key in value}
    return [_own(item) for item in value] if type(value) is list else value


def _data_of(shard: Shard) -> Tensor:
    """Returns the tensor that holds a shard's elements."""
    if isinstance(shard, SlicedShard):
        return _data_of(shard.shard)
    return shard.data if isinstance(shard, FlatShard) else shard


def _check_groups(optimizer: Optimizer, saved: list[Any], names: list[list[str]]) -> None:
    """Checks that each parameter group of a run gets the settings of all its parameters, and no other group's.

    Groups may be joined or divided whose settings are equal.

    Args:
        optimizer: Optimizer of the run, before its state is loaded.
        saved: Parameter groups of the checkpoint, with parameters by name.
        names: Parameter names of each group of the run.

    Raises:
        DloError: The groupings differ, or one of checkpoint and run has a decoupled weight decay.
    """
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    own = {name: number for number, group in enumerate(names) for name in group}
    pairs = {(number, home[name]) for name, number in own.items() if name in home}
    ours, theirs = [_settings(group) for group in optimizer.param_groups], [_settings(group) for group in saved]
    for (one, of_one), (other, of_other) in itertools.combinations(pairs, 2):
        if (one == other and theirs[of_one] != theirs[of_other]) or (of_one == of_other and ours[one] != ours[other]):
            shown = [
                "; ".join(f"group {n}: {_listed(set(group))}" for n, group in enumerate(groups))
                for groups in (names, [group["params"] for group in saved])
            ]
            raise DloError(
                "parameter groups must be those of the checkpoint, whose settings they get, got"
                f" {shown[0]} for the checkpoint's {shown[1]}; group them as before, or start from its weights alone"
                " (`dlo checkpoint export`)"
            )
    decoupled = "decoupled_weight_decay"
    for number, other in pairs:
        before, now = saved[other].get(decoupled), optimizer.param_groups[number].get(decoupled)
        if None not in (before, now) and before != now:
            raise _other_optimizer(optimizer, f"{decoupled}={before}, got {now}")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's settings, without those that schedules change or a device chooses."""
    changing = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
    return {key: value for key, value in group.items() if key not in changing and not isinstance(value, Tensor)}


def _other_optimizer(optimizer: Optimizer, rule: str) -> DloError:
    return DloError(
        f"the run's optimizer must be the checkpoint's, with {rule} for {type(optimizer).__name__}; choose that one, or"
        " start from its weights alone (`dlo checkpoint export`)"
    )


def _other_model(rule: str) -> DloError:
    return DloError(
        f"the checkpoint's optimizer must have {rule}: it is of another model, or other parameters were trained; start"
        " from its weights alone (`dlo checkpoint export`)"
    )


def _by_name(saved: Mapping[str, Any], names: list[list[str]]) -> Mapping[str, Any]:
    """Returns an optimizer's state keyed by parameter name; torch's is keyed by parameter number."""
    groups = saved["param_groups"]
    if not any(isinstance(number, int) for group in groups for number in group["params"]):
        return saved
    sizes, saved_sizes = [len(group) for group in names], [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        raise _other_model(f"parameter groups of {sizes} parameters, as the run has, got {saved_sizes}")
    name_of = {
        number: name
        for group, group_names in zip(groups, names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    return {
        **saved,
        "state": {name_of[key]: state for key, state in saved["state"].items() if key in name_of},
        "param_groups": [{**g, "params": [name_of[number] for number in g["params"]]} for g in groups],
        "beside": {key: state for key, state in saved["state"].items() if key not in name_of},
    }


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return f"{len(names)}" + (f" ({', '.join(shown)}{', ...' if len(names) > 3 else ''})" if names else "")

"""How a strategy's state becomes a canonical checkpoint, and comes back from one.

Model tensors go by their names. Optimizer state goes by parameter name and key (``blocks.0.weight`` / ``exp_avg``), so
that it means the same whatever a strategy's optimizer holds in place of the parameters, and in whatever order.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.checkpoint import AsyncSaver, CutShard, FlatShard, SafeCheckpointIO, Shard, load, remove, save
from dlo_framework.checkpoint.agreement import together
from dlo_framework.checkpoint.convert import as_lightning
from dlo_framework.checkpoint.saved import SavedTensors, Source
from dlo_framework.checkpoint.state_file import refuse_unreadable
from dlo_framework.checkpoint.torch_file import local_path
from dlo_framework.contract import StrategyContract
from dlo_framework.distributed.fused import own_implementation, prefer_fused, unscale_apart
from dlo_framework.distributed.held import memory_of, optimizer_bytes
from dlo_framework.errors import DloError

#: What checkpoints may be written as.
FORMATS = ("canonical", "lightning")
#: Attribute of a module under which its owner is noted.
OWNER = "_dlo_owner"
#: How torch ends the names under which modules save what is no tensor.
EXTRA_STATE = "_extra_state"


class ShardOwner:
    """What a strategy has made of a module's parameters, noted on the module; copies of the module are without it.

    Args:
        strategy: Strategy that has sharded the module.
        world_size: Ranks that the parameters are divided among; 1 where each has all of them.
        undo: Function that makes the parameters full tensors again, called on all ranks; None if nothing does.
    """

    def __init__(self, strategy: Strategy, world_size: int, undo: Callable[[], None] | None) -> None:
        self.strategy, self.name = weakref.ref(strategy), type(strategy).__name__
        self.world_size, self.undo = world_size, undo

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leaves a copy of the module without an owner."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves a pickled module without an owner."""
        return (type(None), ())


class CanonicalStrategy(Strategy, StrategyContract):
    """A Lightning strategy that writes and reads canonical checkpoints.

    What is here suits strategies whose parameters are the module's own tensors, plain or DTensor; those that give
    optimizers something else override :meth:`optimizer_tensors`, :meth:`canonical` and :meth:`room`.
    """

    #: Whether checkpoints are written in the background while training goes on; the command line's
    #: ``--run.async_checkpoints`` sets it.
    async_checkpoints = False
    #: ``canonical``, or ``lightning``: a single file as Lightning's own strategies write it, by rank 0;
    #: ``--run.checkpoint_format`` sets it.
    checkpoint_format = "canonical"
    #: Whether every rank holds the full state of module and optimizers, in the module's own tensors.
    holds_full_state = False
    _planning_group: dist.ProcessGroup | None = None
    _saver: AsyncSaver | None = None

    def connect(self, model: LightningModule) -> None:
        """Takes a module; one that another strategy's run has sharded gets its full parameters back first.

        Raises:
            DloError: if they cannot be had.
        """
        owner: ShardOwner | None = model.__dict__.get(OWNER)
        if owner is not None and owner.strategy() is not self:
            self.take_over(owner, model)
            del model.__dict__[OWNER]
        super().connect(model)

    def take_over(self, owner: ShardOwner, model: LightningModule) -> None:
        """Undoes what another strategy has made of a module.

        Args:
            owner: Note of what that is.
            model: Module.

        Raises:
            DloError: if that cannot be undone, or takes other ranks than this strategy has.
        """
        ranks = getattr(self, "world_size", 1)
        if owner.undo is None or owner.world_size not in (1, ranks):
            raise DloError(
                f"{type(model).__name__} must be built anew for {type(self).__name__} on {ranks} ranks, got a module"
                f" whose parameters {owner.name} has divided among {owner.world_size}; load it from a checkpoint of"
                " that run (dlo_framework.load_from_checkpoint)"
            )
        owner.undo()
        earlier = owner.strategy()
        if isinstance(earlier, CanonicalStrategy):
            earlier.forget_module()

    def forget_module(self) -> None:
        """Called when another strategy has taken the module over: what was kept of its parameters is of no use."""

    # --- what a strategy says of its tensors ---------------------------------------------------------------

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns what an optimizer steps on this rank, by parameter name, in its own order."""
        assert self.lightning_module is not None
        names = {id(parameter): clean(name) for name, parameter in self.lightning_module.named_parameters()}
        return {
            names.get(id(parameter), f"unnamed.{number}"): parameter
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }

    def canonical(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a tensor of an optimizer's state as a checkpoint holds it.

        Args:
            name: the parameter's name.
            tensor: what the optimizer steps for it.
            value: the state tensor.
        """
        return value

    def room(self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns room on this rank for a state tensor whose whole shape a checkpoint tells."""
        if isinstance(tensor, DTensor) and shape == tensor.shape:
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=tensor.device if shape == tensor.shape else "cpu")

    def held_tensors(self) -> list[Tensor]:
        """Returns the memory of this rank's parameters and buffers: what an average of the weights is taken of."""
        assert self.lightning_module is not None
        held = [*self.lightning_module.parameters(), *self.lightning_module.buffers()]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]

    zero_stage = 0

    @property
    def shard_size(self) -> int:
        """How many ranks share what the strategy divides."""
        return self._world()

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        assert self.lightning_module is not None
        parameters = list(self.lightning_module.parameters())
        return {
            "parameters": memory_of(parameters),
            "gradients": memory_of(p.grad for p in parameters if p.grad is not None),
            "optimizer": optimizer_bytes(self.optimizers),
        }

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers; those that wrap another without being built by torch's base get its step hooks too.

        torch's AdamW, Adam and SGD take their fused step on CUDA, unless the user has chosen otherwise.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            complete(optimizer)
            unscale_apart(optimizer)
            prefer_fused(optimizer, self.lightning_module)

    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns the gradients of an unfinished accumulation by parameter name, their mean over the ranks.

        Ranks may have used different parameters: those that any has used are there, on all.
        """
        assert self.lightning_module is not None
        named = [(clean(name), p) for name, p in self.lightning_module.named_parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for _, p in named], dtype=torch.int32, device=self.root_device)
        if self._world() > 1:
            used = self.reduce(used, reduce_op="max")
        return {
            name: self.reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), reduce_op="mean")
            for (name, p), somewhere in zip(named, used.tolist(), strict=True)
            if somewhere
        }

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Takes up an unfinished accumulation."""
        assert self.lightning_module is not None
        gradients = readable(saved)
        for name, parameter in self.lightning_module.named_parameters():
            if clean(name) in gradients:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                gradients.read_into(clean(name), parameter.grad)

    # --- saving --------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns what this rank holds of the module's state, by name; the names are the module's own."""
        assert self.lightning_module is not None
        return {clean(name): value for name, value in self.lightning_module.state_dict().items()}

    def state_names(self) -> set[str]:
        """Returns the names of all of the module's state, that which other ranks hold too."""
        assert self.lightning_module is not None
        return {clean(name) for name in self.lightning_module.state_dict()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state by parameter name: ``{"state": {name: {key: value}}, "param_groups": [...]}``.

        It is what the optimizer's own ``state_dict`` gives, which is where one that wraps another (Lookahead) has it.
        The parameter groups name all their parameters, those of which this rank holds nothing too. What the optimizer
        keeps under keys that are no parameters stands under ``beside``.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        packed, numbers = _packed(optimizer), _numbers(optimizer)
        if "param_groups" not in packed:  # Lightning's, where `configure_optimizers` returns None.
            return packed
        state = {
            name: {
                key: self.canonical(name, tensor, value) if isinstance(value, Tensor) else value
                for key, value in packed["state"][numbers[id(tensor)]].items()
            }
            for name, tensor in self.optimizer_tensors(optimizer).items()
            if numbers[id(tensor)] in packed["state"]
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in packed["param_groups"]]
        for group, names in zip(groups, self.group_names(optimizer), strict=True):
            group["params"] = names
        beside = {key: value for key, value in packed["state"].items() if not isinstance(key, int)}
        return {"state": state, "param_groups": groups} | ({"beside": beside} if beside else {})

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the names of each parameter group's parameters, on all ranks alike."""
        names = {id(tensor): name for name, tensor in self.optimizer_tensors(optimizer).items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a canonical checkpoint; called on all ranks.

        In the background (:attr:`async_checkpoints`) what is written is the state of this moment, and an error is
        raised by the next save, or at the run's end.

        Raises:
            DloError: on all ranks, if any cannot write its part; what stood there still stands. On a path or options
                of other storage than file systems.
        """
        if self.checkpoint_format == "lightning":
            self._save_single_file(checkpoint, self.broadcast(str(filepath)), storage_options)
            return
        path = local_path(self.broadcast(str(filepath)), storage_options)
        if not self.async_checkpoints:
            save(checkpoint, path, group=self.planning_group(), about=self.about())
            return
        if self._saver is None:
            self._saver = AsyncSaver(self.planning_group())
        self._saver.save(checkpoint, path, about=self.about())

    def _save_single_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Has rank 0, which holds all of the state, write it as Lightning's own strategies do."""

        def work() -> None:
            if self.is_global_zero:
                content = as_lightning(checkpoint)
                refuse_unreadable(content)
                writer = self.checkpoint_io if self._has_own_io() else SafeCheckpointIO()
                writer.save_checkpoint(content, path, storage_options=storage_options)

        together(self.planning_group(), work)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._saver is not None and self._saver.is_busy

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint; in the background, not before what was saved after it is on the disk."""
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.remove(filepath)
        else:
            remove(filepath)

    def finish_checkpoints(self) -> None:
        """Waits until what is written in the background is on the disk.

        Raises:
            DloError: if it could not be written.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def teardown(self) -> None:
        """Ends the run, once its checkpoints are on the disk."""
        self.finish_checkpoints()
        super().teardown()

    def about(self) -> dict[str, Any]:
        """Returns what a checkpoint's manifest says of the run, beside step and epoch."""
        return {"strategy": type(self).__name__, "world_size": self._world()}

    def planning_group(self) -> dist.ProcessGroup | None:
        """Returns the gloo group over which ranks agree on who writes what; None in a single process."""
        if self._world() == 1:
            return None
        if self._planning_group is None:
            group: Any = dist.new_group(backend="gloo", timeout=getattr(self, "_timeout", None))
            self._planning_group = group
        return self._planning_group

    def _world(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    # --- loading -------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a canonical checkpoint, or a file of Lightning's; of the first, tensors are read when asked for."""
        self.finish_checkpoints()
        path = self.broadcast(str(checkpoint_path))
        if self.checkpoint_format == "lightning" and self._has_own_io():
            return self.checkpoint_io.load_checkpoint(path)
        return load(local_path(path), group=self.planning_group())

    def setup_environment(self) -> None:
        """Starts the run, unless a plug-in of the Trainer's would not do what it is for."""
        self.check_checkpoints()
        super().setup_environment()

    def check_checkpoints(self) -> None:
        """Checks the format of the checkpoints against what is to write them.

        Raises:
            DloError: on a CheckpointIO that would not be called; on a single file of state that several ranks hold.
        """
        name = type(self).__name__
        if self.checkpoint_format not in FORMATS:
            raise DloError(f"checkpoint_format must be one of {', '.join(FORMATS)}, got {self.checkpoint_format}")
        if self.checkpoint_format == "lightning" and not self.holds_full_state:
            raise DloError(
                f"run.checkpoint_format must be canonical under {name}, whose ranks share the state, got lightning;"
                " take strategy auto or ddp, or `dlo checkpoint convert LAST.ckpt FILE.ckpt` afterwards"
            )
        if self.checkpoint_format == "lightning" and self.async_checkpoints:
            raise DloError(
                "run.async_checkpoints must be false with run.checkpoint_format lightning, got true; leave one out"
            )
        if self.checkpoint_format == "canonical" and self._has_own_io():
            raise DloError(
                f"trainer.plugins must have no CheckpointIO with canonical checkpoints, which {name} writes itself, got"
                f" {type(self.checkpoint_io).__name__}; remove it, or set run.checkpoint_format: lightning"
            )

    def _has_own_io(self) -> bool:
        """Whether the user has brought what reads and writes files."""
        return type(self.checkpoint_io) not in (TorchCheckpointIO, SafeCheckpointIO)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fills what this rank holds of the module's state."""
        if self.holds_full_state and self._loads_by_itself():
            self._load_through_module(checkpoint["state_dict"], strict)
            return
        saved, held = readable(checkpoint["state_dict"]), self.lightning_module_state_dict()
        extra = {name: module for name, module in self._with_extra_state().items() if name in saved}
        held = {name: value for name, value in held.items() if name not in extra}
        names = self.state_names()
        missing, unexpected = names - saved.keys(), saved.keys() - names
        resized = {
            name
            for name in held.keys() & saved.keys()
            if isinstance(held[name], Shard) and held[name].shape != saved.shape(name)
        }
        if (strict and (missing or unexpected)) or resized:
            raise DloError(
                "the checkpoint is of another model than the config's: of its weights"
                f" {_listed(missing)} are missing, {_listed(unexpected)} unexpected, {_listed(resized)} of another size"
            )
        with torch.no_grad():
            for name in held.keys() & saved.keys():
                if isinstance(held[name], Shard):
                    saved.read_into(name, held[name])
        for name, module in extra.items():
            module.set_extra_state(_own(saved[name]))
        self.refresh()

    def _loads_by_itself(self) -> bool:
        """Whether the module has its own way of loading: its method, or hooks of its parts."""
        module = self.lightning_module
        assert module is not None
        own = "load_state_dict" in vars(module) or type(module).load_state_dict is not nn.Module.load_state_dict
        hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        return own or any(getattr(part, name, None) for part in module.modules() for name in hooks)

    def _load_through_module(self, saved: Mapping[str, Any], strict: bool) -> None:
        """Has the module load the state, under its own names."""
        assert self.lightning_module is not None
        names = {clean(name): name for name in self.lightning_module.state_dict()}
        state = OrderedDict((names.get(name, name), saved[name]) for name in saved)
        if getattr(saved, "_metadata", None):
            state._metadata = saved._metadata  # type: ignore[attr-defined]
        self.lightning_module.load_state_dict(state, strict=strict)

    def _with_extra_state(self) -> dict[str, nn.Module]:
        """Returns the modules that save more than tensors (``get_extra_state``), by the name that it is saved under."""
        assert self.lightning_module is not None
        return {
            clean(f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE): module
            for name, module in self.lightning_module.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state
        }

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fills the optimizers' state, and sets the hyperparameters of their groups."""
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise DloError(
                f"configure_optimizers must return as many optimizers as the checkpoint has, got"
                f" {len(self.optimizers)} for {len(states)}; start from its weights alone (`dlo checkpoint export`)"
            )
        for optimizer, saved in zip(self.optimizers, states, strict=False):
            if not optimizer.param_groups:
                optimizer.load_state_dict(dict(saved))
            elif "param_groups" not in saved:
                raise DloError(
                    "the checkpoint must hold the optimizer's state, got that of a run without an optimizer; start from"
                    " its weights alone (`dlo checkpoint export`)"
                )
            else:
                self._load_optimizer(optimizer, saved)

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
        groups = []
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            source = next((sources[name] for name in group_names if name in sources), None)
            if source is None:
                raise DloError(
                    f"the checkpoint has no optimizer state for {_listed(set(group_names))}: it is of another model, or"
                    " other parameters were trained; start from its weights alone (`dlo checkpoint export`)"
                )
            settings = {key: value for key, value in source.items() if key != "params"} | own_implementation(group)
            groups.append({**settings, "params": [numbers[id(parameter)] for parameter in group["params"]]})
        optimizer.load_state_dict({"state": loaded | dict(saved.get("beside", {})), "param_groups": groups})

    def _read_state(self, name: str, tensor: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one parameter's state on this rank."""
        saved, state = readable(saved), {}
        for key in saved:
            if not saved.is_tensor(key):
                state[key] = saved[key]
                continue
            room = self.room(name, tensor, saved.shape(key), saved.dtype(key))
            saved.read_into(key, room)
            state[key] = _memory(room)
        return state


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    """Returns the number that an optimizer's ``state_dict`` gives each tensor that it steps, by the tensor's id."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(held)}


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's ``state_dict``; of one that shares its state among ranks, what this rank holds of it.

    torch's ZeroRedundancyOptimizer refuses ``state_dict`` until one rank has gathered all state.
    """
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    numbers, inner = _numbers(optimizer), getattr(optimizer, "optim", optimizer)
    state = {numbers[id(tensor)]: values for tensor, values in inner.state.items()}
    return {"state": state, "param_groups": [dict(group) for group in optimizer.param_groups]}


def complete(optimizer: Optimizer) -> None:
    """Lets an optimizer whose constructor left out torch's (timm's Lookahead does) call the hooks of its step.

    torch (2.15) has a constructor wrap its class's ``step`` for them; without it they can be registered, and are never
    called. Here the instance's is wrapped, with what a scheduler has made of it.
    """
    if getattr(optimizer.step, "hooked", False):
        return
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(hooks, OrderedDict())
    inner = optimizer.step

    @functools.wraps(inner)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    vars(optimizer)["step"] = MethodType(hooked, optimizer)


def clean(name: str) -> str:
    """Returns a tensor's name without the wrapper of ``torch.compile(module)``."""
    return name.replace("_orig_mod.", "")


def readable(mapping: Mapping[str, Any]) -> SavedTensors:
    """Returns a mapping that can be read into shards; one of a single-file checkpoint holds its tensors itself."""
    return mapping if isinstance(mapping, SavedTensors) else SavedTensors(Source(Path(), {}), {}, mapping)


def _own(value: Any) -> Any:
    """Returns what a checkpoint holds as plain values, and tensors with memory of their own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _own(value[key]) for key in value}
    return [_own(item) for item in value] if type(value) is list else value


def _memory(room: Shard) -> Tensor:
    """Returns the memory that a rank's part of a tensor lies in."""
    if isinstance(room, CutShard):
        return _memory(room.part)
    return room.data if isinstance(room, FlatShard) else room


def _by_name(saved: Mapping[str, Any], names: list[list[str]]) -> Mapping[str, Any]:
    """Returns an optimizer's state keyed by parameter names; torch's own is keyed by the parameters' numbers."""
    groups = saved["param_groups"]
    if not any(isinstance(number, int) for group in groups for number in group["params"]):
        return saved
    sizes, found = [len(group) for group in names], [len(group["params"]) for group in groups]
    if sizes != found:
        raise DloError(
            f"the checkpoint's optimizer has parameter groups of {found} parameters, the run's of {sizes};"
            " they are of different models, or other parameters are trained"
        )
    name_of = {
        number: name
        for group, group_names in zip(groups, names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    return {
        "state": {name_of[key]: state for key, state in saved["state"].items() if key in name_of},
        "param_groups": [{**g, "params": [name_of[number] for number in g["params"]]} for g in groups],
        "beside": {key: state for key, state in saved["state"].items() if key not in name_of},
    }


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return f"{len(names)}" + (f" ({', '.join(shown)}{', ...' if len(names) > 3 else ''})" if names else "")

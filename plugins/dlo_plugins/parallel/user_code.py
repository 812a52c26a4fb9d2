"""Watches the user's code: its uses of parameters outside their units, its hooks, and what it does to gradients.

Modes intercept torch functions: :class:`OutsideUse` detects parameters that are used outside their unit's forward, in
a step, as by a penalty, or in a hook; the others raise where a hook uses or changes gradients in a way that ranks
cannot follow. :func:`check_held` finds parameters that the user's objects hold, and that a strategy replaces.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary

from dlo_framework.batches import tree_leaves
from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.distributed.stacks import is_dlos, own_line
from dlo_framework.errors import DloError

#: Functions that do not read values: they may be called on a parameter whose memory is freed.
_NOT_VALUES = {"__hash__", "__len__", "__set__", "__delete__", "data_ptr", "dim", "element_size", "get_device"}
_NOT_VALUES |= {
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
}
_NOT_VALUES |= {"nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size"}
_NOT_VALUES |= {"storage_offset", "stride", "untyped_storage"}
#: Attributes that are tensors; all others describe shape, dtype and device.
_TENSORS = {"data", "T", "H", "mT", "mH", "real", "imag"}


class LowestMode(TorchFunctionMode):
    """Mode around user code, below all others: a hook may enter modes that outlast it, and leave older ones."""

    def __enter__(self) -> Self:
        """Enters the mode below all others."""
        for mode in [self, *_left_modes()]:
            _push_mode(mode)
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves the mode, wherever it is now."""
        for mode in _left_modes():
            if mode is not self:
                _push_mode(mode)


class OutsideUse(LowestMode):
    """Calls ``on_use`` with the id of each parameter just before its values are used, and whether by its ``data``.

    The mode intercepts every torch function that is called on a tensor, which costs a few microseconds each. So only
    the first step is watched; later steps use the same parameters.

    Args:
        watched: Ids of the parameters.
        on_use: Callback that gets a parameter's id, and whether its ``data`` are read, before the function runs.
    """

    def __init__(self, watched: set[int], on_use: Callable[[int, bool], None]) -> None:
        super().__init__()
        self.watched, self.on_use = watched, on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reports the watched parameters among the arguments, and calls the function."""
        kwargs = kwargs or {}
        by_data = attribute_of(func) == "data"
        assigns = by_data and func.__name__ == "__set__" and not calling_module().startswith(ASKING)
        if assigns or uses_values(func):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.watched:
                    self.on_use(id(leaf), by_data)
        return func(*args, **kwargs)


def _left_modes() -> list[TorchFunctionMode]:
    """Leaves all function modes; returns them, the outermost first (torch 2.11 to 2.15, as its ``DeviceContext``)."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def uses_values(function: Any) -> bool:
    """Returns whether a function that ``__torch_function__`` receives may read or write a tensor's values."""
    name = function_name(function)
    if name == "__get__":
        return attribute_of(function) in _TENSORS
    return name not in _NOT_VALUES


#: Functions between a use of a tensor and who asks for it: function modes, and the listing of a module's state.
_BETWEEN = ("__torch_function__", "on_use", "state_dict", "_save_to_state_dict")


def calling_module() -> str:
    """Returns the name of the module that has called a torch function, given to function modes inside each other.

    Of a module's ``state_dict`` it is the module that has asked for it, such as Lightning in a save.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name in _BETWEEN or frame.f_globals["__name__"] == "torch.overrides":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def function_name(function: Any) -> str:
    """Returns the name of a function that ``__torch_function__`` receives; empty without one."""
    return str(getattr(function, "__name__", ""))


def attribute_of(function: Any) -> str:
    """Returns the name of the attribute that a function reads or writes; empty for other functions."""
    return function_name(getattr(function, "__self__", None))


#: Packages whose code reads weights through the strategy only.
ASKING = ("lightning.", "dlo_framework.", "dlo_plugins.", "dlo_tasks.")
#: Names of all hooks of a module or callback that run outside of its steps.
HOOKS = tuple(
    name for name in dir(LightningModule) if name.startswith("on_") or name in ("lr_scheduler_step", "optimizer_step")
)


def users_hooks(owners: Iterable[Any], names: Iterable[str] = HOOKS) -> Iterator[tuple[Any, str]]:
    """Yields each owner and name of a hook that the user has written, without those of callbacks that read no weights.

    Args:
        owners: Module and callbacks.
        names: Names of hooks.
    """
    for owner in owners:
        if isinstance(owner, PluginCallback) and owner.reads_weights is False:
            continue
        for name in names:
            home = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
            own = name in vars(owner)  # As LambdaCallback has them.
            if own or (home is not None and not home.__module__.startswith(ASKING)):
                yield owner, name


def meet_all(strategy: Any, place: str, what: str, got: str) -> None:
    """Waits for all ranks in code of the user's that has them communicate.

    Args:
        strategy: Strategy of the run.
        place: Name of the place in the code, the same on all ranks.
        what: Subject of the message, what the code uses or writes.
        got: Use or write of this rank in the message.

    Raises:
        DloError: A rank does not come there.
    """
    missing = strategy.meet(place)
    if missing:
        raise DloError(
            f"{what} must be used and written on all ranks alike, got {got} on rank {strategy.global_rank}, while"
            f" {missing}; take it out of a condition on the rank"
        )


class HookContext:
    """Runs a hook of the user's inside a context.

    Args:
        owner: Module or callback.
        name: Name of the hook.
        around: Function that returns the context, given a description of the hook.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._owner, self._name, self._before = owner, name, vars(owner).get(name)
        hook, shown = getattr(owner, name), f"{name} of {type(owner).__name__}"

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with around(shown):
                return hook(*args, **kwargs)

        vars(owner)[name] = call

    def remove(self) -> None:
        """Runs the hook as before."""
        if self._before is None:
            vars(self._owner).pop(self._name, None)
        else:
            vars(self._owner)[self._name] = self._before


def watch_hooks(trainer: Trainer, around: Callable[[str], AbstractContextManager[Any]]) -> list[HookContext]:
    """Runs all hooks of the user's code inside contexts, until these are removed."""
    owners = [trainer.lightning_module, *callbacks_of(trainer)]
    return [HookContext(owner, name, around) for owner, name in list(users_hooks(owners))]


#: Message about a gradient that was changed where the optimizer does not see it.
CHANGED = (
    "gradients of sharded parameters must be changed in on_after_backward, or later in place if the optimizer is"
    " elementwise, got that of {1} {0} after it; change it in on_after_backward"
)


class GradientWrites(LowestMode):
    """Raises where code writes to gradients.

    Args:
        gradients: Names by the ids of the gradients; entries may be added and removed inside the block.
    """

    def __init__(self, gradients: Mapping[int, str]) -> None:
        super().__init__()
        self._gradients = gradients
        self._aliases: dict[int, tuple[Tensor, Any]] = {}  # Results of ``data`` and ``detach``, and their sources.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, unless it writes to a gradient.

        Raises:
            DloError: It does.
        """
        name = function_name(func)
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
        for leaf in tree_leaves((args, kwargs)) if writes and self._gradients else ():
            source = self._aliases[id(leaf)][1] if id(leaf) in self._aliases else leaf
            if id(source) in self._gradients:
                raise DloError(CHANGED.format("written", self._gradients[id(source)]))
        result = func(*args, **(kwargs or {}))
        if name == "detach" or (name == "__get__" and attribute_of(func) == "data"):
            self._aliases[id(result)] = (result, args[0])
        return result


#: Special methods that write to a tensor.
_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"}


class JointGradients(LowestMode):
    """Raises where a user's hook computes a number from several gradients, of which each rank has other ones.

    Clipping by such a norm would scale each rank's gradients by another factor. Values of one gradient, and changes of
    gradients, are allowed.

    Args:
        divided: Axes of the mesh that divide gradients, such as ``pp=2``.
    """

    def __init__(self, divided: str) -> None:
        super().__init__()
        self._divided = divided
        self._sources: Any = WeakIdKeyDictionary()  # By tensor: ids of the parameters whose gradients it depends on.
        self._in_numbers: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows gradients through one function.

        Raises:
            DloError: The result is a number that depends on several gradients.
        """
        result = func(*args, **(kwargs or {}))
        if func == _GET_GRADIENT:
            if result is not None:
                self._sources[result] = {id(args[0])}
            return result
        if function_name(func).startswith("_foreach"):
            for place, value in enumerate(result or ()):
                self._add(value, self._of([item[place] for item in args if isinstance(item, list | tuple)]))
            return result
        sources = self._of(tree_leaves((args, kwargs)))
        if sources:
            values = tree_leaves(result)
            for value in [args[0]] if func == torch.Tensor.__setitem__ else values:
                self._add(value, sources)
            if func.__name__ in _NUMBERS and not is_dlos(self._caller()):
                self._in_numbers |= sources
                self._check(self._in_numbers)
        return result

    @staticmethod
    def _caller() -> Any:
        """Returns the innermost frame outside of torch, this module and other modes."""
        frame: Any = sys._getframe(2)
        while (
            str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
            or frame.f_globals is globals()
            or frame.f_code.co_name == "__torch_function__"
        ):
            frame = frame.f_back
        return frame

    def _of(self, values: list[Any]) -> set[int]:
        tensors = (value for value in values if isinstance(value, Tensor))
        return set().union(*(self._sources.get(tensor, ()) for tensor in tensors))

    def _add(self, value: Any, sources: set[int]) -> None:
        if isinstance(value, Tensor) and sources:
            if value.numel() == 1 and is_dlos(self._caller()):
                return  # dlo's own norms are over all ranks, and anyone may read them.
            self._sources[value] = self._sources.get(value, set()) | sources
            if value.numel() == 1:
                self._check(self._sources[value])

    def _check(self, sources: set[int]) -> None:
        if len(sources) > 1 and not is_dlos(frame := self._caller()):
            raise DloError(
                f"a number from several gradients in a hook does not support {self._divided}: each rank has other"
                f" gradients ({own_line(frame)}); clip by --trainer.gradient_clip_val or self.clip_gradients(), and get"
                " the norm over all ranks from dlo_framework.distributed.step_primitives."
                "agreed_gradient_norm(trainer, optimizer)"
            )


#: Function that a mode gets where `.grad` is read.
_GET_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
#: Functions that return a tensor's values as Python numbers.
_NUMBERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__format__")


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def move_hooks(
    source: nn.Parameter, target: nn.Parameter, before: Wrapper | None = None, after: Wrapper | None = None
) -> None:
    """Moves a parameter's hooks to the parameter that replaces it; their handles stay valid.

    Args:
        source: Parameter with hooks.
        target: Parameter that replaces it; may be the same.
        before: Function that returns what is called in place of a hook of ``register_hook``.
        after: The same for ``register_post_accumulate_grad_hook``.
    """
    for hooks, wrapper in ((source._backward_hooks, before), (source._post_accumulate_grad_hooks, after)):
        if hooks and wrapper is not None:
            hooks.update([(key, wrapper(hook)) for key, hook in hooks.items()])
    share_hooks(source, target)
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def share_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Makes autograd call a parameter's hooks of ``register_hook`` with the gradient of another."""
    hooks, others = source._backward_hooks, target._backward_hooks
    if hooks and others is not hooks:
        hooks.update(others or {})
        target._backward_hooks = hooks


#: Number of entries of a container, and depth of containers in each other, that are searched.
_MOST, _DEEPEST = 10_000, 6


def check_held(module: nn.Module, replaced: Mapping[str, weakref.ref[nn.Parameter]]) -> None:
    """Checks that no attribute of a module or of a callback, and no global beside them, holds a replaced parameter.

    Args:
        module: Module whose parameters have been sharded or cut.
        replaced: Weak references to the parameters before sharding, by name; most are gone.

    Raises:
        DloError: A list, dict, optimizer, function or another object in an attribute holds one.
    """
    held = {id(parameter): name for name, reference in replaced.items() if (parameter := reference()) is not None}
    known = vars(LightningModule()).keys() if held else ()
    root = type(module).__name__
    owners: list[tuple[str, Any]] = [(f"{root}.{part}".rstrip("."), one) for part, one in module.named_modules()]
    if isinstance(module, LightningModule) and module._trainer is not None:
        owners += [(type(callback).__name__, callback) for callback in callbacks_of(module._trainer)]
    kinds = {kind.__module__ for _, one in owners if held for kind in type(one).__mro__}
    owners += [
        (name, sys.modules[name]) for name in kinds if name in sys.modules and not name.startswith(("torch.", *ASKING))
    ]
    seen: dict[int, int] = {}
    for owner, one in owners if held else ():
        for key, value in list(vars(one).items()):
            if key in known or str(key).startswith("__"):
                continue
            name = _find(value, held, seen, _DEEPEST)
            if name:
                raise DloError(
                    "attributes and globals must not hold parameters under a strategy that cuts the model, which"
                    f" replaces them, got {name} in {owner}.{key}; take them from the module where they are used, as"
                    " `self.net.parameters()` in training_step, or use strategy ddp, zero1, zero2 or zero3"
                )


def _find(value: Any, held: Mapping[int, str], seen: dict[int, int], depth: int) -> str:
    """Returns the name of a held parameter in a value; empty if there is none.

    Args:
        value: Value to search.
        held: Names of parameters by their ids.
        seen: Depth to which each value has been searched, by its id; searched values are added.
        depth: Depth to which the value is searched.
    """
    if id(value) in held:
        return held[id(value)]
    if seen.get(id(value), 0) >= depth or isinstance(
        value, Tensor | nn.Module | Trainer | ModuleType | str | bytes | type
    ):
        return ""
    seen[id(value)] = depth
    names = (_find(one, held, seen, depth - 1) for one in itertools.islice(_contents(value), _MOST))
    return next(filter(None, names), "")


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return itertools.chain(value.keys(), value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, Optimizer):
        return value.param_groups
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # The variable has not been assigned yet.
        return False

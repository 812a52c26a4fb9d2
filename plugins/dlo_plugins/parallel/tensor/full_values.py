"""Full values of weights and gradients for a user's code outside of a model's layers, under tensor parallelism.

Each rank has slices of weights, and of their gradients. Layers compute with slices; a penalty on weights in a loss, a
norm of weights that a callback logs, a hook on a gradient, or a gradient norm of one's own must get the full tensors.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.costs import is_compiled
from dlo_framework.distributed.collectives import Communicator, with_backward
from dlo_framework.errors import DloError
from dlo_framework.registry.registry import own_packages
from dlo_framework.shards import Layout, TensorSlice
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.user_code import LowestMode, attribute_of, function_name, move_hooks, uses_values

#: Lightning's modules with functions for a user's hooks, such as `grad_norm`.
_USERS_FUNCTIONS = ("lightning.pytorch.utilities.grads",)
#: Names of functions and attributes whose results are parts as their argument is: memory or gradient of the same shape.
_ALIASES = ("data", "grad", "detach")


def full_tensor(part: Tensor, place: TensorSlice | None, ranks: Communicator) -> Tensor:
    """Returns a full tensor; a collective call.

    Args:
        part: Slice of it, or a partial sum.
        place: Place of the slice; None for a partial sum.
        ranks: Communicator of the ranks with the other slices or sums.
    """
    if place is None:
        return ranks.sum(part.detach().clone(memory_format=torch.contiguous_format))
    full = part.new_zeros(place.full_shape(part.shape))
    place.write_slice(full, part.detach())
    return ranks.sum(full)


def own_part(full: Tensor, place: TensorSlice | None, ranks: Communicator) -> Tensor:
    """Returns this rank's part of a full tensor, of which :func:`full_tensor` makes the full one again."""
    return full / ranks.size if place is None else place.slice_tensor(full)


def give_hooks_full(
    name: str, old: nn.Parameter, new: nn.Parameter, place: TensorSlice | None, ranks: Communicator
) -> None:
    """Moves a parameter's hooks on its gradient to the parameter that replaces it; they get full gradients.

    Args:
        name: Name of the parameter.
        old: Full parameter.
        new: Parameter of this rank: its slice, or the full parameter itself if its gradient is a partial sum.
        place: Place of the slice; None for a partial sum.
        ranks: Communicator of the axis `tp`.
    """

    def call_before(hook: Callable[..., Any], part: Tensor) -> Tensor:
        full = full_tensor(part, place, ranks)
        modified = hook(full)
        return own_part(full if modified is None else modified, place, ranks)

    def call_after(hook: Callable[..., Any], parameter: Tensor) -> None:
        with _FullMode({id(parameter): (name, place)}, ranks, lambda: False):
            hook(parameter)

    move_hooks(
        old,
        new,
        before=lambda hook: functools.partial(call_before, hook),
        after=lambda hook: functools.partial(call_after, hook),
    )


class FullValues:
    """Gives steps and hooks the full values of weights and gradients where code outside of the layers uses them.

    A function mode intercepts every torch function, which costs microseconds each. So only the first step of a kind is
    watched; if it uses full values, later ones are watched too. Hooks of the user's are watched each time. Code of
    dlo's own is left alone, since it knows slices; so are optimizers, and compiled models.

    Args:
        module: Module whose model has been cut.
        layout: Slices of its parameters, and the partial ones.
        ranks: Communicator of the axis `tp`.
        is_summed: Function that returns whether partial gradients have been summed.
        is_tried: Whether values have shown that the blocks' code computes with slices what it does with full weights.

    Attributes:
        is_watching: Whether code gets full values now.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        ranks: Communicator,
        is_summed: Callable[[], bool],
        *,
        is_tried: bool,
    ) -> None:
        self._module, self._ranks, self._is_summed, self._is_tried = module, ranks, is_summed, is_tried
        self._places: dict[str, TensorSlice | None] = {**dict.fromkeys(layout.partial), **layout.slices}
        self._used: dict[str, bool] = {}
        self.is_watching = False

    @contextlib.contextmanager
    def watch(self, kind: str, meet: Callable[[], None] = lambda: None, *, always: bool = False) -> Iterator[None]:
        """Gives full values inside the block.

        Args:
            kind: Kind of step, or name of a hook.
            meet: Function that is called before the kind's first use of full values, which needs all ranks.
            always: Whether to watch also where earlier blocks of the kind have used none.
        """
        if kind not in self._used and is_compiled(self._module):
            self._used[kind] = False
        if self.is_watching or not (always or self._used.get(kind, True)):
            yield
            return
        named = ((plain_name(name), p) for name, p in self._module.named_parameters(remove_duplicate=False))
        places = {id(p): (name, self._places[name]) for name, p in named if name in self._places}
        mode = _FullMode(places, self._ranks, self._is_summed, is_tried=self._is_tried)
        if not self._used.get(kind, False):
            mode.meet = meet
        handles: list[Any] = []
        for name, layer in self._layers():
            own = any(one.rpartition(".")[0] == name for one in self._places)
            handles.append(layer.register_forward_pre_hook(functools.partial(mode.move, own, 1)))
            handles.append(layer.register_forward_hook(functools.partial(mode.move, own, -1), always_call=True))
        self.is_watching = True
        try:
            with mode:
                yield
        finally:
            self.is_watching = False
            for handle in handles:
                handle.remove()
        if mode.used and kind not in self._used:
            rank_zero_warn(
                f"tensor parallelism gathers '{mode.used}' in each {kind}, whose code uses it outside of the model's"
                " layers"
            )
        self._used[kind] = self._used.get(kind, False) or bool(mode.used)

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that have parts of parameters, and those inside the model that contain them, by name."""
        owners = [name.split(".")[:-1] for name in self._places]
        names = {".".join(parts[:depth]) for parts in owners for depth in (*range(3, len(parts)), len(parts))}
        return ((name, self._module.get_submodule(name)) for name in names)


class _FullMode(LowestMode):
    """Replaces parts of parameters and gradients by full tensors, in a user's code outside of layers.

    Args:
        places: Names of parameters, and places of their slices, by ids; no place for partial gradients.
        ranks: Communicator of the axis `tp`.
        is_summed: Function that returns whether partial gradients have been summed.
        is_tried: Whether a block's code may use slices outside of their modules.

    Attributes:
        used: Name of the first parameter of which a full tensor was used; empty for none.
        meet: Function that is called before that use.
    """

    def __init__(
        self,
        places: Mapping[int, tuple[str, TensorSlice | None]],
        ranks: Communicator,
        is_summed: Callable[[], bool],
        *,
        is_tried: bool = True,
    ) -> None:
        super().__init__()
        self._is_tried = is_tried
        self._places, self._ranks, self._is_summed = dict(places), ranks, is_summed
        self._gradients: set[int] = set()
        self.meet: Callable[[], None] = lambda: None
        self._alive: list[Tensor] = []  # So that no id is used twice.
        self.used = ""
        #: Numbers of modules that run now: of those with parts of parameters, and of those that contain such modules.
        self._running = {True: 0, False: 0}

    def move(self, has_parts: bool, step: int, *_: Any) -> None:
        """Begins (1) or ends (-1) a layer, which computes with parts, or a module that contains layers."""
        self._running[has_parts] += step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a torch function, with full tensors where a user's code uses parts of them."""
        kwargs, name, in_block = kwargs or {}, _name(func), self._running[False]
        sets_data = name == "__set__" and attribute_of(func) == "data"
        in_layer = self._running[True] or (in_block and self._is_tried)
        if in_layer or not (name in _ALIASES or sets_data or uses_values(func)):
            return func(*args, **kwargs)
        known = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._places]
        if not known or _is_own_code():
            return func(*args, **kwargs)
        if sets_data:
            part, value = args
            place = self._places[id(part)][1] if id(part) in self._places else None
            if place is not None and value.shape == place.full_shape(part.shape) != part.shape:
                value = place.slice_tensor(value)
            return func(part, value)
        if in_block:
            self._check_block(known)
            return func(*args, **kwargs)
        if name in _ALIASES:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self._add_alias(out, known[0], of_gradient=name == "grad")
            return out
        self._check(known)
        written = [leaf for leaf in tree_leaves(args[:1]) if id(leaf) in self._places] if _writes(name) else []
        full = {id(leaf): self._full(leaf, is_written=bool(written)) for leaf in known}
        args, kwargs = tree_map(lambda leaf: full.get(id(leaf), leaf), (args, kwargs))
        out = func(*args, **kwargs)
        for leaf in written:
            place, own = self._places[id(leaf)][1], full[id(leaf)]
            with torch.no_grad():
                is_weight = place is None and id(leaf) not in self._gradients
                leaf.copy_(own if is_weight else own_part(own, place, self._ranks))
        back = {id(full[id(leaf)]): leaf for leaf in written}
        return tree_map(lambda leaf: back.get(id(leaf), leaf), out) if back else out

    def _check_block(self, known: list[Tensor]) -> None:
        sliced = next((name for name, place in (self._places[id(leaf)] for leaf in known) if place is not None), None)
        if sliced is not None:
            raise DloError(
                f"a weight that ranks have slices of must be used by its own module, got '{sliced}' in the code of a"
                " module around it; give the task an example_batch, so that its tensor rules are tried on values, or"
                " remove the rule"
            )

    def _check(self, known: list[Tensor]) -> None:
        name = self._places[id(known[0])][0]
        if not self.used:
            self.used = name
            self.meet()
        if any(isinstance(leaf, DTensor) for leaf in known):
            raise DloError(
                f"code outside of the model's layers does not support dp_shard with tp: '{name}' is sharded along both"
                " axes; set gradient_clip_val to clip gradients, or use dp_replicate in place of dp_shard"
            )

    def _add_alias(self, alias: Tensor, of: Tensor, *, of_gradient: bool) -> None:
        name, place = self._places[id(of)]
        of_gradient = of_gradient or id(of) in self._gradients
        if of_gradient and place is None and self._is_summed():
            return
        self._places[id(alias)] = name, place
        self._alive.append(alias)
        if of_gradient:
            self._gradients.add(id(alias))

    def _full(self, part: Tensor, *, is_written: bool) -> Tensor:
        _, place = self._places[id(part)]
        if id(part) in self._gradients:
            return full_tensor(part, place, self._ranks)
        if is_written:
            return part.detach().clone() if place is None else full_tensor(part, place, self._ranks)

        def full(weight: Tensor) -> Tensor:
            return weight.clone() if place is None else full_tensor(weight, place, self._ranks)

        # The gradient of a full weight is the same on all ranks: each takes its part.
        return with_backward(part, full, lambda grad: own_part(grad, place, self._ranks))


def _name(function: Any) -> str:
    """Returns a function's name; that of the attribute that it reads."""
    name = function_name(function)
    return attribute_of(function) if name == "__get__" else name


def _writes(name: str) -> bool:
    """Returns whether a function of this name writes to its first argument."""
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_own_code() -> bool:
    """Returns whether dlo, Lightning or an optimizer calls a function, and not a user's code that they call."""
    frame, own, of_user = sys._getframe(2), own_packages(), False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if name in _USERS_FUNCTIONS:
            of_user = True
        elif package in own or package == "lightning":
            return not of_user
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        of_user = of_user or package != "torch"
        frame = frame.f_back  # type: ignore[assignment]
    return not of_user

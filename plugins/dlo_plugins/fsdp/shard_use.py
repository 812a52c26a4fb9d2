"""Detects sharded parameters that a step uses outside their unit's forward, and gathers them there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dlo_plugins.fsdp.gathered_copies import GatheredCopies
from dlo_plugins.sharding.outside_use import attribute_of, uses_values

#: In-place functions that draw numbers or look at other elements: shards would get other values than the full tensor.
_NOT_ELEMENTWISE = {"normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
_NOT_ELEMENTWISE |= {"random_", "renorm_", "cumsum_", "cumprod_", "sort_", "index_fill_", "scatter_", "set_"}


class ShardUse(TorchFunctionMode):
    """Replaces sharded parameters by their gathered copies in each function that uses values of them.

    Functions that write in place, element by element, to shards alone stay on shards: they need no gathering, as in the
    update of a momentum encoder. Only first steps are watched, as with
    :class:`~dlo_plugins.sharding.outside_use.OutsideUse`.

    Args:
        copies: Gathered copies of all sharded parameters.
        keep: Function that gathers copies, now and for each full step.
    """

    def __init__(self, copies: Iterable[GatheredCopies], keep: Callable[[GatheredCopies], None]) -> None:
        super().__init__()
        self._keep = keep
        self._homes = {id(p.sharded_param): (home, p) for home in copies for p in home.group.fsdp_params}
        self._aliases: dict[int, Tensor] = {}  # Results of ``data`` and ``detach`` by id, which stays theirs.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, with gathered copies in place of shards."""
        kwargs = kwargs or {}
        name, attribute = getattr(func, "__name__", ""), attribute_of(func)
        assigns_data = name == "__set__" and attribute == "data"
        if uses_values(func) or assigns_data:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            homes = [self._homes.get(id(leaf)) for leaf in tensors]
            if attribute == "data":
                self._note_data(tensors[0])
            if any(homes):
                are_shards = all(home is not None and not home[0].group.is_unsharded for home in homes)
                if are_shards and (name == "detach" or (attribute == "data" and not assigns_data)):
                    alias: Tensor = func(*args, **kwargs)
                    self._aliases[id(alias)], self._homes[id(alias)] = alias, self._homes[id(tensors[0])]
                    return alias
                in_place = name.endswith("_") and not name.endswith("__") and name not in _NOT_ELEMENTWISE
                if not (are_shards and in_place):
                    for home in homes:
                        if home is not None:
                            self._keep(home[0])
                    args, kwargs = tree_map(self._gathered, (args, kwargs))
        return func(*args, **kwargs)

    def _note_data(self, tensor: Tensor) -> None:
        """Notes that the code reads the ``data`` of a copy, or of a shard that a later step may have gathered."""
        if isinstance(tensor, nn.Parameter):
            for home, parameter in self._homes.values():
                if tensor is parameter.sharded_param or tensor is getattr(parameter, "_unsharded_param", None):
                    home.reads_data = True

    def _gathered(self, leaf: Any) -> Any:
        home = self._homes.get(id(leaf))
        if home is None:
            return leaf
        copy = home[1]._unsharded_param
        return copy.data if id(leaf) in self._aliases else copy

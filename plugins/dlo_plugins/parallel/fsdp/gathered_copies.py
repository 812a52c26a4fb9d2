"""Gathered copies of FSDP2: what a step's code uses of them, and what it writes to them.

FSDP2 gathers into parameters of its own, and frees them without a look at their values. A module that normalises a
weight in its forward, or a step that updates a momentum encoder, writes to these copies: :class:`GatheredCopies` stores
it in this rank's shards before they are freed. Each rank stores its own part, so all must write the same, which
:class:`WrittenValues` compares. :class:`ShardUse` gathers what a step uses outside of a unit's forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.stacks import own_line
from dlo_framework.errors import DloError, shown_names
from dlo_framework.local_memory import local_tensor
from dlo_framework.optimizers import copy_all
from dlo_plugins.parallel.fsdp.torch_fsdp import gathered_copy
from dlo_plugins.parallel.user_code import LowestMode, attribute_of, function_name, share_hooks, uses_values

#: In-place functions that draw numbers or look at other elements: shards would get other values than the full tensor.
_NOT_ELEMENTWISE = {"normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
_NOT_ELEMENTWISE |= {"random_", "renorm_", "cumsum_", "cumprod_", "sort_", "index_fill_", "scatter_", "set_"}
#: Difference of the sums of two ranks' values, relative to the values' norm, up to which they count as the same.
_TOLERANCE = 1e-5
#: Number of parts of a tensor that are summed.
_PARTS = 4
#: Added to a norm before it divides, as torch does.
_EPSILON = 1e-7


class GatheredCopies:
    """Gathered copies of the parameters of one FSDP2 parameter group.

    This rank's part of each copy is stored in the shard when the copy is freed, by one operation, whether or not it was
    written: a write through ``data`` raises no version counter. A shard that has been written to itself since it was
    gathered keeps its values. A copy in another dtype, or on another device, is compared instead.

    It replaces methods of the group, a reach into torch 2.11 to 2.15: ``FSDPParamGroup._to_unsharded``,
    ``_to_sharded`` and ``_to_sharded_post_forward``.

    Args:
        unit: Module that ``fully_shard`` was called with.
        group: Parameter group of the module, an ``FSDPParamGroup``.
        on_free: Function that is called with a shard, its copy, and whether a version counter shows that it was
            written, before they are freed.

    Attributes:
        keeps_writes: Whether what was written to copies is stored.
        reads_data: Whether the user's code reads the ``data`` of a copy in a step.
        reports_all: Whether ``on_free`` is called with all copies, not with those that were written alone.
        on_gather: Function that is called with each shard and its copy after they are gathered; None for none.
    """

    def __init__(self, unit: Any, group: Any, on_free: Callable[[nn.Parameter, nn.Parameter, bool], None]) -> None:
        self.unit, self.group, self.on_free = unit, group, on_free
        self.keeps_writes, self.reads_data, self.reports_all = True, False, False
        self.on_gather: Callable[[nn.Parameter, nn.Parameter], None] | None = None
        self._register, free, shrink = group._to_unsharded, group._to_sharded, group._to_sharded_post_forward
        group._to_unsharded = self._show
        group._to_sharded = lambda: self._free(free)
        group._to_sharded_post_forward = lambda: self._free(shrink)
        self._versions: list[tuple[int, int]] = []
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each shard with its copy, if they are gathered now."""
        for parameter in self.group.fsdp_params if self.group.is_unsharded else ():
            yield parameter.sharded_param, parameter._unsharded_param

    def keep(self) -> None:
        """Keeps the copies from their next gathering to the end of a step's backward, which then reduces gradients.

        Otherwise FSDP2 frees them after the module's forward, and reduces at the end of the module's own backward.
        """
        self.unit.set_reshard_after_forward(False, recurse=False)
        self.group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)

    def finish_backward(self) -> None:
        """Reduces the gradients of copies that no forward of a module has gathered, as FSDP2 does after a backward."""
        if self.group.is_unsharded:
            self.group.post_backward()
            self.group.finalize_backward()
            self.group._training_state = type(self.group._training_state).IDLE

    def _show(self) -> None:
        self._register()
        self._versions = []  # Few calls of Python functions: it runs for each parameter, twice a step.
        for parameter in self.group.fsdp_params:
            shard, copy = parameter.sharded_param, parameter._unsharded_param
            if shard._backward_hooks:
                share_hooks(shard, copy)
            if self.on_gather is not None:
                self.on_gather(shard, copy)
            version = -1 if copy.is_inference() else copy._version
            self._versions.append((version, shard._version + shard._local_tensor._version))

    @torch.no_grad()
    def _free(self, free: Callable[[], None]) -> None:
        if self.group.is_unsharded and self.keeps_writes:
            self._store_writes()
        free()

    def _store_writes(self) -> None:
        shards: list[Tensor] = []
        values: list[Tensor] = []
        was_written = False
        for parameter, (of_copy, of_shard) in zip(self.group.fsdp_params, self._versions, strict=True):
            copy, sharded = parameter._unsharded_param, parameter.sharded_param
            memory, known = parameter.all_gather_outputs[0], self._parts.get(id(parameter))
            if hasattr(sharded._local_tensor, "fsdp_post_all_gather"):
                continue  # A tensor of several others, of which the copy is computed.
            if copy.data_ptr() != memory.data_ptr():  # Assigned to ``data``, which raises no version counter either.
                copy.data = memory.data[: copy.numel()].view(copy.shape).copy_(copy)
            is_written = not copy.is_inference() and copy._version != of_copy
            was_written |= is_written
            if is_written or self.reports_all:
                self.on_free(sharded, copy, is_written)
            if known is None or known[0] is not parameter._sharded_param_data:
                known = self._find_part(parameter)
            _, shard, own = known
            # An operation on a DTensor does not count for its local tensor.
            if sharded._version + sharded._local_tensor._version != of_shard:
                continue
            if (own.dtype, own.device) == (shard.dtype, shard.device):
                shards.append(shard)
                values.append(own)
            elif is_written or self.reads_data:
                self._store(parameter, own.to(shard.device), shard)
        if shards:
            copy_all(shards, values)
        if was_written:  # The streams of the next all-gathers must see it.
            event = self.group.device_handle.Event()
            event.record()
            streams = self.group.comm_ctx
            for stream in (streams.all_gather_copy_in_stream, streams.all_gather_stream):
                stream.wait_event(event)

    def _find_part(self, parameter: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the memory of an ``FSDPParam``, this rank's shard in it, and its part of the copy."""
        shard, dim = local_tensor(parameter.sharded_param), parameter.fsdp_placement.dim
        start = parameter.mesh_info.shard_mesh_rank * parameter.padded_sharded_param_size[dim]
        copy = parameter._unsharded_param.detach()
        own = copy.narrow(dim, min(start, copy.shape[dim]), shard.shape[dim])
        self._parts[id(parameter)] = known = (parameter._sharded_param_data, shard, own)
        return known

    @staticmethod
    def _store(parameter: Any, own: Tensor, shard: Tensor) -> None:
        """Stores a part that may have been written, in the dtype in which it was gathered.

        Raises:
            DloError: It was written, and the dtype is not the shard's.
        """
        if torch.equal(own, shard.to(own.dtype)):
            return
        if own.dtype != shard.dtype:
            raise DloError(
                "parameters under FSDP must be gathered in their own dtype to be written in a step, got"
                f" {parameter._param_fqn} written in {str(own.dtype).removeprefix('torch.')}; set param_dtype: float32,"
                " or write it between steps"
            )
        shard.copy_(own)


class ShardUse(TorchFunctionMode):
    """Replaces sharded parameters by their gathered copies in each function that uses values of them.

    Functions that write in place, element by element, to shards alone stay on shards: they need no gathering, as in the
    update of a momentum encoder. Only first steps are watched, as with
    :class:`~dlo_plugins.parallel.user_code.OutsideUse`.

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
        name, attribute = function_name(func), attribute_of(func)
        assigns_data = name == "__set__" and attribute == "data"
        if uses_values(func) or assigns_data:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            homes = [self._homes.get(id(leaf)) for leaf in tensors]
            if attribute == "data":
                self._note_data(tensors[0])
            if any(homes):
                are_shards = all(
                    isinstance(leaf, DTensor) and (home is None or not home[0].group.is_unsharded)
                    for leaf, home in zip(tensors, homes, strict=True)
                )
                if are_shards and (name == "detach" or (attribute == "data" and not assigns_data)):
                    alias: Tensor = func(*args, **kwargs)
                    self._aliases[id(alias)], self._homes[id(alias)] = alias, self._homes[id(tensors[0])]
                    return alias
                in_place = name.endswith("_") and not name.endswith("__") and name not in _NOT_ELEMENTWISE
                # Beside a shard of the user's own, such as a gradient's, the operation is one on shards.
                on_shards = in_place or (not all(homes) and not torch.is_grad_enabled())
                if not (are_shards and on_shards):
                    for home in homes:
                        if home is not None:
                            self._keep(home[0])
                    args, kwargs = tree_map(self._gathered, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "RegisterPostBackwardFunction" not in str(error):  # FSDP2's view of a unit's inputs (2.11 to 2.15).
                raise
            raise DloError(
                "a module that FSDP gathers must not write to its inputs in place, got"
                f" {name} ({own_line(sys._getframe())}); use x = x * scale for x.mul_(scale), for example, or strategy"
                " zero1, zero2 or zero3"
            ) from error

    def _note_data(self, tensor: Tensor) -> None:
        """Notes that the code reads the ``data`` of a copy, or of a shard that a later step may have gathered."""
        if isinstance(tensor, nn.Parameter):
            for home, parameter in self._homes.values():
                if tensor is parameter.sharded_param or tensor is gathered_copy(parameter):
                    home.reads_data = True

    def _gathered(self, leaf: Any) -> Any:
        home = self._homes.get(id(leaf))
        if home is None:
            return leaf
        copy = home[1]._unsharded_param
        return copy.data if id(leaf) in self._aliases else copy


class ShardsInHooks(LowestMode):
    """Makes code outside of steps work on shards where it would not be one of full tensors.

    What is assigned to the ``data`` of a shard is written to its memory, which FSDP2 keeps; it would be lost otherwise.
    Numbers of shards that ``torch.tensor`` joins, as Lightning's ``grad_norm`` does, are those of full tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, with full tensors where it needs them."""
        sets_data = attribute_of(func) == "data" and func.__name__ == "__set__"
        if sets_data and isinstance(args[0], DTensor):
            with torch.no_grad():
                args[0].copy_(args[1])
            return None
        if func is torch.tensor and isinstance(args[0], list):
            args = ([one.full_tensor() if isinstance(one, DTensor) else one for one in args[0]], *args[1:])
        return func(*args, **(kwargs or {}))


class WrittenValues:
    """Sums of the values that a rank's full parameters have at the end of their use, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have been added."""
        return list(self._sums)

    @torch.no_grad()
    def add(self, name: str, full: Tensor) -> None:
        """Adds a parameter, or replaces its sums.

        Args:
            name: Name of the parameter.
            full: Full tensor.
        """
        if full.is_floating_point() and full.numel():
            flat = full.detach().reshape(-1)
            parts = [part.sum(dtype=torch.float64) for part in flat.chunk(_PARTS)]
            parts += [torch.zeros_like(parts[0])] * (_PARTS - len(parts))
            self._sums[name] = torch.stack([*parts, torch.linalg.vector_norm(flat).double()])

    def check(self, ranks: Communicator) -> None:
        """Compares the sums with those of other ranks, and drops them; a collective call.

        Args:
            ranks: Communicator of the ranks that must have the same values.

        Raises:
            DloError: A parameter has other values on another rank.
        """
        names, sums = self.names, list(self._sums.values())
        self._sums.clear()
        if not names or ranks.size == 1:
            return
        own = torch.stack(sums)  # [parameters, parts + 1]
        highest, lowest = ranks.maximum(own.clone()), -ranks.maximum(-own)
        differs = ((highest - lowest) > _TOLERANCE * highest[:, -1:]).any(1)
        differing = [name for name, one in zip(names, differs.tolist(), strict=True) if one]
        if differing:
            raise DloError(
                "what a step writes to sharded parameters must be the same on all ranks, got other values on each for"
                f" {shown_names(differing)}; compute it from what all ranks have, such as a mean by self.all_gather or"
                " torch.distributed.all_reduce, or write it before the run"
            )


def bound_rows_alike(module: nn.Module, ranks: Communicator) -> None:
    """Makes embeddings with ``max_norm`` bound the rows that any rank's inputs use, before each forward.

    torch bounds those of the rank's own inputs, so that ranks would write other values to one table.

    Args:
        module: Module with such embeddings, whose forwards all ranks call alike.
        ranks: Communicator of the ranks that share the tables, and have other inputs.
    """

    def bound(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = args[0] if args else kwargs["input"]
        used = torch.zeros(table.num_embeddings, dtype=torch.uint8, device=indices.device)
        used[indices.reshape(-1)] = 1
        bound_rows(table.weight, ranks.maximum(used).bool(), table.max_norm, table.norm_type)

    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            part.register_forward_pre_hook(bound, with_kwargs=True)


@torch.no_grad()
def bound_rows(weight: Tensor, used: Tensor, max_norm: float, norm_type: float) -> None:
    """Scales the rows that are used down to a norm, in place, as ``torch.embedding_renorm_`` does.

    Args:
        weight: Table [rows, features].
        used: Whether each row is used [rows].
        max_norm: Largest norm.
        norm_type: Order of the norm.
    """
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scales = torch.where(used & (norms > max_norm), max_norm / (norms + _EPSILON), 1.0)
    weight.mul_(scales.to(weight.dtype).unsqueeze(1))

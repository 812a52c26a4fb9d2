"""Gathered copies of FSDP2: what a step writes to them is stored in this rank's shards before they are freed.

FSDP2 gathers into parameters of its own, and frees them without a look at their values. A module that normalises a
weight in its forward, or a step that updates a momentum encoder, writes to these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dlo_framework.distributed.local_memory import local_tensor
from dlo_framework.errors import DloError
from dlo_plugins.fsdp.step_state import own_groups
from dlo_plugins.sharding.parameter_hooks import share_hooks


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
            torch._foreach_copy_(shards, values)
        if was_written:  # The streams of the next all-gathers must see it.
            event = self.group.device_handle.Event()
            event.record()
            self.group._wait_all_gather_streams_on_event(event)

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


def gathered_copies(
    unit: FSDPModule, on_free: Callable[[nn.Parameter, nn.Parameter, bool], None]
) -> list[GatheredCopies]:
    """Returns the gathered copies of a module that ``fully_shard`` was called with."""
    return [GatheredCopies(unit, group, on_free) for group in own_groups(unit._get_fsdp_state())]

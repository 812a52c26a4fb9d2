"""Master weights of parameters that each rank has in full: this rank's rows, which optimizers step.

A schedule with two versions of the weights uses full parameters all the time, so that FSDP2 cannot gather them for a
use. The rows take the part of FSDP2's shards: they have the parameters' own dtype, and may be in CPU memory, while the
model computes with copies in another dtype. Gradients are added up in the own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.shards import FlatShard
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.fsdp.row_shards import RowGroup, row_range
from dlo_plugins.sharding.flat_slices import FlatSlice
from dlo_plugins.sharding.optimizer_shards import concat


class MasterRowGroup(RowGroup):
    """Parameters whose rows of this rank are copies, of one dtype and in one memory.

    Args:
        named: Full parameters by name.
        communicator: Communicator of the ranks that share the rows.
        device: Device that computes.
        masters: Rows of this rank by name.
    """

    has_master_weights = True

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        communicator: Communicator,
        device: torch.device,
        masters: Mapping[str, FlatShard],
    ) -> None:
        self._masters = [masters[name] for name in named]
        super().__init__(named, communicator, device)
        self.dtype, self.step_device = self._masters[0].dtype, self._masters[0].device

    def _piece(self, piece: FlatSlice) -> FlatShard:
        return self._masters[piece.parameter]

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece, where the optimizer steps; empty where there is none."""
        return [gradient.to(self.step_device, self.dtype) for gradient in super().piece_gradients()]

    def _sent_rows(self) -> Tensor:
        rows = concat(self._values(), self.dtype, self.step_device)
        return rows.to(self.device, self.parameters[0].dtype)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Writes a flat copy back to the rows, and all ranks' rows to the parameters."""
        if self._buffer is not None:
            for piece, values in zip(self._held, self._values(), strict=True):
                values.copy_(self._buffer[piece.offset : piece.offset + piece.length])
            self._buffer = None
        self._all_gather_rows()


class MasterRows:
    """Master weights of a module's parameters.

    Args:
        step_device: Device of the rows, where optimizers step.
        param_dtype: Dtype with which the model computes; None for the parameters' own.

    Attributes:
        shards: Rows of this rank by parameter name; empty ones where it has none.
    """

    def __init__(self, step_device: torch.device, param_dtype: torch.dtype | None) -> None:
        self._step_device, self._param_dtype = step_device, param_dtype
        self.shards: dict[str, FlatShard] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._sharers: dict[str, Communicator] = {}

    def add(self, named: Mapping[str, nn.Parameter], sharers: Communicator) -> None:
        """Copies this rank's rows of parameters, and casts the parameters; those that have rows are left alone.

        Args:
            named: Full parameters by name.
            sharers: Communicator of the ranks that share their rows.
        """
        for name, parameter in named.items():
            if name in self.shards or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            start, length = row_range(parameter.shape, sharers.size, sharers.rank)
            rows = parameter.detach().reshape(-1)[start : start + length]
            self.shards[name] = FlatShard(rows.to(self._step_device, copy=True), parameter.shape, start)
            self._parameters[name], self._sharers[name] = parameter, sharers
            own = parameter.dtype
            if self._param_dtype not in (None, own) and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._param_dtype)
                if parameter.requires_grad:
                    parameter.grad_dtype = own

    def groups(self, named: Mapping[str, nn.Parameter], device: torch.device) -> list[MasterRowGroup]:
        """Returns parameters as one group per dtype and ranks that share rows.

        Args:
            named: Parameters by name; those without rows are left out.
            device: Device that computes.
        """
        alike: dict[tuple[torch.dtype, int], dict[str, nn.Parameter]] = {}
        for name, parameter in named.items():
            if name in self.shards:
                alike.setdefault((self.shards[name].dtype, id(self._sharers[name])), {})[name] = parameter
        return [MasterRowGroup(same, self._sharers[next(iter(same))], device, self.shards) for same in alike.values()]

    def all_gather(self, device: torch.device) -> None:
        """Writes all ranks' rows to the parameters, after the rows were written from outside; a collective call."""
        for group in self.groups(self._parameters, device):
            group.all_gather_params()

    def of_state(self, module: nn.Module) -> Iterator[tuple[str, FlatShard]]:
        """Yields the names in a module's ``state_dict`` that have rows, tied ones too, and the rows."""
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) in first:
                yield plain_name(name), self.shards[first[id(value)]]


def like_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros in the shape and dtype of a parameter's gradient."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype, requires_grad=False)

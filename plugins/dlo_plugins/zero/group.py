"""A flat group: parameters that are partitioned, gathered and reduced together.

The parameters of a group are views of one flat buffer, the *whole*; this rank owns one segment of it, the *shard*.
In stages 1 and 2 the whole stays, and the shard is a view of it. In stage 3 the shard has memory of its own, and the
whole's is given back when nobody needs it: the parameters keep their shapes, and autograd's references to them stay
valid, since the same storage is filled again.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from dlo_framework.checkpoint import FlatShard
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.errors import DloError
from dlo_plugins.zero.partition import FlatPartition


class FlatGroup:
    """Parameters of one dtype in a flat buffer.

    Args:
        named: the parameters by name; their data move into the buffer.
        communicator: the ranks that share them.
        device: where they compute.
        keep_whole: whether each rank keeps all of them (stages 1 and 2).
        home: where the shard lives: ``device``, or the CPU where parameters or optimizer are offloaded.

    Attributes:
        shard: this rank's segment, on ``home``.
        pieces: this rank's run of each parameter it owns any of, views of the shard; what optimizers step.
        gradient: this rank's segment of the gradients' mean, on ``home``; None before the first reduction.
        partition: who owns what.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        communicator: Communicator,
        device: torch.device,
        *,
        keep_whole: bool,
        home: torch.device,
    ) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device, self.keep_whole, self.home = communicator, device, keep_whole, home
        self.partition = FlatPartition(tuple(p.numel() for p in self.parameters), communicator.size)
        self.dtype = self.parameters[0].dtype
        self.trains = self.parameters[0].requires_grad
        self.gradient: Tensor | None = None
        self._landing: list[Tensor] = []
        self._gathering: Pending | None = None
        self._side = side_stream(device) if device.type == "cuda" and home != device else None
        self._move_in()
        owned = self.partition.pieces(communicator.rank)
        self.pieces = [
            FlatShard(
                self.shard[piece.offset : piece.offset + piece.length].detach(),
                self.parameters[piece.parameter].shape,
                piece.start,
            )
            for piece in owned
        ]
        self.owned = [piece.parameter for piece in owned]

    @torch.no_grad()
    def _move_in(self) -> None:
        """Makes the parameters views of the buffer, with the first rank's values on all ranks."""
        self.whole = torch.zeros(self.partition.padded, dtype=self.dtype, device=self.device)
        self._bytes = self.whole.untyped_storage().nbytes()
        for name, parameter, view in zip(self.names, self.parameters, self.views(self.whole), strict=True):
            if parameter.is_meta:
                raise DloError(
                    f"ZeRO divides parameters that have values, but {name} is on the meta device; set meta_init: true"
                    " of ZeroStrategy, or build the module with its weights"
                )
            view.copy_(parameter.data)
            parameter.data = view
        if self.communicator.size > 1:
            self.communicator.broadcast(self.whole)
        own = self.communicator.segment(self.whole)
        shares = self.keep_whole and self.home == self.device
        self.shard = own if shares else _resting(own, self.home)
        if not self.keep_whole:
            self.free()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the parameters' places in a buffer of the whole's length, in their shapes."""
        starts = self.partition.starts
        return [
            buffer[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, self.parameters, strict=False)
        ]

    # --- parameters ----------------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the whole has its memory, or is getting it."""
        return self.whole.untyped_storage().nbytes() > 0

    def start_gather(self) -> None:
        """Starts filling the whole from all ranks' shards, unless it is there."""
        if self.gathered:
            return
        self.whole.untyped_storage().resize_(self._bytes)
        self._publish()

    def finish_gather(self) -> None:
        """Waits until the parameters can be used."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)

    def free(self) -> None:
        """Gives the whole's memory back; the parameters hold nothing until the next gather."""
        assert not self.keep_whole
        if self._gathering is not None:
            self.finish_gather()  # Nobody used it, but it must not write to memory that is gone.
        self.whole.untyped_storage().resize_(0)

    def publish(self) -> None:
        """Starts sending the shard's new values to all ranks' wholes; :meth:`finish_gather` waits for them.

        A gather under way is waited for: dropped, it could leave another rank without what it waits for.
        """
        if self.gathered:
            self.finish_gather()
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        own = self.communicator.segment(self.whole)
        if self._side is None:
            if own.data_ptr() != self.shard.data_ptr():
                own.copy_(self.shard)
            self._gathering = self.communicator.all_gather(self.whole)
            return
        # Beside the computation: the next unit's parameters come up from the CPU while this one computes.
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            own.copy_(self.shard, non_blocking=True)
            self._gathering = self.communicator.all_gather(self.whole)

    # --- gradients -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_gradient(self, segment: Tensor) -> None:
        """Adds a reduced segment to the gradient shard; :meth:`finish_gradient` completes it."""
        if self._side is None:
            if self.gradient is None:
                self.gradient = segment.clone()
            else:
                self.gradient.add_(segment)
            return
        # Beside the computation: backward goes on while the segment goes down to the CPU.
        landed = torch.empty(segment.shape, dtype=segment.dtype, pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            landed.copy_(segment, non_blocking=True)
        segment.record_stream(self._side)
        self._landing.append(landed)

    @torch.no_grad()
    def finish_gradient(self) -> None:
        """Waits until what was taken is in the gradient shard."""
        if self._side is None or not self._landing:
            return
        self._side.synchronize()
        for landed in self._landing:
            if self.gradient is None:
                self.gradient = landed
            else:
                self.gradient.add_(landed)
        self._landing.clear()

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece, views of the gradient shard."""
        assert self.gradient is not None
        owned = self.partition.pieces(self.communicator.rank)
        return [self.gradient[piece.offset : piece.offset + piece.length] for piece in owned]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which a device's copies to and from the CPU run."""
    return torch.cuda.Stream(device)


def _resting(segment: Tensor, home: torch.device) -> Tensor:
    """Returns a copy of a segment where it is to live; pinned where that is the memory beside an accelerator."""
    if home.type == "cpu" and segment.device.type == "cuda":
        copy = torch.empty(segment.shape, dtype=segment.dtype, pin_memory=True)
        return copy.copy_(segment)
    return segment.to(home, copy=True)

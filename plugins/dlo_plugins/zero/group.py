"""A flat group: parameters that are partitioned, gathered and reduced together.

The parameters of a group are views of one flat buffer, the *whole*; this rank owns one segment of it, the *shard*.
In stages 1 and 2 the whole stays, and the shard is a view of it. In stage 3 the shard has memory of its own, and the
whole's is given back when nobody needs it: the parameters keep their shapes, and autograd's references to them stay
valid, since the same storage is filled again. Meanwhile the parameters themselves read as NaN, and cannot be written:
to read memory that is gone ends the process.

In stage 3 the shard may rest in other memory than the step is taken in. Then the step has a copy of it, which stays
where that is the CPU's memory, and is there for the step alone where it is the device's.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from dlo_framework.checkpoint import FlatShard
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.errors import DloError
from dlo_plugins.zero.partition import FlatPartition

#: In bytes: where matrices begin that tensor cores take, and what vector instructions read at once.
_ALIGNMENT = 16


class FlatGroup:
    """Parameters of one dtype in a flat buffer.

    Args:
        named: the parameters by name; their data move into the buffer.
        communicator: the ranks that share them.
        device: where they compute.
        keep_whole: whether each rank keeps all of them (stages 1 and 2).
        home: where the step is taken, with gradients and optimizer state: ``device``, or the CPU where the optimizer is
            offloaded.
        rests: where the shard lives: ``home`` by default and in stages 1 and 2; the CPU where parameters are offloaded.

    Attributes:
        shard: this rank's segment, on ``rests``.
        pieces: this rank's run of each parameter it owns any of, views of the shard.
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
        rests: torch.device | None = None,
    ) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device, self.keep_whole = communicator, device, keep_whole
        self.home, self.rests = home, rests or home
        assert self.rests == home or not keep_whole
        self.dtype = self.parameters[0].dtype
        numels = tuple(p.numel() for p in self.parameters)
        self.partition = FlatPartition(numels, communicator.size, align=max(1, _ALIGNMENT // self.dtype.itemsize))
        self.trains = self.parameters[0].requires_grad
        self.gradient: Tensor | None = None
        self._landing: list[Tensor] = []
        self._gathering: Pending | None = None
        beside = side_stream(device) if device.type == "cuda" else None
        self._upward = beside if self.rests != device else None
        self._downward = beside if home != device else None
        self._move_in()
        self._stepped: Tensor | None = None
        self._current = False  # whether what is stepped has the shard's values
        self.pieces = self._cut(self.shard)
        self.owned = [piece.parameter for piece in self.partition.pieces(communicator.rank)]

    @torch.no_grad()
    def _move_in(self) -> None:
        """Makes the parameters views of the buffer, with the first rank's values on all ranks."""
        self.whole = torch.zeros(self.partition.padded, dtype=self.dtype, device=self.device)
        self._bytes = self.whole.untyped_storage().nbytes()
        self._places = self.views(self.whole)
        for name, parameter, view in zip(self.names, self.parameters, self._places, strict=True):
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
        nothing = _placeholder(self.dtype, self.device)
        self._placeholders = [nothing.expand(parameter.shape) for parameter in self.parameters]
        shares = self.keep_whole and self.home == self.device
        self.shard = own if shares else _resting(own, self.rests)
        if not self.keep_whole:
            self.free()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the parameters' places in a buffer of the whole's length, in their shapes."""
        places = zip(self.partition.places, self.parameters, strict=True)
        return [buffer[start:end].view(parameter.shape) for (start, end), parameter in places]

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
        self._point_to(self._places)
        self._publish()

    def finish_gather(self) -> None:
        """Waits until the parameters can be used."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._upward is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._upward)

    def free(self) -> None:
        """Gives the whole's memory back; the parameters have no values until the next gather."""
        assert not self.keep_whole
        if self._gathering is not None:
            self.finish_gather()  # Nobody used it, but it must not write to memory that is gone.
        self.whole.untyped_storage().resize_(0)
        self._point_to(self._placeholders)

    def _point_to(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

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
        if self._upward is None:
            if own.data_ptr() != self.shard.data_ptr():
                own.copy_(self.shard)
            self._gathering = self.communicator.all_gather(self.whole)
            return
        # Beside the computation: the next unit's parameters come up from the CPU while this one computes.
        self._upward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._upward):
            own.copy_(self.shard, non_blocking=True)
            self._gathering = self.communicator.all_gather(self.whole)

    # --- the step ------------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether what is stepped is a copy of the shard."""
        return self.home != self.rests

    def _cut(self, segment: Tensor) -> list[FlatShard]:
        """Returns this rank's run of each parameter that it owns any of, views of its segment."""
        return [
            FlatShard(
                segment[piece.offset : piece.offset + piece.length].detach(),
                self.parameters[piece.parameter].shape,
                piece.start,
            )
            for piece in self.partition.pieces(self.communicator.rank)
        ]

    def stepped_pieces(self) -> list[FlatShard]:
        """Returns what optimizers step, on ``home``: the pieces, or those of a copy, filled by :meth:`bring`."""
        if not self.apart:
            return self.pieces
        self._stepped = _resting(self.shard, self.home)
        found = self._cut(self._stepped)
        self._put_away()
        return found

    @torch.no_grad()
    def bring(self) -> None:
        """Gives what is stepped the shard's values, before a step."""
        if self._stepped is not None and not self._current:
            self._stepped.untyped_storage().resize_(self._stepped.nbytes)
            self._stepped.copy_(self.shard)
            self._current = True

    @torch.no_grad()
    def take_step(self) -> None:
        """Gives the shard what has been stepped."""
        if self._stepped is not None and self._current:
            self.shard.copy_(self._stepped)
            self._put_away()

    def _put_away(self) -> None:
        """Gives the memory of the copy back, if it is the device's."""
        assert self._stepped is not None
        if self.home == self.device:
            self._stepped.untyped_storage().resize_(0)
            self._current = False
        else:
            self._current = True

    def written(self) -> None:
        """Called when the shard has been written to from outside."""
        self._current = False

    @property
    def copied(self) -> int:
        """The bytes of the copy that is stepped."""
        return 0 if self._stepped is None else self._stepped.untyped_storage().nbytes()

    # --- gradients -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_gradient(self, segment: Tensor) -> None:
        """Adds a reduced segment to the gradient shard; :meth:`finish_gradient` completes it."""
        if self._downward is None:
            if self.gradient is None:
                self.gradient = segment.to(self.home, copy=True)
            else:
                self.gradient.add_(segment)
            return
        # Beside the computation: backward goes on while the segment goes down to the CPU.
        landed = torch.empty(segment.shape, dtype=segment.dtype, pin_memory=True)
        self._downward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._downward):
            landed.copy_(segment, non_blocking=True)
        segment.record_stream(self._downward)
        self._landing.append(landed)

    @torch.no_grad()
    def finish_gradient(self) -> None:
        """Waits until what was taken is in the gradient shard."""
        if self._downward is None or not self._landing:
            return
        self._downward.synchronize()
        for landed in self._landing:
            if self.gradient is None:
                self.gradient = landed
            else:
                self.gradient.add_(landed)
        self._landing.clear()

    def drop_gradient(self) -> None:
        """Forgets the gradient, what is on its way included."""
        self.gradient = None
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


def _placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what a parameter without memory reads as: NaN; of integers, which have none, the least."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), math.nan, dtype=dtype, device=device)
    return torch.full((), False if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


def _resting(segment: Tensor, home: torch.device) -> Tensor:
    """Returns a copy of a segment where it is to live; pinned where that is the memory beside an accelerator."""
    if home.type == "cpu" and segment.device.type == "cuda":
        copy = torch.empty(segment.shape, dtype=segment.dtype, pin_memory=True)
        return copy.copy_(segment)
    return segment.to(home, copy=True)

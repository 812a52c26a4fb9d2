"""A flat group: parameters that are partitioned, gathered and reduced together.

The parameters of a group are views of one flat buffer, the *whole*; this rank owns one segment of it, the *shard*.
In stages 1 and 2 the whole stays, and the shard is a view of it. In stage 3 the shard has memory of its own, and the
whole's is given back when nobody needs it: the parameters keep their shapes, and autograd's references to them stay
valid, since the same storage is filled again. Meanwhile the parameters themselves read as NaN, and cannot be written:
to read memory that is gone ends the process.

In stage 3 the shard may rest in other memory than the step is taken in. Then the step has a copy of it, which stays
where that is the CPU's memory, and is there for the step alone where it is the device's.

The whole may be in half precision. Then the shard holds master weights in single precision, in all stages with memory
of its own, gradients come in half precision, and are summed and kept in single precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dlo_framework.checkpoint import FlatShard
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.errors import DloError
from dlo_plugins.copy_streams import Copied, copy_streams, host_tensor
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
        gathered_dtype: what the whole is in; by default the parameters' dtype.
        reduced_dtype: what gradients are summed in; by default the parameters' dtype.

    Attributes:
        dtype: the shard's, the gradient shard's and the optimizer's: the one that the parameters had.
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
        gathered_dtype: torch.dtype | None = None,
        reduced_dtype: torch.dtype | None = None,
    ) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device, self.keep_whole = communicator, device, keep_whole
        self.home, self.rests = home, rests or home
        assert self.rests == home or not keep_whole
        self.dtype = self.parameters[0].dtype
        numels = tuple(p.numel() for p in self.parameters)
        self.gathered_dtype, self.reduced_dtype = gathered_dtype or self.dtype, reduced_dtype or self.dtype
        #: Whether the shard is a copy in another precision than the parameters.
        self.has_masters = self.gathered_dtype != self.dtype
        smallest = min(dtype.itemsize for dtype in (self.dtype, self.gathered_dtype, self.reduced_dtype))
        self.partition = FlatPartition(numels, communicator.size, align=max(1, _ALIGNMENT // smallest))
        self._shapes = [parameter.shape for parameter in self.parameters]
        self.trains = self.parameters[0].requires_grad
        self.gradient: Tensor | None = None
        self._landing: list[tuple[Tensor, Copied]] = []
        self._gathering: Pending | None = None
        self._hidden = False  # whether the parameters read as NaN until a gather has ended
        self._copies = copy_streams(device)
        self._from_shard: Copied | None = None  # the last copy up from the shard or from what is stepped
        self._to_shard: Copied | None = None  # the last copy of what has been stepped to the shard
        self._move_in()
        self._stepped: Tensor | None = None
        self._current = False  # whether what is stepped has the shard's values
        self.pieces = self._cut(self.shard)
        runs = self.partition.pieces(communicator.rank)
        self.owned = [piece.parameter for piece in runs]
        self._runs = [(piece.offset, piece.offset + piece.length) for piece in runs]

    @torch.no_grad()
    def _move_in(self) -> None:
        """Makes the parameters views of the buffer, with the first rank's values on all ranks."""
        self.whole = full = torch.zeros(self.partition.padded, dtype=self.dtype, device=self.device)
        self._places = self.views(full)
        for name, parameter, view in zip(self.names, self.parameters, self._places, strict=True):
            if parameter.is_meta:
                raise DloError(
                    f"ZeRO divides parameters that have values, but {name} is on the meta device; set meta_init: true"
                    " of ZeroStrategy, or build the module with its weights"
                )
            view.copy_(parameter.data)
            parameter.data = view
        if self.communicator.size > 1:
            self.communicator.broadcast(full)
        own = self.communicator.segment(full)
        nothing = _placeholder(self.gathered_dtype, self.device)
        self._placeholders = [nothing.expand(parameter.shape) for parameter in self.parameters]
        self.shard = own if self.shares_memory else _resting(own, self.rests)
        if self.has_masters:
            self.whole = full.to(self.gathered_dtype)
            self._places = self.views(self.whole)
            self._point_to(self._places)
        self._bytes = self.whole.untyped_storage().nbytes()
        self._staged: Tensor | None = None  # the shard as it is gathered, where it rests in the CPU's memory
        self._is_staged = False
        if not self.keep_whole:
            self.free()

    @property
    def shares_memory(self) -> bool:
        """Whether the shard is a view of the whole."""
        return self.keep_whole and self.home == self.device and not self.has_masters

    @torch.no_grad()
    def dissolve(self) -> None:
        """Gives the parameters memory of their own, and the shards' values; called on all ranks."""
        full = self.whole
        if self.has_masters:
            self.finish_copies()
            full = torch.empty(self.partition.padded, dtype=self.dtype, device=self.device)
            self.communicator.segment(full).copy_(self.shard)
            self.communicator.all_gather(full).wait()
        else:
            self.finish_gather()
        for parameter, view in zip(self.parameters, self.views(full), strict=True):
            parameter.data = view.clone()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the parameters' places in a buffer of the whole's length, in their shapes."""
        return self.cut(buffer)[0]

    def cut(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parameters' places in a buffer of the whole's length, in their shapes, and the gaps between."""
        chunks = buffer.split_with_sizes(self.partition.lengths)
        places = [chunks[n].view(shape) for n, shape in zip(self.partition.filled, self._shapes, strict=True)]
        return places, [chunks[n] for n in self.partition.padding]

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
        if self._gathering is None and self.keep_whole:
            return
        self.start_gather()
        if self._gathering is not None:
            if self._from_shard is not None:
                self._from_shard.wait()
            self._gathering.wait()
            self._gathering = None
        if self._hidden:
            self._point_to(self._places)
            self._hidden = False

    def hide(self) -> None:
        """Has the parameters read as NaN until :meth:`finish_gather`: what is read sooner may be of the step before."""
        if self._gathering is not None and self.communicator.size > 1:
            self._point_to(self._placeholders)
            self._hidden = True

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
        self._is_staged = False
        if self.gathered:
            self.finish_gather()
            self._publish()

    def _publish(self) -> None:
        own = self.communicator.segment(self.whole)
        sent = self.shard if self.rests == self.device else self._to_send()
        if self._to_shard is not None:
            self._to_shard.wait()
            self._to_shard = None
        if self.rests == self.device:
            if not self.shares_memory:
                own.copy_(sent)
            self._gathering = self.communicator.all_gather(self.whole)
            return
        # Beside the computation: the next unit's parameters come up from the CPU while this one computes.
        self._from_shard = self._copies.up.copy(own, sent)
        with self._from_shard.followed():
            self._gathering = self.communicator.all_gather(self.whole)

    def _to_send(self) -> Tensor:
        """Returns the shard in the dtype that is gathered: of two dtypes a copy to a device would wait for the host."""
        if not self.has_masters:
            return self.shard
        if self._staged is None:
            self._staged = host_tensor(self.shard.to(self.gathered_dtype), self.device)
        if not self._is_staged:
            self.finish_copies()
            self._staged.copy_(self.shard)
            self._is_staged = True
        return self._staged

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
        """Gives what is stepped the shard's values, before a step.

        What the CPU steps may still be on its way to the device from the last step, long as that is ago.
        """
        if self.home != self.device and self._from_shard is not None:
            self._from_shard.synchronize()
            self._from_shard = None
        if self._stepped is not None and not self._current:
            self._stepped.untyped_storage().resize_(self._stepped.nbytes)
            if self.home == self.device:
                if self._to_shard is not None:
                    self._to_shard.wait()
                self._from_shard = self._copies.up.copy(self._stepped, self.shard)
                self._from_shard.wait()
            else:
                self._copies.down.copy(self._stepped, self.shard).synchronize()
            self._current = True

    @torch.no_grad()
    def take_step(self) -> None:
        """Gives the shard what has been stepped; a copy of it is on its way when this returns."""
        self._is_staged = False
        if self._stepped is not None and self._current:
            if self.home == self.device:
                self._to_shard = self._copies.down.copy(self.shard, self._stepped)
            else:
                self._from_shard = self._to_shard = self._copies.up.copy(self.shard, self._stepped)
            self._put_away()

    def finish_copies(self) -> None:
        """Has the host wait for the copies from and to the shard: others may read and write it then."""
        for copied in (self._from_shard, self._to_shard):
            if copied is not None:
                copied.synchronize()
        self._from_shard = self._to_shard = None

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
        self._current = self._is_staged = False

    @property
    def copied(self) -> int:
        """The bytes of the copy that is stepped."""
        return 0 if self._stepped is None else self._stepped.untyped_storage().nbytes()

    # --- gradients -----------------------------------------------------------------------------------------

    def take_gradient(self, segment: Tensor) -> Copied | None:
        """Adds a reduced segment to the gradient shard; :meth:`finish_gradient` completes it.

        Returns:
            The copy that reads the segment's memory, which is not written before it has been waited for; None where
            nothing reads it any more.
        """
        if self.home == self.device:
            if self.gradient is None:
                self.gradient = segment.to(self.home, self.dtype, copy=True)
            else:
                self.gradient.add_(segment)
            return None
        # Beside the computation: backward goes on while the segment goes down to the CPU.
        landed = host_tensor(segment, self.device)
        copied = self._copies.down.copy(landed, segment)
        self._landing.append((landed, copied))
        return copied

    def finish_gradient(self) -> None:
        """Waits until what was taken is in the gradient shard."""
        for landed, copied in self._landing:
            copied.synchronize()
            if self.gradient is None:
                self.gradient = landed.to(self.dtype)
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
        return [self.gradient[start:end] for start, end in self._runs]


def _placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what a parameter without memory reads as: NaN; of integers, which have none, the least."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), math.nan, dtype=dtype, device=device)
    return torch.full((), False if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


def _resting(segment: Tensor, home: torch.device) -> Tensor:
    """Returns a copy of a segment where it is to live; page-locked where that is the memory beside an accelerator."""
    if home.type == "cpu" and segment.device.type != "cpu":
        return host_tensor(segment, segment.device).copy_(segment)
    return segment.to(home, copy=True)

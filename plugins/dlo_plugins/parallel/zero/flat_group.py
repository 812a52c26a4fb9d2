"""Flat buffer of the parameters that ZeRO partitions, gathers and reduces together.

The parameters of a group are views of one flat buffer, the *full buffer*; this rank owns one segment of it, the
*shard*. In stages 1 and 2 the full buffer stays allocated, and the shard is a view of it. In stage 3 the shard has
memory of its own, and the full buffer's storage is freed between uses. The parameters keep their shapes, and autograd's
references to them stay valid, because the same storage is filled again. Between uses the parameters read as NaN and
cannot be written, because reading freed memory would end the process. What a step writes to gathered parameters is
stored in the shards before they are freed.

In stage 3 the shard may be on another device than the optimizer step. Then the step works on a copy of the shard. A
copy in CPU memory is kept; a copy in device memory exists during the step only.

The full buffer may be in half precision. Then the shard holds master weights in single precision, with memory of its
own in all stages. Gradients are computed in half precision, and summed and kept in single precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.copy_streams import CopyHandle, copy_streams, empty_host_tensor
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.errors import DloError, shown_names
from dlo_framework.shards import FlatShard
from dlo_plugins.parallel.flat_slices import FlatPartition

#: Alignment in bytes, which tensor cores and vector instructions require.
_ALIGNMENT = 16


class FlatGroup:
    """Parameters of one dtype in a flat buffer.

    Args:
        named: Parameters by name; their data move into the buffer.
        communicator: Communicator of the ranks that share them.
        device: Device that computes.
        keep_full: Whether each rank keeps the full buffer (stages 1 and 2).
        step_device: Device of the step, of gradients and of optimizer state: ``device``, or the CPU where the
            optimizer is offloaded.
        shard_device: Device of the shard: ``step_device`` by default and in stages 1 and 2; the CPU where parameters
            are offloaded.
        gathered_dtype: Dtype of the full buffer; by default the parameters' dtype.
        reduced_dtype: Dtype in which gradients are summed; by default the parameters' dtype.
        gradient_dtype: Dtype of the gradient shard; by default the parameters' dtype.

    Attributes:
        dtype: Dtype of the shard and the optimizer state: the parameters' original dtype.
        shard: Segment of this rank, on ``shard_device``.
        pieces: Views of the shard, one for each parameter of which this rank owns elements.
        gradient: Segment of this rank of the mean gradients, on ``step_device``; None before the first reduction.
        partition: Partition of the buffer over the ranks.
        hooks: Handles of the hooks that a reducer has on parameters, by the parameter's index.
        reduction: Flat gradients of this rank that are being reduced, and the collective; None while there is none.
        is_complete: Whether all gradients of this backward are computed.
        is_launched: Whether their reduction has been started in this backward.
        earlier: Gradients that earlier micro-batches have left on the parameters, and their version counters, which
            rise when this backward adds to a gradient. None where there are none.
        mirrored: Version of the shard whose values the full buffer has, except for what the user's code has written
            since; -1 for none.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        communicator: Communicator,
        device: torch.device,
        *,
        keep_full: bool,
        step_device: torch.device,
        shard_device: torch.device | None = None,
        gathered_dtype: torch.dtype | None = None,
        reduced_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device, self.keep_full = communicator, device, keep_full
        self.step_device, self.shard_device = step_device, shard_device or step_device
        assert self.shard_device == step_device or not keep_full
        self.dtype = self.parameters[0].dtype
        numels = tuple(p.numel() for p in self.parameters)
        self.gathered_dtype, self.reduced_dtype = gathered_dtype or self.dtype, reduced_dtype or self.dtype
        self.gradient_dtype = gradient_dtype or self.dtype
        #: Whether the shard is a copy in another dtype than the full buffer.
        self.has_master_weights = self.gathered_dtype != self.dtype
        smallest = min(dtype.itemsize for dtype in (self.dtype, self.gathered_dtype, self.reduced_dtype))
        self.partition = FlatPartition(numels, communicator.size, align=max(1, _ALIGNMENT // smallest))
        self._shapes = [parameter.shape for parameter in self.parameters]
        self.trains = self.parameters[0].requires_grad
        self.gradient: Tensor | None = None
        self.hooks: dict[int, RemovableHandle] = {}
        self.reduction: tuple[Tensor, Pending] | None = None
        self.is_complete = self.is_launched = False
        self.earlier: list[tuple[Tensor | None, int]] | None = None
        self._arriving: list[tuple[Tensor, CopyHandle]] = []
        self._gathering: Pending | None = None
        self._hidden = False  # whether the parameters read as NaN until a gather has ended
        self.mirrored = -1
        self._versions = [parameter._version for parameter in self.parameters]
        self._marks = [
            (version, parameter.data_ptr()) for version, parameter in zip(self._versions, self.parameters, strict=True)
        ]
        self._before: Tensor | None = None  # the own segment as gathered, where writes through ``data`` are possible
        self._copies = copy_streams(device)
        self._from_shard: CopyHandle | None = None  # last copy up from the shard or from its stepped copy
        self._to_shard: CopyHandle | None = None  # last copy from the stepped copy to the shard
        self._fill_buffers()
        self._stepped: Tensor | None = None
        self._current = False  # whether the stepped copy has the shard's values
        self._is_stored = False  # whether a step's values have been stored since they were loaded
        self.pieces = self._cut(self.shard)
        runs = self.partition.pieces(communicator.rank)
        self.owned = [piece.parameter for piece in runs]
        self._runs = [(piece.offset, piece.offset + piece.length) for piece in runs]

    @torch.no_grad()
    def _fill_buffers(self) -> None:
        """Makes the parameters views of the full buffer, with the first rank's values on all ranks."""
        self.full = full = torch.zeros(self.partition.padded, dtype=self.dtype, device=self.device)
        self._places = self.views(full)
        for name, parameter, view in zip(self.names, self.parameters, self._places, strict=True):
            if parameter.is_meta:
                raise DloError(
                    f"parameters under ZeRO must have values, got {name} on the meta device; set meta_init: true of"
                    " ZeroStrategy, or build the module with its weights"
                )
            if not (self.keep_full or parameter.numel()):
                raise DloError(
                    f"parameters under ZeRO's stage 3 must have elements, got {name} of shape {list(parameter.shape)};"
                    " leave it out, or use stage 1 or 2"
                )
            view.copy_(parameter.data)
            parameter.data = view
        if self.communicator.size > 1:
            self.communicator.broadcast(full)
        own = self.communicator.segment(full)
        nothing = _placeholder(self.gathered_dtype, self.device)
        self._placeholders = [nothing.expand(parameter.shape) for parameter in self.parameters]
        self.shard = own if self.shares_memory else _copy_to(own, self.shard_device)
        if self.has_master_weights:
            self.full = full.to(self.gathered_dtype)
            self._places = self.views(self.full)
            self._point_to(self._places)
        self._own = self.communicator.segment(self.full)
        self._bytes = self.full.untyped_storage().nbytes()
        self._staged: Tensor | None = None  # the shard in the gathered dtype, where the shard is in CPU memory
        self._is_staged = False
        if not self.keep_full:
            self.free()
        self.mirrored = self.shard._version if self.keep_full else -1

    @property
    def shares_memory(self) -> bool:
        """Whether the shard is a view of the full buffer."""
        return self.keep_full and self.step_device == self.device and not self.has_master_weights

    @torch.no_grad()
    def dissolve(self) -> None:
        """Gives the parameters memory of their own with the shards' values; all ranks must call it."""
        full = self.full
        if self.has_master_weights:
            self.finish_copies()
            full = torch.empty(self.partition.padded, dtype=self.dtype, device=self.device)
            self.communicator.segment(full).copy_(self.shard)
            self.communicator.all_gather(full).wait()
        else:
            self.finish_gather()
        for parameter, view in zip(self.parameters, self.views(full), strict=True):
            parameter.data = view.clone()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns views of a buffer of the full length in the parameters' shapes."""
        return self.cut(buffer)[0]

    def cut(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns views of a buffer of the full length in the parameters' shapes, and the gaps between them."""
        chunks = buffer.split_with_sizes(self.partition.lengths)
        places = [chunk.view(shape) for chunk, shape in zip(chunks[::2], self._shapes, strict=True)]
        return places, [gap for gap in chunks[1::2] if gap.numel()]

    # --- parameters ----------------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the full buffer is allocated; its all-gather may still be running."""
        return self.full.untyped_storage().nbytes() > 0

    def start_gather(self) -> None:
        """Allocates the full buffer and starts its all-gather, unless it is allocated."""
        if self.gathered:
            return
        self.check_params()
        self.full.untyped_storage().resize_(self._bytes)
        self._point_to(self._places)
        self._start_all_gather()

    def finish_gather(self) -> None:
        """Waits until the parameters can be used."""
        if self._gathering is None and self.keep_full:
            return
        self.start_gather()
        if self._gathering is not None:
            if self._from_shard is not None:
                self._from_shard.wait()
            self._gathering.wait()
            self._gathering = None
            if self._before is not None:
                self._before.copy_(self._own)
        if self._hidden:
            self._point_to(self._places)
            self._hidden = False

    def hide_params(self) -> None:
        """Makes the parameters read as NaN until :meth:`finish_gather`; they may still have the last step's values."""
        if self._gathering is not None and self.communicator.size > 1:
            self._point_to(self._placeholders)
            self._hidden = True

    def free(self) -> None:
        """Frees the full buffer; the parameters read as NaN until the next gather."""
        assert not self.keep_full
        if self._gathering is not None:
            self.finish_gather()  # Nothing used it, but it must not write to freed memory.
        self.store_writes()
        self.full.untyped_storage().resize_(0)
        self._point_to(self._placeholders)

    # --- writes of the user's code -------------------------------------------------------------------------

    def _is_untouched(self) -> bool:
        """Returns whether no parameter has been written or assigned to since the last call; a quick first look."""
        marks = [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
        same, self._marks = marks == self._marks, marks
        return same

    def find_written(self) -> list[str]:
        """Returns the names of the parameters whose version counters have risen since the last call."""
        before, self._versions = self._versions, [parameter._version for parameter in self.parameters]
        return [name for name, was, now in zip(self.names, before, self._versions, strict=True) if was != now]

    def _find_assigned(self) -> list[int]:
        """Returns the numbers of the parameters whose data are neither in the full buffer nor read as NaN."""
        hidden = self._placeholders[0].data_ptr()
        first = self.full.data_ptr()
        places = range(first, first + self._bytes)
        pointers = [parameter.data_ptr() for parameter in self.parameters]
        return [number for number, at in enumerate(pointers) if at and at != hidden and at not in places]

    def check_params(self) -> None:
        """Checks that no value of a parameter is lost, as one that was written or assigned to while it was freed.

        Raises:
            DloError: One is.
        """
        if not self.gathered and self._is_untouched():
            return
        lost = [] if self.gathered else self.find_written()
        lost += [self.names[number] for number in self._find_assigned()]
        if lost:
            raise DloError(
                f"parameters under ZeRO must be written in place between steps, got {shown_names(lost)} whose data were"
                " assigned, or which was written in stage 3, where it has no value; use `with torch.no_grad():"
                " parameter.copy_(...)` in training_step or, in stages 1 and 2, between steps; or use strategy ddp"
            )

    @property
    def _is_stored_always(self) -> bool:
        """Whether the shard can be overwritten without asking: it has the full buffer's dtype and device."""
        return not self.has_master_weights and self.shard_device == self.step_device == self.device

    def watch_data(self) -> None:
        """Compares values from now on: the user's code reads ``data``, through which a write raises no version."""
        if self._before is None and self.gathered and not self.shares_memory and not self._is_stored_always:
            self._before = self._own.clone()

    def store_writes(self) -> bool:
        """Stores what the user's code has written to the gathered parameters in the shard.

        All ranks write the same values, so that each stores its own segment: always where that is a copy in the
        device's memory of 1/N of the elements; elsewhere if a version counter has risen or, for parameters whose
        ``data`` are read in the first step of its kind, if the values differ.

        Returns:
            Whether a parameter's version counter has risen, or its data were assigned, since the last call.

        Raises:
            DloError: The shard is in a higher precision than the parameters that were written.
        """
        untouched = self._is_untouched()
        written = [] if untouched else self.find_written()
        is_in_use = self.gathered and self._gathering is None and self.mirrored == self.shard._version
        if self.shares_memory or not is_in_use:
            return bool(written)
        for number in () if untouched else self._find_assigned():
            written.append(self.names[number])
            self.parameters[number].data = self._places[number].copy_(self.parameters[number].data)
        own = self._own
        if self._is_stored_always:
            self.shard.copy_(own)
        elif written or (self._before is not None and not torch.equal(own, self._before)):
            if self.has_master_weights:
                raise DloError(
                    f"parameters under ZeRO must be gathered in {self.dtype} to be written by the model, got"
                    f" {shown_names(written or self.names)} in {self.gathered_dtype}; set param_dtype: float32 of"
                    " ZeroStrategy, or leave out bf16_weights"
                )
            self.finish_copies()
            self.shard.copy_(own)
            self._current = self._is_staged = False
        self.mirrored = self.shard._version
        return bool(written)

    def _point_to(self, tensors: list[Tensor]) -> None:
        self._marks = [(version, tensor.data_ptr()) for (version, _), tensor in zip(self._marks, tensors, strict=True)]
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def in_partition_order(self, number: int, full: Tensor) -> Tensor:
        """Returns a full tensor of a parameter's shape, flat, in the order in which the partition's pieces cut it."""
        return full.flatten()

    def full_tensor(self, number: int, flat: Tensor) -> Tensor:
        """Returns the full tensor from :meth:`in_partition_order`."""
        return flat.view(self._shapes[number])

    def all_gather_params(self) -> None:
        """Starts the all-gather of the shards' new values, if the full buffer is allocated.

        :meth:`finish_gather` waits for it. A running all-gather is finished first, because the other ranks take part
        in it.
        """
        self._is_staged = False
        if self.gathered:
            self.finish_gather()
            self._start_all_gather()

    def _start_all_gather(self) -> None:
        own = self._own
        self.mirrored = self.shard._version
        sent = self.shard if self.shard_device == self.device else self._staged_shard()
        if self._to_shard is not None:
            self._to_shard.wait()
            self._to_shard = None
        if self.shard_device == self.device:
            if not self.shares_memory:
                own.copy_(sent)
            self._gathering = self.communicator.all_gather(self.full)
            return
        # Overlapped: the next unit's parameters are copied from the CPU while this unit computes.
        self._from_shard = self._copies.up.copy(own, sent)
        with self._from_shard.stream_context():
            self._gathering = self.communicator.all_gather(self.full)

    def _staged_shard(self) -> Tensor:
        """Returns the shard in the gathered dtype: a copy to a device that casts would block the host."""
        if not self.has_master_weights:
            return self.shard
        if self._staged is None:
            self._staged = empty_host_tensor(self.shard.to(self.gathered_dtype), self.device)
        if not self._is_staged:
            self.finish_copies()
            self._staged.copy_(self.shard)
            self._is_staged = True
        return self._staged

    # --- the step ------------------------------------------------------------------------------------------

    def _cut(self, segment: Tensor) -> list[FlatShard]:
        """Returns views of this rank's segment, one for each parameter of which it owns elements."""
        return [
            FlatShard(
                segment[piece.offset : piece.offset + piece.length].detach(),
                self.parameters[piece.parameter].shape,
                piece.start,
            )
            for piece in self.partition.pieces(self.communicator.rank)
        ]

    def stepped_pieces(self) -> list[FlatShard]:
        """Returns the pieces that optimizers step, on ``step_device``: those of the shard, or of a copy of it."""
        if self.step_device == self.shard_device:
            return self.pieces
        self._stepped = _copy_to(self.shard, self.step_device)
        pieces = self._cut(self._stepped)
        self._free_copy()
        return pieces

    @torch.no_grad()
    def load_params(self) -> bool:
        """Loads the shard's values into the copy that is stepped, before a step; returns whether they were written to.

        First waits for the last step's copy from the CPU to the device, which may still read that memory.
        """
        written = self.store_writes()
        self._is_stored = False
        if self.step_device != self.device and self._from_shard is not None:
            self._from_shard.synchronize()
            self._from_shard = None
        if self._stepped is not None and not self._current:
            self._stepped.untyped_storage().resize_(self._stepped.nbytes)
            if self.step_device == self.device:
                if self._to_shard is not None:
                    self._to_shard.wait()
                self._from_shard = self._copies.up.copy(self._stepped, self.shard)
                self._from_shard.wait()
            else:
                self._copies.down.copy(self._stepped, self.shard).synchronize()
            self._current = True
        return written

    @torch.no_grad()
    def store_step(self) -> None:
        """Starts the copy of the stepped values to the shard, where the optimizer steps a copy."""
        self._is_staged = False
        if self._stepped is not None and self._current and not self._is_stored:
            self._is_stored = True
            if self.step_device == self.device:
                self._to_shard = self._copies.down.copy(self.shard, self._stepped)
            else:
                self._from_shard = self._to_shard = self._copies.up.copy(self.shard, self._stepped)
            self._free_copy()

    def finish_copies(self) -> None:
        """Makes the host wait for the copies from and to the shard; then others may read and write it."""
        for copied in (self._from_shard, self._to_shard):
            if copied is not None:
                copied.synchronize()
        self._from_shard = self._to_shard = None

    def _free_copy(self) -> None:
        """Frees the stepped copy, if it is in device memory."""
        assert self._stepped is not None
        if self.step_device == self.device:
            self._stepped.untyped_storage().resize_(0)
            self._current = False
        else:
            self._current = True

    def mark_changed(self) -> None:
        """Marks the copies of the shard as out of date, after it was written from outside."""
        self._current = self._is_staged = False
        self.mirrored = -1

    @property
    def copy_bytes(self) -> int:
        """Number of bytes of the stepped copy."""
        return 0 if self._stepped is None else self._stepped.untyped_storage().nbytes()

    # --- gradients -----------------------------------------------------------------------------------------

    def missing_gradients(self) -> list[int]:
        """Returns the indices of the parameters whose gradient this backward has not computed yet."""
        if self.earlier is None:
            return [number for number, p in enumerate(self.parameters) if p.grad is None]
        return [
            number
            for number, (p, (gradient, version)) in enumerate(zip(self.parameters, self.earlier, strict=True))
            if p.grad is None or (p.grad is gradient and p.grad._version == version)
        ]

    def drop_parameter_grads(self) -> None:
        """Drops the gradients that backward has left on the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def end_reduction(self) -> tuple[Tensor, Tensor]:
        """Waits for the reduction; returns its buffer, and this rank's segment of the result."""
        assert self.reduction is not None
        (buffer, pending), self.reduction = self.reduction, None
        return buffer, pending.wait()

    def add_gradient(self, segment: Tensor) -> CopyHandle | None:
        """Adds a reduced segment to the gradient shard; :meth:`finish_gradient` completes it.

        Returns:
            Copy that still reads the segment, and must end before the segment is written; None where there is none.
        """
        if self.step_device == self.device:
            if self.gradient is None:
                self.gradient = segment.to(self.step_device, self.gradient_dtype, copy=True)
            else:
                self.gradient.add_(segment)
            return None
        # Overlapped: backward continues while the segment is copied to the CPU.
        landed = empty_host_tensor(segment, self.device)
        copied = self._copies.down.copy(landed, segment)
        self._arriving.append((landed, copied))
        return copied

    @property
    def gradient_arrived(self) -> bool:
        """Whether :meth:`finish_gradient` would not wait."""
        return all(copied.has_ended for _, copied in self._arriving)

    def finish_gradient(self) -> None:
        """Waits until the added segments are in the gradient shard."""
        for landed, copied in self._arriving:
            copied.synchronize()
            if self.gradient is None:
                self.gradient = landed.to(self.gradient_dtype)
            else:
                self.gradient.add_(landed)
        self._arriving.clear()

    def drop_gradient(self) -> None:
        """Drops the gradient shard, and segments that are still being copied."""
        self.gradient = None
        self._arriving.clear()

    def piece_gradients(self) -> list[Tensor]:
        """Returns views of the gradient shard, one for each piece."""
        assert self.gradient is not None
        return [self.gradient[start:end] for start, end in self._runs]


def _placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the value of a freed parameter: NaN, or the least integer where the dtype has no NaN."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), math.nan, dtype=dtype, device=device)
    return torch.full((), False if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


def _copy_to(segment: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a segment on a device; in pinned memory where that is the CPU beside an accelerator."""
    if device.type == "cpu" and segment.device.type != "cpu":
        return empty_host_tensor(segment, segment.device).copy_(segment)
    return segment.to(device, copy=True)

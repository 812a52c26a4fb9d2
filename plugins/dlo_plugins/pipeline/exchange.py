"""Exchange of hidden states and gradients between the stages of a step, in the order of the schedule.

A receiver knows the layout of each message in advance: it depends on the signature of the micro-batch alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.pipeline.actions import ActionKind, Placement
from dlo_plugins.pipeline.autocast import autocast_dtype
from dlo_plugins.pipeline.gates import StageShapes
from dlo_plugins.pipeline.pipeline_schedules import Schedule
from dlo_plugins.pipeline.transport import ReceiveQueue, SendQueue, Transport


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Layout of a hidden state and of its gradient.

    Attributes:
        size: Shape of the tensor.
        stride: Strides of its dims in elements; they leave no gaps in memory.
        dtype: Dtype of its elements.
        requires_grad: Whether to send its gradient back.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorLayout:
        """Returns a tensor's layout; channels-last tensors keep their strides, those with gaps get contiguous ones."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(size, stride):
            stride = tuple(torch.empty(size, device="meta").stride())
        return cls(size, stride, tensor.dtype, tensor.requires_grad)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's elements in 1-D, in the order of this layout; copied if its own layout differs."""
        tensor = tensor.detach()
        if tuple(tensor.stride()) != self.stride or tensor.dtype != self.dtype:
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def empty(self, device: torch.device) -> Tensor:
        """Returns an uninitialised 1-D tensor to receive such a tensor."""
        return torch.empty(torch.Size(self.size).numel(), dtype=self.dtype, device=device)

    def unflatten(self, flat: Tensor) -> Tensor:
        """Returns a received 1-D tensor as a view in its own shape."""
        return flat.as_strided(self.size, self.stride)


def _is_dense(size: Iterable[int], stride: Iterable[int]) -> bool:
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, size, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


@dataclasses.dataclass(frozen=True)
class Message:
    """Message from one stage to another.

    Attributes:
        is_gradient: Whether it is the gradient of a hidden state, not the hidden state itself.
        stage: Stage that receives it.
        micro_batch: Number of its micro-batch, counted through steps that hand backwards to the next one.
    """

    is_gradient: bool
    stage: int
    micro_batch: int

    @property
    def boundary(self) -> int:
        """The later of the two stages that exchange it."""
        return self.stage + self.is_gradient


class Exchange:
    """Sends and receives hidden states and gradients, over the network or between two stages of this rank.

    Before the first hidden state for micro-batches of a shape, the sender sends its layout, and the shapes that the
    modules of earlier stages return. Later messages of this shape need no header.

    Args:
        transport: Transport between the ranks.
        placement: Placement of the stages on ranks.
        device: Device of the messages.

    Attributes:
        most_in_flight: Largest number of this rank's messages in flight at one time of the last step.
    """

    most_in_flight = 0

    def __init__(self, transport: Transport, placement: Placement, device: torch.device) -> None:
        self._transport, self._placement, self._device = transport, placement, device
        self._rank = transport.rank
        self._known: dict[tuple[int, Any], tuple[TensorLayout, StageShapes]] = {}  # by boundary and signature
        self._signatures: dict[int, Any] = {}  # by number of the micro-batch
        self._first = 0
        self._sends = SendQueue()
        self._positions: list[dict[tuple[bool, int, int], int]] = []
        self._inboxes: dict[int, ReceiveQueue] = {}
        self._local: dict[Message, Tensor] = {}

    def start(self, schedule: Schedule, signatures: Sequence[Any], first: int = 0) -> Exchange:
        """Begins a step.

        Args:
            schedule: Schedule of the step.
            signatures: Signatures of its micro-batches; hidden states of equal signatures have the same layout.
            first: Number of its first micro-batch; 0 for a step without micro-batches of the step before.
        """
        if not first:
            self._signatures, self._inboxes = {}, {}
        # Of earlier steps, only the last has micro-batches in flight.
        self._signatures = {n: kept for n, kept in self._signatures.items() if n >= self._first}
        self._signatures |= {first + n: signature for n, signature in enumerate(signatures)}
        self._first = first
        self._sends, self._local = SendQueue(), {}
        self._positions = _positions(schedule)
        expected: dict[int, list[Message]] = {}
        for source, order in enumerate(schedule.orders):
            for action in order if source != self._rank else ():
                step = 1 if action.kind is ActionKind.FORWARD else -1 if action.is_backward else 0
                stage, number = action.stage + step, first + action.micro_batch
                if number < 0:  # There was no step before.
                    continue
                if step and 0 <= stage < self._placement.stages and self._placement.rank_of(stage) == self._rank:
                    expected.setdefault(source, []).append(Message(step < 0, stage, number))
        for source, items in expected.items():
            if source in self._inboxes:  # It may have messages of the step before.
                self._inboxes[source].expect(items)
                continue
            link = self._transport.link(source, incoming=True)
            self._inboxes[source] = ReceiveQueue(link, items, self._buffer_for, self._store_header)
        return self

    def receive_hidden(self, stage: int, micro_batch: int) -> Tensor:
        """Returns the hidden state with which a stage begins, as a leaf."""
        item = Message(False, stage, micro_batch)
        found = self._receive(item, stage - 1)
        return found.detach().requires_grad_(self._layout(item).requires_grad)

    def receive_gradient(self, stage: int, micro_batch: int) -> Tensor:
        """Returns the gradient of the hidden state that a stage has sent."""
        return self._receive(Message(True, stage, micro_batch), stage + 1)

    def get_shapes(self, stage: int, signature: Any) -> StageShapes:
        """Returns the shapes of earlier stages' outputs; they came with the first hidden state of a signature."""
        return self._known[stage, signature][1]

    def set_layout(self, stage: int, signature: Any, hidden: Tensor, shapes: StageShapes) -> None:
        """Stores the layout of a stage's hidden state, so that it needs no header."""
        self._known[stage, signature] = TensorLayout.from_tensor(hidden), shapes

    def clear(self) -> None:
        """Clears all layouts; call it between steps, on all ranks."""
        self._known.clear()

    def send_hidden(self, stage: int, micro_batch: int, hidden: Tensor, shapes: StageShapes) -> None:
        """Sends a stage its hidden state.

        Raises:
            DloError: If its shape differs from that of earlier micro-batches with the same signature.
        """
        item, layout = Message(False, stage, micro_batch), TensorLayout.from_tensor(hidden)
        key = stage, self._signatures[micro_batch]
        new = key not in self._known
        known = self._known.setdefault(key, (layout, shapes))[0]
        if (known.size, known.dtype, known.requires_grad) != (layout.size, layout.dtype, layout.requires_grad):
            raise DloError(
                "a pipeline's hidden states must have one shape for micro-batches of one shape, got"
                f" {list(known.size)} in {known.dtype}, then {list(layout.size)} in {layout.dtype} for stage {stage};"
                " remove what makes shapes depend on values, or train with pp=1"
            )
        self._send(item, hidden, (known, shapes) if new else None)

    def send_gradient(self, stage: int, micro_batch: int, gradient: Tensor) -> None:
        """Sends a stage the gradient of the hidden state that it has sent."""
        self._send(Message(True, stage, micro_batch), gradient, None)

    def finish(self) -> None:
        """Ends a step: waits until all messages have arrived."""
        self.most_in_flight = self._sends.most
        self._sends.finish()

    def _send(self, item: Message, tensor: Tensor, header: Any) -> None:
        target = self._placement.rank_of(item.stage)
        if target == self._rank:
            self._local[item] = tensor
            return
        # The next step uses what is not in this one's order; then the step's end waits until it has arrived.
        place = self._place(target, item.is_gradient, item.stage, item.micro_batch, math.inf)
        link = self._transport.link(target, incoming=False)
        if header is not None:
            self._sends.add(target, place, link, link.send_object(header))
        flat = self._layout(item).flatten(tensor)
        self._sends.add(target, place, link, [(link.send(flat), flat)])

    def _receive(self, item: Message, sender: int) -> Tensor:
        source = self._placement.rank_of(sender)
        if source == self._rank:
            return self._local.pop(item)
        flat = self._inboxes[source].receive(item)
        self._sends.release(source, self._place(source, item.is_gradient, sender, item.micro_batch, -1))
        return self._layout(item).unflatten(flat)

    def _place(self, rank: int, is_backward: bool, stage: int, micro_batch: int, otherwise: float) -> float:
        """Returns the position of an action in a rank's order, or another value if it is not in this step's."""
        return self._positions[rank].get((is_backward, stage, micro_batch - self._first), otherwise)

    def _layout(self, item: Message) -> TensorLayout:
        return self._known[item.boundary, self._signatures[item.micro_batch]][0]

    def _buffer_for(self, item: Message) -> Tensor | Literal[False] | None:
        known = self._known.get((item.boundary, self._signatures[item.micro_batch]))
        if known is None:
            return None
        if item.is_gradient and not known[0].requires_grad:
            return False
        return known[0].empty(self._device)

    def _store_header(self, item: Message, header: Any) -> None:
        self._known[item.boundary, self._signatures[item.micro_batch]] = header


@functools.lru_cache(maxsize=64)
def _positions(schedule: Schedule) -> list[dict[tuple[bool, int, int], int]]:
    """Returns the positions of forwards and backwards in each rank's order, by `(is_backward, stage, micro_batch)`."""
    return [
        {
            (action.is_backward, action.stage, action.micro_batch): place
            for place, action in enumerate(order)
            if action.kind not in (ActionKind.WEIGHT, ActionKind.RECOMPUTE)
        }
        for order in schedule.orders
    ]


def batch_signatures(micro_batches: Iterable[Any], model: nn.Module, device: torch.device) -> list[Hashable]:
    """Returns a key for each micro-batch on which the layouts of its hidden states depend.

    It is equal for micro-batches of the same shapes and dtypes, whatever their values.

    Args:
        micro_batches: Micro-batches of a step.
        model: Model; its training mode and its frozen parameters are part of the key.
        device: Device whose autocast state is part of the key.
    """
    frozen = tuple(not parameter.requires_grad for parameter in model.parameters())
    state = (model.training, torch.is_grad_enabled(), hash(frozen), autocast_dtype(device.type))
    return [(_described(micro_batch), state) for micro_batch in micro_batches]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    return value if isinstance(value, str | int | bool) else type(value).__name__

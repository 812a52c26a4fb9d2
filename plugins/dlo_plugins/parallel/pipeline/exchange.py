"""Exchange of hidden states and gradients between the stages of a step, and sums of tied weights' gradients.

The messages from one rank to another are one stream, in the order of the sender's schedule, which the receiver knows.
It knows the layout of each message in advance too: it depends on the signature of the micro-batch alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.distributed import collectives
from dlo_framework.distributed.collectives import HostReceive, backend_of, exchange_limit
from dlo_framework.distributed.groups import kept_group
from dlo_framework.errors import DloError
from dlo_framework.local_memory import local_tensor
from dlo_framework.models.autocast import autocast_dtype
from dlo_plugins.parallel.pipeline.gates import StageShapes
from dlo_plugins.parallel.pipeline.model_stages import Stages
from dlo_plugins.parallel.pipeline.pipeline_schedules import ActionKind, Placement, Schedule

#: Number of receives that are posted in advance for each sender, but on NCCL.
_AHEAD = 2


class Link:
    """Link between two ranks in one direction.

    Args:
        group: Process group of the link's messages.
        peer: Other rank's number in the group.
        device: Device of the messages.
        limit: Timeout of a message; None uses the group's.
        by_host: Whether to copy messages to the CPU to send them.
        ahead: Number of receives to post in advance.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        limit: timedelta | None,
        by_host: bool = False,
        ahead: int = _AHEAD,
    ) -> None:
        self.group, self.peer, self.device, self._limit, self._by_host = group, peer, device, limit, by_host
        self.ahead = ahead

    def send(self, tensor: Tensor) -> dist.Work:
        """Starts to send a contiguous tensor."""
        work = dist.isend(tensor.cpu() if self._by_host else tensor, group=self.group, group_dst=self.peer)
        assert work is not None
        return work

    def receive(self, tensor: Tensor) -> dist.Work | HostReceive:
        """Starts to receive into a contiguous tensor; wait for it with :meth:`wait`."""
        into = torch.empty_like(tensor, device="cpu") if self._by_host else tensor
        work = dist.irecv(into, group=self.group, group_src=self.peer)
        assert work is not None
        return HostReceive(work, into, tensor) if self._by_host else work

    def wait(self, work: dist.Work | HostReceive) -> None:
        """Waits until a send or receive is complete; on an accelerator, the current stream waits."""
        work.wait() if self._limit is None else work.wait(self._limit)

    def send_object(self, value: Any) -> list[tuple[dist.Work, Tensor]]:
        """Starts to send an object that can be pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], device=self.device)
        return [(self.send(length), length), (self.send(data), data)]

    def receive_object(self) -> Any:
        """Waits for an object from :meth:`send_object`, and returns it."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.wait(self.receive(length))
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.wait(self.receive(data))
        return pickle.loads(data.cpu().numpy().tobytes())


class Transport:
    """Links from a rank to the other ranks of its pipeline.

    An NCCL group that was connected when it was made, as Lightning makes it, runs all its messages one after the other,
    whatever the peer (torch 2.11 to 2.15). A send would then wait for receives that were posted in advance from another
    rank, whose sends would wait for this rank's. So on NCCL, messages to higher and to lower ranks use separate groups,
    and a rank's two neighbours use different groups (:func:`group_index`): in each group a rank has a single peer. All
    ranks of the pipeline make these groups together. They must be members of equally many groups, as the ranks of a
    mesh are, since torch names such groups by that number. gloo runs all messages concurrently.

    On NCCL no receive is posted in advance: a posted one is a kernel that waits on the device. With two in advance,
    pipelines hung on an H200 (two ranks, torch 2.11, NCCL 2.28); with none, 1F1B trains as one process.

    Args:
        group: Process group of the pipeline's ranks.
        device: Device of the messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group)
        backend = backend_of(group, device)
        self._apart: list[dist.ProcessGroup] = []
        if backend == "nccl":
            ranks = dist.get_process_group_ranks(group)
            limit = group._get_backend(device).options._timeout
            crossings = 1 if len(ranks) == 2 else 3
            self._apart = [kept_group(f"crossing {n}", ranks, timeout=limit) for n in range(2 * crossings)]
        self._limit = exchange_limit(group) if backend == "gloo" else None
        self._by_host = collectives.is_sent_by_host(group, device)
        self._is_fake = backend == "fake"
        self._ahead = 0 if backend == "nccl" else _AHEAD

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connects pairs of ranks in advance: each pair sends a number in both directions.

        NCCL connects two ranks at their first message, which takes seconds and blocks both. A fault of the network
        shows here, before data are read. All ranks of the pipeline call it.

        Args:
            pairs: Pairs of rank numbers, the same on all ranks. All ranks use the same order of pairs, so that no two
                wait for each other.
        """
        for pair in sorted({tuple(sorted(pair)) for pair in pairs}):
            if self.rank not in pair or self._is_fake:
                continue
            peer = pair[1] if self.rank == pair[0] else pair[0]
            for incoming in (self.rank == pair[1], self.rank == pair[0]):
                link, number = self.link(peer, incoming=incoming), torch.zeros(1, device=self.device)
                link.wait(link.receive(number) if incoming else link.send(number))

    def link(self, peer: int, *, incoming: bool) -> Link:
        """Returns the link from or to another rank of the pipeline."""
        group = self.group
        if self._apart:
            upwards = peer < self.rank if incoming else peer > self.rank
            group = self._apart[2 * group_index(self.rank, peer) + int(upwards)]
        return Link(group, peer, self.device, self._limit, self._by_host, self._ahead)


def group_index(rank: int, peer: int) -> int:
    """Returns the number of the group, out of three, that two ranks use.

    In no group does a rank have both of its neighbours in the ring. Consecutive ranks alternate between the first and
    the second group. The last and the first rank use the third, as do ranks further apart that share a tied weight.
    """
    return min(rank, peer) % 2 if abs(rank - peer) == 1 else 2


class SendQueue:
    """Sent tensors of a step that may not have arrived yet.

    gloo (torch 2.11 to 2.15) does not report the arrival of a message unless one waits for it. The peer's later
    messages show it: the peer has used what it received before it sent them.

    Attributes:
        most: Largest number of messages in flight at one time.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, deque[tuple[float, Link, dist.Work, Tensor]]] = {}
        self.most = 0

    def add(self, peer: int, place: float, link: Link, works: Iterable[tuple[dist.Work, Tensor]]) -> None:
        """Keeps tensors until they have arrived.

        Args:
            peer: Rank that receives them.
            place: Position in the peer's order of the action that uses them.
            link: Link to the peer.
            works: Sends, each with its tensor.
        """
        queue = self._under_way.setdefault(peer, deque())
        queue.extend((place, link, work, tensor) for work, tensor in works)
        self.most = max(self.most, sum(map(len, self._under_way.values())))

    def release(self, peer: int, place: float) -> None:
        """Releases the tensors that a peer has used.

        Args:
            peer: Rank that has sent a message.
            place: Position in the peer's order of the action that has sent the message.
        """
        queue = self._under_way.get(peer, deque())
        used = [item for item in queue if item[0] <= place]
        for _, link, work, _ in used:
            link.wait(work)
        self._under_way[peer] = deque(item for item in queue if item[0] > place)

    def finish(self) -> None:
        """Waits for all sends."""
        for queue in self._under_way.values():
            for _, link, work, _ in queue:
                link.wait(work)
        self._under_way.clear()


class ReceiveQueue:
    """Receives of a step from one other rank, in the order in which that rank sends.

    Args:
        link: Link from the other rank.
        expected: Items that the other rank sends, in order.
        buffer: Function that returns a flat tensor to receive an item into, None if its size is not known yet, or
            False if the item is not sent.
        header: Callback with an item whose size was not known, and the header that was sent before it.
    """

    def __init__(
        self,
        link: Link,
        expected: Iterable[Any],
        buffer: Callable[[Any], Tensor | Literal[False] | None],
        header: Callable[[Any, Any], None],
    ) -> None:
        self._link, self._buffer, self._header = link, buffer, header
        self._expected = deque(expected)
        self._posted: dict[Any, tuple[dist.Work | HostReceive, Tensor]] = {}

    def expect(self, items: Iterable[Any]) -> None:
        """Adds items that the other rank sends after those that are expected already."""
        self._expected.extend(items)

    def receive(self, item: Any) -> Tensor:
        """Returns an item once it has arrived, and keeps those that were sent before it."""
        while item not in self._posted:
            assert self._expected, f"{item} is not sent"
            if not self._post():
                first = self._expected[0]
                self._header(first, self._link.receive_object())
        work, buffer = self._posted.pop(item)
        while len(self._posted) < self._link.ahead and self._expected and self._post():
            pass
        self._link.wait(work)
        return buffer

    def _post(self) -> bool:
        """Posts the next receive, unless its size is not known yet."""
        buffer = self._buffer(self._expected[0])
        if buffer is None:
            return False
        item = self._expected.popleft()
        if buffer is not False:
            self._posted[item] = self._link.receive(buffer), buffer
        return True


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
        hidden = self._receive(item, stage - 1)
        return hidden.detach().requires_grad_(self._layout(item).requires_grad)

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


@dataclass(frozen=True)
class TiedGroup:
    """Parameter that several ranks hold.

    Attributes:
        name: First name of the parameter in the model.
        ranks: Ranks of the pipeline that hold it, in ascending order.
    """

    name: str
    ranks: tuple[int, ...]


def find_tied_groups(model: nn.Module, stages: Stages, placement: Placement) -> list[TiedGroup]:
    """Returns the parameters that stages of several ranks use."""
    groups = []
    for name, _ in model.named_parameters():
        ranks = sorted({placement.rank_of(stage) for stage in stages.stages_of(name)})
        if len(ranks) > 1:
            groups.append(TiedGroup(name, tuple(ranks)))
    return groups


class TiedWeights:
    """Sums the gradients of tied weights over the ranks that hold them.

    Args:
        model: Model that has been cut.
        groups: Tied parameters, the same on all ranks.
        transport: Transport between the ranks.
    """

    def __init__(self, model: nn.Module, groups: Sequence[TiedGroup], transport: Transport) -> None:
        self._model, self._transport, self._groups = model, transport, groups
        self._held = [tied for tied in groups if transport.rank in tied.ranks]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the parameters' `.grad` over all uses; call it once a step, when gradients are complete."""
        for tied in self._held:
            parameter = self._model.get_parameter(tied.name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self._sum(tied, parameter.grad)

    @torch.no_grad()
    def sum_tensors(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums gradients that are not in the parameters' `.grad`, in place.

        Args:
            gradients: Gradients by the first of a parameter's names. For each tied weight, either all ranks that hold
                it have a gradient, or none of them.
        """
        for tied in self._held:
            if tied.name in gradients:
                self._sum(tied, gradients[tied.name])

    def named_on_any_rank(self, names: Collection[str]) -> set[str]:
        """Returns the tied weights of this rank that at least one rank names; all ranks of the pipeline call it.

        Args:
            names: Names of this rank's parameters, the first name of each.
        """
        if not self._groups:
            return set()
        named = [tied.name in names for tied in self._groups]
        flags = torch.tensor(named, dtype=torch.uint8, device=self._transport.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._transport.group)
        on_any_rank = {tied.name for tied, flag in zip(self._groups, flags.tolist(), strict=True) if flag}
        return on_any_rank & {tied.name for tied in self._held}

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks of the pipeline that hold a tied weight, by its first name; none for another parameter."""
        return next((tied.ranks for tied in self._groups if tied.name == name), ())

    def _sum(self, tied: TiedGroup, tensor: Tensor) -> None:
        gradient = local_tensor(tensor)  # FSDP2's shards of a tied weight have the same bounds on all its ranks.
        first, *others = tied.ranks
        if self._transport.rank == first:
            for other in others:
                gradient += self._receive(other, torch.empty_like(gradient))
            for other in others:
                self._send(other, gradient)
        else:
            self._send(first, gradient)
            gradient.copy_(self._receive(first, torch.empty_like(gradient)))

    def _send(self, peer: int, tensor: Tensor) -> None:
        link = self._transport.link(peer, incoming=False)
        link.wait(link.send(tensor.contiguous()))

    def _receive(self, peer: int, into: Tensor) -> Tensor:
        link = self._transport.link(peer, incoming=True)
        link.wait(link.receive(into))
        return into

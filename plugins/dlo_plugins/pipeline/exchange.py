"""What a step's actions get from and give to other ranks' actions, in the order of the schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.pipeline.actions import Kind, Placement
from dlo_plugins.pipeline.gates import Shapes
from dlo_plugins.pipeline.layout import Layout
from dlo_plugins.pipeline.schedules import Schedule
from dlo_plugins.pipeline.transport import Inbox, Sends, Transport


@dataclasses.dataclass(frozen=True)
class Item:
    """Something that passes from rank to rank.

    Attributes:
        is_gradient: of a hidden state; or the hidden state itself.
        stage: that receives it.
        micro_batch: whose it is.
    """

    is_gradient: bool
    stage: int
    micro_batch: int

    @property
    def boundary(self) -> int:
        """The later of the two stages between which it passes."""
        return self.stage + self.is_gradient


class Exchange:
    """Hands hidden states and gradients on, over the network or from one stage to another of this rank.

    Before the first hidden state for micro-batches of a shape, the sender tells the receiver its layout, and what the
    modules before have returned; later ones come without a word.

    Args:
        transport: between the ranks.
        placement: of the stages on ranks.
        device: of what passes.

    Attributes:
        most_under_way: messages of this rank that were under way at one time of the last step, at most.
    """

    most_under_way = 0

    def __init__(self, transport: Transport, placement: Placement, device: torch.device) -> None:
        self._transport, self._placement, self._device = transport, placement, device
        self._rank = transport.rank
        self._known: dict[tuple[int, Any], tuple[Layout, Shapes]] = {}  # by boundary and signature
        self._signatures: Sequence[Any] = ()
        self._sends = Sends()
        self._places: list[dict[tuple[bool, int, int], int]] = []
        self._inboxes: dict[int, Inbox] = {}
        self._here: dict[Item, Tensor] = {}

    def start(self, schedule: Schedule, signatures: Sequence[Any]) -> Exchange:
        """Begins a step.

        Args:
            schedule: of the step.
            signatures: of its micro-batches; hidden states of equal ones have one layout.
        """
        self._signatures = signatures
        self._sends, self._here = Sends(), {}
        self._places = _places(schedule)
        expected: dict[int, list[Item]] = {}
        for source, order in enumerate(schedule.orders):
            for action in order if source != self._rank else ():
                step = 1 if action.kind is Kind.FORWARD else -1 if action.is_backward else 0
                stage = action.stage + step
                if step and 0 <= stage < self._placement.stages and self._placement.rank_of(stage) == self._rank:
                    expected.setdefault(source, []).append(Item(step < 0, stage, action.micro_batch))
        self._inboxes = {
            source: Inbox(self._transport.link(source, incoming=True), items, self._room, self._learn)
            for source, items in expected.items()
        }
        return self

    def hidden(self, stage: int, micro_batch: int) -> Tensor:
        """Returns the hidden state that a stage is to begin with, as a leaf."""
        item = Item(False, stage, micro_batch)
        found = self._take(item, stage - 1)
        return found.detach().requires_grad_(self._layout(item).requires_grad)

    def gradient(self, stage: int, micro_batch: int) -> Tensor:
        """Returns the gradient of what a stage has sent."""
        return self._take(Item(True, stage, micro_batch), stage + 1)

    def shapes(self, stage: int, signature: Any) -> Shapes:
        """Returns what the modules before a stage return, which came with its first hidden state of this signature."""
        return self._known[stage, signature][1]

    def learn(self, stage: int, signature: Any, hidden: Tensor, shapes: Shapes) -> None:
        """Notes what a stage's hidden state is like, so that nothing needs to be said of it."""
        self._known[stage, signature] = Layout.of(hidden), shapes

    def forget(self) -> None:
        """Forgets all layouts; between steps, and on all ranks."""
        self._known.clear()

    def send_hidden(self, stage: int, micro_batch: int, hidden: Tensor, shapes: Shapes) -> None:
        """Gives a stage its hidden state.

        Raises:
            DloError: if its shape is another than with earlier micro-batches of the same shape.
        """
        item, layout = Item(False, stage, micro_batch), Layout.of(hidden)
        key = stage, self._signatures[micro_batch]
        new = key not in self._known
        known = self._known.setdefault(key, (layout, shapes))[0]
        if (known.size, known.dtype, known.requires_grad) != (layout.size, layout.dtype, layout.requires_grad):
            raise DloError(
                "micro-batches of one shape have hidden states of one shape in a pipeline; that for stage"
                f" {stage} was {list(known.size)} in {known.dtype} and is {list(layout.size)} in {layout.dtype} now"
            )
        self._give(item, hidden, (known, shapes) if new else None)

    def send_gradient(self, stage: int, micro_batch: int, gradient: Tensor) -> None:
        """Gives a stage the gradient of what it has sent."""
        self._give(Item(True, stage, micro_batch), gradient, None)

    def finish(self) -> None:
        """Ends a step: waits until all has arrived."""
        self.most_under_way = self._sends.most
        self._sends.finish()

    def _give(self, item: Item, tensor: Tensor, header: Any) -> None:
        target = self._placement.rank_of(item.stage)
        if target == self._rank:
            self._here[item] = tensor
            return
        place = self._places[target][item.is_gradient, item.stage, item.micro_batch]
        link = self._transport.link(target, incoming=False)
        if header is not None:
            self._sends.add(target, place, link, link.send_object(header))
        flat = self._layout(item).flat(tensor)
        self._sends.add(target, place, link, [(link.send(flat), flat)])

    def _take(self, item: Item, sender: int) -> Tensor:
        source = self._placement.rank_of(sender)
        if source == self._rank:
            return self._here.pop(item)
        flat = self._inboxes[source].take(item)
        self._sends.arrived(source, self._places[source][item.is_gradient, sender, item.micro_batch])
        return self._layout(item).shaped(flat)

    def _layout(self, item: Item) -> Layout:
        return self._known[item.boundary, self._signatures[item.micro_batch]][0]

    def _room(self, item: Item) -> Tensor | Literal[False] | None:
        known = self._known.get((item.boundary, self._signatures[item.micro_batch]))
        if known is None:
            return None
        if item.is_gradient and not known[0].requires_grad:
            return False
        return known[0].room(self._device)

    def _learn(self, item: Item, header: Any) -> None:
        self._known[item.boundary, self._signatures[item.micro_batch]] = header


@functools.lru_cache(maxsize=64)
def _places(schedule: Schedule) -> list[dict[tuple[bool, int, int], int]]:
    """Returns where in each rank's order a forward or backward stands: by whether backward, stage and micro-batch."""
    return [
        {
            (action.is_backward, action.stage, action.micro_batch): place
            for place, action in enumerate(order)
            if action.kind is not Kind.WEIGHT
        }
        for order in schedule.orders
    ]

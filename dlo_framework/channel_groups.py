"""Channels inside a block that can be removed together: who computes them, what works on each alone, who reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of one tensor inside a block, which no residual addition uses. Names are relative to the model.

    Attributes:
        block: Name of the block.
        count: Number of channels.
        writers: Layers whose output channels they are.
        channelwise: Depthwise convolutions, and norms with statistics of each channel, in their order.
        readers: Layers whose input channels they are.
    """

    block: str
    count: int
    writers: tuple[str, ...]
    channelwise: tuple[str, ...]
    readers: tuple[str, ...]

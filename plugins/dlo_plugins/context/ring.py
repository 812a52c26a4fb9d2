"""Ring attention: ranks pass keys and values around a ring, so that each rank's queries see those of all ranks.

Ring Attention with Blockwise Transformers for Near-Infinite Context. Liu, Zaharia & Abbeel, 2023, arXiv 2310.01889.
Departures: a rank has one chunk from the head and one from the tail (`sequence_layout`), so that causal attention is
the same work on all ranks; pairs of chunks in which no query sees a key are skipped; and a rank does not send its own
contribution to its keys' gradients: backward takes 2 (n - 1) transfers of a rank's keys and values, where the paper's
takes 2 n - 1.

Elements that a rank sends for each layer, with n ranks and P the elements of its keys and values: (n - 1) P in forward,
2 (n - 1) P in backward, and (n - 1) P more with recomputation.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed import collectives
from dlo_plugins.context.blockwise import Attention, MergedOutput, add_sinks, attend, attend_backward, sinks_gradient
from dlo_plugins.context.sequence_layout import chunks_of

#: Tags by which gloo separates transfers that run at the same time.
_KEYS, _GRADIENTS = 1, 2


class Transfer:
    """Asynchronous transfer of one tensor to the next rank, and of another from the previous rank.

    Args:
        ring: Ring of the ranks.
        sent: Tensor to send, 1-D and contiguous; it must not change until :meth:`wait`.
        tag: Tag that separates this transfer from others that run at the same time.
    """

    def __init__(self, ring: Ring, sent: Tensor, tag: int) -> None:
        by_host = collectives.is_sent_by_host(ring.group, sent.device)
        self._limit, self._device, self._sent = ring.limit(sent.device), sent.device, sent.cpu() if by_host else sent
        self._received = torch.empty_like(self._sent)
        self._works: list[dist.Work] = []
        if sent.is_meta:  # A meta tensor has no data to send.
            return
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        pair = [
            dist.P2POp(dist.isend, self._sent, group=ring.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, self._received, group=ring.group, tag=tag, group_peer=before),
        ]
        self._works = dist.batch_isend_irecv(pair)

    def wait(self) -> Tensor:
        """Waits for both directions, and returns the received tensor."""
        for work in self._works:
            if self._limit is None:
                work.wait()
            else:
                work.wait(self._limit)
        return self._received.to(self._device)


class Ring:
    """Ring of the ranks that share a sequence.

    Attributes:
        group: Process group of the ranks; None for the default one.
        rank: Number of this rank in the group.
        size: Number of ranks.
        elements: Numbers of elements sent so far: keys and values in forward and in backward, gradients, all-to-alls.
        group_name: Name by which torch's functional collectives find the process group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.group_name: str = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.elements: Counter[str] = Counter()
        self._limits: dict[str, timedelta | None] = {}

    def limit(self, device: torch.device) -> timedelta | None:
        """Returns the longest time of a transfer of a device's tensors; None for the group's own limit.

        On NCCL it is None, also where the group has gloo for CPU tensors: the host would wait for each transfer.
        """
        if device.type not in self._limits:
            on_gloo = collectives.backend_of(self.group, device) == "gloo"
            self._limits[device.type] = collectives.exchange_limit(self.group) if on_gloo else None
        return self._limits[device.type]

    def shift(self, sent: Tensor, tag: int, what: str) -> Transfer:
        """Starts a transfer of a tensor to the next rank, and counts its elements under the name `what`."""
        self.elements[what] += sent.numel()
        return Transfer(self, sent, tag)

    def chunks(self, back: int) -> tuple[int, int]:
        """Returns the numbers of the two chunks of the rank that is `back` places before this one."""
        return chunks_of((self.rank - back) % self.size, self.size)


class _Wire:
    """Conversion of keys and values to one flat tensor, which is sent, and back.

    Args:
        k: Keys, for their shape.
        v: Values, for their shape.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._shapes = k.shape, v.shape

    @staticmethod
    def join(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._shapes
        return flat[: first.numel()].view(first), flat[first.numel() :].view(second)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, what: Attention, ring: Ring, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output of this rank's queries, [B, H, 2 S, E], and its log-sum-exp, [B, H, 2 S].

    Args:
        q: Queries of this rank's two chunks, [B, H, 2 S, D].
        k: Keys of this rank's two chunks, [B, K, 2 S, D].
        v: Values of this rank's two chunks, [B, K, 2 S, E].
        what: Attention to compute.
        ring: Ring of the ranks.
        sinks: Score of each head's attention sink, [H]; None without sinks.
    """
    out, own, wire = MergedOutput(q, v.shape[-1]), ring.chunks(0), _Wire(k, v)
    at_hand = wire.join(k, v) if ring.size > 1 else None
    keys, values = k, v
    for step in range(ring.size):
        coming = None
        if at_hand is not None and step < ring.size - 1:
            coming = ring.shift(at_hand, _KEYS, "forward_keys_values")
        attend(what, out, q, own, keys, values, ring.chunks(step))
        if coming is not None:
            at_hand = coming.wait()
            keys, values = wire.split(at_hand)
    add_sinks(out, sinks)
    return out.value(), out.lse


def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v.

    The gradient of a rank's keys and values starts at the next rank, one step late; each rank adds its contribution and
    sends the sum to the next rank, until it is back.

    Args:
        grad: Gradient of the output, [B, H, 2 S, E].
        q: Queries, as for :func:`ring_forward`.
        k: Keys, as for :func:`ring_forward`.
        v: Values, as for :func:`ring_forward`.
        out: Output of :func:`ring_forward`.
        lse: Log-sum-exp of :func:`ring_forward`.
        what: Attention of the forward.
        ring: Ring of the ranks.
    """
    own, wire, dtype = ring.chunks(0), _Wire(k, v), lse.dtype
    dq = torch.zeros_like(q, dtype=dtype)
    home = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
    at_hand = wire.join(k, v) if ring.size > 1 else None
    keys, values, grown = k, v, None
    for step in range(ring.size):
        coming = None
        if at_hand is not None and step < ring.size - 1:
            coming = ring.shift(at_hand, _KEYS, "backward_keys_values")
        here = home if step == 0 else torch.zeros_like(home)
        into = (dq, *wire.split(here))
        attend_backward(what, grad, out, lse, q, own, keys, values, ring.chunks(step), into)
        if step > 0:
            if grown is not None:
                here += grown.wait()
            grown = ring.shift(here, _GRADIENTS, "backward_gradients")
        if coming is not None:
            at_hand = coming.wait()
            keys, values = wire.split(at_hand)
    if grown is not None:
        home += grown.wait()
    dk, dv = wire.split(home)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks; saves only this rank's tensors for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, what: Attention, ring: Ring) -> Tensor:
        """Returns the output of :func:`ring_forward`."""
        out, lse = ring_forward(q, k, v, what, ring, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.what, ctx.ring = what, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return *ring_backward(grad, q, k, v, out, lse, ctx.what, ctx.ring), of_sinks, None, None

"""Ring attention: keys and values go round the ranks, and each rank's queries see all of them.

Ring Attention with Blockwise Transformers for Near-Infinite Context. Liu, Zaharia & Abbeel, 2023, arXiv 2310.01889.
Departures: chunks are dealt out from head and tail (`layout`), so that causal attention gives all ranks the same work;
pairs of which nothing is seen are not computed; and a rank's own part of its keys' gradients never travels: a backward
pass takes 2 (n - 1) transfers of a rank's keys and values, where the paper's takes 2 n - 1.

Elements that a rank sends a layer, of n ranks, with P the elements of its keys and values: forward (n - 1) P, backward
2 (n - 1) P, and with recomputation the forward's once more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed import collectives
from dlo_plugins.context.blockwise import Attention, Output, attend, attend_backward
from dlo_plugins.context.layout import chunks_of

#: So that gloo keeps apart what is under way at once.
_KEYS, _GRADIENTS = 1, 2


class Transfer:
    """What goes to the next rank, and comes from the one before, while something else is computed.

    Args:
        ring: of the ranks.
        sent: 1-D, contiguous; it is not to change until :meth:`wait`.
        tag: tells it from others under way.
    """

    def __init__(self, ring: Ring, sent: Tensor, tag: int) -> None:
        by_host = collectives.is_sent_by_host(ring.group, sent.device)
        self._ring, self._device, self._sent = ring, sent.device, sent.cpu() if by_host else sent
        self._received = torch.empty_like(self._sent)
        self._works: list[dist.Work] = []
        if sent.is_meta:  # Nothing is there to be sent.
            return
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        pair = [
            dist.P2POp(dist.isend, self._sent, group=ring.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, self._received, group=ring.group, tag=tag, group_peer=before),
        ]
        self._works = dist.batch_isend_irecv(pair)

    def wait(self) -> Tensor:
        """Waits for both, and returns what has come."""
        for work in self._works:
            if self._ring.limit is None:
                work.wait()
            else:
                work.wait(self._ring.limit)
        return self._received.to(self._device)


class Ring:
    """The ranks that share a sequence.

    Attributes:
        group: their process group; None is the default one.
        rank: this rank's number in it.
        size: how many there are.
        elements: sent to the next rank so far, of keys and values in forward, of those in backward, of gradients.
        limit: how long a transfer may take; None leaves it to the group.
        group_name: torch's name of the process group, by which its functional collectives find it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.group_name: str = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.elements: Counter[str] = Counter()
        on_gloo = "gloo" in str(dist.get_backend(group))
        self.limit = collectives.exchange_limit(group) if on_gloo else None

    def shift(self, sent: Tensor, tag: int, what: str) -> Transfer:
        """Starts to pass a tensor on."""
        self.elements[what] += sent.numel()
        return Transfer(self, sent, tag)

    def chunks(self, back: int) -> tuple[int, int]:
        """Returns the numbers of the chunks of the rank that is so many places back."""
        return chunks_of((self.rank - back) % self.size, self.size)


class _Wire:
    """Two tensors as one flat one, which is what travels.

    Args:
        k: the keys.
        v: the values.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._shapes = k.shape, v.shape

    @staticmethod
    def join(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._shapes
        return flat[: first.numel()].view(first), flat[first.numel() :].view(second)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, what: Attention, ring: Ring) -> tuple[Tensor, Tensor]:
    """Returns the output of this rank's queries, [B, H, 2 S, E], and its log-sum-exp, [B, H, 2 S].

    Args:
        q: Queries of this rank's two chunks, [B, H, 2 S, D].
        k: Keys of the same chunks, [B, K, 2 S, D].
        v: Values of the same chunks, [B, K, 2 S, E].
        what: The attention.
        ring: The ranks.
    """
    out, own, wire = Output(q, v.shape[-1]), ring.chunks(0), _Wire(k, v)
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
    return out.value(), out.lse


def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v.

    The gradient of a rank's keys begins at the next rank, one step late, and grows on its way home.

    Args:
        grad: Gradient of the output, [B, H, 2 S, E].
        q: Queries, as for :func:`ring_forward`.
        k: Keys, as for :func:`ring_forward`.
        v: Values, as for :func:`ring_forward`.
        out: Output of :func:`ring_forward`.
        lse: Log-sum-exp of :func:`ring_forward`.
        what: The attention.
        ring: The ranks.
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, what: Attention, ring: Ring) -> Tensor:
        """Returns the output of :func:`ring_forward`."""
        out, lse = ring_forward(q, k, v, what, ring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.what, ctx.ring = what, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_backward(grad, q, k, v, out, lse, ctx.what, ctx.ring), None, None

"""Attention whose scores are more than products of queries and keys: soft caps, sinks and biases of positions.

Gemma 2: Improving Open Language Models at a Practical Size. Gemma Team, 2024, arXiv 2408.00118 (soft caps). Efficient
Streaming Language Models with Attention Sinks. Xiao et al., 2023, arXiv 2309.17453; as in gpt_oss, a sink is one more
learned score of each head, to which no value belongs.

Fused kernels compute neither soft caps nor sinks, so that the scores are in memory: for the gathered blocks O(L w) of
them. A bias of positions is a dense matrix itself, to which the mask is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Soft cap, sinks and biases of scores.

    Attributes:
        softcap: Soft bound: a score s becomes `softcap * tanh(s / softcap)`; None for none.
        sinks: Score of each head's sink, `[H]`; None without sinks.
        bias: Summand of scores without soft cap and sinks, which broadcasts to `[B, H, q, k]`; None for none.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is none of them."""
        return self.softcap is None and self.sinks is None and self.bias is None

    def repeated(self, times: int) -> Scores:
        """Returns the same for several rows of heads in one dim."""
        return self if self.sinks is None else Scores(self.softcap, self.sinks.repeat(times))


#: Products and nothing else.
PLAIN_SCORES = Scores()


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scores: Scores = PLAIN_SCORES,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns attention under a dense mask, `[B, H, q, E]`.

    Args:
        query: Queries, `[B, H, q, D]`.
        key: Keys, `[B, H, k, D]`.
        value: Values, `[B, H, k, E]`.
        seen: Mask, bool, that broadcasts to `[B, H, q, k]`; each query sees a key. None for all.
        scores: Soft cap and sinks of the scores, or their bias.
        scale: Factor of scores; the width's inverse square root by default.
        dropout: Dropout rate of attention weights.
    """
    if scores.bias is not None:
        bias = scores.bias.to(query.dtype)
        seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, seen, dropout_p=dropout, scale=scale)
    if scores.is_plain:
        return F.scaled_dot_product_attention(query, key, value, seen, dropout_p=dropout, scale=scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    found = (query @ key.transpose(-1, -2)).to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if seen is not None:
        found = found.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        found = torch.cat([found, scores.sinks.to(wide)[:, None, None].expand(*found.shape[:-1], 1)], -1)
    weights = found.softmax(-1)
    if scores.sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout).to(value.dtype) @ value

"""Attention under a mask on a GPU: FlexAttention, compiled, equals gathered blocks."""

import pytest
import torch

from dlo_framework.models.attention import AttentionMask, BigBird, BSLongformer, FixedSparsity, Prefix, SlidingWindow
from dlo_framework.models.attention.masked_attention import masked_attention

PATTERNS = [FixedSparsity(64), BSLongformer(64), BigBird(32, True), SlidingWindow(100, 64), Prefix(70, 64)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_flex_equals_gathered_blocks(pattern: object) -> None:
    mask = AttentionMask(pattern, causal=True, num_heads=4)  # type: ignore[arg-type]
    inputs = [torch.randn(2, 4, 500, 64, device="cuda", requires_grad=True) for _ in range(3)]
    documents = (torch.arange(500, device="cuda") >= 230).long().expand(2, -1)
    for numbers in (None, documents):
        outs = [masked_attention(kernel, *inputs, mask, numbers) for kernel in ("flex", "blocks")]
        torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)
        ours, theirs = (torch.autograd.grad(out.square().sum(), inputs) for out in outs)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)

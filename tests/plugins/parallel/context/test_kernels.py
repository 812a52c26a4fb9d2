"""A block's output, log-sum-exp and gradients, fused and written out, against the softmax of the whole."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_plugins.parallel.context import block_attention
from dlo_plugins.parallel.context.block_attention import (
    CUDA_CUDNN,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    Block,
    Dropout,
    MergedOutput,
    Result,
    Score,
    kernel_for,
)
from dlo_plugins.parallel.context.sequence_layout import PairMask

B, H, K, D = 2, 4, 2, 8


def inputs(queries: int, keys: int, width: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, queries, D), (B, K, keys, D), (B, K, keys, width)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def reference(q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * score.scale
    if score.softcap is not None:
        scores = score.softcap * (scores / score.softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("kind", ["fused", "softcap", "wide values", "few scores"])
@pytest.mark.parametrize("view", ["all", "causal", "some"])
def test_a_block_is_the_softmax_of_the_whole(kind: str, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "few scores":
        monkeypatch.setattr(block_attention, "_SCORES", 3 * B * H * 7)
    score = Score(0.3, None if kind == "fused" else 1.5)
    q, k, v = inputs(7, 7, 12 if kind == "wide values" else D)
    assert (kernel_for(q, v, view == "some") is None) == (kind == "wide values")
    mask = None
    if view == "causal":
        mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(B, 1, 7, 7)
    elif view == "some":
        mask = torch.rand(B, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.6
        mask |= torch.eye(7, dtype=torch.bool)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = reference(q, k, v, score, mask)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        given = None if view == "causal" or mask is None else PairMask(mask)
        block = Block(q, k, v, score, view == "causal", given)
        found = block_attention.forward(block)
        grads = block_attention.backward(block, Result(grad, *found))
    torch.testing.assert_close(found, (out, lse))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("scores", [2**24, 3 * B * H * 7])
def test_dropout_is_the_same_in_forward_and_backward(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_SCORES", scores)
    q, k, v = (x.requires_grad_() for x in inputs(7, 7))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    score, dropout = Score(0.3), Dropout(0.4, seed=5)
    random, rows = dropout.generator(q.device), min(7, scores // (B * H * 7))
    drawn = [torch.rand(B, H, rows if at + rows <= 7 else 7 - at, 7, generator=random) for at in range(0, 7, rows)]
    keep = (torch.cat(drawn, 2) >= 0.4) / 0.6
    assert 0 < (keep == 0).double().mean() < 0.8
    scaled = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~mask, -math.inf)
    out = (scaled.softmax(-1) * keep) @ v.repeat_interleave(2, 1)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        block = Block(q, k, v, score, True, dropout=dropout)
        found, lse = block_attention.forward(block)
        grads = block_attention.backward(block, Result(grad, found, lse))
    torch.testing.assert_close((found, lse), (out, scaled.logsumexp(-1)))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_blocks_add_up_and_those_that_see_nothing_add_nothing(softcap: float | None) -> None:
    score = Score(0.3, softcap)
    q, k, v = (x.requires_grad_() for x in inputs(5, 12))
    mask = torch.rand(B, 1, 5, 12, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[:, :, 2, :8] = False  # sees nothing of the first two blocks
    mask[:, :, :, 11] = True
    out, lse = reference(q, k, v, score, mask)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), grad)
    whole = MergedOutput(q, D)
    slices = [slice(0, 4), slice(4, 8), slice(8, 12)]
    blocks = [Block(q, k[:, :, at], v[:, :, at], score, mask=PairMask(mask[..., at])) for at in slices]
    with torch.no_grad():
        for block in blocks:
            part = block_attention.forward(block)
            whole.add(slice(0, 5), *part)
        torch.testing.assert_close((whole.value(), whole.lse), (out, lse))
        dq = torch.zeros_like(q)
        for at, block in zip(slices, blocks, strict=True):
            part = block_attention.backward(block, Result(grad, whole.value(), whole.lse))
            dq += part[0]
            torch.testing.assert_close(part[1], expected[1][:, :, at])
            torch.testing.assert_close(part[2], expected[2][:, :, at])
        torch.testing.assert_close(dq, expected[0])


def test_the_efficient_kernel_gets_the_output_in_the_strides_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA code takes them from the number of heads and their width, in half precision."""
    strides = []

    class Kernels:
        @staticmethod
        def _scaled_dot_product_efficient_attention_backward(*args: Any, **options: Any) -> None:
            out = args[5]
            strides.append(out.stride())
            assert torch.equal(out, torch.ones_like(out))

    monkeypatch.setattr(block_attention, "_aten", Kernels)
    q, k, v = inputs(7, 7)
    block = Block(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), Score(0.3))
    for out in (torch.ones(B, H, 7, D), torch.ones(B, 7, H, D).transpose(1, 2)):
        CUDA_EFFICIENT.backward(block, Result(out, out, torch.ones(B, H, 7)))
    assert strides == [(7 * H * D, D, H * D, 1)] * 2


@pytest.mark.parametrize(("capability", "enabled", "cudnn"), [((8, 0), True, 0), ((9, 0), True, 1), ((9, 0), False, 0)])
def test_cudnns_attention_is_asked_for_where_it_is_the_fastest(
    capability: tuple[int, int], enabled: bool, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        assert kernel_for(q, q, False) is (CUDA_CUDNN if cudnn else CUDA_FLASH)
        assert kernel_for(q, q, True) is CUDA_EFFICIENT
        for kernel, causal in itertools.product((CUDA_CUDNN, CUDA_FLASH, CUDA_EFFICIENT), (False, True)):
            block = Block(q, q, q, Score(0.3), causal)
            out, lse, *_ = kernel.forward(block)
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
            grads = kernel.backward(block, Result(out, out, lse))[:3]
            assert [grad.shape for grad in grads] == [q.shape] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("view", ["all", "causal", "some"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuda_kernels_are_what_is_written_out(dtype: torch.dtype, view: str) -> None:
    q, k, v = (x.to("cuda", dtype) for x in inputs(40, 40))
    mask = None
    if view == "some":
        seen = (torch.rand(B, 1, 40, 40) > 0.5).cuda()
        seen[:, :, 3] = False
        mask = PairMask(seen)
    kernel = kernel_for(q, v, mask is not None)
    efficient = mask is not None or dtype == torch.float32
    halves = CUDA_CUDNN if CUDA_CUDNN.fits(q, v, False) else CUDA_FLASH
    assert kernel is (CUDA_EFFICIENT if efficient else halves)
    causal, score = view == "causal", Score(0.3)
    block = Block(q, k, v, score, causal, mask)
    found = block_attention.forward(block)
    exact = Block(q.double(), k.double(), v.double(), score, causal, mask)
    expected = block_attention.forward(exact)
    grad = torch.randn_like(found[0])
    # Log-sum-exps of more blocks than this one, and not those of the kernel's own forward.
    lse = torch.logaddexp(expected[1], torch.zeros_like(expected[1]))
    out = expected[0] * (expected[1] - lse).exp()[..., None]
    grads = block_attention.backward(block, Result(grad, out.to(dtype), lse.float()))
    exact_grads = block_attention.backward(exact, Result(grad.double(), out, lse))
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for got, wanted in zip((found[0], *grads), (expected[0], *exact_grads), strict=True):
        assert (got.double() - wanted).norm() / wanted.norm() < limit
    seen = expected[1].isfinite()
    torch.testing.assert_close(found[1].double()[seen], expected[1][seen], rtol=limit, atol=limit)

"""Sparsity patterns: layouts equal DeepSpeed's; block kernels equal attention with the dense mask; refusals."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dlo_framework.errors import DloError
from dlo_framework.models import attention as patterns
from dlo_framework.models.attention import (
    Attention,
    AttentionMask,
    BigBird,
    BSLongformer,
    DenseSparsity,
    FixedSparsity,
    Prefix,
    SlidingWindow,
    SparsityPattern,
    VariableSparsity,
)
from dlo_framework.models.attention.attention_mask import LocalHeads
from dlo_framework.models.attention.attention_options import choose_kernel
from dlo_framework.models.attention.masked_attention import attend_blocks, flex_mask, masked_attention

#: Layouts of DeepSpeed 0.16.5's sparsity configs, with `random.seed(seed)` before each: a row is a hexadecimal number.
DEEPSPEED = json.loads((Path(__file__).parents[3] / "support" / "deepspeed_layouts.json").read_text())
HEADS, LENGTH = 4, 150


class Own(SparsityPattern):
    """A user's pattern: every second block."""

    def layout(self, num_heads, num_blocks):
        numbers = torch.arange(num_blocks)
        return ((numbers[:, None] - numbers) % 2 == 0).expand(num_heads, -1, -1)


SOME = [
    DenseSparsity(16),
    FixedSparsity(16, True, num_different_global_patterns=4),
    VariableSparsity(16, True, 2, [2, 3], [0, 5]),
    BSLongformer(16),
    BigBird(16, True, num_random_blocks=2),
    SlidingWindow(37, 16),
    SlidingWindow(1, 32),
    Own(16),
    BSLongformer(200),
]


@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: f"{case['pattern']}-{case['seed']}")
def test_layouts_equal_deepspeeds(case):
    kind, settings = getattr(patterns, case["pattern"]), dict(case["settings"])
    if case["pattern"] in ("VariableSparsity", "BigBird"):
        settings["seed"] = case["seed"]
    found = kind(block=16, **settings).layout(case["heads"], case["blocks"])
    assert found.dtype == torch.bool
    expected = [[bool(int(row, 16) >> at & 1) for at in range(case["blocks"])][::-1] for row in case["layout"]]
    assert torch.equal(found, torch.tensor(expected).view_as(found))


def by_dense_mask(q, k, v, mask, documents=None, heads=None):
    places = torch.arange(q.shape[2])
    seen = mask.visible(places, places, heads, q.shape[2])[None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), seen)


def tensors(kv_heads=HEADS, length=LENGTH, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (HEADS, 8), (kv_heads, 8), (kv_heads, 6)
    return [torch.randn(2, heads, length, width, dtype=dtype, requires_grad=True) for heads, width in shapes]


DOCUMENTS = torch.tensor([[0] * 50 + [1] * 80 + [-1] * 20, [0] * 150])


CAUSAL = [*SOME, Prefix(21, 16)]


@pytest.mark.parametrize(
    ("kernel", "causal", "patterns_of"),
    [
        *(
            (kernel, causal, patterns)
            for kernel in ("blocks", "sdpa")
            for causal, patterns in ((True, CAUSAL), (False, SOME))
        ),
        ("flex", True, [BigBird(16, True, num_random_blocks=2), Prefix(21, 16)]),
        *(pytest.param("flex", *case, marks=pytest.mark.slow) for case in ((True, CAUSAL), (False, SOME))),
    ],
)
def test_kernels_equal_attention_with_the_dense_mask(kernel, causal, patterns_of):
    for pattern in patterns_of:
        mask = AttentionMask(pattern, causal=causal, num_heads=HEADS)
        for documents, kv_heads in ((None, 4), (None, 2), (DOCUMENTS, 4), (DOCUMENTS, 2)):
            inputs = tensors(kv_heads)
            if kernel == "flex":  # Its kernel for CPUs has no backward.
                inputs = [tensor.detach()[..., :6] for tensor in inputs]
            found = masked_attention(kernel, *inputs, mask, documents)
            expected = by_dense_mask(*inputs, mask, documents)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            if kernel == "flex":
                continue
            weight = torch.randn_like(found)
            ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_causal_mask_has_no_later_keys_and_a_window_its_width():
    places = torch.arange(LENGTH)
    behind = places[:, None] - places
    for pattern in SOME:
        seen = AttentionMask(pattern, causal=True, num_heads=HEADS).visible(places, places)
        assert not seen[:, behind < 0].any()
        assert seen[:, behind == 0].all()
    seen = AttentionMask(SlidingWindow(37, 16), causal=True, num_heads=HEADS).visible(places, places)[0]
    assert torch.equal(seen, (behind >= 0) & (behind < 37))
    seen = AttentionMask(SlidingWindow(37, 16), causal=False, num_heads=HEADS).visible(places, places)[0]
    assert torch.equal(seen, behind.abs() < 37)
    seen = AttentionMask(Prefix(21, 16), causal=True, num_heads=HEADS).visible(places, places)[0]
    assert torch.equal(seen, (behind >= 0) | (places[None] < 21))


@pytest.mark.parametrize("pattern", [BigBird(16, True), BSLongformer(16)])
def test_heads_of_a_rank_have_their_own_layouts(pattern):
    mask = AttentionMask(pattern, causal=True, num_heads=HEADS)
    q, k, v = tensors()
    full = attend_blocks(q, k, v, mask)
    for first in (0, 2):
        heads, part = LocalHeads(first, 2), slice(first, first + 2)
        found = attend_blocks(q[:, part], k[:, part], v[:, part], mask, heads=heads)
        torch.testing.assert_close(found, full[:, part], rtol=0, atol=1e-12)


def test_shorter_sequences_take_the_first_blocks_of_the_longest_layout():
    mask = AttentionMask(BigBird(16, True), causal=True, num_heads=HEADS, longest=320)
    assert torch.equal(mask.layout(100), mask.layout(320)[:, :7, :7])
    assert mask.layout(400).shape == (HEADS, 25, 25)


def test_flex_blocks_cover_every_visible_position():
    for block in (48, 64, 128, 200, 384):
        mask = AttentionMask(BSLongformer(block), causal=True, num_heads=1)
        length = 1000
        seen = flex_mask(mask, length, None, None, torch.device("cpu")).to_dense()[0, 0].bool()
        places = torch.arange(length)
        exact = mask.visible(places, places)[0]
        covered = seen[places[:, None] // 128, places[None] // 128]
        assert not (exact & ~covered).any()
        assert covered.float().mean() < 0.75


def test_memory_grows_with_the_length_and_not_with_its_square():
    mask = AttentionMask(BSLongformer(64), causal=True, num_heads=HEADS)
    sizes = [sum(group.seen.numel() for group in mask.table(n, None, torch.device("cpu")).groups) for n in (2048, 8192)]
    assert sizes[1] < 4.5 * sizes[0]


class Short(Own):
    def layout(self, num_heads, num_blocks):
        return super().layout(num_heads, num_blocks)[:1]


class Blind(Own):
    def layout(self, num_heads, num_blocks):
        return ~torch.eye(num_blocks, dtype=torch.bool).expand(num_heads, -1, -1)


WRONG = {
    "num_global_blocks must divide num_local_blocks=4, got 3": lambda: FixedSparsity(num_global_blocks=3),
    "num_different_global_patterns must be at most 1, got 2; set it to 1, or set different": lambda: FixedSparsity(
        num_different_global_patterns=2
    ),
    "horizontal_global_attention must be false for unidirectional": lambda: AttentionMask(
        FixedSparsity(horizontal_global_attention=True), causal=True, num_heads=1
    ),
    "global_block_end_indices must have 1 entries": lambda: BSLongformer(global_block_end_indices=[2, 3]),
    "global_block_end_indices must be above": lambda: VariableSparsity(
        global_block_indices=[2], global_block_end_indices=[2]
    ),
    "window must be at least 1, got 0": lambda: SlidingWindow(0),
    "must be unidirectional for a causal model, got bidirectional": lambda: AttentionMask(
        BigBird(attention="bidirectional"), causal=True, num_heads=1
    ),
    "in a model that is not causal, got Prefix": lambda: AttentionMask(Prefix(3), causal=False, num_heads=1),
    "must be \\[heads, blocks, blocks\\] = \\[2, 3, 3\\], got \\[1, 3, 3\\]": lambda: AttentionMask(
        Short(8), causal=True, num_heads=2
    ).layout(24),
    "must be true on its diagonal": lambda: AttentionMask(Blind(8), causal=True, num_heads=2).layout(24),
    "got flassh; did you mean 'flash'": lambda: Attention("flassh"),
    "with a sparse mask, got flash with BigBird": lambda: Attention("flash", BigBird()),
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_refused(message):
    with pytest.raises(DloError, match=message):
        WRONG[message]()


def test_the_kernel_follows_mask_device_and_dropout():
    cpu, sparse = torch.device("cpu"), AttentionMask(BigBird(), causal=True, num_heads=1)
    dense = AttentionMask(DenseSparsity(), causal=True, num_heads=1)
    assert choose_kernel("auto", sparse, cpu, torch.float32, dropout=False).name == "blocks"
    assert choose_kernel("auto", dense, cpu, torch.float32, dropout=False).name == "sdpa"
    cuda = torch.device("cuda")
    assert choose_kernel("auto", sparse, cuda, torch.float32, dropout=False).name == "flex"
    assert choose_kernel("auto", sparse, cuda, torch.float32, dropout=True).name == "blocks"


def test_patterns_are_rebuilt_from_their_settings():
    for pattern in [*SOME, Prefix(3)]:
        again = Attention.from_settings(Attention("auto", pattern).settings()).mask
        assert repr(again) == repr(pattern)
        assert torch.equal(again.layout(2, 9), pattern.layout(2, 9))
    random.seed(1)
    before = random.getstate()
    BigBird().layout(2, 9)
    assert random.getstate() == before, "the layout draws from numbers of its own"

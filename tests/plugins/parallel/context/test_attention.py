"""Attention on shards of a sequence: positions, who sees whom, a block's values and gradients, and on ranks."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.context import block_attention, shared_attention
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
from dlo_plugins.parallel.context.context_sequence import ContextSequence
from dlo_plugins.parallel.context.sequence_layout import (
    CountedTensor,
    PairMask,
    Visibility,
    chunks_of,
    concat_shards,
    count_ends,
    find_documents,
    pad_batch,
    read_counts,
    shard_sequence,
)
from support.on_ranks import on_ranks
from support.waits import Waits

B, H, K, D = 2, 4, 2, 8


def inputs(queries: int, keys: int, width: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, queries, D), (B, K, keys, D), (B, K, keys, width)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def reference(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None, sinks: Tensor | None = None, kept: Any = 1
) -> tuple[Tensor, Tensor]:
    """Returns the output, and each query's log of the sum of exponentials; `kept` are dropout's factors."""
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * score.scale
    if score.softcap is not None:
        scores = score.softcap * (scores / score.softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : v.shape[2]] * kept) @ v, lse


def drawn(dropout: Dropout, rows: int) -> Tensor:
    """Returns dropout's factors, whose random numbers are drawn for some rows at a time."""
    random = dropout.generator(torch.device("cpu"))
    found = torch.cat([torch.rand(B, H, min(rows, 7 - at), 7, generator=random) for at in range(0, 7, rows)], 2)
    assert 0.2 < (found >= dropout.rate).double().mean() < 0.8
    return (found >= dropout.rate) / (1 - dropout.rate)


@pytest.mark.parametrize("kind", ["fused", "softcap", "wide values", "few scores", "dropout", "dropout, few scores"])
@pytest.mark.parametrize("view", ["all", "causal", "some"])
def test_a_block_is_the_softmax_of_the_whole(kind: str, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 3 if "few scores" in kind else 7
    if rows < 7:
        monkeypatch.setattr(block_attention, "_SCORES", rows * B * H * 7)
    score = Score(0.3, None if kind == "fused" else 1.5)
    dropout = Dropout(0.4, seed=5) if "dropout" in kind else None
    q, k, v = inputs(7, 7, 12 if kind == "wide values" else D)
    assert (kernel_for(q, v, view == "some") is None) == (kind == "wide values")
    mask = None
    if view == "causal":
        mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(B, 1, 7, 7)
    elif view == "some":
        mask = torch.rand(B, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.6
        mask |= torch.eye(7, dtype=torch.bool)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = reference(q, k, v, score, mask, kept=1 if dropout is None else drawn(dropout, rows))
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        given = None if view == "causal" or mask is None else PairMask(mask)
        block = Block(q, k, v, score, view == "causal", given, dropout)
        found = block_attention.forward(block)
        grads = block_attention.backward(block, Result(grad, *found))
    torch.testing.assert_close(found, (out, lse))
    torch.testing.assert_close(grads, expected)


def test_blocks_in_which_a_query_sees_no_key_add_nothing() -> None:
    q, *_ = inputs(5, 5)
    lse, whole = q.sum(-1), MergedOutput(q, D)
    blind = torch.zeros_like(q), torch.full_like(lse, -math.inf)
    for block in (blind, blind, (q, lse), blind):
        whole.add(slice(0, 5), *block)
    torch.testing.assert_close((whole.value(), whole.lse), (q, lse))


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


# --- which positions a rank holds, and batches that are made to fit --------------------------------------------------


def test_a_rank_holds_a_chunk_of_the_head_and_one_of_the_tail() -> None:
    assert [chunks_of(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert shard_sequence(torch.arange(8)[None], 1, 2).tolist() == [[2, 3, 4, 5]]


def test_a_length_that_does_not_fit_is_padded_with_what_has_no_target() -> None:
    batch = {
        "input_ids": torch.full((2, 5), 7),
        "labels": torch.full((2, 5), 7),
        "position_ids": torch.arange(5).expand(2, 5),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
        "tokens_in_step": torch.tensor(10),
    }
    found = pad_batch(batch, 2)
    assert found["labels"][0].tolist() == [7] * 5 + [-100] * 3
    assert found["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert found["attention_mask"][1].tolist() == [1] * 5 + [0] * 3
    assert found["input_ids"].shape == (2, 8)
    assert found["tokens_in_step"] is batch["tokens_in_step"]
    assert batch["labels"].shape == (2, 5)


@pytest.mark.parametrize("batch", [[torch.zeros(2, 4)], {"pixels": torch.zeros(2, 4)}, {"input_ids": torch.zeros(4)}])
def test_other_batches_are_refused(batch: object) -> None:
    with pytest.raises(DloError, match=r"a batch must be a dict with `input_ids` \[B, L\]"):
        pad_batch(batch, 2)


# --- who sees whom, against a mask written out for the whole sequence ------------------------------------------------


ROWS, LENGTH, CHUNKS = 3, 32, 8


def packed(generator: torch.Generator, length: int = LENGTH, rows: int = ROWS, longest: int = 20) -> torch.Tensor:
    """Positions of documents of random lengths, one after another."""
    found = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            row += range(int(torch.randint(1, longest, (), generator=generator)))
        found.append(row[:length])
    return torch.tensor(found)


def whole_mask(positions: torch.Tensor, mask: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """Bool [B, L, L]."""
    index, document = torch.arange(positions.shape[1]), (positions == 0).cumsum(1)
    found = (index <= index[:, None]) & (document[:, :, None] == document[:, None])
    if window is not None:
        found &= index[:, None] - index < window
    if mask is not None:
        found &= mask.bool()[:, None] | torch.eye(len(index), dtype=torch.bool)
    return found


def padding(generator: torch.Generator) -> torch.Tensor:
    """A mask of padding: on the right, on the left, or nowhere."""
    found = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row in range(ROWS):
        cut = int(torch.randint(0, LENGTH // 2, (), generator=generator))
        if row % 3 == 1:
            found[row, LENGTH - cut :] = 0
        elif row % 3 == 2:
            found[row, :cut] = 0
    return found


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("kind", ["one document", "packed", "padded", "packed and padded"])
def test_every_pair_of_chunks_is_as_the_whole_mask_has_it(kind: str, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = packed(generator) if "packed" in kind else torch.arange(LENGTH).repeat(ROWS, 1)
    mask = padding(generator) if "padded" in kind else None
    whole = whole_mask(positions, mask, window)
    documents = find_documents(positions, mask, CHUNKS)
    causal = torch.ones(documents.size, documents.size, dtype=torch.bool).tril()
    for query in range(CHUNKS):
        for key in range(CHUNKS):
            expected = whole.unflatten(1, (CHUNKS, -1))[:, query].unflatten(2, (CHUNKS, -1))[:, :, key]
            seen = documents.seen(query, key, window)
            if seen is Visibility.NOTHING:
                assert not expected.any()
            elif seen is Visibility.ALL:
                assert expected.all()
            elif seen is Visibility.CAUSAL:
                assert (expected == causal).all()
            found = documents.mask(query, key, window, positions.device).visible[:, 0]
            assert torch.equal(found.expand_as(expected), expected)


def test_without_a_mask_documents_are_those_of_transformers() -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    positions = torch.tensor([[0, 1, 2, 7, 8, 0, 0, 1], [3, 4, 5, 6, 7, 0, 1, 2]])
    theirs = find_packed_sequence_indices(positions)
    starts = find_documents(positions, None, 2).starts
    assert theirs is not None
    assert starts is not None
    assert torch.equal(starts[:, :, None] == starts[:, None], theirs[:, :, None] == theirs[:, None])


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_what_the_host_has_counted_it_does_not_ask_the_device_for(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = packed(generator) if kind == "packed" else torch.arange(LENGTH).repeat(ROWS, 1)
    mask = padding(generator) if kind == "padded" else None
    given = [positions] if mask is None else [positions, mask]
    assert read_counts(given) is None
    given = moved(count_ends(positions, mask, CHUNKS), *given)
    positions, mask = given[0], None if mask is None else given[1]
    with Waits() as waits:
        asked = find_documents(positions, mask, CHUNKS)
    assert "cpu" in waits.calls
    ends = read_counts(given)
    assert ends is not None
    visibility_host = [tensor.clone() for tensor in ends]
    with Waits() as waits:
        documents = find_documents(positions, mask, CHUNKS, ends)
    assert set(waits.calls) <= {"item"}  # of the counts, which are on the host
    for name in ("starts", "real", "first_start", "last_start", "padded"):
        one, other = getattr(asked, name), getattr(documents, name)
        assert (one is None and other is None) or torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(ends, visibility_host, strict=True))
    positions[0, 0] = 7
    assert read_counts(given) is None


def moved(ends: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [CountedTensor.attach(tensor, ends).to("cpu") for tensor in tensors]


# --- attention alone on 2 and 4 ranks, by both methods: outputs and gradients are those of the whole sequence --------


LONG = 45


def batch_of(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of random documents, or of padded ones."""
    ids = torch.zeros(B, LONG, dtype=torch.long)
    if kind == "packed":
        cuts = torch.rand(B, LONG, generator=generator) < 0.12
        cuts[:, 0] = True
        index = torch.arange(LONG)
        return {"input_ids": ids, "position_ids": index - torch.where(cuts, index, 0).cummax(1).values}
    if kind == "padded":
        lengths = torch.randint(1, LONG, (B, 1), generator=generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(LONG) < lengths).long()}
    return {"input_ids": ids}


#: Largest relative errors.
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14}


def _check_errors(rank: int, ranks: int, method: str) -> None:
    """Compares every combination."""
    shared_attention._CHUNK = 8  # In this process alone: so that the whole sequence is cut into several chunks.
    sequence = ContextSequence(dist.group.WORLD, method)  # type: ignore[arg-type]
    cases = itertools.product(("plain", "packed", "padded"), (None, 1, 7, 30), (None, 2.0), LIMITS)
    for number, (kind, window, softcap, dtype) in enumerate(cases):
        kv_heads = (1, 2, 4)[number // 2 % 3]
        generator = torch.Generator().manual_seed(number)
        batch = batch_of(kind, generator)
        score = Score(0.4, softcap)
        padded = -(-LONG // (2 * ranks)) * 2 * ranks
        shapes = [(B, heads, padded, D) for heads in (H, kv_heads, kv_heads, H)]
        q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        grad[:, :, LONG:] = 0
        if "attention_mask" in batch:
            grad[:, :, :LONG] *= batch["attention_mask"][:, None, :, None]
        leaves = [x[:, :, :LONG].clone().requires_grad_() for x in (q, k, v)]
        sinks = torch.randn(H, generator=generator, dtype=torch.float64).requires_grad_() if number % 2 else None
        positions = batch.get("position_ids", torch.arange(LONG).expand(B, LONG))
        out, _ = reference(*leaves, score, whole_mask(positions, batch.get("attention_mask"), window)[:, None], sinks)
        wanted_of = leaves if sinks is None else [*leaves, sinks]
        expected = [out.detach(), *torch.autograd.grad(out, wanted_of, grad[:, :, :LONG])]
        if "attention_mask" in batch:
            expected[0] = expected[0] * batch["attention_mask"][:, None, :, None]

        sequence.shard(batch)
        mine = [shard_sequence(x, rank, ranks, 2).to(dtype).requires_grad_() for x in (q, k, v)]
        own = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
        part = sequence.attention(*mine, score, window, sinks=own)
        part.backward(shard_sequence(grad, rank, ranks, 2).to(dtype))
        found = [concat_shards(gathered(x, ranks), 2)[:, :, :LONG] for x in (part.detach(), *(x.grad for x in mine))]
        if "attention_mask" in batch:
            found[0] = found[0] * batch["attention_mask"][:, None, :, None]
        if own is not None:
            assert own.grad is not None
            dist.all_reduce(own.grad)
            found.append(own.grad)
        for got, wanted in zip(found, expected, strict=True):
            # A window of one token leaves no gradient of its query and key.
            error = float((got.double() - wanted).norm() / torch.maximum(wanted.norm(), grad.norm()))
            assert error < LIMITS[dtype], (kind, window, softcap)


def gathered(x: Tensor, ranks: int) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous())
    return parts


def _dropout(rank: int, ranks: int, method: str) -> None:
    sequence = ContextSequence(dist.group.WORLD, method)  # type: ignore[arg-type]
    batch, score, length = batch_of("packed", torch.Generator().manual_seed(0)), Score(0.4), 48
    sequence.shard(batch)
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, heads, length, D) for heads in (H, 2, 2, H)]
    q, k, v, grad = (
        shard_sequence(torch.randn(shape, generator=generator, dtype=torch.float64), rank, ranks, 2) for shape in shapes
    )
    v.requires_grad_()
    exact = sequence.attention(q, k, v, score, None)
    mean, runs = torch.zeros_like(exact), 40
    for run in range(runs):
        torch.manual_seed(run)  # the same on all ranks
        out = sequence.attention(q, k, v, score, None, dropout=0.3)
        mean += out.detach() / runs
        if run == 0:
            out.backward(grad)
            assert v.grad is not None
            # The output is linear in v, so backward has dropped what forward has if and only if these are equal.
            sums = torch.stack([(out.detach() * grad).sum(), (v.grad * v.detach()).sum()])
            dist.all_reduce(sums)
            torch.testing.assert_close(sums[0], sums[1])
            torch.manual_seed(run)
            assert torch.equal(sequence.attention(q, k, v, score, None, dropout=0.3), out)
            assert (out - exact).norm() > 0.2 * exact.norm()
            heads = [x for part in gathered(out.detach() / exact.detach(), ranks) for x in part.unbind(1)]
            assert not any(torch.allclose(a, b) for a, b in itertools.combinations(heads, 2))
    assert (mean - exact).norm() < 0.23 * exact.norm()  # falls as the root of the runs


@on_ranks(2)
def test_attention_and_dropout_are_those_of_the_whole_sequence(rank: int, ranks: int) -> None:
    for method in ("ring", "ulysses"):
        _dropout(rank, ranks, method)
    _check_errors(rank, ranks, "ring")


# With four ranks heads of keys are repeated for ulysses.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "method"), [(2, "ulysses"), (4, "ulysses"), (3, "ring"), (4, "ring")])
def test_attention_is_that_of_the_whole_sequence(method: str, ranks: int) -> None:
    run_distributed(_check_errors, ranks, method)

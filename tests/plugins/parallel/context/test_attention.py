"""Attention alone on 2 and 4 ranks, by both methods: outputs and gradients are those of the whole sequence."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.context import shared_attention
from dlo_plugins.parallel.context.block_attention import Score
from dlo_plugins.parallel.context.context_sequence import ContextSequence
from dlo_plugins.parallel.context.sequence_layout import concat_shards, shard_sequence

B, H, D, LENGTH = 3, 4, 8, 45


def batch_of(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of random documents, or of padded ones."""
    ids = torch.zeros(B, LENGTH, dtype=torch.long)
    if kind == "packed":
        cuts = torch.rand(B, LENGTH, generator=generator) < 0.12
        cuts[:, 0] = True
        index = torch.arange(LENGTH)
        return {"input_ids": ids, "position_ids": index - torch.where(cuts, index, 0).cummax(1).values}
    if kind == "padded":
        lengths = torch.randint(1, LENGTH, (B, 1), generator=generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()}
    return {"input_ids": ids}


def seen_by(batch: dict[str, Tensor], window: int | None) -> Tensor:
    """Bool [B, 1, L, L] of the whole sequence."""
    index = torch.arange(LENGTH)
    found = (index <= index[:, None]).expand(B, LENGTH, LENGTH).clone()
    if window is not None:
        found &= index[:, None] - index < window
    if "position_ids" in batch:
        document = (batch["position_ids"] == 0).cumsum(1)
        found &= document[:, :, None] == document[:, None]
    if "attention_mask" in batch:
        found &= batch["attention_mask"].bool()[:, None] | torch.eye(LENGTH, dtype=torch.bool)
    return found[:, None]


def whole(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, score: Score, sinks: Tensor | None = None) -> Tensor:
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * score.scale
    if score.softcap is not None:
        scores = score.softcap * (scores / score.softcap).tanh()
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : v.shape[2]] @ v


def _worst_errors(rank: int, ranks: int, method: str) -> dict[str, float]:
    """Compares every combination; returns the worst relative error by dtype."""
    worst: dict[str, float] = {}
    shared_attention._CHUNK = 8  # In this process alone: so that the whole sequence is cut into several chunks.
    sequence = ContextSequence(dist.group.WORLD, method)  # type: ignore[arg-type]
    cases = itertools.product(
        ("plain", "packed", "padded"), (None, 1, 7, 30), (None, 2.0), (torch.float32, torch.float64)
    )
    for number, (kind, window, softcap, dtype) in enumerate(cases):
        kv_heads = (1, 2, 4)[number // 2 % 3]
        generator = torch.Generator().manual_seed(number)
        batch = batch_of(kind, generator)
        score = Score(0.4, softcap)
        padded = -(-LENGTH // (2 * ranks)) * 2 * ranks
        shapes = [(B, heads, padded, D) for heads in (H, kv_heads, kv_heads, H)]
        q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        grad[:, :, LENGTH:] = 0
        if "attention_mask" in batch:
            grad[:, :, :LENGTH] *= batch["attention_mask"][:, None, :, None]
        leaves = [x[:, :, :LENGTH].clone().requires_grad_() for x in (q, k, v)]
        sinks = torch.randn(H, generator=generator, dtype=torch.float64).requires_grad_() if number % 2 else None
        out = whole(*leaves, seen_by(batch, window), score, sinks)
        wanted_of = leaves if sinks is None else [*leaves, sinks]
        expected = [out.detach(), *torch.autograd.grad(out, wanted_of, grad[:, :, :LENGTH])]
        if "attention_mask" in batch:
            expected[0] = expected[0] * batch["attention_mask"][:, None, :, None]

        sequence.shard(batch)
        mine = [shard_sequence(x, rank, ranks, 2).to(dtype).requires_grad_() for x in (q, k, v)]
        own = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
        part = sequence.attention(*mine, score, window, sinks=own)
        part.backward(shard_sequence(grad, rank, ranks, 2).to(dtype))
        found = [concat_shards(gathered(x, ranks), 2)[:, :, :LENGTH] for x in (part.detach(), *(x.grad for x in mine))]
        if "attention_mask" in batch:
            found[0] = found[0] * batch["attention_mask"][:, None, :, None]
        if own is not None:
            assert own.grad is not None
            dist.all_reduce(own.grad)
            found.append(own.grad)
        for got, wanted in zip(found, expected, strict=True):
            # A window of one token leaves no gradient of its query and key.
            error = float((got.double() - wanted).norm() / torch.maximum(wanted.norm(), grad.norm()))
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
    return worst


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
    mean, runs = torch.zeros_like(exact), 80
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
    assert (mean - exact).norm() < 0.16 * exact.norm()  # falls as the root of the runs


def _errors_and_dropout(rank: int, ranks: int) -> dict[str, float]:
    for method in ("ring", "ulysses"):
        _dropout(rank, ranks, method)
    return _worst_errors(rank, ranks, "ring")


def test_attention_and_dropout_are_those_of_the_whole_sequence() -> None:
    check(run_distributed(_errors_and_dropout, 2))


# With four ranks heads of keys are repeated for ulysses.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "method"), [(2, "ulysses"), (4, "ulysses"), (3, "ring"), (4, "ring")])
def test_attention_is_that_of_the_whole_sequence(method: str, ranks: int) -> None:
    check(run_distributed(_worst_errors, ranks, method))


def check(found: list[dict[str, float]]) -> None:
    for worst in found:
        assert worst["torch.float32"] < 1e-6
        assert worst["torch.float64"] < 1e-14

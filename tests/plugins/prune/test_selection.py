"""The choice of pruned weights is that of a sort, whatever the scores, ties and ranks."""

import pytest
import torch

from dlo_plugins.prune.callback import cubic_sparsity, magnitude_masks, ticket_sparsity
from dlo_plugins.prune.layers import NMPattern, follows_pattern, keep_largest, nm_mask
from dlo_plugins.prune.pruned_shards import Keys, find_cut, order_keys


def one_process(values: torch.Tensor) -> torch.Tensor:
    return values


def pruned(scores: list[torch.Tensor], counts: list[int], groups: list[int]) -> list[torch.Tensor]:
    """Returns what is pruned of tensors that follow each other in the model."""
    offsets = [sum(part.numel() for part in scores[:number]) for number in range(len(scores))]
    parts = [
        Keys(lambda score=score: order_keys(score).flatten(), group)
        for score, group in zip(scores, groups, strict=True)
    ]
    where = [
        lambda offset=offset, score=score: offset + torch.arange(score.numel())
        for offset, score in zip(offsets, scores, strict=True)
    ]
    cut = find_cut(parts, where, torch.tensor(counts), one_process)
    return [
        cut.is_pruned(order_keys(score).flatten(), index, group)
        for score, index, group in zip(scores, where, groups, strict=True)
    ]


@pytest.mark.parametrize("count", [0, 1, 499, 500, 1499, 1500])
def test_it_prunes_what_a_stable_sort_puts_first(count):
    draw = torch.Generator().manual_seed(count)
    # Rounded, so that many scores are equal.
    scores = [(torch.randn(500, generator=draw) * 20).round() / 20, (torch.randn(20, 50, generator=draw) * 20).round()]
    flat = torch.cat([score.flatten() for score in scores])
    expected = torch.zeros(1500, dtype=torch.bool)
    expected[flat.argsort(stable=True)[:count]] = True
    assert torch.equal(torch.cat(pruned(scores, [count], [0, 0])), expected)


def test_each_group_has_a_threshold_of_its_own():
    scores = [torch.arange(10.0), torch.arange(100.0, 110.0)]
    first, second = pruned(scores, [3, 7], [0, 1])
    assert first.tolist() == [True] * 3 + [False] * 7
    assert second.tolist() == [True] * 7 + [False] * 3


def test_n_of_m_keeps_the_largest_and_the_first_of_equal_ones():
    assert keep_largest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [False, True, True, False]
    weight = torch.randn(6, 8, 3)
    for dim, pattern in ((1, NMPattern(2, 4)), (0, NMPattern(1, 3)), (1, NMPattern(1, 8))):
        mask = nm_mask(weight.abs(), pattern, dim)
        assert follows_pattern(weight * mask, pattern, dim)
        assert int(mask.sum()) == weight.numel() * pattern.n // pattern.m
        moved, kept = weight.abs().movedim(dim, -1), mask.movedim(dim, -1)
        groups, chosen = moved.reshape(-1, pattern.m), kept.reshape(-1, pattern.m)
        for group, own in zip(groups, chosen, strict=True):
            assert float(group[own].min()) >= float(group[~own].max())
    assert not follows_pattern(torch.ones(4, 4), NMPattern(2, 4), 1)


def test_the_cubic_schedule_is_the_papers():
    assert [cubic_sparsity(at, 0.8) for at in (-1, 0, 1, 2)] == [0.0, 0.0, 0.8, 0.8]
    assert cubic_sparsity(0.5, 0.8, 0.2) == pytest.approx(0.8 + (0.2 - 0.8) * 0.125)
    assert ticket_sparsity(3, 0.2) == pytest.approx(1 - 0.8**3)


def test_masks_of_a_round_keep_what_is_pruned_pruned():
    weights = {"a": torch.randn(10, 10), "b": torch.zeros(10, 10)}
    first = magnitude_masks(weights, {}, 0.3, "global")
    assert sum(int((~mask).sum()) for mask in first.values()) == 60
    assert not first["b"][:6].any()  # Equal magnitudes: the first are pruned.
    second = magnitude_masks({**weights, "b": torch.full((10, 10), 9.0)}, first, 0.4, "global")
    assert not (second["b"] & ~first["b"]).any()
    assert sum(int((~mask).sum()) for mask in second.values()) == 80
    layers = magnitude_masks(weights, {}, 0.3, "layer")
    assert [int((~mask).sum()) for mask in layers.values()] == [30, 30]

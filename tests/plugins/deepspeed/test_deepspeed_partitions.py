"""DeepSpeed's partitions: every element has one place on one rank, and the places are those of DeepSpeed's own code."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_plugins.deepspeed.partitions import Stage3Layout, Stage12Layout

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
RANKS = st.integers(1, 9)


def partitions_of(layout, numels: list[int], ranks: int, length: int) -> list[torch.Tensor]:
    """Returns each rank's partition: elements numbered over all parameters, padding -1."""
    starts = torch.tensor([0, *numels]).cumsum(0).tolist()
    found = []
    for rank in range(ranks):
        flat = torch.full((length,), -1)
        for piece in layout.slices(rank):
            first = starts[piece.parameter] + piece.start
            place = flat[piece.offset : piece.offset + piece.length]
            assert (place == -1).all(), "two pieces in one place"
            place.copy_(torch.arange(first, first + piece.length))
        found.append(flat)
    return found


@given(SIZES, RANKS, st.sampled_from([1, 4, 8]))
def test_a_flat_buffer_is_cut_into_equal_segments(numels: list[int], ranks: int, aligned: int) -> None:
    layout = Stage12Layout(tuple(numels), ranks, aligned)
    found = torch.cat(partitions_of(layout, numels, ranks, layout.segment))
    # As DeepSpeed's flatten_dense_tensors_aligned has it: gaps behind all but the last, then up to the alignment.
    runs, at = [], 0
    for number, numel in enumerate(numels):
        runs.append(torch.arange(sum(numels[:number]), sum(numels[:number]) + numel))
        at += numel
        if number < len(numels) - 1:
            runs.append(torch.full((-at % aligned,), -1))
            at += -at % aligned
    whole = torch.cat(runs)
    padded = torch.cat([whole, torch.full((-len(whole) % (2 * ranks),), -1)])
    assert torch.equal(found, padded)


@given(SIZES, RANKS)
def test_each_parameter_is_cut_by_itself(numels: list[int], ranks: int) -> None:
    layout = Stage3Layout(tuple(numels), ranks)
    found = partitions_of(layout, numels, ranks, sum(layout.segments))
    starts = torch.tensor([0, *numels]).cumsum(0).tolist()
    for rank, flat in enumerate(found):
        for number, part in enumerate(flat.split(layout.segments)):
            whole = torch.full((layout.segments[number] * ranks,), -1)
            whole[: numels[number]] = torch.arange(starts[number], starts[number + 1])
            assert torch.equal(part, whole.chunk(ranks)[rank])

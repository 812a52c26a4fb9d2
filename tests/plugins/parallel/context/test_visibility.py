"""Who sees whom, against a mask written out for the whole sequence."""

from typing import Any

import pytest
import torch

from dlo_plugins.parallel.context.sequence_layout import (
    CountedTensor,
    Visibility,
    count_ends,
    find_documents,
    read_counts,
)
from support.waits import Waits

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
    """Bool [B, L, L], token by token."""
    rows, length = positions.shape
    found = torch.zeros(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        document = (positions[row] == 0).cumsum(0)
        for query in range(length):
            for key in range(query + 1):
                near = window is None or query - key < window
                real = mask is None or bool(mask[row, key]) or key == query
                found[row, query, key] = document[query] == document[key] and near and real
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

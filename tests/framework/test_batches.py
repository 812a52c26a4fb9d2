"""Batches of any structure: their samples, and slices of them."""

from collections import namedtuple

import torch

from dlo_framework.batches import batch_size, find_batch_size, slice_batch

Pair = namedtuple("Pair", ["x", "y"])


class Own(dict):
    """A dict of a user's own class, which torch's pytree takes for a leaf."""


def test_batch_size_looks_into_any_nest():
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size((torch.zeros(4, 2), torch.zeros(4))) == 4
    assert batch_size({"name": "x", "tokens": torch.zeros(5, 7)}) == 5
    assert batch_size([{"x": torch.zeros(6)}]) == 6
    assert batch_size("text") == 1
    assert find_batch_size("text") is None
    assert batch_size(({"x": torch.zeros(5, 2)}, torch.zeros(3))) == 5
    assert batch_size({"step": torch.tensor(3), "names": ["a", "b"], "x": [torch.zeros(4)]}) == 4
    assert batch_size(Own(x=torch.zeros(7))) == 7


def test_a_slice_has_the_samples_of_each_entry_and_the_structure():
    rows = torch.arange(4)
    batch = Own(
        pair=Pair(rows, [rows * 2]),
        names=["a", "b", "c", "d"],
        size=(8, 8),
        scale=torch.tensor(0.5),
        table=torch.ones(9),
    )
    part = slice_batch(batch, 1, 2)
    assert type(part) is Own
    assert type(part["pair"]) is Pair
    assert part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y[0].tolist() == [2, 4]
    assert part["names"] == ["b", "c"]
    assert part["size"] == (8, 8)
    assert part["scale"] is batch["scale"]
    assert len(part["table"]) == 9
    assert part["pair"].x.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr(), "a view"
    assert batch["pair"].x is rows

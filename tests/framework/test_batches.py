"""Batches of any structure: their samples, and slices of them."""

from collections import OrderedDict, namedtuple

import torch

from dlo_framework.batches import batch_size, find_batch_size, leaves, map_leaves, sample_shapes, slice_batch

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


def test_shapes_of_samples():
    images, boxes = torch.zeros(4, 3, 8, 8), torch.zeros(4, 2)
    assert sample_shapes((images, {"boxes": [boxes], "id": torch.zeros(4)})) == ((3, 8, 8), (2,), ())
    assert batch_size([torch.tensor(1.0), images]) == 4
    assert sample_shapes(None) == ()


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


def test_leaves_are_in_order_and_a_function_maps_those_of_several_nests():
    nest = OrderedDict(b=[1, (2, {"c": 3})], a=None)
    assert list(leaves(nest)) == [1, 2, 3, None]
    made = map_leaves(
        lambda one, two: one if one is None else one + two, nest, OrderedDict(a=5, b=[10, (20, {"c": 30})])
    )
    assert made == OrderedDict(b=[11, (22, {"c": 33})], a=None)
    assert type(made) is OrderedDict

"""What is random in training: found, switched off or made equal."""

import random

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchvision.ops import StochasticDepth

from dlo_framework.testing.record import switch_off_dropout
from dlo_framework.testing.training import GlobalBatches, SeededDataset, prepare_loaders


class Layer(nn.Module):
    """As transformers' layers: rates in plain attributes, and in a config that the forward pass reads."""

    class Config:
        hidden_dropout_prob = 0.5

        def __init__(self) -> None:
            self.attention_dropout, self.hidden_size, self.droplet = 0.2, 8, 0.7

    def __init__(self) -> None:
        super().__init__()
        self.config, self.dropout, self.layerdrop, self.p = self.Config(), 0.1, 0.3, 0.4


def repeats(model: nn.Module, x: torch.Tensor) -> bool:
    model.train()
    return torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)), (4, 6, 8), "1 AlphaDropout, 1 Drop"),
        (nn.Sequential(nn.Identity(), StochasticDepth(0.5, "row")), (16, 8), "1 StochasticDepth"),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), (4, 6, 8), "3 Dropout, 1 MultiheadAttention"),
        (nn.RReLU(), (4, 8), "1 RReLU"),
        (
            timm.create_model(
                "vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.1, drop_path_rate=0.2, attn_drop_rate=0.1
            ),
            (2, 3, 32, 32),
            "DropPath",
        ),
    ],
    ids=["dropout", "stochastic_depth", "encoder", "rrelu", "timm"],
)
def test_a_model_without_dropout_repeats_itself(model, shape, said):
    x = torch.randn(shape)
    assert not repeats(model, x)
    assert said in switch_off_dropout(model)
    assert repeats(model, x)
    assert switch_off_dropout(model) is None


def test_rates_in_attributes_are_found_and_nothing_else():
    layer = Layer()
    assert switch_off_dropout(layer) == "1 Config, 1 Layer"
    assert (layer.dropout, layer.layerdrop, layer.config.attention_dropout) == (0.0, 0.0, 0.0)
    assert (layer.p, layer.config.droplet, layer.config.hidden_size) == (0.4, 0.7, 8)


class Noise:
    """A dataset that draws from all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_seeded_items_are_the_same_in_any_order_and_leave_the_random_state_alone():
    data = SeededDataset(Noise(), seed=3)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    items = [data[index] for index in range(6)]
    assert [data[index] for index in reversed(range(6))] == items[::-1]
    assert len({value for item in items for value in item[1:]}) == 18
    assert items != [SeededDataset(Noise(), seed=4)[index] for index in range(6)]
    assert before[0] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert torch.equal(before[2], torch.get_rng_state())


@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_those_of_all_ranks(drop_last):
    """22 samples on 4 ranks are 6 each, in batches of 4 and 2; padded samples come twice."""
    one = GlobalBatches(range(22), 4, 4, drop_last, shuffle=True, seed=5)
    one.sampler.set_epoch(2)
    batches = list(one)
    assert [len(batch) for batch in batches] == ([16] if drop_last else [16, 8])
    assert len(one) == len(batches)
    for rank in range(4):
        sampler = torch.utils.data.DistributedSampler(range(22), 4, rank, shuffle=True, seed=5)
        sampler.set_epoch(2)
        whole = list(sampler)
        mine = [index for batch in batches for index in batch[rank * len(batch) // 4 : (rank + 1) * len(batch) // 4]]
        assert mine == whole[: len(mine)]


def test_loaders_of_unknown_kinds_are_used_as_they_are_and_named():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    plain, stream, notes = DataLoader(TensorDataset(torch.arange(6)), batch_size=2), DataLoader(Stream()), []
    found = prepare_loaders({"a": plain, "b": [stream, "own"]}, seed=0, shares=2, shuffle=False, notes=notes)
    assert found["b"] == [stream, "own"]
    assert [batch[0].tolist() for batch in found["a"]] == [[0, 2, 1, 3], [4, 5]]
    assert len(notes) == 2
    assert "DataLoader over Stream is used unchanged" in notes[1]

import copy

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.quantisation.conversion import model_bytes
from dlo_plugins.quantisation.embedding_tables import convert_tables, find_tables
from dlo_plugins.quantisation.layer_choice import choose_layers, choose_tables
from dlo_plugins.quantisation.portable import make_tables_portable
from dlo_plugins.quantisation.schemes import SCHEMES


class Net(nn.Module):
    """A table with a tied head, one of positions, one that two modules read, and two that cannot be int8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(320, 64), nn.Embedding(16, 64)
        self.renormalised, self.other = nn.Embedding(8, 64, max_norm=1.0), nn.Embedding(8, 64)
        self.alias = nn.Embedding(16, 64)
        self.alias.weight = self.positions.weight
        self.bilinear = nn.Bilinear(1, 64, 8, bias=False)
        self.bilinear.weight = self.other.weight
        self.head = nn.Linear(64, 320, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids) + self.positions(ids % 16) + self.alias(ids % 16))


TABLES = ["tokens", "positions", "alias"]


def test_tables_and_what_shares_them_are_int8() -> None:
    model = Net()
    before, ids, size = copy.deepcopy(model), torch.arange(320).view(4, 80), model_bytes(model)
    assert find_tables(model) == TABLES
    convert_tables(model, TABLES)
    assert model.head.weight is model.tokens.weight
    assert model.alias.weight is model.positions.weight
    # The lookup is that of torchao's restored table, to the bit, and restores the rows that it reads.
    table = model.tokens.weight
    torch.testing.assert_close(model.tokens(ids), table.dequantize()[ids], rtol=0, atol=0)
    step = before.tokens.weight.abs().amax(1, keepdim=True) / 127
    assert ((table.dequantize() - before.tokens.weight).abs() <= 0.51 * step).all()
    torch.testing.assert_close(model(ids), before(ids), rtol=0, atol=1.0)
    assert size / model_bytes(model) > 3.2
    portable = copy.deepcopy(before)
    make_tables_portable(portable, TABLES)
    torch.testing.assert_close(portable(ids), model(ids), rtol=1e-5, atol=1e-4)
    assert portable.head.weight is portable.tokens.weight


def test_a_lookup_restores_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    convert_tables(model, TABLES)
    monkeypatch.setattr(type(model.tokens.weight), "dequantize", lambda *args: pytest.fail("the full table"))
    assert model.tokens(torch.tensor([3, 5])).shape == (2, 64)


def test_patterns_cover_tables_too() -> None:
    model = Net()
    assert choose_tables(model, find_tables(model), ["positions", "alias"]) == ["tokens"]
    with pytest.raises(DloError, match=r"embeddings must be false for Net, which has no nn\.Embedding outside skip"):
        choose_tables(model, TABLES, ["*"])
    model.inner = nn.Linear(64, 64)
    assert choose_layers(model, SCHEMES["int8"], 32, ["positions"], tables=TABLES) == ["inner"]
    with pytest.raises(DloError, match="skip must match"):
        choose_layers(model, SCHEMES["int8"], 32, ["positions"])

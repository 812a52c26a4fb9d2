import pytest
import timm
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.quantisation.quantised_layers import choose_layers
from dlo_plugins.quantisation.schemes import SCHEMES

INT8, INT4 = SCHEMES["int8"], SCHEMES["int4_weights"]


def vit() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=96, depth=2, num_heads=3)


def test_the_head_stays_and_patterns_cover_modules() -> None:
    found = choose_layers(vit(), INT8, 32, head=("norm", "head"))
    assert found == [f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    assert choose_layers(vit(), INT8, 32, skip=["blocks.0", "*.*.mlp"], head=("head",)) == [
        "blocks.1.attn.qkv",
        "blocks.1.attn.proj",
    ]


def test_shared_weights_adapters_and_uncalled_projections_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
            self.output.weight = self.embedding.weight
            self.attention, self.inner = nn.MultiheadAttention(32, 4), nn.Linear(32, 32)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4)})

    assert choose_layers(Net(), INT8, 32) == ["inner"]


@pytest.mark.parametrize(
    ("scheme", "group_size", "options", "message"),
    [
        (INT8, 32, {"skip": ["block.0"]}, "got 'block.0', which matches none; did you mean 'blocks.0'"),
        (INT8, 32, {"skip": ["*"], "head": ("head",)}, "outside its head and skip, got none"),
        (INT4, 128, {"head": ("head",)}, "got 128 for 96 of blocks.0.attn.qkv, .*; set group_size: 32"),
        (INT4, 32, {}, "a multiple of 16 for int4_weights, got 1000 of head; add to skip: head"),
        (INT4, 32, {"head": ("head",), "slices": 2}, "got 32 for 96 / 2 input features of .*; set tp=1"),
    ],
)
def test_what_does_not_fit(scheme, group_size, options, message) -> None:
    with pytest.raises(DloError, match=message):
        choose_layers(vit(), scheme, group_size, **options)


def test_a_row_that_no_group_divides() -> None:
    model = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32))
    with pytest.raises(DloError, match="got 32 for 40 of 0; add to skip: 0"):
        choose_layers(model, INT4, 32)
    assert choose_layers(model, INT4, 32, skip=["0"]) == ["1"]


def test_layers_to_skip_are_named_by_a_pattern_where_one_matches_them_alone() -> None:
    blocks = [nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32)}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
    with pytest.raises(DloError, match=r"of layers.0.down, layers.1.down; add to skip: layers\.\*\.down$"):
        choose_layers(model, INT4, 32)
    assert choose_layers(model, INT4, 32, skip=["layers.*.down"]) == ["layers.0.up", "layers.1.up"]
    blocks[1]["down"] = nn.Linear(64, 32)
    with pytest.raises(DloError, match=r"add to skip: layers\.0\.down$"):
        choose_layers(model, INT4, 32)

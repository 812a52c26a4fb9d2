"""ImageClassifier under a mask: equal to timm's own attention with the same dense mask; other models are refused."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dlo_framework.errors import DloError
from dlo_framework.models.attention import (
    Attention,
    AttentionMask,
    BigBird,
    BSLongformer,
    DenseSparsity,
    FixedSparsity,
    Prefix,
    SlidingWindow,
    VariableSparsity,
)
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.vision_attention import MaskedAttention, masked_vision_model

SIZES = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
#: Other attention: rotations, biases of positions of each block and of all, parallel blocks, differences of two maps.
OTHERS = {
    "eva02_tiny_patch14_224": {},
    "vit_base_patch16_rope_224": {},
    "beit_base_patch16_224": {},
    "vit_relpos_small_patch16_224": {},
    "vit_srelpos_small_patch16_224": {},
    "vit_dpwee_patch16_reg1_gap_256": {"patch_size": 4},
    "vit_dlittle_patch16_reg1_gap_256": {"patch_size": 4},
}
MODELS = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"qk_norm": True, "norm_layer": torch.nn.LayerNorm},
    "deit3_small_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
}
PATTERNS = [
    DenseSparsity(8),
    FixedSparsity(8, True, num_different_global_patterns=4),
    FixedSparsity(8, horizontal_global_attention=True),
    VariableSparsity(8, True, 1, [2, 1], [0, 3]),
    BSLongformer(8),
    BigBird(8, True),
    SlidingWindow(7, 8),
]


def build(name, **more):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **{**SIZES, **MODELS.get(name, {}), **OTHERS.get(name, {}), **more})
    return model.double().eval()


class DenseMask(TorchFunctionMode):
    """Adds a dense mask to each call of attention, as a reference."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            places = torch.arange(args[0].shape[2])
            seen = self.mask.visible(places, places, length=len(places))[None]
            bias = kwargs.get("attn_mask")
            kwargs["attn_mask"] = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_models_equal_timms_attention_with_the_dense_mask(name):
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for pattern in PATTERNS if name in MODELS else PATTERNS[-2:]:
        model = build(name)
        masked = copy.deepcopy(model)
        masked_vision_model(masked, Attention(mask=pattern), torch.device("cpu"))
        assert [name for name, _ in masked.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert masked.state_dict().keys() == model.state_dict().keys()
        reference = DenseMask(AttentionMask(pattern, causal=False, num_heads=4))
        found = masked(images)
        with reference:
            expected = model(images)
        assert reference.calls >= 2
        assert torch.equal(model(images), expected) == pattern.is_dense
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        ours = torch.autograd.grad(found.square().sum(), list(masked.parameters()))
        theirs = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_classifier_trains_at_other_sizes_and_survives_a_checkpoint():
    args = {**SIZES, "num_heads": 4}
    options = {"model_args": args, "num_classes": 5, "image_size": 32}
    task = ImageClassifier("vit_tiny_patch16_224", **options, attention=Attention(mask=BigBird(8, True)))
    task.configure_model()
    assert sum(isinstance(part, MaskedAttention) for part in task.modules()) == 2
    for size in (32, 24):
        task(torch.randn(2, 3, size, size)).sum().backward()
    again = ImageClassifier("vit_tiny_patch16_224", **options, attention=dict(task.hparams["attention"]))
    again.configure_model()
    again.load_state_dict(task.state_dict())
    task.eval(), again.eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(task(images), again(images))
    plain = ImageClassifier("vit_tiny_patch16_224", **options)
    plain.configure_model()
    plain.load_state_dict(task.state_dict())
    assert not torch.allclose(plain.eval()(images), task(images))


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "xcit_tiny_12_p16_224", "levit_128s"])
def test_models_with_other_attention_are_refused_before_the_run(name):
    task = ImageClassifier(name, num_classes=5, image_size=224, attention=Attention(mask=BSLongformer()))
    with pytest.raises(DloError, match="must be for models that attend from all tokens of an image to all"):
        task.check(None)


def test_a_bias_of_positions_is_computed_by_sdpa():
    model = build("beit_base_patch16_224")
    assert masked_vision_model(model, Attention(mask=BSLongformer(8)), torch.device("cpu")).name == "sdpa"
    with pytest.raises(DloError, match="auto or sdpa for scores with a bias of positions, got blocks"):
        masked_vision_model(build("beit_base_patch16_224"), Attention("blocks"), torch.device("cpu"))


def test_options_of_language_models_are_refused():
    with pytest.raises(DloError, match="got varlen, which packs documents"):
        ImageClassifier(attention=Attention("varlen"))
    with pytest.raises(DloError, match="in a model that is not causal, got Prefix"):
        masked_vision_model(build("vit_tiny_patch16_224"), Attention(mask=Prefix(3)), torch.device("cpu"))

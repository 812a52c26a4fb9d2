"""ImageClassifier under a mask: equal to timm's own attention with the same dense mask; other models are refused."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.layers import Attention as TimmAttention

from dlo_framework.attention import (
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
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.vision_attention import MaskedAttention, masked_vision_model

SIZES = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
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
    model = timm.create_model(name, num_classes=5, **{**SIZES, **MODELS.get(name, {}), **more})
    return model.double().eval()


def with_dense_mask(mask, part, args, kwargs):
    tokens = args[0].shape[1]
    places = torch.arange(tokens)
    return args[:1], {"attn_mask": mask.visible(places, places, length=tokens)[None]}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_timms_attention_with_the_dense_mask(name):
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for pattern in PATTERNS:
        model = build(name)
        masked = copy.deepcopy(model)
        masked_vision_model(masked, Attention(mask=pattern), torch.device("cpu"))
        assert [name for name, _ in masked.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert masked.state_dict().keys() == model.state_dict().keys()
        for part in model.modules():
            if type(part) is TimmAttention:
                mask = AttentionMask(pattern, causal=False, num_heads=4)
                part.register_forward_pre_hook(partial(with_dense_mask, mask), with_kwargs=True)
        found, expected = masked(images), model(images)
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


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_models_with_other_attention_are_refused_before_the_run(name):
    task = ImageClassifier(name, num_classes=5, image_size=224, attention=Attention(mask=BSLongformer()))
    with pytest.raises(DloError, match=r"must be for models whose attention is timm.layers.Attention"):
        task.check(None)


def test_options_of_language_models_are_refused():
    with pytest.raises(DloError, match="got varlen, which packs documents"):
        ImageClassifier(attention=Attention("varlen"))
    with pytest.raises(DloError, match="in a model that is not causal, got Prefix"):
        masked_vision_model(build("vit_tiny_patch16_224"), Attention(mask=Prefix(3)), torch.device("cpu"))

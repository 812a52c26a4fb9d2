"""A model without some channels computes what the larger one computes where nothing reads those channels."""

from typing import Any

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.pruning.structured import _check_weights, channel_scores, kept_units, prune_channels, prune_weights
from dlo_tasks.imagenet.classifier import ImageClassifier

COATNET = {"embed_dim": [16, 32, 32, 32], "depths": [1, 2, 1, 1], "stem_width": 16, "transformer_dim_head": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet50", {"layers": [1, 2, 1, 1]}),
    "resnet_wide": ("wide_resnet50_2", {"layers": [1, 1, 1, 1]}),
    "resnet_basic": ("resnet18", {"layers": [1, 2, 1, 1]}),
    "coatnet": ("coatnet_0_rw_224", COATNET),
    "coatnet_late": ("coatnet_0_rw_224", {**COATNET, "conv_attn_early": False, "conv_expand_output": True}),
    "coatnet_bn": ("coatnet_bn_0_rw_224", COATNET),
    "maxvit": ("maxvit_nano_rw_256", {**COATNET, "depths": [1, 1, 1, 1]}),
}


def task_of(model: str, args: dict[str, Any]) -> Any:
    task = ImageClassifier(model, model_args=args, num_classes=10, image_size=32, log_images=0)
    torch.manual_seed(0)
    task.configure_model()
    for module in task.model.modules():  # Norms as after training: scales, shifts and statistics of each channel.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return task.double()


def smaller_task(task: Any, amount: float) -> tuple[Any, dict[str, torch.Tensor], str]:
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    groups = task.channel_groups()
    sizes, _ = prune_weights(weights, task, {"channels": amount})
    smaller: Any = type(task)(**{**dict(task.hparams), **task.resized({}, **sizes)})
    smaller.configure_model()
    line = prune_channels(weights, groups, [group.count for group in smaller.channel_groups()], "model.")
    _check_weights(weights, smaller)
    smaller.double().load_state_dict(weights)
    return smaller, weights, line


def silence(task: Any, smaller: Any) -> None:
    """Zeroes the weights that read the removed channels."""
    state = {name: value.clone() for name, value in task.state_dict().items()}
    for group, left in zip(task.channel_groups(), smaller.channel_groups(), strict=True):
        keep = kept_units(channel_scores(group, state, "model."), left.count)
        gone = torch.tensor([channel for channel in range(group.count) if channel not in keep.tolist()]).long()
        with torch.no_grad():
            for name in group.readers:
                task.model.get_submodule(name).weight.index_fill_(1, gone, 0.0)


@pytest.mark.parametrize(
    ("name", "amount"),
    [*((name, amount) for name in MODELS for amount in (0.5, 0.3) if name != "resnet_basic"), ("resnet_basic", 0.67)],
)
def test_it_computes_what_is_left_and_trains(name: str, amount: float) -> None:
    task = task_of(*MODELS[name])
    smaller, _, line = smaller_task(task, amount)
    groups, left = task.channel_groups(), smaller.channel_groups()
    fraction = sum(group.count for group in left) / sum(group.count for group in groups)
    assert fraction == pytest.approx(1 - amount, abs=0.03)
    assert f"{sum(g.count for g in groups)} -> {sum(g.count for g in left)}" in line
    inputs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = task.eval()(inputs)
    silence(task, smaller)
    expected = task(inputs)
    assert not torch.allclose(before, expected, atol=1e-3)
    torch.testing.assert_close(smaller.eval()(inputs), expected, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in task.parameters())
    smaller.train()(inputs).square().sum().backward()
    assert all(p.grad is not None for p in smaller.parameters())


def test_a_smaller_model_is_pruned_again() -> None:
    task = task_of(*MODELS["coatnet"])
    once, _, _ = smaller_task(task, 0.3)
    twice, _, _ = smaller_task(once, 0.5)
    counts = [sum(group.count for group in each.channel_groups()) for each in (task, once, twice)]
    assert counts[2] / counts[1] == pytest.approx(0.5, abs=0.06)
    assert counts[1] / counts[0] == pytest.approx(0.7, abs=0.03)


def test_the_score_is_of_the_norms_scale_and_of_the_readers() -> None:
    task = task_of(*MODELS["resnet"])
    group = task.channel_groups()[0]
    assert (group.writers, group.channelwise, group.readers) == (
        ("layer1.0.conv1",),
        ("layer1.0.bn1",),
        ("layer1.0.conv2",),
    )
    block = task.model.layer1[0]
    with torch.no_grad():
        block.conv1.weight[5] *= 1e3  # The norm undoes it.
        block.bn1.weight[5] = 1e-4
        block.conv2.weight[:, 9] = 0
    scores = channel_scores(group, task.state_dict(), "model.")
    assert scores.argsort()[:2].tolist() == [9, 5]


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("convnext_atto", {}, "must have blocks of timm's ResNets .* got ConvNeXt without"),
        ("resnext50_32x4d", {}, r"got layer1\.0\.conv2, Conv2d with groups=32"),
        ("coatnext_nano_rw_224", {}, "must have blocks of timm's ResNets"),
        ("coatnet_0_rw_224", {**COATNET, "conv_attn_layer": "eca"}, r"got stages\.0\.blocks\.0\.se_early, EcaModule"),
        ("coatnet_0_rw_224", {**COATNET, "conv_group_size": 8}, r"got stages\.0\.blocks\.0\.conv2_kxk"),
    ],
)
def test_what_stands_in_the_way_is_named(model: str, args: dict[str, Any], message: str) -> None:
    task = ImageClassifier(model, model_args=args, num_classes=10, image_size=64, log_images=0)
    with pytest.raises(DloError, match=message):
        task.on_meta().channel_groups()


def test_basic_blocks_are_divided_by_a_whole_number() -> None:
    task = task_of(*MODELS["resnet_basic"])
    with pytest.raises(DloError, match=r"must leave a half, .* got 30%; set 50%"):
        smaller_task(task, 0.3)
    half, _, _ = smaller_task(task, 0.5)
    quarter, _, _ = smaller_task(half, 0.5)
    assert quarter.hparams["model_args"]["block_reduce_first"] == 4


def test_an_amount_that_removes_nothing_is_refused() -> None:
    task = task_of(*MODELS["coatnet"])
    with pytest.raises(DloError, match=r"--channels must remove at least one of \d+ channels"):
        smaller_task(task, 0.01)

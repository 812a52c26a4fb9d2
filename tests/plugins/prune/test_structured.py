"""A model without some units computes what the larger one does with those at zero; the choice of pruned weights."""

from typing import Any

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.prune.callback import cubic_sparsity, magnitude_masks, ticket_sparsity
from dlo_plugins.prune.layers import NMPattern, follows_pattern, keep_largest, nm_mask
from dlo_plugins.prune.pruned_shards import Keys, find_cut, order_keys
from dlo_plugins.prune.structured import (
    _check_weights,
    channel_scores,
    find_units,
    kept_units,
    prune_channels,
    prune_weights,
    unit_scores,
)
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "qwen2": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "phi3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3}
    | {"num_attention_heads": 4, "max_position_embeddings": 32},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
}
GROUPED = ("llama", "qwen2", "phi3")


def vision() -> ImageClassifier:
    task = ImageClassifier("vit_tiny_patch16_224", model_args=dict(VIT), num_classes=10)
    torch.manual_seed(0)
    task.configure_model()
    return task


def language(family: str) -> CausalLM:
    more = {"num_key_value_heads": 2} if family in GROUPED else {}
    if family == "phi3":
        more["pad_token_id"] = 0
    task = CausalLM(config={"model_type": family, "vocab_size": 96, **CONFIGS[family], **more}, attention="eager")
    torch.manual_seed(0)
    task.configure_model()
    return task


def outputs(task: Any) -> torch.Tensor:
    torch.manual_seed(1)
    task.eval()
    if isinstance(task, ImageClassifier):
        return task(torch.randn(3, 3, 16, 16))
    return task.model(input_ids=torch.randint(0, 96, (2, 12))).logits


def pruned_task(task: Any, amounts: dict[str, Any]) -> tuple[Any, dict[str, Any], list[str]]:
    """Returns the smaller task, its sizes, and the lines about them."""
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    sizes, lines = prune_weights(weights, task, amounts)
    smaller: Any = type(task)(**{**dict(task.hparams), **task.resized({}, **sizes)})
    smaller.configure_model()
    smaller.load_state_dict(weights)
    return smaller, sizes, lines


def silenced(task: Any, kind: str, amount: float) -> torch.Tensor:
    """Returns the outputs of the larger model whose removed units nothing reads."""
    plan, state = task.parallel_plan(), dict(task.state_dict())
    for group in find_units(task.model, plan, kind):
        scores = unit_scores(group, task.model, state)
        keep = kept_units(scores, group.count - round(amount * group.count))
        gone = torch.tensor([unit for unit in range(group.count) if unit not in keep.tolist()])
        with torch.no_grad():
            for name in group.rows:
                row = task.model.get_submodule(name)
                transposed = hasattr(row, "nf")
                row.weight.index_fill_(0 if transposed else 1, group.inputs(gone), 0.0)
    return outputs(task)


@pytest.mark.parametrize(("kind", "amount"), [("heads", 0.5), ("hidden", 0.27)])
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "phi3", "opt", "gpt_neox"])
def test_it_computes_what_is_left(family, kind, amount):
    task = vision() if family == "vit" else language(family)
    smaller, _, lines = pruned_task(task, {kind: amount})
    torch.testing.assert_close(outputs(smaller), silenced(task, kind, amount), atol=2e-5, rtol=1e-4)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in task.parameters())
    assert "->" in lines[0]


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
def test_families_without_a_width_of_heads_generate_are_cut_and_are_read_again(tmp_path, family):
    task = language(family)
    smaller, sizes, _ = pruned_task(task, {"heads": 0.5})
    with pytest.raises(DloError, match="config must describe the smaller model, got other shapes of"):
        _check_weights(smaller.state_dict(), task)
    assert (smaller.hparams["config"]["head_dim"], sizes["heads"]) == (8, 2)
    expected = outputs(smaller)
    (group, *_) = find_units(smaller.model, smaller.parallel_plan(), "heads")
    assert (group.count, group.width) == (2, 8)  # Its plan is that of two heads.
    ids = torch.randint(2, 96, (2, 6))
    written = smaller.model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    for _ in range(3):  # With a cache, as without one.
        ids = torch.cat([ids, smaller.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, ids)
    smaller.model.save_pretrained(tmp_path)
    again = CausalLM(model=str(tmp_path), attention="eager")
    again.configure_model()
    assert torch.equal(outputs(again), expected)
    wide = CausalLM(config={"model_type": family, "vocab_size": 96, **CONFIGS[family], "head_dim": 16})
    with pytest.raises(DloError, match=r"head_dim must divide the width of .* into at least its 4 heads, got 16"):
        wide.configure_model()


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_blocks_are_removed_and_renumbered(family):
    task = vision() if family == "vit" else language(family)
    blocks = task.parallel_plan().block_names(task.model)
    smaller, sizes, _ = pruned_task(task, {"blocks": [1]})
    assert sizes == {"blocks": len(blocks) - 1}
    parent, _, number = blocks[1].rpartition(".")
    del task.model.get_submodule(parent)[int(number)]
    torch.testing.assert_close(outputs(smaller), outputs(task))
    assert len(smaller.parallel_plan().block_names(smaller.model)) == len(blocks) - 1


@pytest.mark.parametrize(
    ("amounts", "message"),
    [
        ({"heads": 0.01}, r"--heads must remove at least one and leave one of 4, got 1%"),
        ({"blocks": 0.99}, r"--blocks must remove at least one and leave one of 4, got 99%"),
        ({"blocks": [7]}, r"--blocks must be numbers from 0 to 3, not all of them, got 7"),
    ],
)
def test_nothing_left_and_nothing_removed_are_refused(amounts, message):
    task = vision()
    with pytest.raises(DloError, match=message):
        prune_weights(dict(task.state_dict()), task, amounts)


def test_a_plan_without_rules_is_refused():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    with pytest.raises(DloError, match=r"must have tensor rules for --hidden, got none in blocks\.0"):
        find_units(model, ParallelPlan(blocks=("blocks.*",)), "hidden")


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
    line = prune_channels(weights, groups, [group.count for group in smaller.channel_groups()])
    _check_weights(weights, smaller)
    smaller.double().load_state_dict(weights)
    return smaller, weights, line


def silence(task: Any, smaller: Any) -> None:
    """Zeroes the weights that read the removed channels."""
    state = {name: value.clone() for name, value in task.state_dict().items()}
    for group, left in zip(task.channel_groups(), smaller.channel_groups(), strict=True):
        keep = kept_units(channel_scores(group, state), left.count)
        gone = torch.tensor([channel for channel in range(group.count) if channel not in keep.tolist()]).long()
        with torch.no_grad():
            for name in group.readers:
                task.model.get_submodule(name).weight.index_fill_(1, gone, 0.0)


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        *((name, 0.3) for name in ("resnet", "coatnet", "maxvit")),
        ("resnet_basic", 0.67),
        *(pytest.param(name, 0.3, marks=pytest.mark.slow) for name in ("resnet_wide", "coatnet_late", "coatnet_bn")),
    ],
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


# --- the choice of pruned weights is that of a sort, whatever the scores, ties and ranks -----------------------------


def one_process(values: torch.Tensor) -> torch.Tensor:
    return values


def pruned(scores: list[torch.Tensor], counts: list[int], groups: list[int]) -> list[torch.Tensor]:
    """Returns what is pruned of tensors that follow each other in the model."""
    offsets = [sum(part.numel() for part in scores[:number]) for number in range(len(scores))]
    parts = [
        Keys(lambda score=score: order_keys(score).flatten(), group)
        for score, group in zip(scores, groups, strict=True)
    ]
    where = [
        lambda offset=offset, score=score: offset + torch.arange(score.numel())
        for offset, score in zip(offsets, scores, strict=True)
    ]
    cut = find_cut(parts, where, torch.tensor(counts), one_process)
    return [
        cut.is_pruned(order_keys(score).flatten(), index, group)
        for score, index, group in zip(scores, where, groups, strict=True)
    ]


@pytest.mark.parametrize("count", [0, 1, 499, 500, 1499, 1500])
def test_it_prunes_what_a_stable_sort_puts_first(count):
    draw = torch.Generator().manual_seed(count)
    # Rounded, so that many scores are equal.
    scores = [(torch.randn(500, generator=draw) * 20).round() / 20, (torch.randn(20, 50, generator=draw) * 20).round()]
    flat = torch.cat([score.flatten() for score in scores])
    expected = torch.zeros(1500, dtype=torch.bool)
    expected[flat.argsort(stable=True)[:count]] = True
    assert torch.equal(torch.cat(pruned(scores, [count], [0, 0])), expected)


def test_each_group_has_a_threshold_of_its_own():
    scores = [torch.arange(10.0), torch.arange(100.0, 110.0)]
    first, second = pruned(scores, [3, 7], [0, 1])
    assert first.tolist() == [True] * 3 + [False] * 7
    assert second.tolist() == [True] * 7 + [False] * 3


def test_n_of_m_keeps_the_largest_and_the_first_of_equal_ones():
    assert keep_largest(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [False, True, True, False]
    weight = torch.randn(6, 8, 3)
    for dim, pattern in ((1, NMPattern(2, 4)), (0, NMPattern(1, 3)), (1, NMPattern(1, 8))):
        mask = nm_mask(weight.abs(), pattern, dim)
        assert follows_pattern(weight * mask, pattern, dim)
        assert int(mask.sum()) == weight.numel() * pattern.n // pattern.m
        moved, kept = weight.abs().movedim(dim, -1), mask.movedim(dim, -1)
        groups, chosen = moved.reshape(-1, pattern.m), kept.reshape(-1, pattern.m)
        for group, own in zip(groups, chosen, strict=True):
            assert float(group[own].min()) >= float(group[~own].max())
    assert not follows_pattern(torch.ones(4, 4), NMPattern(2, 4), 1)


def test_the_cubic_schedule_is_the_papers():
    assert [cubic_sparsity(at, 0.8) for at in (-1, 0, 1, 2)] == [0.0, 0.0, 0.8, 0.8]
    assert cubic_sparsity(0.5, 0.8, 0.2) == pytest.approx(0.8 + (0.2 - 0.8) * 0.125)
    assert ticket_sparsity(3, 0.2) == pytest.approx(1 - 0.8**3)


def test_masks_of_a_round_keep_what_is_pruned_pruned():
    weights = {"a": torch.randn(10, 10), "b": torch.zeros(10, 10)}
    first = magnitude_masks(weights, {}, 0.3, "global")
    assert sum(int((~mask).sum()) for mask in first.values()) == 60
    assert not first["b"][:6].any()  # Equal magnitudes: the first are pruned.
    second = magnitude_masks({**weights, "b": torch.full((10, 10), 9.0)}, first, 0.4, "global")
    assert not (second["b"] & ~first["b"]).any()
    assert sum(int((~mask).sum()) for mask in second.values()) == 80
    layers = magnitude_masks(weights, {}, 0.3, "layer")
    assert [int((~mask).sum()) for mask in layers.values()] == [30, 30]

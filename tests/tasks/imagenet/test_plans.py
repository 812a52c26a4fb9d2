import pytest
import timm
import torch

from dlo_framework.plan import Rule
from dlo_tasks.imagenet.timm_models import plan_for


def meta(name: str, **args) -> torch.nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **args)


def _refuse_state_dict(*_):
    raise AssertionError("a plan must not read the model's state_dict")


@pytest.mark.parametrize(
    ("name", "blocks", "stem", "head"),
    [
        ("vit_small_patch16_224", 12, {"cls_token", "pos_embed", "patch_embed"}, {"norm", "head"}),
        ("vit_medium_patch16_reg4_gap_256", 12, {"reg_token", "pos_embed", "patch_embed"}, None),
        ("deit_tiny_distilled_patch16_224", 12, None, {"norm", "head", "head_dist"}),
        ("vit_so400m_patch14_siglip_224", 27, {"pos_embed", "patch_embed"}, {"norm", "attn_pool"}),
        ("vit_small_patch16_18x2_224", 18, None, None),
        ("coatnet_0_rw_224", 2 + 3 + 7 + 2, {"stem"}, {"norm", "head"}),
        ("maxvit_tiny_tf_224", 11, {"stem"}, {"head"}),
        ("resnet50", 16, {"conv1", "bn1"}, {"fc"}),
        ("mixer_b16_224", 12, {"stem"}, {"norm", "head"}),
        ("swin_tiny_patch4_window7_224", 4, {"patch_embed"}, {"norm", "head"}),
        ("convnext_tiny", 4, {"stem"}, {"head"}),
        ("twins_svt_small", 2 + 2 + 10 + 4 + 4 + 3, {"patch_embeds.0"}, {"norm", "head"}),
        ("cait_xxs24_224", 24, {"patch_embed", "pos_embed"}, {"blocks_token_only", "norm", "head", "cls_token"}),
        ("xcit_nano_12_p8_224", 12, None, {"cls_attn_blocks", "norm", "head", "cls_token"}),
        ("volo_d1_224", 14, None, {"post_network", "aux_head", "norm", "head", "cls_token"}),
    ],
)
def test_plans_cover_real_models(name, blocks, stem, head):
    model = meta(name)
    # Under ZeRO 3 a model whose parameters are freed has no state_dict, and callbacks ask for its plan then.
    hook = model.register_state_dict_pre_hook(_refuse_state_dict)
    plan = plan_for(model)
    hook.remove()
    plan.validate(model)
    assert len(plan.block_names(model)) == blocks
    assert stem is None or set(plan.stem) == stem
    assert head is None or set(plan.head) == head


def test_vit_rules_alternate_columns_and_rows():
    model = meta("vit_small_patch16_224")
    plan = plan_for(model)
    found = {n: plan.rule_for(f"blocks.7.{n}") for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1")}
    assert found == {
        "attn.qkv": Rule.QKV,
        "attn.proj": Rule.ROW,
        "mlp.fc1": Rule.COLUMN,
        "mlp.fc2": Rule.ROW,
        "norm1": Rule.SEQUENCE,
    }
    assert plan.rule_for("head.weight") is plan.rule_for("pos_embed") is Rule.REPLICATE
    assert plan.attention_names(model) == [f"blocks.{i}.attn" for i in range(12)]


def test_a_fused_gate_is_cut_in_both_halves():
    model = meta("vit_giant_patch14_reg4_dinov2")  # SwiGLU packed in fc1: [gate, value]
    plan = plan_for(model)
    plan.validate(model)
    assert plan.rule_for("blocks.0.mlp.fc1") is Rule.GATE_UP
    assert plan.rule_for("blocks.0.mlp.fc2") is Rule.ROW


def test_what_a_norm_over_all_features_follows_is_not_cut():
    plan = plan_for(meta("vit_tiny_patch16_224", scale_attn_norm=True, scale_mlp_norm=True))
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert {plan.rule_for(f"blocks.0.{name}") for name in names} == {Rule.REPLICATE}


def test_a_bias_of_relative_positions_is_cut_along_its_heads():
    table = "attn.rel_pos.relative_position_bias_table"
    last = plan_for(meta("coatnet_nano_rw_224"))
    assert last.rule_for(f"stages.2.blocks.0.{table}") is Rule.LAST_DIM_HEADS
    first = plan_for(meta("maxvit_tiny_tf_224"))
    assert first.rule_for(f"stages.2.blocks.0.attn_grid.{table}") is Rule.HEADS
    made = plan_for(meta("coatnet_rmlp_nano_rw_224"))
    assert made.rule_for("stages.2.blocks.0.attn.rel_pos.mlp.fc2.weight") is Rule.HEADS
    assert made.rule_for("stages.2.blocks.0.attn.rel_pos.mlp.fc2") is Rule.REPLICATE

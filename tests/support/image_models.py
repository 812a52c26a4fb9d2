"""A small model of each module of timm."""

from __future__ import annotations

from typing import Any

#: A small model of each module of timm.
_NAMES = """
    beit_base_patch16_224 haloregnetz_b mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
    convnext_nano cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deepseek_vit_412m
    deit_tiny_patch16_224 densenet121 dla102x dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    tinynet_e efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_s fastvit_s12
    focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m_enc ghostnet_050 hardcorenas_b hgnet_tiny hiera_tiny_224
    hieradet_small hrnet_w18_small iformer_s inception_next_atto inception_resnet_v2 inception_v3 inception_v4
    lcnetv2_small levit_384_s8 lowformer_b0 mambaout_femto coatnet_nano_cc_224 caformer_s18 mixer_s16_224
    mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_siglip nasnetalarge
    nest_tiny nextvit_small nf_seresnet26 pit_xs_224 pnasnet5large pvt_v2_b0 qwen3_vit_306m rdnet_tiny regnetv_040
    repghostnet_050 repvit_m1 res2net50_14w_8s resnest14d resnet18 resnetv2_18 rexnet_100 selecsls42
    legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
    swinv2_tiny_window16_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small
    vgg11 visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224
    samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p
    xcit_nano_12_p8_224
"""
#: Their images are 64 pixels wide, but for models that need more.
IMAGE_SIZES = {
    **dict.fromkeys(("gemma4_vit_167m_enc", "inception_resnet_v2", "inception_v3", "inception_v4"), 96),
    **dict.fromkeys(("deepseek_vit_412m", "efficientformer_l1", "haloregnetz_b", "levit_384_s8"), 224),
    **dict.fromkeys(("eva02_tiny_patch14_224", "sequencer2d_s"), 56),
    "crossvit_tiny_240": 240,
}
#: Large ones that have four blocks in place of theirs.
SHORTENED = (
    *("beit_base_patch16_224", "cait_xxs24_224", "deepseek_vit_412m", "gemma4_vit_167m_enc"),
    *("naflexvit_base_patch16_siglip", "qwen3_vit_306m", "samvit_base_patch16_224"),
)
#: Rates that models have of their own, and whose random numbers are others on several ranks.
RATES = {
    "drop_path_rate": (
        *("efficientformerv2_s0", "fasternet_s", "focalnet_tiny_srf", "nest_tiny", "nextvit_small"),
        *("swin_tiny_patch4_window7_224", "swinv2_tiny_window16_256", "tiny_vit_5m_224"),
    ),
    "drop_rate": ("ghostnet_050", "repghostnet_050", "rexnet_100", "vgg11"),
    "proj_drop_rate": ("cpubone_nano",),
}

#: Transformers among them: attention and MLPs without convolutions or batch norms between their projections.
_TRANSFORMERS = """
    beit_base_patch16_224 cait_xxs24_224 convit_tiny crossvit_tiny_240 davit_tiny deepseek_vit_412m
    deit_tiny_patch16_224 eva02_tiny_patch14_224 gcvit_xxtiny gemma4_vit_167m_enc hiera_tiny_224 hieradet_small
    mixer_s16_224 mvitv2_tiny naflexvit_base_patch16_siglip nest_tiny pit_xs_224 qwen3_vit_306m
    swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224
    twins_svt_small vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224
    samvit_base_patch16_224 volo_d1_224 xcit_nano_12_p8_224
"""
IMAGE_MODELS, TRANSFORMERS = _NAMES.split(), _TRANSFORMERS.split()


def options(name: str) -> dict[str, Any]:
    """Returns the arguments of `ImageClassifier` for a model."""
    args: dict[str, Any] = {"depth": 4} if name in SHORTENED else {}
    args |= {rate: 0.0 for rate, models in RATES.items() if name in models}
    return {"model_args": args, "image_size": IMAGE_SIZES.get(name, 64)}

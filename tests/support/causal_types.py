"""Every type of causal and of masked language model of transformers, as a tiny one with random weights."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

#: Two for each of two stages: a check before a run may leave out what repeats.
LAYERS = 4
#: Value of a setting, by its name in any type.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "text_vocab_size", "decoder_vocab_size", "unpadded_vocab_size"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input", "audio_vocab_size"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(
        ("embedding_dim", "word_embed_proj_dim", "attention_hidden_size", "lru_width", "backbone_hidden_size"), 32
    ),
    **dict.fromkeys(("hidden_size_global", "input_embedding_size", "output_embedding_size"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "depth", "num_global_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "kv_n_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dff", "d_inner", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("index_head_dim", "attention_head_size", "dim_head", "d_kv", "d_head"), 8),
    **dict.fromkeys(("qk_head_dim",), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers",), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("swa_head_dim", "hidden_size_per_layer_input", "index_topk", "block_size"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"), 8),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), 64),
    **dict.fromkeys(("shape_embed_dim", "pronunciation_embed_dim", "mamba_d_ssm"), 32),
    **dict.fromkeys(("mlp_dim", "ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 48),
    **dict.fromkeys(("zero_expert_num",), 1),
}
#: Settings of a type, or of those of whom some share a form of attention, beside those above.
_ENCODERS = (  # that are decoders if they are told to
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_GEMMA3N = {
    **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    **{"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.95, 0.0, 0.0], "intermediate_size": [48] * 3},
    **{"hidden_size_per_layer_input": 8, "laurel_rank": 8},
}
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in _ENCODERS},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    # Short texts reach compressors of few tokens.
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots3_note": {"audio_config": {"adapter_in_dim": 32}},
    "dots3_note_text": {"head_dim": 16},
    "gemma3n": {
        **{"text_config": _GEMMA3N, "vision_config": {"architecture": "test_resnet"}},
        **{"audio_config": {"conf_num_hidden_layers": 1}},
    },
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        **{"is_decoder": True, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
        **{"attn_layers": ["local"] * 4, "local_attn_chunk_length": 4},
    },
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 8, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
}
#: Types that are no models of text alone, or that transformers cannot build or run from a config alone.
LEFT_OUT = (
    *("blt", "cohere_compass_text", "dbrx", "dots3_note", "gemma4_assistant", "gemma4_unified_assistant", "musicgen"),
    *("musicgen_melody", "qwen4_exp", "qwen4_exp_text", "xlstm", "zamba"),
)
TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(LEFT_OUT))
#: What the others that do not train are refused for.
MASKED_TYPES = tuple(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
REFUSED = {"cpmant": "whose tokens attend to later ones", "reformer": "fails on a few tokens"}
_MASKED: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 63},
    "esmc": {"num_key_value_heads": 4},
    "mobilebert": {"embedding_size": 16},  # Its head has the features beyond these.
    "neomme": {"head_dim": 16},
}
MASKED_REFUSED = {
    "mra": "must attend to later tokens",  # Its attention is zero without its kernel for GPUs.
    "neomme": "must attend to later tokens",  # Nor does that of random weights; its head mixes tokens too.
    "perceiver": "fails on a few tokens",
}
_LAYERED = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers", "indexer_types")


def tiny(model_type: str, dropout: bool = True, **more: Any) -> dict[str, Any]:
    """Returns the config of a type's tiny model, as `CausalLM` takes it.

    Args:
        model_type: transformers' name of it.
        dropout: Whether it has its type's dropout.
        **more: Settings that hold over these.
    """
    from transformers import AutoConfig

    settings = _shrink(AutoConfig.for_model(model_type).to_dict(), dropout)
    for name, value in OWN.get(model_type, {}).items():
        settings[name] = settings[name] | value if isinstance(value, dict) and name in settings else value
    return settings | more | {"model_type": model_type}


def tiny_masked(model_type: str, dropout: bool = True, **more: Any) -> dict[str, Any]:
    """Returns the config of a type's tiny model, as `MaskedLM` takes it."""
    settings = tiny(model_type, dropout)
    both_ways = {name: False for name in ("is_decoder", "causal") if settings.get(name)}
    return settings | both_ways | _MASKED.get(model_type, {}) | more


def _shrink(settings: dict[str, Any], dropout: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            found[name] = _shrink(value, dropout) | {"model_type": value["model_type"]}
        elif name in SIZES and isinstance(value, int | list) and not isinstance(value, bool):
            found[name] = min(SIZES[name], value) if isinstance(value, int) else SIZES[name]
        elif "drop" in name and isinstance(value, float) and not dropout:
            found[name] = 0.0
        elif name.endswith(("token_id", "token_index")):
            number = value[0] if isinstance(value, list) and value else value
            if isinstance(number, int) and number >= SIZES["vocab_size"]:
                found[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 63)
    for name in _LAYERED:
        if isinstance(settings.get(name), list):
            kinds = list(dict.fromkeys(settings[name]))
            found[name] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
            for layers in ("num_hidden_layers", "n_layer", "num_layers"):
                if layers in found:
                    found[layers] = len(found[name])
    if "kv_lora_rank" in settings and "num_key_value_heads" in found:  # One projection of a few features for all heads.
        found["num_key_value_heads"] = found["num_attention_heads"]
    if settings.get("per_layer_config"):  # What layers of some kinds have otherwise, by number.
        theirs = {int(layer): _shrink(value, dropout) for layer, value in settings["per_layer_config"].items()}
        firsts = [settings["layer_types"].index(kind) for kind in found["layer_types"]]
        found["per_layer_config"] = {layer: theirs[first] for layer, first in enumerate(firsts) if first in theirs}
    return found

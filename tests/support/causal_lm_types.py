"""A tiny config of each type of causal language model that transformers has: what nobody here wrote."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61
#: Settings by the value that they get wherever a config has them.
_BY_VALUE: dict[Any, str] = {
    61: "vocab_size vocab_size_per_layer_input",
    32: """
        attention_hidden_size d_model emb_dim embedding_dim embedding_size hidden_size lru_width n_embd
        word_embed_proj_dim
    """,
    48: """
        d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim ffn_dim ffn_hidden_size
        intermediate_size intermediate_size_mlp n_inner
    """,
    4: """
        decoder_attention_heads decoder_layers encoder_attention_heads linear_num_value_heads mamba_dt_rank
        mamba_n_heads mamba_num_heads moe_num_experts n_head n_heads n_layer n_layers n_routed_experts
        num_attention_heads num_decoder_attention_heads num_decoder_layers num_encoder_attention_heads
        num_experts num_heads num_hidden_layers num_layers num_local_experts rotary_dim
        swa_num_attention_heads time_step_rank
    """,
    2: """
        encoder_layers eos_token_id forced_eos_token_id index_n_heads linear_num_key_heads max_window_layers
        moe_k moe_topk n_mamba_heads num_encoder_layers num_experts_per_tok num_experts_per_token
        num_key_value_heads num_kv_heads num_query_groups sep_token_id swa_num_key_value_heads
        type_vocab_size
    """,
    8: """
        attention_head_size chunk_size d_head dim_head head_dim hidden_size_per_layer_input index_head_dim
        index_topk kv_channels linear_key_head_dim linear_value_head_dim mamba_chunk_size mamba_d_state
        qk_nope_head_dim qk_rope_head_dim ssm_state_size state_size swa_head_dim v_head_dim
    """,
    64: "context_length mamba_d_ssm max_position_embeddings max_seq_len model_max_length n_ctx n_positions",
    16: """
        attention_window_size expert_ffn_hidden_size kv_lora_rank local_attention mamba_d_head
        mamba_head_dim mamba_headdim moe_intermediate_size moe_shared_expert_intermediate_size q_lora_rank
        qk_head_dim shared_expert_intermediate_size shared_experts_intermediate_size
        shared_intermediate_size sliding_window window_size
    """,
    1: """
        bos_token_id cls_token_id decoder_start_token_id first_k_dense_replace mamba_n_groups mamba_ngroups
        n_group n_groups num_expert_group topk_group zero_expert_num
    """,
    0: "num_nextn_predict_layers pad_token_id",
    None: "forced_bos_token_id",
}
_TINY = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
#: Settings that a type checks against each other.
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}


def type_names() -> list[str]:
    """Returns the types that AutoModelForCausalLM maps."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str, **more: Any) -> dict[str, Any]:
    """Returns the settings of a tiny model of a type, without dropout.

    Args:
        kind: transformers' `model_type`.
        **more: settings of the text model that hold over these.
    """
    found = _shrunk(CONFIG_MAPPING[kind]().to_dict()) | _OWN.get(kind, {})
    next((found[key] for key in ("text_config", "decoder_config") if key in found), found).update(more)
    return {"model_type": kind, **found}


def _shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("config") and value:
            found[name] = _shrunk(value)
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif name in _TINY and value is not None and not isinstance(value, list | bool):
            found[name] = _TINY[name]
    if "qk_rope_head_dim" in settings:  # Its own dims make up a head's.
        found.pop("head_dim", None)
    if "kv_lora_rank" in settings and "num_key_value_heads" in found:  # The latent makes a key for each query.
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found

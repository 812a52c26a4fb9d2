"""Parallel plans of language models, read from what transformers says of each family."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.plan import Rule
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.language_plans import plan_for
from support.causal_types import tiny
from support.token_batches import SMALL

SIZES: dict[str, Any] = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0}
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4}
OPT = {**NEOX, "ffn_dim": 48, "word_embed_proj_dim": 32}
OPT.pop("intermediate_size")
FAMILIES = dict.fromkeys(("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere"), SIZES)
FAMILIES |= {"lfm2": SIZES | {"layer_types": ["conv", "full_attention", "conv"]}, "bart": {}, "bigbird_pegasus": {}}
FAMILIES |= {"gpt_neox": NEOX, "gpt2": GPT2, "opt": OPT, "bloom": {"vocab_size": 60, "hidden_size": 32, "n_layer": 3}}


def make(family: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family], **more))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"lfm2", "bart", "bigbird_pegasus"}))
def test_every_parameter_has_one_place(family: str) -> None:
    model = make(family)
    plan = plan_for(model)
    plan.validate(model)
    assert len(plan.block_names(model)) == len(plan.attention_names(model)) == 3
    assert plan.owners("lm_head.weight") == ["head"]
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    assert plan.owners(f"{embedding}.weight") == ["stem"]
    final = [name for name, _ in model.named_parameters() if "norm" in name.split(".")[-2] or "ln_f" in name]
    outside = [name for name in final if not name.startswith(plan.blocks[0].removesuffix("*")) and "word" not in name]
    assert outside
    assert all(plan.owners(name) == ["head"] for name in outside)


@pytest.mark.parametrize(
    ("family", "norm", "place"),
    [
        ("lfm2", "embedding_norm", "head"),
        ("bart", "layernorm_embedding", "stem"),
        ("bigbird_pegasus", "layernorm_embedding", "head"),
        ("opt", "final_layer_norm", "head"),
    ],
)
def test_a_norm_stands_where_it_runs_wherever_it_is_registered(family: str, norm: str, place: str) -> None:
    model = make(family)
    plan = plan_for(model)
    names = [name for name, _ in model.named_parameters() if norm in name.split(".") and ".layers." not in name]
    assert names
    assert all(plan.owners(name) == [place] for name in names)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "cohere"])
def test_tensor_rules_are_the_familys_own(family: str) -> None:
    plan = plan_for(make(family))
    rules = {
        "self_attn.q_proj": Rule.HEADS,
        "self_attn.k_proj": Rule.KV_HEADS,
        "self_attn.v_proj": Rule.KV_HEADS,
        "self_attn.o_proj": Rule.ROW,
        "mlp.gate_proj": Rule.COLUMN,
        "mlp.up_proj": Rule.COLUMN,
        "mlp.down_proj": Rule.ROW,
        "input_layernorm": Rule.SEQUENCE,
        "self_attn.q_norm": Rule.REPLICATE,
    }
    assert {name: plan.rule_for(f"model.layers.1.{name}.weight") for name in rules} == rules
    assert plan.rule_for("model.embed_tokens.weight") is plan.rule_for("lm_head.weight") is Rule.VOCAB


def test_a_fused_projection_has_a_rule_only_where_its_layout_is_known() -> None:
    neox = plan_for(make("gpt_neox"))
    assert neox.rule_for("gpt_neox.layers.0.attention.query_key_value") is Rule.QKV_BY_HEAD
    assert neox.rule_for("gpt_neox.layers.0.attention.dense") is Rule.ROW
    phi = plan_for(make("phi3"))
    assert phi.rule_for("model.layers.0.self_attn.qkv_proj") is Rule.QKV_GROUPED
    assert phi.rule_for("model.layers.0.mlp.gate_up_proj") is Rule.GATE_UP
    assert phi.rule_for("model.layers.0.self_attn.o_proj") is phi.rule_for("model.layers.0.mlp.down_proj") is Rule.ROW
    gpt2 = plan_for(make("gpt2"))
    assert gpt2.rule_for("transformer.h.1.attn.c_attn.weight") is Rule.QKV
    assert gpt2.rule_for("transformer.h.1.mlp.c_proj.bias") is Rule.ROW
    assert plan_for(make("bloom")).tensor == {}  # transformers has no plan for it, and neither have we


def test_norms_of_queries_have_the_rule_of_what_they_span() -> None:
    def rule(family: str, **more: Any) -> Rule:
        return plan_for(make(family, **more)).rule_for("model.layers.1.self_attn.k_norm.weight")

    assert rule("qwen3") is Rule.REPLICATE  # one weight for all heads
    assert rule("cohere", use_qk_norm=True) is Rule.KV_HEADS  # one a head
    assert rule("olmo2") is Rule.COLUMN_NORM  # the mean square is over all heads


def test_mlps_whose_threshold_is_a_mean_over_all_features_are_not_cut() -> None:
    model = CausalLM(config=tiny("gemma3n_text")).on_meta().model
    plan = plan_for(model)
    assert [share > 0 for share in model.config.activation_sparsity_pattern] == [True, False, False]
    rules = [plan.rule_for(f"model.layers.{layer}.mlp.gate_proj.weight") for layer in range(3)]
    assert rules == [Rule.REPLICATE, Rule.COLUMN, Rule.COLUMN]
    assert plan.rule_for("model.layers.0.self_attn.q_proj.weight") is Rule.HEADS


def test_tied_embeddings_are_one_group() -> None:
    tied = plan_for(make("llama", tie_word_embeddings=True))
    assert tied.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert plan_for(make("llama", tie_word_embeddings=False)).tied == ()


def test_the_plan_of_an_adapted_model_is_that_of_the_model() -> None:
    model = make("llama")
    before = plan_for(model)
    adapters.add_adapters(model, model.lm_head, Lora(), torch.float32)
    after = plan_for(model)
    after.validate(model)
    assert after == before
    assert after.tensor == before.tensor
    assert after.rule_for("model.layers.0.self_attn.q_proj.base_layer.weight") is Rule.HEADS

"""Families of transformers: their parallel plans, their mixtures, and the loss that balances the experts of these."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.plan import Rule
from dlo_framework.shards import Box
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.compile.callback import Compile
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language import adapters, model_folders
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.language_plans import plan_for
from dlo_tasks.language.masked_lm import MaskedLM
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.causal_types import TYPES, tiny, tiny_masked
from support.seq2seq import seq2seq_config
from support.strategies import STRATEGIES
from support.token_batches import Tokens, packed_rows
from support.trainers import quiet_trainer

#: Families of the ordinary test, with the modules that hold router and experts.
NAMED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe"), "mlp"),
    **dict.fromkeys(("phimoe", "qwen2_moe", "qwen3_moe"), "mlp"),
    **{"granitemoe": "block_sparse_moe", "jamba": "feed_forward", "llama4_text": "feed_forward"},
}
#: Families with experts in a form of their own, which `ep` refuses: JetMoe sorts tokens between two linear layers of
#: experts, LongCat-Flash counts experts without weights among the others.
OWN_FORM = {"jetmoe", "longcat_flash"}


def build(family: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny(family, **more)))


def check(family: str) -> list[Mixture]:
    model = build(family)
    found = find_mixtures(model)
    stacked = {name for mixture in found for name in mixture.stacked}
    inside = {
        name
        for name, parameter in model.named_parameters()
        if re.search(r"\bexperts\b", name) and "shared" not in name and parameter.ndim >= 3
    }
    assert (not found and inside) if family in OWN_FORM else inside <= stacked, family
    assert all(model.get_parameter(name).shape[0] == mixture.count for mixture in found for name in mixture.stacked)
    assert all(mixture.router is not None and mixture.top_k for mixture in found)
    plan = plan_for(model)
    assert bool(plan.experts) == bool(found)
    if found:
        plan.validate(model)
        assert find_mixtures(model, plan) == found
    return found


def test_mixtures_of_named_families_are_found_in_their_plans() -> None:
    for family, name in NAMED.items():
        found = check(family)
        assert {mixture.name.rpartition(".")[2] for mixture in found} == {name}
        assert {mixture.form for mixture in found} == {"dense" if family == "llama4_text" else "routed"}
        assert {mixture.count for mixture in found} == {4}
    shared = {family: bool(find_mixtures(build(family))[0].shared) for family in ("deepseek_v3", "mixtral")}
    assert shared == {"deepseek_v3": True, "mixtral": False}


def test_dense_layers_between_are_not_mixtures() -> None:
    model = build("glm4_moe")
    names = [mixture.name for mixture in find_mixtures(model, plan_for(model))]
    assert plan_for(model).experts == ("model.layers.*.mlp",)
    assert names == ["model.layers.1.mlp", "model.layers.2.mlp", "model.layers.3.mlp"]


def test_joined_experts_and_features_are_found() -> None:
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN

    config = DbrxFFNConfig(hidden_size=8, ffn_hidden_size=6, moe_num_experts=4, moe_top_k=2)
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"ffn": DbrxFFN(SimpleNamespace(ffn_config=config))})
    (found,) = find_mixtures(model)
    assert (found.name, found.form, found.count, found.top_k) == ("ffn", "routed", 4, 2)
    assert set(found.stacked) == {f"ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2")}


@pytest.mark.slow
def test_every_family_with_experts_is_found() -> None:
    found = {family: check(family) for family in TYPES}
    assert len([family for family, mixtures in found.items() if mixtures]) >= 55
    assert {family for family, mixtures in found.items() if any(mixture.form == "dense" for mixture in mixtures)} == {
        "llama4",
        "llama4_text",
    }


def stored(family: str, folder: Path) -> tuple[Any, Any]:
    """Returns a model, and what has been saved of it."""
    config = AutoConfig.for_model(**tiny(family, num_hidden_layers=2))
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model, model_folders.open_safetensors(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stored_experts_are_stacked_without_being_read(family: str, tmp_path: Path) -> None:
    model, saved = stored(family, tmp_path)
    assert any(".experts.3." in name for name in saved)  # transformers writes each expert's matrices.
    model_folders._take_new_names(saved, model)
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    assert len(names) == 4
    for name in names:
        expected = model.get_parameter(name).detach()
        assert torch.equal(saved[name], expected)
        # The rows in the middle of the second half of the experts, as a rank of ep and FSDP reads them.
        count, rows, columns = expected.shape
        box = Box((count // 2, rows // 2 - 3, 0), (count // 2, 7, columns))
        part = torch.empty(box.sizes)
        saved.read_part(name, box, part)
        assert torch.equal(part, expected[count // 2 :, rows // 2 - 3 : rows // 2 + 4])


def test_an_expert_that_is_missing_leaves_its_stack_out(tmp_path: Path) -> None:
    model, saved = stored("mixtral", tmp_path)
    del saved[next(name for name in saved if ".experts.1.w2." in name)]
    model_folders._take_new_names(saved, model)
    found = [name in saved for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    assert sorted(found) == [False, True]


# --- the loss that balances the experts of a mixture: transformers' own, whatever the batch is cut into --------------


BALANCED: dict[str, Any] = {"dropout": False, "router_aux_loss_coef": 0.5, "output_router_logits": True}
FAMILIES: dict[str, dict[str, Any]] = {"mixtral": {}, "qwen3_moe": {}, "granitemoe": {"logits_scaling": 2.0}}


def task_of(family: str = "mixtral", **more: Any) -> CausalLM:
    torch.manual_seed(0)
    options = {name: more.pop(name) for name in ("recompute", "optimizer", "lr", "schedule") if name in more}
    task = CausalLM(config=tiny(family, **BALANCED | FAMILIES[family] | more), **options)
    task.configure_model()
    return task


def batch_of(rows: int = 2, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    ids, labels = torch.randint(60, (2, rows, length), generator=torch.Generator().manual_seed(seed))
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(rows, length)}


def reference(task: CausalLM, batch: dict[str, Tensor]) -> Any:
    """What transformers computes, all logits at once."""
    model: Any = task.model
    names = [name for name in ("input_ids", "position_ids", "attention_mask") if name in batch]
    inputs = {name: batch[name] for name in names}
    return model(**inputs, labels=batch["labels"], shift_labels=batch["labels"], use_cache=False)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, recompute: bool) -> None:
    task, twin = task_of(family, recompute=recompute), task_of(family)
    padded = {**batch_of(), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])}
    for batch in (batch_of(), padded):
        expected, found = reference(twin, batch), task.training_step(batch, 0)["loss"]
        assert expected.aux_loss > 1
        assert found.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        expected.loss.backward()
        found.backward()
        for one, other in zip(task.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_each_micro_batchs_balance_counts_by_its_targets() -> None:
    task, parts = task_of(), [batch_of(1, seed=1), batch_of(3, seed=2)]
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    whole = torch.tensor(sum(counts))
    found = sum(float(task.training_step({**part, "tokens_in_step": whole}, 0)["loss"]) for part in parts)
    losses = [float(reference(task, part).loss) for part in parts]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert found == pytest.approx(mean, rel=1e-5)


def test_it_is_no_part_of_what_is_measured_and_absent_unless_it_is_asked_for() -> None:
    task, batch = task_of(), batch_of()
    plain = reference(task, batch)
    entropy = float(plain.loss - 0.5 * plain.aux_loss)
    task.eval()
    task.setup("validate")
    assert isinstance(task(input_ids=batch["input_ids"]), Tensor)
    measures: Any = task.metrics(task(input_ids=batch["input_ids"]), batch)
    assert float(measures["loss"].compute()) == pytest.approx(entropy)
    for off in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        other = task_of(**off)
        assert not other.needs_hidden_states
        assert float(other.training_step(batch, 0)["loss"]) == pytest.approx(entropy, rel=1e-5)


class Twice(Tokens):
    """Batches with the same rows on each rank, so that one process's balance is theirs."""

    def make_batch(self, rows: int, draw: torch.Generator, length: int) -> dict[str, Tensor]:
        half = packed_rows(rows // 2, draw, length)
        return {name: torch.cat([value, value]) for name, value in half.items()}


def balanced() -> tuple[CausalLM, Tokens]:
    return task_of(vocab_size=96, recompute=True, optimizer="sgd", lr=0.1, schedule="constant"), Twice(1, steps=2)


def test_strategies_that_divide_the_weights_train_with_it() -> None:
    assert_parity(balanced, [Case(STRATEGIES[name]) for name in ("fsdp", "zero3", "tp")], steps=2, rtol=1e-5)


@pytest.mark.slow
def test_compiled_blocks_have_it_too() -> None:
    found = []
    for callbacks in ([], [Compile(backend="aot_eager")]):
        task, data = balanced()
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(task, datamodule=data)
        found.append(task.state_dict())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"pp": 2, "micro_batches": 2}, "pp=2"),
        ({"cp": 2}, "cp=2"),
        ({"tp": 2, "sequence_parallel": True}, "sequence_parallel: true"),
    ],
)
def test_axes_that_divide_blocks_or_sequences_are_refused(axes: dict[str, Any], named: str) -> None:
    strategy = MeshStrategy(dp_shard=1, **axes)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    mixture = CausalLM(config=tiny("mixtral", **BALANCED))
    both = Seq2SeqLM(config=seq2seq_config("t5"))
    masked = MaskedLM(config=tiny_masked("bert"))
    refused: list[tuple[Any, str, set[str]]] = [
        (mixture, "routers' logits", {"pp=2", "cp=2", "sequence_parallel: true"}),
        (both, "its decoder uses the encoder's output", {"cp=2", "sequence_parallel: true"}),
        (masked, "its tokens attend to all others", {"cp=2"}),
    ]
    for task, reason in ((task, reason) for task, reason, by in refused if named in by):
        with pytest.raises(DloError, match=rf"{reason}.*, got {named}, which divides them; use the other axes"):
            strategy.check_model(task)


def test_a_family_without_it_is_refused() -> None:
    task = CausalLM(config=tiny("llama4_text", output_router_logits=True))
    with pytest.raises(DloError, match=r"output_router_logits must be false .*, got true for Llama4ForCausalLM"):
        task.check(None)


# --- parallel plans, read from what transformers says of each family ------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        *("bloom", "cohere", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "opt", "phi3"),
        "qwen3",
    ],
)
def test_every_parameter_has_one_place(family: str) -> None:
    model = build(family)
    plan = plan_for(model)
    plan.validate(model)
    assert len(plan.block_names(model)) == len(plan.attention_names(model)) == model.config.num_hidden_layers
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
    model = build(family)
    plan = plan_for(model)
    names = [name for name, _ in model.named_parameters() if norm in name.split(".") and ".layers." not in name]
    assert names
    assert all(plan.owners(name) == [place] for name in names)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "cohere"])
def test_tensor_rules_are_the_familys_own(family: str) -> None:
    plan = plan_for(build(family))
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
    neox = plan_for(build("gpt_neox"))
    assert neox.rule_for("gpt_neox.layers.0.attention.query_key_value") is Rule.QKV_BY_HEAD
    assert neox.rule_for("gpt_neox.layers.0.attention.dense") is Rule.ROW
    phi = plan_for(build("phi3"))
    assert phi.rule_for("model.layers.0.self_attn.qkv_proj") is Rule.QKV_GROUPED
    assert phi.rule_for("model.layers.0.mlp.gate_up_proj") is Rule.GATE_UP
    assert phi.rule_for("model.layers.0.self_attn.o_proj") is phi.rule_for("model.layers.0.mlp.down_proj") is Rule.ROW
    gpt2 = plan_for(build("gpt2"))
    assert gpt2.rule_for("transformer.h.1.attn.c_attn.weight") is Rule.QKV
    assert gpt2.rule_for("transformer.h.1.mlp.c_proj.bias") is Rule.ROW
    assert plan_for(build("bloom")).tensor == {}  # transformers has no plan for it, and neither have we


def test_norms_of_queries_have_the_rule_of_what_they_span() -> None:
    def rule(family: str, **more: Any) -> Rule:
        return plan_for(build(family, **more)).rule_for("model.layers.1.self_attn.k_norm.weight")

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
    tied = plan_for(build("llama", tie_word_embeddings=True))
    assert tied.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert plan_for(build("llama", tie_word_embeddings=False)).tied == ()


def test_the_plan_of_an_adapted_model_is_that_of_the_model() -> None:
    model = build("llama")
    before = plan_for(model)
    adapters.add_adapters(model, model.lm_head, Lora(), torch.float32)
    after = plan_for(model)
    after.validate(model)
    assert after == before
    assert after.tensor == before.tensor
    assert after.rule_for("model.layers.0.self_attn.q_proj.base_layer.weight") is Rule.HEADS

"""Experts on simulated ranks: each holds its share of the state, and sends as many tokens as the formula says."""

from typing import Any

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.mesh.mesh_description import MeshDescription, describe_mesh
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.simulated_ranks import simulate_ranks

ROWS, LENGTH = 2, 16
SPEC = MeshSpec(dp_replicate=2, dp_shard=3, cp=2, ep=2)
#: Settings of the models in their config.json.
QWEN3_235B = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536},
    **{"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False},
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3"}  # transformers' defaults


def task(config: dict[str, Any]) -> Any:
    return CausalLM(config=config).on_meta()


def described(task: Any, spec: MeshSpec) -> MeshDescription:
    return describe_mesh(task, task.parallel_plan(), spec)


def batch(length: int = LENGTH, rows: int = ROWS) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def exchanged(found: Any) -> int:
    return sum(row.elements for row in found.traffic if row.kind == "all_to_all" and row.axis == "ep")


def test_each_rank_has_its_experts_and_sends_what_the_formula_says() -> None:
    config = tiny("qwen3_moe", num_hidden_layers=3, vocab_size=97)
    model = task(config)
    drawn = described(model, SPEC)
    experts = 4
    for found in simulate_ranks(model, MeshStrategy(), SPEC, [11], batch()):
        assert found.state_bytes == drawn.ranks[found.rank].state_bytes
        # A rank's tokens go to k experts and come back, in forward and in backward, with its own share of them.
        tokens = ROWS * LENGTH // SPEC.cp
        assert exchanged(found) == 4 * 2 * tokens * 32 * 3
    assert drawn.groups["ep"][:3] == ((0, 1), (2, 3), (4, 5))
    assert drawn.mixtures is not None
    assert (drawn.mixtures.experts, drawn.mixtures.local, drawn.mixtures.mixtures) == (experts, 2, 3)
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert drawn.mixtures.parameters == stacked
    assert drawn.mixtures.active == drawn.parameters - stacked // 2
    text = drawn.text()
    assert "3 mixtures of 4 experts, 2 for a token" in text
    assert "each rank has 2" in text
    # All copies of the state together: each element once in each.
    assert sum(rank.state_bytes.parameters for rank in drawn.ranks) == 2 * drawn.unsharded.parameters


@pytest.mark.slow
def test_more_ranks_than_experts_have_equal_shares() -> None:
    model = task(tiny("gpt_oss", vocab_size=96))
    spec = MeshSpec(dp_replicate=2, dp_shard=8, ep=2)  # 4 ranks share 2 experts.
    drawn = described(model, spec)
    for found in simulate_ranks(model, MeshStrategy(), spec, [7], batch()):
        assert found.state_bytes == drawn.ranks[found.rank].state_bytes
    assert drawn.largest.state_bytes.total <= 1.02 * 4 * 4 * drawn.parameters / 8
    full = described(model, MeshSpec(dp_shard=8))  # Without ep: 8 ranks share 4 experts, and their biases unevenly.
    assert full.largest.state_bytes.total <= 1.03 * 4 * 4 * drawn.parameters / 8


@pytest.mark.slow
def test_tp_and_ep_both_cut_experts() -> None:
    model = task(tiny("qwen3_moe", num_hidden_layers=3, vocab_size=96))
    spec = MeshSpec(dp_shard=8, tp=2, ep=2)  # 4 ranks share the halves of 2 experts.
    drawn = described(model, spec)
    for found in simulate_ranks(model, MeshStrategy(), spec, [7], batch()):
        assert found.state_bytes == drawn.ranks[found.rank].state_bytes
    assert drawn.coverage is not None
    assert drawn.coverage.sharded_fraction > 0.97
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    without = drawn.parameters - stacked
    # Of what is not in experts, tp leaves some in full.
    assert drawn.largest.state_bytes.total <= 16 * (stacked / 16 + without / 8)


def test_ranks_that_cannot_share_experts_are_refused() -> None:
    strategy = MeshStrategy(dp_shard=3, ep=3)
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 3
    with pytest.raises(DloError, match=r"ep must divide the 4 experts of 'model.layers.0.mlp', got 3; set ep=2"):
        strategy.check_model(task(tiny("mixtral")))
    with pytest.raises(DloError, match=r"ep must have mixtures of experts to divide, got 3 for LlamaForCausalLM"):
        strategy.check_model(task(tiny("llama")))
    for family in ("jetmoe", "longcat_flash"):
        with pytest.raises(DloError, match=r"ep must have mixtures of experts to divide"):
            strategy.check_model(task(tiny(family)))
    with pytest.raises(DloError, match=r"ep must divide the 4 ranks of dp_shard x cp, .* got 3; set ep=2"):
        MeshSpec(dp_shard=-1, cp=2, ep=3).resolve(4)
    with pytest.raises(DloError, match=r"ep must be at least 1, got 0"):
        MeshSpec(ep=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "copies", "ranks", "ep", "billions"),
    [(QWEN3_235B, 1, 256, 16, 235.1), (DEEPSEEK_V3, 8, 256, 64, 671.0)],
)
def test_large_models_are_simulated_on_many_ranks(
    config: dict[str, Any], copies: int, ranks: int, ep: int, billions: float
) -> None:
    model = task(config)
    spec = MeshSpec(dp_replicate=copies, dp_shard=ranks, ep=ep)
    drawn = described(model, spec)
    assert drawn.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    (found,) = simulate_ranks(model, MeshStrategy(), spec, [0], batch(4096, 1))
    assert found.state_bytes == drawn.ranks[0].state_bytes
    assert drawn.largest.state_bytes.total <= 1.02 * 16 * drawn.parameters / ranks
    mixtures, width = drawn.mixtures, model.model.config.hidden_size
    assert mixtures is not None
    assert exchanged(found) == 4 * 8 * 4096 * width * mixtures.mixtures
    if copies > 1:  # The same ranks with one copy: 32 ranks share 4 experts.
        one = described(model, MeshSpec(dp_shard=copies * ranks, ep=ep))
        assert one.largest.state_bytes.total <= 1.02 * 16 * drawn.parameters / (copies * ranks)

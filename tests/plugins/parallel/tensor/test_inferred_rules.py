"""Tensor rules of models whose families bring none: what is found, and what the proof refuses."""

import pytest
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.plan import Rule
from dlo_framework.task import Task
from dlo_plugins.parallel.tensor.inferred_rules import InferredRules, infer_rules
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_planner import SHAPING, make_tp_plan
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask


class Shapes:
    seq_len = 16


def rules_of(task: Task) -> InferredRules:
    task = task.on_meta()
    return infer_rules(task, task.parallel_plan(), Shapes())


def kinds(found: InferredRules) -> dict[str, str]:
    """Rules of projections and tensors, without those that only say that a module works on full activations."""
    return {name: str(rule) for name, rule in found.plan.tensor.items() if rule not in (Rule.SEQUENCE, *SHAPING)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_users_own_transformer_is_cut(fused: bool) -> None:
    found = rules_of(ForeignTask(fused=fused))
    of_attention = {"qkv": "qkv"} if fused else {"q": "heads", "k": "heads", "v": "heads"}
    assert kinds(found) == {
        **{f"layers.*.mix.{name}": rule for name, rule in of_attention.items()},
        **{"layers.*.mix.out": "row", "layers.*.up": "column", "layers.*.down": "row"},
    }
    # The code takes the number of features from its input's shape, and no attribute has the width of a head.
    assert found.plan.tensor["layers.*.mix"] is Rule.LOCAL_SHAPES
    assert found.plan.head_widths == {"layers.*.mix": 8}
    assert not found.whole


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "bart",  # in the block itself, beside a cross attention that never runs
            {
                **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "heads"),
                **{"self_attn.out_proj": "row", "fc1": "column", "fc2": "row"},
            },
        ),
        (
            "olmoe",  # grouped queries, norms over all heads, and experts in one tensor
            {
                **{"self_attn.q_norm": "column_norm", "self_attn.k_norm": "column_norm"},
                **{"self_attn.q_proj": "heads", "self_attn.k_proj": "kv_heads", "self_attn.v_proj": "kv_heads"},
                "self_attn.o_proj": "row",
            },
        ),
        (
            "bloom",  # biases of heads come from outside of the block
            {
                **{"self_attention.query_key_value": "qkv_by_head", "self_attention.dense": "row"},
                **{"mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"},
            },
        ),
        (
            "gpt_bigcode",  # one projection of all queries, one key and one value
            {
                **{"attn.c_attn": "qkv_grouped", "attn.c_proj": "row"},
                **{"mlp.c_fc": "column", "mlp.c_proj": "row"},
            },
        ),
    ],
)
def test_families_of_transformers_without_rules(family: str, expected: dict[str, str]) -> None:
    found = rules_of(CausalLM(config=tiny(family, dropout=False)))
    assert {name.split(".*.", 1)[1]: rule for name, rule in kinds(found).items()} == expected
    assert not found.whole


def test_queries_beside_one_key_and_value() -> None:
    """A user's module has no attribute with the number of key/value heads, and repeats the key for all heads."""
    task = ForeignTask(fused=True, one_key=True).on_meta()
    found = rules_of(task)
    assert not found.whole
    assert kinds(found)["layers.*.mix.qkv"] == "qkv_grouped"
    applier = TensorParallel()
    plan = applier.complete_plan(task, task.parallel_plan(), 4)
    cut = make_tp_plan(task.model, plan, 4)
    assert cut.divisions["layers.0.mix.qkv.weight"].pieces == (32, 8, 8)
    assert cut.regions["layers.0.mix"].gathered == {"layers.0.mix.qkv": 16}
    runs = [cut.divisions["layers.0.mix.qkv.weight"].slice_for(4, rank).runs for rank in range(4)]
    rows = sorted(row for run in runs for first, count in run for row in range(first, first + count))
    assert rows == list(range(48))  # Each row belongs to one rank.
    few = ForeignTask(fused=True, one_key=True, width=12, heads=4).on_meta()  # Heads of 3 features.
    undivided = make_tp_plan(few.model, applier.complete_plan(few, few.parallel_plan(), 2), 2)
    assert "layers.0.mix" not in undivided.regions


def test_code_that_reshapes_to_full_features_and_checks_its_number_of_heads() -> None:
    """TrOCR's attention compares shapes with its attribute, and reshapes to its full width."""
    found = rules_of(CausalLM(config=tiny("trocr", dropout=False)))
    assert not found.whole
    assert found.plan.tensor["model.decoder.layers.*.self_attn"] is Rule.LOCAL_COUNTS


def test_timms_beit_whose_bias_is_added_by_hand() -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 4}
    found = rules_of(ImageClassifier("beit_base_patch16_224", num_classes=3, image_size=64, model_args=args))
    assert {name.removeprefix("blocks.*."): rule for name, rule in kinds(found).items()} == {
        **{"attn.qkv": "qkv", "attn.proj": "row", "mlp.fc1": "column", "mlp.fc2": "row"},
        **{"attn.q_bias": "heads", "attn.k_bias": "heads", "attn.v_bias": "heads"},
        "attn.relative_position_bias_table": "last_dim_heads",
    }


@pytest.mark.slow
def test_queries_keys_and_values_of_different_widths() -> None:
    """LeViT: heads of queries and keys of 4 features, of values of 8, each head's together; batch norms between."""
    args = {"embed_dim": (16, 32), "key_dim": 4, "depth": (2, 2), "num_heads": (2, 4), "attn_ratio": 2}
    task = ImageClassifier("levit_128s", num_classes=3, image_size=224, model_args=args).on_meta()
    found = infer_rules(task, task.parallel_plan())
    plan = found.plan
    block = "stages.1.blocks.0.attn"
    assert plan.rule_for(f"{block}.qkv.linear") is Rule.HEADS
    assert plan.rule_for(f"{block}.qkv.bn") is Rule.PER_CHANNEL
    assert plan.rule_for(f"{block}.attention_biases") is Rule.HEADS
    assert plan.rule_for("stages.1.downsample.attn_downsample.kv.linear") is Rule.HEADS  # 12 features a head, not 4
    assert plan.rule_for("stages.1.downsample.attn_downsample.q.ln.linear") is Rule.COLUMN
    cut = make_tp_plan(task.model, TensorParallel().complete_plan(task, task.parallel_plan(), 2), 2)
    assert (cut.regions[block].heads, cut.regions[block].width) == (4, 16)


@pytest.mark.slow
def test_blocks_of_another_class_under_the_same_names_keep_their_projections() -> None:
    """VOLO's outlookers have a `proj` too, and are no blocks of the plan."""
    task = ImageClassifier("volo_d1_224", num_classes=3, image_size=32)
    task = task.on_meta()
    found = infer_rules(task, task.parallel_plan(), Shapes())
    plan = found.plan
    assert plan.rule_for("network.2.0.attn.proj") is Rule.ROW
    assert plan.rule_for("network.0.0.attn.proj") is Rule.REPLICATE


def test_heads_that_are_mixed_stay_whole_with_the_reason() -> None:
    found = rules_of(ForeignTask(mixes_heads=True))
    assert "layers.*.down" in found.cut
    assert [*found.whole] == ["layers.*.mix.out"]


def test_features_that_are_compared_with_each_other_stay_whole() -> None:
    """Shapes would fit: only values tell that each rank would normalise its own features alone."""
    found = rules_of(ForeignTask(normalises=True))
    assert found.cut == ("layers.*.mix.out",)
    assert "differs by" in found.whole["layers.*.down"]


class Lone(nn.Module):
    """One projection in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.only(x).relu()


class LoneTask(ForeignTask):
    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(nn.Embedding(64, 8), nn.Sequential(Lone(), Lone()))


def test_a_model_without_pairs_is_refused_with_what_is_in_the_way() -> None:
    task = LoneTask().on_meta()
    with pytest.raises(DloError, match=r"got none from Sequential, and none can be inferred \(no linear layer"):
        TensorParallel().complete_plan(task, task.parallel_plan(), 2)


def test_the_ranks_divide_some_regions_only() -> None:
    task = ForeignTask(heads=3, width=24).on_meta()
    applier = TensorParallel()
    plan = applier.complete_plan(task, task.parallel_plan(), 2)
    found = make_tp_plan(task.model, plan, 2)
    assert {row for region in found.regions.values() for row in region.rows} == {f"layers.{n}.down" for n in range(2)}
    threes = make_tp_plan(task.model, applier.complete_plan(task, task.parallel_plan(), 3), 3)
    assert {row for region in threes.regions.values() for row in region.rows} >= {"layers.0.mix.out", "layers.1.down"}
    with pytest.raises(DloError, match=r"tp must divide the .* set tp="):
        applier.complete_plan(task, task.parallel_plan(), 7)


def test_the_models_own_rules_win_and_are_not_proved_again(monkeypatch) -> None:
    monkeypatch.setattr("dlo_plugins.parallel.tensor.inferred_rules.infer_rules", lambda *args: 1 / 0)
    task = CausalLM(config=tiny("llama", dropout=False)).on_meta()
    plan = task.parallel_plan()
    assert TensorParallel().complete_plan(task, plan, 2) is plan


def test_sequence_parallelism_needs_rules_of_the_family() -> None:
    task = ForeignTask().on_meta()
    with pytest.raises(DloError, match="sequence_parallel must have the tensor rules of the model's family"):
        TensorParallel(sequence_parallel=True).complete_plan(task, task.parallel_plan(), 2)

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule, tied_groups


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)


PLAN = ParallelPlan(
    blocks=("blocks.*",),
    stem=("token", "embed"),
    head=("norm", "head"),
    tensor={
        "blocks.0.qkv": "replicate",
        "blocks.*.qkv": "qkv",
        "blocks.*.norm": Rule.SEQUENCE,
        "head": "vocab",
    },
    attention=("blocks.*.qkv",),
)


def changed(**changes) -> ParallelPlan:
    return dataclasses.replace(PLAN, **changes)


def message(plan: ParallelPlan, module: nn.Module) -> str:
    with pytest.raises(DloError) as error:
        plan.validate(module)
    return str(error.value)


def test_blocks_come_in_module_order_and_not_in_that_of_strings():
    assert PLAN.block_names(Net(12)) == [f"blocks.{i}" for i in range(12)]


def test_blocks_of_several_patterns_come_in_their_order():
    ordered = changed(blocks=("blocks.2", "blocks.[01]", "blocks.*"))
    assert ordered.block_names(Net(4)) == ["blocks.2", "blocks.0", "blocks.1", "blocks.3"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("blocks.0.qkv", Rule.REPLICATE),
        ("blocks.1.qkv", Rule.QKV),
        ("blocks.1.qkv.bias", Rule.QKV),
        ("blocks.11.norm.weight", Rule.SEQUENCE),
        ("head.weight", Rule.VOCAB),
        ("header.weight", Rule.REPLICATE),
        ("embed.weight", Rule.REPLICATE),
    ],
)
def test_the_first_pattern_that_matches_a_name_or_a_parent_gives_the_rule(name, rule):
    assert PLAN.rule_for(name) is rule


def test_wild_cards():
    plan = ParallelPlan(tensor={"*": "row"})
    assert plan.rule_for("a") is plan.rule_for("a.b") is Rule.ROW
    plan = ParallelPlan(tensor={"**.fc": "column", "layer[1-3].x?": "row"})
    assert plan.rule_for("a.b.c.fc.weight") is Rule.COLUMN
    assert plan.rule_for("a.fcc") is Rule.REPLICATE
    assert plan.rule_for("layer2.x1") is Rule.ROW
    assert plan.rule_for("layer4.x1") is plan.rule_for("layer2.x11") is Rule.REPLICATE


def test_a_pattern_that_matches_nothing_names_the_nearest():
    assert (
        message(changed(blocks=("block.*",)), Net())
        == "blocks pattern 'block.*' matches nothing in the model; did you mean 'blocks.*'?"
    )
    assert "tensor pattern 'blocks.*.kqv'" in message(changed(tensor={"blocks.*.kqv": "qkv"}), Net())
    assert "did you mean 'norm'?" in message(changed(head=("norms", "head")), Net())


def test_each_parameter_has_one_owner():
    assert "got 'token' in none of them; add 'token' to stem" in message(changed(stem=("embed",)), Net())
    assert "got 'norm.weight' in stem and head" in message(changed(stem=("token", "embed", "norm")), Net())


def test_buffers_need_an_owner_too():
    net = Net()
    net.register_buffer("periods", torch.zeros(2), persistent=False)
    assert "'periods' in none" in message(PLAN, net)


def test_blocks_within_blocks_are_refused():
    assert "got 'blocks.0.norm' inside another" in message(changed(blocks=("blocks.*", "blocks.*.norm")), Net())


def test_tied_weights_are_checked_both_ways():
    net = Net()
    tied = changed(tied=[("embed.weight", "head.weight")])
    assert "must share one tensor, got two for" in message(tied, net)
    net.head.weight = net.embed.weight
    tied.validate(net)
    assert tied_groups(net) == (("embed.weight", "head.weight"),)
    assert "must be in tied, got" in message(PLAN, net)
    assert "got 'head.wight'; did you mean 'head.weight'?" in message(
        changed(tied=[("embed.weight", "head.wight")]), net
    )
    with pytest.raises(DloError, match="at least two"):
        changed(tied=[("head.weight",)])


def test_unknown_rule():
    with pytest.raises(DloError, match=r"unknown tensor rule 'colum'; did you mean 'column'\?"):
        ParallelPlan(tensor={"a": "colum"})


def test_infer_finds_the_blocks_and_both_ends():
    net = Net()
    net.head.weight = net.embed.weight
    plan = ParallelPlan.infer(net)
    assert plan.block_names(net) == ["blocks.0", "blocks.1", "blocks.2"]
    assert (plan.stem, plan.head) == (("token", "embed"), ("norm", "head"))
    assert plan.tied == (("embed.weight", "head.weight"),)
    plan.validate(net)


def test_infer_takes_the_class_with_the_most_blocks_that_nothing_lies_between():
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(4, 4)
            self.blocks = nn.Sequential(Block(), Block(), Block())

    stages = nn.Sequential(Stage(), Stage())
    assert ParallelPlan.infer(stages).blocks == ("0", "1")


def test_infer_takes_modules_between_stages_as_blocks_where_no_other_class_has_many_parameters():
    net = nn.Module()
    net.stem = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for stage in range(2):
        net.add_module(f"embed{stage}", nn.LayerNorm(4))
        net.add_module(f"stage{stage}", nn.Sequential(Block(), Block(), Block()))
    net.head = nn.Linear(4, 2)
    plan = ParallelPlan.infer(net)
    assert plan.blocks == (*(f"stage0.{n}" for n in range(3)), "embed1", *(f"stage1.{n}" for n in range(3)))
    assert (plan.stem, plan.head) == (("stem", "embed0"), ("head",))
    plan.validate(net)
    net.stem = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))  # More than an eighth of the parameters.
    assert ParallelPlan.infer(net).blocks == ("stem.0", "stem.1")
    del net.stem
    scattered = nn.ModuleDict({str(n): nn.ModuleList([Block(), nn.LayerNorm(4)]) for n in range(4)})
    with pytest.raises(DloError, match="must hold two or more consecutive blocks"):
        ParallelPlan.infer(scattered)


def test_infer_counts_a_module_that_is_registered_twice_once():
    again = Block()
    for net, blocks in (
        (nn.Sequential(Block(), nn.ReLU(), again, again), ["0", "2"]),
        (nn.Sequential(again, Block(), again), ["0", "1"]),
        (nn.ModuleDict({"first": again, "net": nn.Sequential(Block(), Block(), again)}), ["net.0", "net.1"]),
    ):
        plan = ParallelPlan.infer(net)
        plan.validate(net)
        assert plan.block_names(net) == blocks


def test_infer_says_what_to_do_when_nothing_repeats():
    with pytest.raises(
        DloError, match=r"Linear must hold two or more consecutive blocks.*name them in Task.parallel_plan"
    ):
        ParallelPlan.infer(nn.Linear(2, 2))


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(2, 6), st.integers(0, 2), st.booleans())
def test_an_inferred_plan_is_always_valid_and_covers_everything_once(before, depth, after, meta):
    with torch.device("meta" if meta else "cpu"):
        net = nn.Module()
        for i in range(before):
            net.add_module(f"before{i}", nn.Linear(2, 2))
        net.add_module("layers", nn.ModuleList(Block(2) for _ in range(depth)))
        for i in range(after):
            net.add_module(f"after{i}", nn.LayerNorm(2))
    plan = ParallelPlan.infer(net)
    plan.validate(net)
    assert len(plan.block_names(net)) == depth
    owners = [plan.owners(name) for name, _ in net.named_parameters()]
    assert sorted({len(parts) for parts in owners}) == [1]
    assert len(plan.stem) == before
    assert len(plan.head) == after

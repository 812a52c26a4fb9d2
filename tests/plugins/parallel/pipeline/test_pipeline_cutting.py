"""Cutting without processes: what each stage holds, runs and leaves, what cannot be cut, and stages of equal cost."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.pipeline.exchange import find_tied_groups
from dlo_plugins.parallel.pipeline.gates import StageForward, StageShapes
from dlo_plugins.parallel.pipeline.model_stages import (
    Stages,
    balance_stages,
    flop_costs,
    make_stages,
    release_other_stages,
)
from dlo_plugins.parallel.pipeline.pipeline_schedules import Placement, make_schedule
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.image_models import options
from support.pipeline_nets import CASES, language, plain, vit

CPU = torch.device("cpu")


def run_stages(model: nn.Module, plan: ParallelPlan, counts: list[int], forward: Callable[[nn.Module], Any]) -> Any:
    """Runs the stages one after another, each with a model of its own that holds nothing else."""
    hidden, shapes = None, StageShapes()
    for stage in range(len(counts)):
        own = copy.deepcopy(model)
        stages = Stages(own, plan, counts)
        release_other_stages(own, stages, [stage])
        passage = StageForward(own, stages, stage, CPU, hidden, shapes, True)
        hidden, shapes = passage.run(lambda own=own: forward(own)), passage.known
    return hidden


@pytest.mark.parametrize("name", CASES)
def test_stages_one_after_another_are_the_model(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name](1)
    case.model.eval()
    expected = case.forward(case.model, case.micro_batches[0])
    blocks = len(case.plan.block_names(case.model))
    for counts in ([2, blocks - 2], [1] * blocks):
        found = run_stages(case.model, case.plan, counts, lambda model: case.forward(model, case.micro_batches[0]))
        assert torch.equal(found, expected)


def test_each_tensor_has_one_stage_and_the_rest_is_meta() -> None:
    case = vit(1)
    stages = Stages(case.model, case.plan, [1, 3, 2])
    names = [name for name, _ in case.model.named_parameters()]
    held: list[str] = []
    for stage in range(3):
        model = copy.deepcopy(case.model)
        holds = release_other_stages(model, stages, [stage])
        assert [name for name, _ in model.named_parameters()] == names
        for name, parameter in model.named_parameters():
            assert parameter.is_meta is not holds(name)
            assert parameter.shape == case.model.get_parameter(name).shape
        held += [name for name in names if holds(name)]
    assert sorted(held) == sorted(names)
    assert stages.stages_of("cls_token") == stages.stages_of("patch_embed.proj.weight") == (0,)
    assert stages.stages_of("blocks.3.attn.qkv.weight") == (1,)
    assert stages.stages_of("head.weight") == stages.stages_of("norm.bias") == (2,)


def test_tied_weights_stay_one_tensor_and_are_known_across_ranks() -> None:
    case = language("llama", 1, tie_word_embeddings=True)
    stages = Stages(case.model, case.plan, [1, 1, 1, 1])
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert stages.stages_of(names[0]) == stages.stages_of(names[1]) == (0, 3)
    (group,) = find_tied_groups(case.model, stages, Placement(4))
    assert group.name == names[0]
    assert group.ranks == (0, 3)
    assert find_tied_groups(case.model, stages, Placement(2, 2, "v")) == []  # First and last stage on one rank.
    holds = release_other_stages(case.model, stages, [1])
    assert not holds(names[0])
    assert case.model.get_parameter(names[0]) is case.model.get_parameter(names[1])
    assert case.model.get_parameter(names[0]).is_meta


class Chain(nn.Module):
    """Blocks with something beside the hidden state, by kind."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Two() for _ in range(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(()))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.stem(x) + (self.stem.weight[:1] if self.kind == "weight" else 0)
        early = {"stem": first, "derived": {"of": [first.exp() + 1]}}
        for number, block in enumerate(self.blocks):
            if self.kind == "skip" and number == 2:
                continue
            if self.kind == "around":
                hidden = hidden + block(hidden)
            else:
                extra = early.get(self.kind, torch.ones_like(first))
                hidden = block(hidden, hidden if self.kind == "block" else extra)
            if self.kind == "shape" and number == 0:
                self.factor = 1.0 + len(first[first > 0]) / 10
            if self.kind == "buffer" and number == 0:
                self.mean.mul_(0.9).add_(first.mean())
            if self.kind == "twice":
                hidden = block(hidden)
            if self.kind == "supervised":
                self.head(hidden)
            if self.kind == "head's weight":
                hidden = hidden + self.head.weight.mean()
        if self.kind == "weight in head":
            hidden = hidden @ self.stem.weight
        return self.head(hidden + first if self.kind == "head" else hidden)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, extra: Any = None) -> Tensor:
        if isinstance(extra, dict):
            extra = extra["of"][0]
        return torch.tanh(self.dense(hidden)) * (1.0 if extra is None else extra.mean())


CHAIN = ParallelPlan(blocks=("blocks.*",), stem=("stem",), head=("head",))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("stem", r"got 'blocks\.2' with an argument computed from 'stem'"),
        ("derived", r"got 'blocks\.2' with an argument computed from 'stem'"),
        ("block", r"got 'blocks\.2' with an argument computed from 'blocks\.1'"),
        ("around", r"got 'add' after 'blocks\.2' on a value computed from 'stem'"),
        ("head", r"got 'add' after 'blocks\.3' on a value computed from 'stem'"),
        ("weight in head", r"after 'blocks\.3' on a value computed from 'stem\.weight'"),
        ("shape", r"got a shape computed from values of 'stem' by 'index'"),
        ("buffer", r"got buffer 'mean' computed from 'stem'"),
        ("twice", r"got 'blocks\.0' in place of 'blocks\.1'"),
        ("skip", r"got 'blocks\.3' in place of 'blocks\.2'"),
        ("supervised", r"head must run after the last block, got a forward of Chain that calls 'head' before"),
        ("head's weight", r"got an operation after 'blocks\.0' on a weight \(.*meta.*\), which is in another stage"),
    ],
)
def test_what_else_passes_between_stages_is_found_and_named(kind: str, message: str) -> None:
    x = torch.randn(3, 4)
    for counts in ([2, 2], [1, 1, 1, 1]):
        with pytest.raises(DloError, match=message if counts == [2, 2] else "pipeline"):
            run_stages(Chain(kind), CHAIN, counts, lambda model: model(x))


def test_a_block_that_is_registered_twice_is_a_block_of_two_stages() -> None:
    model, x = Chain("weight"), torch.randn(3, 4)
    model.blocks[3] = model.blocks[2] = model.blocks[0]
    assert CHAIN.block_names(model) == ["blocks.0", "blocks.1"]
    assert CHAIN.block_names(model, repeated=True) == [f"blocks.{number}" for number in range(4)]
    for counts in ([2, 2], [1, 2, 1]):
        assert torch.equal(run_stages(model, CHAIN, counts, lambda own: own(x)), model(x))
    costs = flop_costs(model, CHAIN, lambda: model(x))
    assert costs is not None
    assert costs.blocks == (2 * 3 * 4 * 4,) * 4
    assert costs.stem == 2 * costs.head == costs.blocks[0]


@pytest.mark.parametrize(
    "name",
    [
        "densenet121",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("levit_384_s8", "nextvit_small")),
    ],
)
def test_modules_between_stages_are_blocks_of_a_pipeline(name: str) -> None:
    task = ImageClassifier(name, num_classes=3, **options(name))
    task.configure_model()
    model, plan, x = task.model.eval(), task.parallel_plan(), torch.randn(2, 3, task.image_size, task.image_size)
    count = len(plan.block_names(model))
    with torch.no_grad():
        found = run_stages(model, plan, [count // 3, count - count // 3], lambda own: own(x))
        assert torch.equal(found, model(x))


def test_a_forward_that_ends_early_is_named() -> None:
    with pytest.raises(DloError, match=r"got one that ended without 'blocks\.0'"):
        run_stages(Chain(), CHAIN, [2, 2], lambda model: model.stem(torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 4, 8, None, [1, 2]), r"of blocks for each of the 4 stages.*got \[1, 2\]; set \[1, 1, 2, 2\]"),
        (("1F1B", 2, 8, None, [2, 2]), r"add up to the model's 6 blocks, got \[2, 2\] \(4 blocks\); set \[3, 3\]"),
        (("1F1B", 8, 8), r"got 6 blocks for 8 stages; set pp times stages_per_rank to 6 or less"),
        (("ZBV", 4, 8), r"got 6 blocks for 8 stages"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_fix(arguments: tuple[Any, ...], message: str) -> None:
    case = plain(1)
    with pytest.raises(DloError, match=message):
        make_stages(case.model, case.plan, make_schedule(*arguments[:4]).placement.stages, *arguments[4:])


# --- sharing blocks out to stages by cost ----------------------------------------------------------------------------


def stage_costs(costs: list[float], counts: Any, stem: float, head: float) -> list[float]:
    sums, at = [], 0
    for count in counts:
        sums.append(sum(costs[at : at + count]))
        at += count
    sums[0] += stem
    sums[-1] += head
    return sums


def dearest(costs: list[float], counts: Any, stem: float, head: float) -> float:
    return max(stage_costs(costs, counts, stem, head))


def squares(costs: list[float], counts: Any, stem: float, head: float) -> float:
    return sum(cost * cost for cost in stage_costs(costs, counts, stem, head))


@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 20).map(float),
    st.integers(0, 20).map(float),
)
def test_no_split_has_a_cheaper_dearest_stage(costs: list[float], stages: int, stem: float, head: float) -> None:
    if stages > len(costs):
        with pytest.raises(DloError, match=f"to {len(costs)} or less"):
            balance_stages(costs, stages, stem, head)
        return
    counts = balance_stages(costs, stages, stem, head)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    every = itertools.product(range(1, len(costs) + 1), repeat=stages)
    splits = [split for split in every if sum(split) == len(costs)]
    best = min(dearest(costs, split, stem, head) for split in splits)
    assert dearest(costs, counts, stem, head) == best
    fair = [split for split in splits if dearest(costs, split, stem, head) == best]
    assert squares(costs, counts, stem, head) == min(squares(costs, split, stem, head) for split in fair)


def test_costs_by_operations() -> None:
    case = vit(1)
    by_flops = flop_costs(case.model, case.plan, lambda: case.forward(case.model, case.micro_batches[0]))
    assert by_flops is not None
    tokens, width, rows = 17, 24, 3
    dense = 2 * 12 * width * width * tokens * rows
    attention = 2 * 2 * tokens * tokens * width * rows
    assert by_flops.blocks == (dense + attention,) * 6
    assert by_flops.stem == 2 * 16 * 3 * 64 * width * rows
    assert by_flops.head == 2 * width * 7 * rows
    # A loss that computes belongs to the head.
    llama = language("llama", 1, packed=True)
    model, batch = llama.model, llama.micro_batches[0]
    with_loss = flop_costs(model, llama.plan, lambda: llama.loss(model, llama.forward(model, batch), batch))
    assert with_loss is not None
    assert with_loss.head == 2 * 32 * 64 * 18
    assert with_loss.stem == 0


def test_a_forward_that_needs_values_has_no_count() -> None:
    case = plain(1)

    def forward() -> None:
        case.forward(case.model, case.micro_batches[0]).nonzero()

    assert flop_costs(case.model, case.plan, forward) is None
